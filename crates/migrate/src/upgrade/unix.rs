//! Unix stream sockets that may move to shared memory.
//!
//! As between network namespaces, the kernel connects them, and its sockets stay behind the
//! descriptors: they have the peer's name, and are used again if the connection moves back. The
//! monitor asks the kernel which two sockets are connected. Three things differ from TCP:
//!
//! - A send puts its bytes into the peer's queue before it returns, so nothing is ever in flight.
//! - Names do not identify the peer, because most clients have no name.
//! - A socket that wants credentials with each message, or that has passed descriptors, stays in
//!   the kernel.

use super::calls::{begin, first, with_unix, CALLS};
use super::unix_rest::{int, is_unconnected, peer_of};
use super::worth;
use crate::bits::Bits;
use crate::table::{self, Desc, Kind};
use crate::{lately, name};
use core::sync::atomic::{AtomicBool, Ordering};
use fsocket_abi::channel::{CLIENT, SERVER};
use fsocket_sys as sys;

/// Has the program made a Unix socket? If it has not, [`may_connect`] costs only a load.
static MADE: AtomicBool = AtomicBool::new(false);
/// Has the process forked, or was it forked itself?
static FORKED: AtomicBool = AtomicBool::new(false);
/// Number of descriptors for which the two sets below have room.
const NUMBERS: i32 = 1 << 16;
/// Unix sockets that do not listen and have not been connected.
static UNUSED: Bits<{ NUMBERS as usize / 64 }> = Bits::new();
/// Those of `UNUSED` that were made since the last fork.
static NEW: Bits<{ NUMBERS as usize / 64 }> = Bits::new();

/// The kernel has connected `fd` to the address at `addr`. Does nothing for other sockets.
///
/// # Safety
/// `addr` points to `len` bytes, as the program passed it.
pub unsafe fn connected(fd: i32, addr: *const libc::sockaddr, len: u32) {
    // SAFETY: the program says that its address is there.
    if !with_unix() || !unsafe { name::is_unix(addr, len) } {
        return;
    }
    match table::lookup(fd) {
        Some(d) if d.kind() == Kind::Kernel && d.kernel().awaits_connect() => count(d, CLIENT),
        Some(_) => {}
        // Another process of the fork group has the socket, too, and would not learn of the move.
        None if was_forked(fd) => {}
        None => follow(fd, CLIENT),
    }
    forget(fd);
}

/// The kernel has accepted `fd` from a listener without the library. Does nothing for other
/// sockets.
pub fn accepted(fd: i32) {
    if with_unix() && int(fd, libc::SO_DOMAIN) == Some(libc::AF_UNIX) {
        follow(fd, SERVER);
    }
}

/// From now on the calls of this connection are counted.
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
        // The end is announced at its third request, because a client with one question makes
        // fewer (`psql -c`).
        d.kernel().set_next_try(CALLS + worth::TURN);
    }
}

/// The program has made a Unix socket.
pub fn made(fd: i32) {
    if !MADE.load(Ordering::Relaxed) {
        MADE.store(true, Ordering::Relaxed);
    }
    UNUSED.set(fd, true);
    NEW.set(fd, true);
}

/// The socket is connected or closed, so it leaves the sets.
pub fn forget(fd: i32) {
    if UNUSED.has(fd) {
        UNUSED.set(fd, false);
    }
}

/// Called before a fork. Unconnected sockets will stay in the kernel, because the child has them,
/// too.
pub fn before_fork() {
    FORKED.store(true, Ordering::Relaxed);
    if MADE.load(Ordering::Relaxed) {
        NEW.clear();
    }
}

/// Has the process forked, or was it forked, since the socket was made?
fn was_forked(fd: i32) -> bool {
    match fd < NUMBERS {
        true => UNUSED.has(fd) && !NEW.has(fd),
        false => FORKED.load(Ordering::Relaxed),
    }
}

/// May `fd` be an unconnected Unix socket that the table does not know?
#[inline]
pub fn may_connect(fd: i32) -> bool {
    let is_made = || UNUSED.has(fd) || fd >= NUMBERS;
    MADE.load(Ordering::Relaxed) && is_made() && table::lookup(fd).is_none()
}

/// Called before an epoll instance watches `fd` ([`may_connect`]), or `fd` is duplicated. If `fd`
/// is an unconnected Unix socket, the table tracks it from now on, because the instance and the
/// duplicate must follow its connection. (nginx adds a socket to its instance before it connects
/// the socket.) `kernel`: they cannot follow, so the connection stays in the kernel.
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

/// Can the connection never move? Called before the first try, so that a connection for one
/// request does not pay for these questions.
pub(super) fn stays(fd: i32) -> bool {
    int(fd, libc::SO_TYPE) != Some(libc::SOCK_STREAM) || sends_signals(fd) || lately::STRANGERS.has(&peer_of(fd).ip, 0)
}

/// Did the program ask for signals (O_ASYNC) before it connected? (If it asks later, that moves
/// the connection back.)
fn sends_signals(fd: i32) -> bool {
    sys::fcntl(fd, libc::F_GETFL, 0).is_ok_and(|flags| flags & libc::O_ASYNC != 0)
}
