//! Questions about policy that the kernel answers only to a privileged process.

use crate::netlink::{self, kinds, Netlink};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{openat, Mode, OFlags, CWD};

/// From linux/netfilter/nfnetlink.h and nf_tables.h.
const NFNLGRP_NFTABLES: u32 = 7;
const NFT_MSG_GETCHAIN: u16 = (libc::NFNL_SUBSYS_NFTABLES as u16) << 8 | 4;
const NFTA_CHAIN_HOOK: u16 = 4;
const NFPROTO_INET: u8 = 1;
const NFPROTO_IPV4: u8 = 2;
const NFPROTO_NETDEV: u8 = 5;
const NFPROTO_IPV6: u8 = 10;

/// Whether nf_tables has a base chain (one with a hook) through which a client's local packet
/// could pass.
pub fn has_chains(netlink: &mut Netlink) -> Result<bool, rustix::io::Errno> {
    let mut found = false;
    // struct nfgenmsg: all families.
    netlink.ask(NFT_MSG_GETCHAIN, true, &[0; 4], |_, body| {
        let passed = [NFPROTO_INET, NFPROTO_IPV4, NFPROTO_IPV6, NFPROTO_NETDEV];
        let hooked = body.len() >= 4 && passed.contains(&body[0]) && kinds(&body[4..]).any(|k| k == NFTA_CHAIN_HOOK);
        found |= hooked;
    })?;
    Ok(found)
}

/// Tables of the legacy iptables. /proc/net lists those that exist, and nothing announces changes.
/// The tables belong to the network namespace of the thread that asks first.
#[derive(Default)]
pub struct Tables {
    /// The /proc/net directory of that thread, and the lists in it that have been opened.
    proc: Option<OwnedFd>,
    lists: [Option<OwnedFd>; 2],
}

impl Tables {
    pub fn any(&mut self) -> bool {
        if self.proc.is_none() {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            self.proc = openat(CWD, "/proc/thread-self/net", flags, Mode::empty()).ok();
        }
        let Some(proc) = &self.proc else { return false };
        let names = ["ip_tables_names", "ip6_tables_names"];
        names.into_iter().zip(&mut self.lists).any(|(name, list)| {
            // (After its module was unloaded, an opened list cannot be read any more, and is
            // opened again.)
            let known = list.as_ref().and_then(|list| is_empty(list.as_fd()));
            let is_empty = known.or_else(|| {
                *list = openat(proc, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok();
                is_empty(list.as_ref()?.as_fd())
            });
            is_empty == Some(false)
        })
    }
}

fn is_empty(list: BorrowedFd<'_>) -> Option<bool> {
    rustix::io::retry_on_intr(|| rustix::io::pread(list, &mut [0u8; 64], 0)).ok().map(|n| n == 0)
}

/// A socket that is readable when nf_tables changes.
pub fn rules() -> Result<OwnedFd, rustix::io::Errno> {
    netlink::socket(Some(rustix::net::netlink::NETFILTER), 1 << (NFNLGRP_NFTABLES - 1))
}

/// A socket for requests to nf_tables.
pub fn questions() -> Result<Netlink, rustix::io::Errno> {
    Netlink::new(Some(rustix::net::netlink::NETFILTER))
}
