//! Connections that go to other processes: what the monitor is told of each, so that it knows when one has it alone.

use super::calls::{at_once, begin, wanted};
use super::rest::{is_here, own_of, peer_of};
use crate::table::{self, Desc, Kind, DESCS};
use crate::{ctl, route, successor};
use fsocket_abi::channel::{CLIENT, SERVER};
use fsocket_proto::request;
use fsocket_proto::values::Passing;
use fsocket_sys as sys;

/// `fd`, a connected kernel socket, goes to another process. In this one it stays the kernel's.
pub fn sent(fd: i32) {
    let d = match table::lookup(fd) {
        Some(d) if d.kind() == Kind::Kernel => d,
        Some(_) => return,
        None => match table::alloc(Kind::Kernel) {
            Some(d) => {
                d.kernel().forget_decision();
                d.placeholder().mark_changed();
                if !table::install(fd, d) {
                    return table::release(d);
                }
                d
            }
            None => return,
        },
    };
    // A child that was forked for it does not have it alone when this process closes its own.
    // It was not to go over before it was passed: others may have it.
    let shared = d.kernel().stays() && !is_passed(d);
    forbid(d);
    let Some(cookie) = successor::cookie(fd) else { return };
    d.kernel().set_passed_as(cookie);
    tell(d, Passing::Sent);
    if shared {
        tell(d, Passing::Shared);
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
    let Some(d) = table::alloc(Kind::Fresh) else { return };
    d.set_families(family);
    // Most are accepted and passed on. (A guess that is wrong leaves it in the kernel.)
    let opened = !route::has_listener(&me, fd) && route::has_listener(&peer, fd);
    begin(d, if opened { CLIENT } else { SERVER });
    // So that it is offered when its peer asks, which does so soon once only.
    at_once(d);
    if !table::install(fd, d) {
        return table::release(d);
    }
    d.kernel().set_passed_as(cookie);
    tell(d, Passing::Arrived);
}

/// Before a fork: the child will have them, too. One that serves a connection which its parent has accepted, and closes, has
/// it alone soon. (Those of TCP stay in the kernel: most are in shared memory already when such a server forks.)
pub fn before_fork() {
    for d in (0..DESCS.len()).filter_map(|i| DESCS.get(i)).filter(|d| d.kind() == Kind::Kernel && d.is_used()) {
        match table::fd_of(d).filter(|_| d.is_unix() && (is_passed(d) || !d.kernel().stays())) {
            Some(fd) => sent(fd),
            None => give_up(d),
        }
    }
}

/// In a forked child.
#[link_section = ".text.fsocket_start"]
pub(super) fn become_child() {
    for d in (0..DESCS.len()).filter_map(|i| DESCS.get(i)) {
        if d.kind() == Kind::Kernel && d.is_used() && d.is_unix() && is_passed(d) {
            d.kernel().restart(1);
            at_once(d);
            d.kernel().comes_by_fork();
        }
    }
}

/// Before the first try of one that came by a fork. (A child that makes a few calls on it talks to nobody.)
pub(super) fn arrives(d: &Desc) {
    if d.kernel().arrives() {
        tell(d, Passing::Arrived);
    }
}

/// Tells the monitor what became of the descriptor; see [`Passing`].
pub fn tell(d: &Desc, what: Passing) {
    let cookie = d.kernel().passed_as();
    if cookie != 0 {
        ctl::tell(request::Passed { cookie, what }, None);
    }
}

/// This process does not have it any more, or has it alone and in shared memory.
pub fn let_go(d: &Desc) {
    tell(d, Passing::Released);
    d.kernel().set_passed_as(0);
}

pub(super) fn is_passed(d: &Desc) -> bool {
    d.kernel().passed_as() != 0
}

/// It is used in a way that the kernel alone can do, or by another process as well.
pub fn give_up(d: &Desc) {
    tell(d, Passing::Shared);
    forbid(d);
}

/// In this process it stays the kernel's.
pub(super) fn forbid(d: &Desc) {
    while d.kind() == Kind::Kernel && !d.kernel().forbid() {
        sys::nanosleep(20_000);
    }
}
