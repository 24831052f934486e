//! Kinds of policy of the host for which the kernel announces no changes, or for which it is cheap
//! to look each time.

use super::kernel::Tables;
use crate::descriptor;
use crate::netlink::{self, attributes, u32_at, Netlink};
use fsocket_bpf::links::Links;
use fsocket_bpf::pairs::{self, Recorder};
use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// A bit for each policy that was found.
pub mod found {
    /// Tables of the legacy iptables.
    pub const TABLES: u64 = 1;
    /// BPF programs that choose the listener (sk_lookup), in the network namespace of the socket.
    pub const SK_LOOKUP: u64 = 2;
    /// IPsec policies.
    pub const XFRM: u64 = 4;
    /// BPF programs on the loopback device (tcx).
    pub const TCX: u64 = 8;
    /// BPF programs attached to netfilter hooks.
    pub const NETFILTER_LINK: u64 = 16;
}

/// From linux/bpf.h.
const BPF_PROG_QUERY: libc::c_int = 16;
const BPF_SK_LOOKUP: u32 = 36;
const BPF_TCX_INGRESS: u32 = 46;
const BPF_TCX_EGRESS: u32 = 47;
/// How long the last look at BPF links stays valid: a host with many links must not slow every
/// connection.
const LINKS_HOLD: Duration = Duration::from_millis(100);
/// From linux/xfrm.h and netlink.h.
const XFRM: u32 = 6;
const XFRM_MSG_GETSPDINFO: u16 = 0x25;
const XFRM_MSG_GETDEFAULT: u16 = 0x28;
const XFRMA_SPD_INFO: u16 = 1;
const XFRM_USERPOLICY_BLOCK: u8 = 1;
const XFRMNLGRP_POLICY: u32 = 4;
/// The loopback device.
const LOOPBACK: u32 = 1;

#[derive(Default)]
pub struct Host {
    tables: Tables,
    xfrm: Option<Netlink>,
    /// Whether xfrm_user is built into the kernel. (If it is a module, a request to it would load
    /// the module.)
    xfrm_builtin: Option<bool>,
    /// `None`: not tried yet. `Some(None)`: loading failed. It is not tried again, because each
    /// try is expensive.
    links: Option<Option<Links>>,
    /// The network namespaces that have netfilter programs, and when they were read.
    seen: Option<(Instant, Vec<u64>)>,
}

impl Host {
    /// Returns the [`found`] bits for the network namespaces of this process and of `socket`.
    ///
    /// # Errors
    /// The kernel does not answer, or this process lacks the right.
    pub fn has(&mut self, socket: BorrowedFd<'_>) -> Result<u64, Errno> {
        let namespace = descriptor::netns_of(socket).ok_or(Errno::PERM)?;
        let mut all = 0;
        let mut note = |bit: u64, is_there: bool| all |= if is_there { bit } else { 0 };
        note(found::SK_LOOKUP, attached(namespace.as_raw_fd() as u32, BPF_SK_LOOKUP)?);
        note(found::TCX, attached(LOOPBACK, BPF_TCX_INGRESS)? || attached(LOOPBACK, BPF_TCX_EGRESS)?);
        note(found::TABLES, self.tables.any());
        note(found::XFRM, self.has_xfrm()?);
        note(found::NETFILTER_LINK, self.has_links(rustix::fs::fstat(&namespace)?.st_ino)?);
        Ok(all)
    }

    /// Whether there are IPsec policies, or a default policy that blocks packets.
    fn has_xfrm(&mut self) -> Result<bool, Errno> {
        let builtin = *self.xfrm_builtin.get_or_insert_with(|| crate::modules::is_builtin("xfrm_user"));
        if !builtin && !["xfrm_user", "af_key"].iter().any(|m| Path::new("/sys/module").join(m).exists()) {
            return Ok(false);
        }
        if self.xfrm.is_none() {
            self.xfrm = match Netlink::new(xfrm()) {
                Ok(line) => Some(line),
                Err(Errno::PROTONOSUPPORT) => return Ok(false),
                Err(e) => return Err(e),
            };
        }
        let Some(line) = &mut self.xfrm else { return Ok(false) };
        let (mut known, mut any) = (false, false);
        line.ask(XFRM_MSG_GETSPDINFO, false, &[0; 4], |_, body| {
            // The first three counts: inbound, outbound and forwarding policies. Policies of
            // single sockets follow.
            let counts = body.get(4..).into_iter().flat_map(attributes).find(|(kind, _)| *kind == XFRMA_SPD_INFO);
            if let Some((_, counts)) = counts.filter(|(_, c)| c.len() >= 12) {
                known = true;
                any = (0..3).any(|i| u32_at(counts, i * 4) != 0);
            }
        })?;
        // (From Linux 5.15 on.)
        let _ = line.ask(XFRM_MSG_GETDEFAULT, false, &[0; 3], |_, body| {
            any |= body.iter().take(3).any(|what| *what == XFRM_USERPOLICY_BLOCK);
        });
        known.then_some(any).ok_or(Errno::PROTO)
    }

