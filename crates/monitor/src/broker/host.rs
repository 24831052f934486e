//! Kinds of policy of the host that nobody announces, or that cost little to ask for each time.

use super::kernel::Tables;
use crate::descriptor;
use crate::netlink::{self, attributes, u32_at, Netlink};
use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::Errno;
use std::path::Path;
use std::time::{Duration, Instant};

/// What there is, a bit each.
pub mod found {
    /// Tables of iptables of old.
    pub const TABLES: u64 = 1;
    /// BPF programs that choose the listener, in the network namespace of the socket.
    pub const SK_LOOKUP: u64 = 2;
    /// Policies of IPsec.
    pub const XFRM: u64 = 4;
    /// BPF programs on the loopback device (tcx).
    pub const TCX: u64 = 8;
    /// BPF programs among netfilter's hooks.
    pub const NETFILTER_LINK: u64 = 16;
}

/// From linux/bpf.h.
const BPF_PROG_QUERY: libc::c_int = 16;
const BPF_LINK_GET_FD_BY_ID: libc::c_int = 30;
const BPF_LINK_GET_NEXT_ID: libc::c_int = 31;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const BPF_SK_LOOKUP: u32 = 36;
const BPF_TCX_INGRESS: u32 = 46;
const BPF_TCX_EGRESS: u32 = 47;
const BPF_LINK_TYPE_NETFILTER: u32 = 10;
/// Links that one look goes through, at most; where there are more, one of them may be such.
const LINKS: usize = 1024;
/// How long what was seen of links holds: many of them must not slow everybody.
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
    /// Is xfrm_user part of the kernel? (To ask would load a module.)
    xfrm_builtin: Option<bool>,
    links: Option<(Instant, bool)>,
}

impl Host {
    /// [`found`], as seen from the network namespace of this process, and of a socket.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn has(&mut self, socket: BorrowedFd<'_>) -> Result<u64, Errno> {
        let namespace = descriptor::netns_of(socket).ok_or(Errno::PERM)?;
        let mut all = 0;
        let mut note = |bit: u64, is_there: bool| all |= if is_there { bit } else { 0 };
        note(found::SK_LOOKUP, attached(namespace.as_raw_fd() as u32, BPF_SK_LOOKUP)?);
        note(found::TCX, attached(LOOPBACK, BPF_TCX_INGRESS)? || attached(LOOPBACK, BPF_TCX_EGRESS)?);
        note(found::TABLES, self.tables.any());
        note(found::XFRM, self.has_xfrm()?);
        note(found::NETFILTER_LINK, self.has_links()?);
        Ok(all)
    }

    /// Whether there are policies of IPsec, or one for what none is for.
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
            // Policies inward, outward, forwarded; then those of single sockets.
            let counts = body.get(4..).into_iter().flat_map(attributes).find(|(kind, _)| *kind == XFRMA_SPD_INFO);
            if let Some((_, counts)) = counts.filter(|(_, c)| c.len() >= 12) {
                known = true;
                any = (0..3).any(|i| u32_at(counts, i * 4) != 0);
            }
        })?;
        // (From 5.15 on.)
        let _ = line.ask(XFRM_MSG_GETDEFAULT, false, &[0; 3], |_, body| {
            any |= body.iter().take(3).any(|what| *what == XFRM_USERPOLICY_BLOCK);
        });
        known.then_some(any).ok_or(Errno::PROTO)
    }

    fn has_links(&mut self) -> Result<bool, Errno> {
        if let Some((_, any)) = self.links.filter(|(at, _)| at.elapsed() < LINKS_HOLD) {
            return Ok(any);
        }
        let any = netfilter_links()?;
        self.links = Some((Instant::now(), any));
        Ok(any)
    }
}

fn xfrm() -> Option<rustix::net::Protocol> {
    std::num::NonZeroU32::new(XFRM).map(rustix::net::Protocol::from_raw)
}

/// A socket that tells when policies of IPsec change.
///
/// # Errors
/// Of the calls.
pub fn xfrm_events() -> Result<OwnedFd, Errno> {
    netlink::socket(xfrm(), 1 << (XFRMNLGRP_POLICY - 1))
}

/// A command of bpf(2) with a structure that begins as its part of `union bpf_attr`.
fn bpf<T>(command: libc::c_int, attr: &mut T) -> Result<i32, Errno> {
    // SAFETY: the structure lives during the call and is as long as said; it holds no pointer but such to memory
    // that its maker keeps.
    let rc = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<T>()) };
    match rc {
        0.. => Ok(rc as i32),
        _ => Err(std::io::Error::last_os_error().raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)),
    }
}

/// Whether programs of this type are attached to a network namespace or a device.
fn attached(target: u32, attach_type: u32) -> Result<bool, Errno> {
    /// Beginning of the `query` part.
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
    let mut query = Query { target, attach_type, ..Query::default() };
    match bpf(BPF_PROG_QUERY, &mut query) {
        Ok(_) => Ok(query.count != 0),
        // A kernel without such programs, or with none so far.
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOENT | Errno::TOOBIG) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Whether there is a link of the type netfilter, in any network namespace.
fn netfilter_links() -> Result<bool, Errno> {
    let mut id = 0u32;
    for _ in 0..LINKS {
        // start_id, next_id, open_flags; or link_id and so on.
        let mut next = [id, 0, 0, 0];
        match bpf(BPF_LINK_GET_NEXT_ID, &mut next) {
            Ok(_) => id = next[1],
            Err(Errno::NOENT | Errno::INVAL | Errno::NOSYS) => return Ok(false),
            Err(e) => return Err(e),
        }
        let Ok(link) = bpf(BPF_LINK_GET_FD_BY_ID, &mut [id, 0, 0, 0]) else { continue };
        // SAFETY: just made, and ours alone.
        let link = unsafe { OwnedFd::from_raw_fd(link) };
        if link_type(&link) == Some(BPF_LINK_TYPE_NETFILTER) {
            return Ok(true);
        }
    }
    Ok(true)
}

fn link_type(link: &OwnedFd) -> Option<u32> {
    /// The `info` part.
    #[repr(C)]
    struct Info {
        fd: u32,
        len: u32,
        at: u64,
    }
    // struct bpf_link_info begins with the type.
    let mut info = [0u32; 16];
    let (len, at) = (size_of_val(&info) as u32, info.as_mut_ptr() as u64);
    let asked = bpf(BPF_OBJ_GET_INFO_BY_FD, &mut Info { fd: link.as_raw_fd() as u32, len, at });
    asked.is_ok().then_some(info[0])
}
