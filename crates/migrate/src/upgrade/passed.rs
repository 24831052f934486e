//! Connections that are passed to other processes. The monitor is told of each descriptor, so
//! that it knows when only one process has the connection.

use super::calls::{at_once, begin, wanted};
use super::rest::{is_here, own_of, peer_of};
use crate::table::{self, Desc, Kind, DESCS};
use crate::{ctl, route, successor};
use fsocket_abi::channel::{CLIENT, SERVER};
use fsocket_proto::request;
use fsocket_proto::values::Passing;
use fsocket_sys as sys;

/// `fd`, a connected kernel socket, is about to be sent to another process. In this process it
/// stays in the kernel.
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
    // If the connection was not allowed to move before it was passed, other processes may have
    // it. (A child that was forked to serve the connection then still shares it, even if this
    // process closes its own descriptor.)
    let shared = d.kernel().stays() && !is_passed(d);
    forbid(d);
    let Some(cookie) = successor::cookie(fd) else { return };
    d.kernel().set_passed_as(cookie);
    tell(d, Passing::Sent);
    if shared {
        tell(d, Passing::Shared);
    }
}

/// `fd`, a connected socket, has come from another process. It may move once no other process has
/// it.
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
    // Most passed connections were accepted by the sender. (If this guess is wrong, the
    // connection stays in the kernel.)
    let opened = !route::has_listener(&me, fd) && route::has_listener(&peer, fd);
    begin(d, if opened { CLIENT } else { SERVER });
    // This end must be offered by the time its peer asks, which the peer does only once early.
    at_once(d);
    if !table::install(fd, d) {
        return table::release(d);
    }
    d.kernel().set_passed_as(cookie);
    tell(d, Passing::Arrived);
}

/// Called before a fork: the child will have the connections, too. In a server that forks for
/// each connection, the parent soon closes an accepted connection, and then only the child has
/// it. (TCP connections stay in the kernel: most connections of such a server are over shared
/// memory before the fork.)
pub fn before_fork() {
    for d in (0..DESCS.len()).filter_map(|i| DESCS.get(i)).filter(|d| d.kind() == Kind::Kernel && d.is_used()) {
        match table::fd_of(d).filter(|_| d.is_unix() && (is_passed(d) || !d.kernel().stays())) {
            Some(fd) => sent(fd),
            None => give_up(d),
        }
    }
}

/// In a forked child: inherited Unix connections may move once the monitor knows that only one
/// process has each.
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

/// Called before the first try of a connection that came by a fork. (A child that makes only a
/// few calls on it need not send this message to the monitor.)
pub(super) fn arrives(d: &Desc) {
    if d.kernel().arrives() {
        tell(d, Passing::Arrived);
    }
}

/// Tells the monitor what happened to the descriptor; see [`Passing`].
pub fn tell(d: &Desc, what: Passing) {
    let cookie = d.kernel().passed_as();
    if cookie != 0 {
        ctl::tell(request::Passed { cookie, what }, None);
    }
}

/// This process does not have the connection any more, or only this process has it, over shared
/// memory.
pub fn let_go(d: &Desc) {
    tell(d, Passing::Released);
    d.kernel().set_passed_as(0);
}

pub(super) fn is_passed(d: &Desc) -> bool {
    d.kernel().passed_as() != 0
}

/// The connection stays in the kernel: it is used in a way that only the kernel supports, or
/// another process has it, too.
pub fn give_up(d: &Desc) {
    tell(d, Passing::Shared);
    forbid(d);
}

/// Keeps the connection in the kernel, in this process.
pub(super) fn forbid(d: &Desc) {
    while d.kind() == Kind::Kernel && !d.kernel().forbid() {
        sys::nanosleep(20_000);
    }
}
