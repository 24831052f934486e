//! Unix stream sockets that may go over.
//!
//! As between network namespaces: the kernel has connected them, its socket stays idle behind the descriptors, answers who
//! is at the other end, and is the way back. The monitor asks the kernel which two sockets are connected. Three things
//! differ from TCP. A send puts its bytes into the peer's queue before it returns, so nothing is ever on its way. Names say
//! nothing of the peer: most clients have none. The kernel keeps a socket that wants credentials with each message, or that
//! has passed descriptors.

use super::calls::{begin, first, with_unix, CALLS};
use super::unix_rest::{int, is_unconnected, peer_of};
use super::worth;
use crate::table::{self, Desc, Kind};
use crate::{lately, name};
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use fsocket_abi::channel::{CLIENT, SERVER};
use fsocket_sys as sys;

/// Has the program made a Unix socket? If not, [`may_connect`] costs a load.
static MADE: AtomicBool = AtomicBool::new(false);
/// Forks so far, plus one.
static FORKS: AtomicU32 = AtomicU32::new(1);
/// [`FORKS`] when the Unix socket with this number was made; 0: it is something else, listens, or has been connected.
static MADE_AT: [AtomicU32; 1024] = [const { AtomicU32::new(0) }; 1024];

/// The kernel has connected `fd` to the address at `addr`. Nothing, if that is no Unix socket.
///
/// # Safety
/// `addr` is the program's for `len` bytes.
pub unsafe fn connected(fd: i32, addr: *const libc::sockaddr, len: u32) {
    // SAFETY: the program says that its address is there.
    if !with_unix() || !unsafe { name::is_unix(addr, len) } {
        return;
    }
    match table::lookup(fd) {
        Some(d) if d.kind() == Kind::Kernel && d.kernel().awaits_connect() => count(d, CLIENT),
        Some(_) => {}
        // A process of the fork has it, too, and would not go over.
        None if was_forked(fd) => {}
        None => follow(fd, CLIENT),
    }
    forget(fd);
}

/// The kernel has accepted `fd` from a listener that is not ours. Nothing, if that is no Unix socket.
pub fn accepted(fd: i32) {
    if with_unix() && int(fd, libc::SO_DOMAIN) == Some(libc::AF_UNIX) {
        follow(fd, SERVER);
    }
}

/// From here on the calls are counted.
fn follow(fd: i32, side: usize) {
    if fd <= table::STDIO {
        return;
    }
    let Some(d) = table::alloc(Kind::Fresh) else { return };
    d.set_families(libc::AF_UNIX as u32);
    count(d, side);
    if !table::install(fd, d) {
        table::release(d);
    }
}

fn count(d: &'static Desc, side: usize) {
    begin(d, side);
    d.kernel().set_across(true);
    worth::begins(d);
    if first() == CALLS {
        // A client with one question says in a third request that it ends (`psql -c`).
        d.kernel().set_next_try(CALLS + worth::TURN);
    }
}

/// The program has made a Unix socket.
pub fn made(fd: i32) {
    if !MADE.load(Ordering::Relaxed) {
        MADE.store(true, Ordering::Relaxed);
    }
    if let Some(at) = MADE_AT.get(fd as usize) {
        at.store(FORKS.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// A socket is one no more that may connect.
pub fn forget(fd: i32) {
    if let Some(at) = MADE_AT.get(fd as usize) {
        at.store(0, Ordering::Relaxed);
    }
}

/// Sockets that are not connected yet stay in the kernel: the child will have them, too.
pub fn before_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Has the process forked, or come by a fork, since it made this socket?
fn was_forked(fd: i32) -> bool {
    let at = MADE_AT.get(fd as usize).map_or(0, |at| at.load(Ordering::Relaxed));
    at != 0 && at != FORKS.load(Ordering::Relaxed)
}

/// May `fd` be a Unix socket that is not connected yet, and that the table does not know?
#[inline]
pub fn may_connect(fd: i32) -> bool {
    let is_made = || MADE_AT.get(fd as usize).is_none_or(|at| at.load(Ordering::Relaxed) != 0);
    MADE.load(Ordering::Relaxed) && is_made() && table::lookup(fd).is_none()
}

/// An epoll instance is to watch `fd` ([`may_connect`]), or it has a second number. If it is a Unix socket that is not connected
/// yet, the table knows it from here on: instance and number must follow its connection. (nginx adds a socket to its instance
/// before it connects it.) `kernel`: they could not, and the connection stays in the kernel.
pub fn before_connect(fd: i32, kernel: bool) {
    if fd <= table::STDIO || !with_unix() || !is_unconnected(fd) {
        return;
    }
    let Some(d) = table::alloc(Kind::Kernel) else { return };
    d.set_families(libc::AF_UNIX as u32);
    d.placeholder().mark_changed();
    d.kernel().await_connect();
    if kernel {
        d.kernel().forbid();
    }
    if !table::install(fd, d) {
        table::release(d);
    }
}

/// Before the first try, so that a connection for one request does not pay for it: is it one that never goes over?
pub(super) fn stays(fd: i32) -> bool {
    int(fd, libc::SO_TYPE) != Some(libc::SOCK_STREAM) || sends_signals(fd) || lately::STRANGERS.has(&peer_of(fd).ip, 0)
}

/// Has the program asked for signals before it connected? (A later wish ends the following.)
fn sends_signals(fd: i32) -> bool {
    sys::fcntl(fd, libc::F_GETFL, 0).is_ok_and(|flags| flags & libc::O_ASYNC != 0)
}
