//! Routes, routing rules, and the loopback device: what NETLINK_ROUTE tells without a privilege.
//!
//! Packets of a connection within the host leave and enter by the loopback device of its network
//! namespace. The device has a policy if it is down, or has an XDP program, a queueing discipline,
//! or filters.

use crate::address::is_v4;
use crate::netlink::{self, attributes, kinds, put, u32_at, Netlink};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::RecvFlags;

/// From linux/rtnetlink.h.
const RTA_UID: u16 = 25;
const RTA_IP_PROTO: u16 = 27;
const RTA_DPORT: u16 = 29;
/// From linux/fib_rules.h: priority, suppressed prefix lengths (none), table, origin.
const FR_ACT_TO_TBL: u8 = 1;
const FIB_RULE_INVERT: u32 = 2;
const FRA_USUAL: [u16; 4] = [6, 14, 15, 21];
/// The loopback device has the first number in each network namespace.
const LOOPBACK: u32 = 1;
/// Stands in place of a device for a block of filters that several devices share.
const SHARED_BLOCK: u32 = u32::MAX;
/// From linux/if_link.h.
const IFLA_QDISC: u16 = 6;
const IFLA_XDP: u16 = 43;
const IFLA_EXT_MASK: u16 = 29;
const RTEXT_FILTER_SKIP_STATS: u32 = 8;
const IFLA_XDP_ATTACHED: u16 = 2;
/// Parent of the disciplines "ingress" and "clsact".
const TC_H_INGRESS: u32 = 0xffff_fff1;
/// The most datagrams that one look reads. If there are more, something has changed in any case.
const DATAGRAMS: usize = 64;

/// The cached routing state, and the socket that announces changes.
pub struct Routing {
    ask: Netlink,
    events: OwnedFd,
    /// `None`: not read since the last change.
    seen: Option<Seen>,
}

/// Facts that hold until the kernel announces a change.
#[derive(Clone, Copy)]
struct Seen {
    /// The result of [`local_first`].
    local_first: bool,
    /// The result of [`has_filters`].
    has_filters: bool,
}

impl Routing {
    /// # Errors
    /// Those of the kernel.
    pub fn new() -> Result<Routing, Errno> {
        let group = |n: libc::c_uint| 1 << (n - 1);
        let groups = group(libc::RTNLGRP_LINK)
            | group(libc::RTNLGRP_TC)
            | group(libc::RTNLGRP_IPV4_ROUTE)
            | group(libc::RTNLGRP_IPV6_ROUTE)
            | group(libc::RTNLGRP_IPV4_RULE)
            | group(libc::RTNLGRP_IPV6_RULE);
        Ok(Routing { ask: Netlink::new(None)?, events: netlink::socket(None, groups)?, seen: None })
    }

    /// This socket is readable when something has changed.
    pub fn events(&self) -> &OwnedFd {
        &self.events
    }

    /// Reads the announcements. Returns whether one of them may matter to connections within the
    /// host.
    pub fn changed(&mut self) -> bool {
        let mut scratch = [0u8; 8192];
        let mut matters = false;
        for _ in 0..DATAGRAMS {
            match rustix::net::recv(&self.events, &mut scratch[..], RecvFlags::DONTWAIT) {
                Ok((n, _)) => matters |= netlink::messages(&scratch[..n]).any(|(kind, body)| is_ours(kind, body)),
                Err(Errno::AGAIN) => break,
                // Some announcements were lost.
                Err(_) => matters = true,
            }
        }
        if matters {
            self.seen = None;
        }
        matters
    }

    /// Why the kernel may refuse a connection of a socket of this user to this place.
    ///
    /// # Errors
    /// The kernel does not answer.
    pub fn look(&mut self, ip: &[u8; 16], port: u16, uid: u32) -> Result<Option<&'static str>, Errno> {
        // Events are read first. The kernel queues the event of a change before the call that
        // makes the change returns.
        self.changed();
        let seen = match self.seen {
            Some(seen) => seen,
            None => {
                let has_filters = has_filters(&mut self.ask)?;
                *self.seen.insert(Seen { local_first: local_first(&mut self.ask)?, has_filters })
            }
        };
        if seen.has_filters || !is_bare(&mut self.ask)? {
            return Ok(Some("the loopback device is down, or has programs, filters or queues"));
        }
        // Rules before the one for local addresses may depend on facts about the connection that
        // are unknown here.
        let leads_here = seen.local_first && self.leads_here(ip, port, uid);
        Ok((!leads_here).then_some("the route of the destination does not lead to this host"))
    }

    /// Whether the destination has a route of type "local".
    fn leads_here(&mut self, ip: &[u8; 16], port: u16, uid: u32) -> bool {
        let v4 = is_v4(ip);
        let (family, to) = if v4 { (libc::AF_INET, &ip[12..]) } else { (libc::AF_INET6, &ip[..]) };
        // struct rtmsg: family, lengths of destination and source, and what the kernel fills in.
        let mut body = vec![family as u8, to.len() as u8 * 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        put(&mut body, libc::RTA_DST, to);
        put(&mut body, RTA_UID, &uid.to_ne_bytes());
        put(&mut body, RTA_IP_PROTO, &[libc::IPPROTO_TCP as u8]);
        put(&mut body, RTA_DPORT, &port.to_be_bytes());
        let mut local = false;
        let answer = self.ask.ask(libc::RTM_GETROUTE, false, &body, |kind, body| {
            local = kind == libc::RTM_NEWROUTE && body.get(7) == Some(&libc::RTN_LOCAL);
        });
        answer.is_ok() && local
    }
}

