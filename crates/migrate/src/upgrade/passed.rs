//! Connections that go to other processes: what the monitor is told of each, so that it knows when one has it alone.

use super::calls::{at_once, begin, wanted};
use super::rest::{is_here, own_of, peer_of};
use crate::cow::Sparing;
use crate::table::{self, kind, Desc};
use crate::{ctl, route, successor};
use core::sync::atomic::Ordering;
use fsocket_abi::channel::{CLIENT, SERVER};
use fsocket_proto::{kind as msg, passed, Msg};
use fsocket_sys as sys;

/// `fd`, a connected kernel socket, goes to another process. In this one it stays the kernel's.
pub fn sent(fd: i32) {
    let d = match table::lookup(fd) {
        Some(d) if d.kind() == kind::KERNEL => d,
        Some(_) => return,
        None => match table::alloc(kind::KERNEL) {
            Some(d) => {
                d.using.reset();
                d.dirty.store(true, Ordering::Relaxed);
                if !table::install(fd, d) {
                    return table::release(d);
                }
                d
            }
            None => return,
        },
    };
    // A child that was forked for it does not have it alone when this process closes its own.
    d.ticket.put(0);
    // It was not to go over before it was passed: others may have it.
    let shared = d.using.never() && !is_passed(d);
    forbid(d);
    let Some(cookie) = successor::cookie(fd) else { return };
    d.passed_as.store(cookie, Ordering::Relaxed);
    tell(d, passed::SENT);
    if shared {
        tell(d, passed::SHARED);
    }
}

/// `fd`, a connected socket, has come from another process: it may go over as soon as no other process has it.
pub fn received(fd: i32, family: u32) {
    if !wanted() || fd <= table::STDIO {
        return;
    }
    let (Some(me), Some(peer), Some(cookie)) = (own_of(fd), peer_of(fd), successor::cookie(fd)) else { return };
    if !is_here(&peer.ip) {
        return;
    }
    let Some(d) = table::alloc(kind::FRESH) else { return };
    d.family.store(family, Ordering::Relaxed);
    d.kernel_family.store(family, Ordering::Relaxed);
    // Most are accepted and passed on. (A guess that is wrong leaves it in the kernel.)
    let opened = !route::has_listener(&me, fd) && route::has_listener(&peer, fd);
    begin(d, if opened { CLIENT } else { SERVER });
    // So that it is offered when its peer asks, which does so soon once only.
    at_once(d);
    if !table::install(fd, d) {
        return table::release(d);
    }
    d.passed_as.store(cookie, Ordering::Relaxed);
    tell(d, passed::ARRIVED);
}

/// What became of it since; see [`fsocket_proto::passed`].
pub fn tell(d: &Desc, what: u64) {
    let cookie = d.passed_as.load(Ordering::Relaxed);
    if cookie != 0 {
        let mut m = Msg::new(msg::PASSED);
        m.id = cookie;
        m.arg0 = what;
        ctl::tell(m, None);
    }
}

/// This process does not have it any more, or has it alone and in shared memory.
pub fn let_go(d: &Desc) {
    tell(d, passed::RELEASED);
    d.passed_as.store(0, Ordering::Relaxed);
}

pub(super) fn is_passed(d: &Desc) -> bool {
    d.passed_as.load(Ordering::Relaxed) != 0
}

/// In this process it stays the kernel's.
pub(super) fn forbid(d: &Desc) {
    while d.kind() == kind::KERNEL && !d.using.forbid() {
        sys::nanosleep(20_000);
    }
}
