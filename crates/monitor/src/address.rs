//! Addresses: whether one belongs to this host, and how reports show addresses.

use fsocket_proto::Addr;
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

pub const V4_ANY: [u8; 16] = Ipv4Addr::UNSPECIFIED.to_ipv6_mapped().octets();
pub const V6_ANY: [u8; 16] = [0; 16];

/// Whether this is an IPv4 address, in v4-mapped form.
pub fn is_v4(ip: &[u8; 16]) -> bool {
    Ipv6Addr::from(*ip).to_ipv4_mapped().is_some()
}

pub fn is_loopback(ip: &[u8; 16]) -> bool {
    Ipv6Addr::from(*ip).to_canonical().is_loopback()
}

/// fe80::/10: the same address means different hosts on different links.
pub fn is_link_local(ip: &[u8; 16]) -> bool {
    ip[0] == 0xfe && ip[1] & 0xc0 == 0x80
}

/// The kernel's view of a destination: the unspecified address is loopback.
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

/// Like [`show`], for an address without a family.
pub fn show_ip(ip: &[u8; 16], port: u16) -> String {
    SocketAddr::new(IpAddr::V6(Ipv6Addr::from(*ip)).to_canonical(), port).to_string()
}

/// The form in which the kernel lists sockets: a v4-mapped address becomes IPv4.
pub fn canonical(a: SocketAddr) -> SocketAddr {
    SocketAddr::new(a.ip().to_canonical(), a.port())
}

/// This host's addresses, v4-mapped, in the network namespace of this process. Loopback and
/// link-local addresses are left out.
pub fn local_addresses() -> BTreeSet<[u8; 16]> {
    let mut found = BTreeSet::new();
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `list` is valid for the write. `freeifaddrs` below frees the result.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return found;
    }
    let mut next = list;
    while !next.is_null() {
        // SAFETY: `next` is not null, and is an element of the list that `getifaddrs` made and
        // that is freed only after the loop.
        let entry = unsafe { &*next };
        next = entry.ifa_next;
        if entry.ifa_addr.is_null() {
            continue;
        }
        // SAFETY: the pointer is not null, and `getifaddrs` stores a complete, aligned sockaddr
        // there.
        let ip = match i32::from(unsafe { (*entry.ifa_addr).sa_family }) {
            libc::AF_INET => {
                // SAFETY: for AF_INET, `getifaddrs` stores a whole sockaddr_in.
                let sin = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned() };
                Ipv4Addr::from(sin.sin_addr.s_addr.to_ne_bytes()).to_ipv6_mapped().octets()
            }
            libc::AF_INET6 => {
                // SAFETY: for AF_INET6, `getifaddrs` stores a whole sockaddr_in6.
                let sin6 = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
                sin6.sin6_addr.s6_addr
            }
            _ => continue,
        };
        if !is_loopback(&ip) && !is_link_local(&ip) {
            found.insert(ip);
        }
    }
    // SAFETY: `getifaddrs` made the list, no reference to it is left, and it is freed once.
    unsafe { libc::freeifaddrs(list) };
    found
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
