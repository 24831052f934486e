//! Containers: network namespaces on bridges of a host, as container engines make them.
//!
//! ```text
//! client 10.88.1.2 -- 10.88.1.1 br1 | host | br2 10.88.2.1 -- 10.88.2.2 server
//! ```
//!
//! The host forwards between its two bridges. Rules that a test adds with [`Containers::nft`]
//! translate addresses.

use super::link::{self, ip};
use super::{Hosts, Interface, NetHost};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub struct Containers {
    /// The host that has the bridges; the monitor may run here.
    pub host: NetHost,
    /// Client and server are each on a bridge of their own.
    pub client: NetHost,
    pub server: NetHost,
    /// A third container, on the server's bridge.
    pub neighbour: NetHost,
    /// Last, so that it is dropped after the descriptors above.
    pub hosts: Hosts,
}

fn address(bridge: u8, number: u8, device: &str) -> Interface {
    Interface {
        device: device.to_owned(),
        v4: Ipv4Addr::new(10, 88, bridge, number),
        v6: Ipv6Addr::new(0xfd88, bridge.into(), 0, 0, 0, 0, 0, number.into()),
    }
}

/// Sets addresses and brings the device up. `nodad` makes an address usable at once.
fn set_up(host: &NetHost, at: &Interface) -> Result<(), String> {
    let (v4, v6) = (format!("{}/24", at.v4), format!("{}/64", at.v6));
    ip(&["-n", &host.namespace, "addr", "add", &v4, "dev", &at.device])?;
    ip(&["-n", &host.namespace, "addr", "add", &v6, "dev", &at.device, "nodad"])?;
    ip(&["-n", &host.namespace, "link", "set", &at.device, "up"])
}

impl Containers {
    pub fn new() -> Result<Containers, String> {
        let mut hosts = Hosts::new()?;
        let mut host = hosts.add("host")?;
        let forward = "echo 1 > /proc/sys/net/ipv4/ip_forward; echo 1 > /proc/sys/net/ipv6/conf/all/forwarding";
        link::inside(&host.namespace, "sh", &["-c", forward])?;
        for bridge in [1, 2] {
            let at = address(bridge, 1, &format!("br{bridge}"));
            ip(&["-n", &host.namespace, "link", "add", &at.device, "type", "bridge"])?;
            set_up(&host, &at)?;
            host.interfaces.push(at);
        }
        let mut container = |name: &str, bridge: u8, number: u8| -> Result<NetHost, String> {
            let mut made = hosts.add(name)?;
            let (at, port) = (address(bridge, number, "eth0"), format!("veth-{name}"));
            let peer = ["type", "veth", "peer", "name", &at.device, "netns", &made.namespace];
            ip(&[&["-n", &host.namespace, "link", "add", &port][..], &peer].concat())?;
            ip(&["-n", &host.namespace, "link", "set", &port, "master", &format!("br{bridge}"), "up"])?;
            set_up(&made, &at)?;
            let gateway = address(bridge, 1, "");
            ip(&["-n", &made.namespace, "route", "add", "default", "via", &gateway.v4.to_string()])?;
            ip(&["-n", &made.namespace, "route", "add", "default", "via", &gateway.v6.to_string()])?;
            made.interfaces.push(at);
            Ok(made)
        };
        let (client, server) = (container("client", 1, 2)?, container("server", 2, 2)?);
        let neighbour = container("next", 2, 3)?;
        Ok(Containers { host, client, server, neighbour, hosts })
    }

    /// Adds rules in the host, in the syntax of nft(8).
    pub fn nft(&self, rules: &str) -> Result<(), String> {
        self.host.inside("nft", &[rules])
    }

    /// Redirects a port of the host, for clients, to a port of the server (IPv4).
    pub fn publish(&self, port: u16, to: u16) -> Result<(), String> {
        self.nft(&format!(
            "table ip published {{ chain in {{ type nat hook prerouting priority -100; \
             tcp dport {port} dnat to {}:{to}; }}; }}",
            self.server.interfaces[0].v4
        ))
    }

    /// Gives packets that leave the client's bridge the address of the host.
    pub fn masquerade(&self) -> Result<(), String> {
        self.nft(
            "table ip hidden { chain out { type nat hook postrouting priority 100; \
             ip saddr 10.88.1.0/24 oifname br2 masquerade; }; }",
        )
    }

    /// Address of the host as the client sees it.
    pub fn gateway(&self) -> IpAddr {
        self.host.interfaces[0].v4.into()
    }

    /// Address of the server, for all hosts.
    pub fn server4(&self) -> IpAddr {
        self.server.interfaces[0].v4.into()
    }

    /// The IPv6 address of the server.
    pub fn server6(&self) -> IpAddr {
        self.server.interfaces[0].v6.into()
    }
}