/// Whether an event is about a rule, the loopback device, or the table of local addresses. (Other
/// events are frequent on routers, and do not matter.)
fn is_ours(kind: u16, body: &[u8]) -> bool {
    let device = |at: usize| body.len() < at + 4 || [LOOPBACK, SHARED_BLOCK].contains(&u32_at(body, at));
    match kind {
        // struct rtmsg: the table is the fifth byte.
        libc::RTM_NEWROUTE | libc::RTM_DELROUTE => body.get(4) == Some(&libc::RT_TABLE_LOCAL),
        // `struct ifinfomsg` and `struct tcmsg` have the device at the same offset.
        _ if kind < libc::RTM_NEWADDR || (libc::RTM_NEWQDISC..=libc::RTM_GETTFILTER).contains(&kind) => device(4),
        _ => true,
    }
}

/// Whether the loopback device is up, and has neither an XDP program nor a queueing discipline.
/// Read each time, because the kernel does not announce a program that is attached by a BPF link.
fn is_bare(ask: &mut Netlink) -> Result<bool, Errno> {
    // struct ifinfomsg: family, type, device, flags, mask.
    let mut body = vec![0u8; 16];
    body[4..8].copy_from_slice(&LOOPBACK.to_ne_bytes());
    put(&mut body, IFLA_EXT_MASK, &RTEXT_FILTER_SKIP_STATS.to_ne_bytes());
    let mut bare = false;
    ask.ask(libc::RTM_GETLINK, false, &body, |kind, body| {
        if kind != libc::RTM_NEWLINK || body.len() < 16 {
            return;
        }
        let up = u32_at(body, 8) & libc::IFF_UP as u32 != 0;
        let fine = |(kind, value): (u16, &[u8])| match kind {
            IFLA_QDISC => value.starts_with(b"noqueue\0"),
            IFLA_XDP => !attributes(value).any(|(kind, v)| kind == IFLA_XDP_ATTACHED && v != [0]),
            _ => true,
        };
        bare = up && attributes(&body[16..]).all(fine);
    })?;
    Ok(bare)
}

/// Whether the loopback device has a place for filters ("clsact", "ingress"). All disciplines are
/// listed: the kernel sends the answer about a single one to all listeners for events, but not to
/// the process that asks.
fn has_filters(ask: &mut Netlink) -> Result<bool, Errno> {
    let mut found = false;
    // struct tcmsg: family, device, handle, parent, info.
    ask.ask(libc::RTM_GETQDISC, true, &[0; 20], |kind, body| {
        let ours = kind == libc::RTM_NEWQDISC && body.len() >= 20 && u32_at(body, 4) == LOOPBACK;
        found |= ours && u32_at(body, 12) == TC_H_INGRESS;
    })?;
    Ok(found)
}

/// Whether the first routing rule, for IPv4 and for IPv6, is the one that finds local addresses,
/// and has no conditions.
fn local_first(routes: &mut Netlink) -> Result<bool, Errno> {
    let (mut seen, mut plain) = (Vec::new(), true);
    // struct fib_rule_hdr: all families.
    routes.ask(libc::RTM_GETRULE, true, &[0; 12], |kind, body| {
        if kind != libc::RTM_NEWRULE || body.len() < 12 || seen.contains(&body[0]) {
            return;
        }
        if matches!(i32::from(body[0]), libc::AF_INET | libc::AF_INET6) {
            seen.push(body[0]);
            // Any destination, source and type of service; table "local"; action "look up".
            let local = body[1..8] == [0, 0, 0, libc::RT_TABLE_LOCAL, 0, 0, FR_ACT_TO_TBL];
            let inverted = u32_at(body, 8) & FIB_RULE_INVERT != 0;
            plain &= local && !inverted && kinds(&body[12..]).all(|k| FRA_USUAL.contains(&k));
        }
    })?;
    Ok(plain)
}
