//! What the kernel says of its policy to a privileged process only.

use crate::netlink::{self, kinds, Netlink};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{openat, Mode, OFlags, CWD};

/// From linux/netfilter/nfnetlink.h and nf_tables.h.
const NFNLGRP_NFTABLES: u32 = 7;
const NFT_MSG_GETCHAIN: u16 = (libc::NFNL_SUBSYS_NFTABLES as u16) << 8 | 4;
const NFTA_CHAIN_HOOK: u16 = 4;
const NFPROTO_INET: u8 = 1;
const NFPROTO_IPV4: u8 = 2;
const NFPROTO_NETDEV: u8 = 5;
const NFPROTO_IPV6: u8 = 10;

/// Whether there is a base chain (one with a hook) that a local packet of ours could pass.
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

/// iptables of old: tables that exist are registered, and nothing tells of changes. They are those of the network namespace of the
/// thread that asks first.
#[derive(Default)]
pub struct Tables {
    /// The thread's /proc/net, and the lists in it that have been there.
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
            // (A list from before its module was unloaded cannot be read any more.)
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

/// A socket that tells when nf_tables changes.
pub fn rules() -> Result<OwnedFd, rustix::io::Errno> {
    netlink::socket(Some(rustix::net::netlink::NETFILTER), 1 << (NFNLGRP_NFTABLES - 1))
}

/// One to ask nf_tables by.
pub fn questions() -> Result<Netlink, rustix::io::Errno> {
    Netlink::new(Some(rustix::net::netlink::NETFILTER))
}

/// How many programs of this type are in force for a cgroup; `None`: not known.
pub fn programs(cgroup: BorrowedFd<'_>, attach_type: u32) -> Option<u32> {
    const BPF_PROG_QUERY: libc::c_int = 16;
    const BPF_F_QUERY_EFFECTIVE: u32 = 1;
    /// Beginning of the `query` part of union bpf_attr.
    #[repr(C)]
    struct Query {
        target: u32,
        attach_type: u32,
        query_flags: u32,
        attach_flags: u32,
        ids: u64,
        count: u32,
        pad: u32,
    }
    let mut query = Query {
        target: cgroup.as_raw_fd() as u32,
        attach_type,
        query_flags: BPF_F_QUERY_EFFECTIVE,
        attach_flags: 0,
        ids: 0,
        count: 0,
        pad: 0,
    };
    // SAFETY: the structure lives during the call and is as long as said; without `ids` the kernel
    // writes into nothing else.
    let rc = unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_QUERY, &raw mut query, size_of::<Query>()) };
    (rc == 0).then_some(query.count)
}