    /// Whether BPF programs are attached to netfilter hooks in the network namespace with this
    /// inode number.
    fn has_links(&mut self, namespace: u64) -> Result<bool, Errno> {
        if let Some((_, seen)) = self.seen.as_ref().filter(|(at, _)| at.elapsed() < LINKS_HOLD) {
            return Ok(seen.contains(&namespace));
        }
        let cannot = |why: fsocket_bpf::Error| {
            tracing::debug!(%why, "BPF links cannot be asked for");
            Errno::PERM
        };
        let links = self.links.get_or_insert_with(|| Links::start().map_err(cannot).ok());
        let seen = links.as_ref().ok_or(Errno::PERM)?.netfilter().map_err(cannot)?;
        let any = seen.contains(&namespace);
        self.seen = Some((Instant::now(), seen));
        Ok(any)
    }
}

fn xfrm() -> Option<rustix::net::Protocol> {
    std::num::NonZeroU32::new(XFRM).map(rustix::net::Protocol::from_raw)
}

/// A socket that is readable when IPsec policies change.
///
/// # Errors
/// Those of the system calls.
pub fn xfrm_events() -> Result<OwnedFd, Errno> {
    netlink::socket(xfrm(), 1 << (XFRMNLGRP_POLICY - 1))
}

/// Starts the record of connections between network namespaces. A thread loads the BPF programs,
/// because the first process of a container is waiting for the monitor.
pub fn record_pairs() -> Arc<OnceLock<Option<pairs::Parts>>> {
    let loaded = Arc::new(OnceLock::new());
    let to = loaded.clone();
    let load = move || {
        let why = |why: &fsocket_bpf::Error| {
            tracing::warn!(%why, "connections between network namespaces use kernel TCP");
        };
        to.set(Recorder::start_for_good().inspect_err(why).ok())
    };
    if let Err(e) = std::thread::Builder::new().name("pairs".into()).spawn(load) {
        tracing::warn!("connections between network namespaces use kernel TCP: {e}");
        let _ = loaded.set(None);
    }
    loaded
}

/// Calls bpf(2) with a structure that is laid out like the beginning of `union bpf_attr`.
fn bpf<T>(command: libc::c_int, attr: &mut T) -> Result<i32, Errno> {
    // SAFETY: `attr` lives during the call, and its size is passed. The structures of this file
    // contain no pointers except null.
    let rc = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<T>()) };
    match rc {
        0.. => Ok(rc as i32),
        _ => Err(std::io::Error::last_os_error().raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)),
    }
}

/// Whether programs of this type are attached to a network namespace or a device.
fn attached(target: u32, attach_type: u32) -> Result<bool, Errno> {
    match programs(target, attach_type, 0) {
        // The kernel does not know such programs, or none was ever attached.
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOENT | Errno::TOOBIG) => Ok(false),
        count => count.map(|n| n != 0),
    }
}

/// How many programs of this type are attached there.
fn programs(target: u32, attach_type: u32, query_flags: u32) -> Result<u32, Errno> {
    /// The beginning of the `query` member of `union bpf_attr`.
    #[derive(Default)]
    #[repr(C)]
    struct Query {
        target: u32,
        attach_type: u32,
        query_flags: u32,
        attach_flags: u32,
        ids: u64,
        count: u32,
        pad: u32,
        rest: [u64; 4],
    }
    let mut query = Query { target, attach_type, query_flags, ..Query::default() };
    bpf(BPF_PROG_QUERY, &mut query).map(|_| query.count)
}

/// How many programs of this type are in force for a cgroup; `None`: unknown.
pub fn in_force(cgroup: BorrowedFd<'_>, attach_type: u32) -> Option<u32> {
    const BPF_F_QUERY_EFFECTIVE: u32 = 1;
    programs(cgroup.as_raw_fd() as u32, attach_type, BPF_F_QUERY_EFFECTIVE).ok()
}
