//! Addresses: which are this host's own, and how they look in a report.

use fsocket_proto::Addr;
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

pub const V4_ANY: [u8; 16] = Ipv4Addr::UNSPECIFIED.to_ipv6_mapped().octets();
pub const V6_ANY: [u8; 16] = [0; 16];

/// IPv4, in v4-mapped form.
pub fn is_v4(ip: &[u8; 16]) -> bool {
    Ipv6Addr::from(*ip).to_ipv4_mapped().is_some()
}

pub fn is_loopback(ip: &[u8; 16]) -> bool {
    Ipv6Addr::from(*ip).to_canonical().is_loopback()
}

/// fe80::/10: means another host on another link.
pub fn is_link_local(ip: &[u8; 16]) -> bool {
    ip[0] == 0xfe && ip[1] & 0xc0 == 0x80
}

/// What the kernel makes of a destination: the unspecified address is
/// loopback.
pub fn destination(ip: [u8; 16]) -> [u8; 16] {
    match ip {
        V4_ANY => Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets(),
        V6_ANY => Ipv6Addr::LOCALHOST.octets(),
        other => other,
    }
}

/// `127.0.0.1:80`, `[::]:80`.
pub fn show(addr: &Addr) -> String {
    let ip = Ipv6Addr::from(addr.ip);
    let ip = match ip.to_ipv4_mapped() {
        Some(v4) if i32::from(addr.family) == libc::AF_INET => IpAddr::V4(v4),
        _ => IpAddr::V6(ip),
    };
    SocketAddr::new(ip, addr.port).to_string()
}

/// The same for an address without a family.
pub fn show_ip(ip: &[u8; 16], port: u16) -> String {
    SocketAddr::new(IpAddr::V6(Ipv6Addr::from(*ip)).to_canonical(), port).to_string()
}

/// As the kernel numbers sockets: IPv4 wherever it is.
pub fn canonical(a: SocketAddr) -> SocketAddr {
    SocketAddr::new(a.ip().to_canonical(), a.port())
}

/// This host's own addresses beyond loopback, v4-mapped, in this process's
/// network namespace.
pub fn local_addresses() -> BTreeSet<[u8; 16]> {
    let mut found = BTreeSet::new();
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `list` is valid for the write; freed below.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return found;
    }
    let mut next = list;
    while !next.is_null() {
        // SAFETY: an element of the list that getifaddrs made, not yet freed.
        let entry = unsafe { &*next };
        next = entry.ifa_next;
        if entry.ifa_addr.is_null() {
            continue;
        }
        // SAFETY: not null; getifaddrs stores a complete sockaddr of the family
        // that it names, aligned for it.
        let ip = match i32::from(unsafe { (*entry.ifa_addr).sa_family }) {
            libc::AF_INET => {
                // SAFETY: an address of AF_INET is a whole sockaddr_in.
                let sin = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned() };
                Ipv4Addr::from(sin.sin_addr.s_addr.to_ne_bytes()).to_ipv6_mapped().octets()
            }
            libc::AF_INET6 => {
                // SAFETY: an address of AF_INET6 is a whole sockaddr_in6.
                let sin6 = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
                sin6.sin6_addr.s6_addr
            }
            _ => continue,
        };
        if !is_loopback(&ip) && !is_link_local(&ip) {
            found.insert(ip);
        }
    }
    // SAFETY: made by getifaddrs and freed once.
    unsafe { libc::freeifaddrs(list) };
    found
}

/// A netlink socket that becomes readable when an address comes or goes.
pub fn watch_addresses() -> std::io::Result<rustix::fd::OwnedFd> {
    use rustix::net::{netlink, AddressFamily, SocketFlags, SocketType};
    let fd = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        // NETLINK_ROUTE is protocol 0, the default.
        None,
    )?;
    let groups = (libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR) as u32;
    rustix::net::bind(&fd, &netlink::SocketAddrNetlink::new(0, groups))?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_of_address() {
        let v4 = |s: &str| s.parse::<Ipv4Addr>().unwrap().to_ipv6_mapped().octets();
        let v6 = |s: &str| s.parse::<Ipv6Addr>().unwrap().octets();
        assert!(is_loopback(&v4("127.9.9.9")) && is_loopback(&v6("::1")));
        assert!(!is_loopback(&v4("10.0.0.1")) && !is_loopback(&V4_ANY));
        assert!(is_v4(&V4_ANY) && !is_v4(&V6_ANY));
        assert_eq!(destination(V4_ANY), v4("127.0.0.1"));
        assert_eq!(destination(V6_ANY), v6("::1"));
        assert!(is_link_local(&v6("fe80::1")) && !is_link_local(&v6("fd00::1")));
        let addr = |ip, family| Addr { ip, port: 80, family: family as u16, v6only: 0 };
        assert_eq!(show(&addr(v4("127.0.0.1"), libc::AF_INET)), "127.0.0.1:80");
        assert_eq!(show(&addr(V6_ANY, libc::AF_INET6)), "[::]:80");
        assert!(local_addresses().iter().all(|ip| !is_loopback(ip)));
    }
}
