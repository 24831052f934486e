//! Checks whether a placeholder still is in the state of a new socket.
//!
//! The library notes what libc's functions do to a placeholder: options and duplicates (`dirty`),
//! epoll instances and processes that have it (`watched`), and the close-on-exec flag. The
//! library does not see raw system calls, nor access through /proc. It asks the kernel for the
//! remaining state, when the answer matters:
//!
//! | question | when |
//! | --- | --- |
//! | flags of the open file | the placeholder is kept |
//! | address, end of receiving, owner, signal, mode | the program does something with the next socket for which the kernel looks at the placeholder ([`settle`]) |
//!
//! A connection over shared memory uses nothing of its placeholder, so most placeholders are
//! never checked for the second row. A placeholder is closed if one answer differs from a new
//! socket's, or if the kernel does not answer.

use crate::table::Desc;
use core::sync::atomic::{AtomicU64, Ordering};
use fsocket_sys as sys;

/// User and group that own this process's new sockets, packed; [`UNKNOWN`] until they are read.
#[link_section = ".data.fsocket_start"]
static CREATOR: AtomicU64 = AtomicU64::new(UNKNOWN);
const UNKNOWN: u64 = u64::MAX;
const F_GETSIG: i32 = 11;

/// The process may have changed its credentials, so that new sockets may get another owner.
pub fn other_credentials() {
    CREATOR.store(UNKNOWN, Ordering::Relaxed);
    crate::table::all().for_each(|d| d.placeholder().mark_changed());
}

/// User and group that would own a socket if this process made it now.
fn creator() -> u64 {
    match CREATOR.load(Ordering::Relaxed) {
        UNKNOWN => {
            let now = pack(sys::geteuid(), sys::getegid());
            CREATOR.store(now, Ordering::Relaxed);
            now
        }
        known => known,
    }
}

fn pack(uid: u32, gid: u32) -> u64 {
    u64::from(uid) << 32 | u64::from(gid)
}

/// Is the placeholder of `d` like a new socket, as far as the library has seen and its flags
/// show? Some: yes, with the close-on-exec flag. None: it has changed.
pub(crate) fn close_on_exec_if_unchanged(fd: i32, d: &Desc) -> Option<bool> {
    let p = d.placeholder();
    if p.is_changed() || p.is_watched() || d.unconnected().is_for_kernel() || !has_flags(fd, d.placeholder().nonblock())
    {
        return None;
    }
    match d.placeholder().close_on_exec() {
        Some(known) => Some(known),
        None => Some(sys::fcntl(fd, libc::F_GETFD, 0).ok()? & libc::FD_CLOEXEC != 0),
    }
}

/// Are the flags those of a new socket (no O_ASYNC, O_APPEND, O_DIRECT, …), with O_NONBLOCK as
/// the library believes?
fn has_flags(fd: i32, nonblock: bool) -> bool {
    let expected = libc::O_RDWR | if nonblock { libc::O_NONBLOCK } else { 0 };
    sys::fcntl(fd, libc::F_GETFL, 0) == Ok(expected)
}

/// Called before the kernel uses the placeholder of `d` (descriptor `fd`) on the program's
/// behalf. A recycled placeholder that differs from a new socket is replaced.
#[inline]
pub fn settle(fd: i32, d: &Desc) {
    if d.placeholder().is_recycled() {
        ask(fd, d);
    }
}

#[cold]
fn ask(fd: i32, d: &Desc) {
    d.placeholder().set_recycled(false);
    if is_unbound(fd) && is_open(fd) && has_no_owner(fd) && is_as_created(fd) {
        return;
    }
    d.placeholder().mark_changed();
    let nonblock = if d.placeholder().nonblock() { libc::SOCK_NONBLOCK } else { 0 };
    let Ok(new) = sys::socket(d.placeholder().family() as i32, libc::SOCK_STREAM | libc::SOCK_CLOEXEC | nonblock, 0)
    else {
        return;
    };
    let cloexec = sys::fcntl(fd, libc::F_GETFD, 0).is_ok_and(|f| f & libc::FD_CLOEXEC != 0);
    let _ = sys::dup3(new, fd, if cloexec { libc::O_CLOEXEC } else { 0 });
    let _ = sys::close(new);
}

/// Has the socket neither address nor port? Then it was never connected or listening.
fn is_unbound(fd: i32) -> bool {
    let mut name = [0u8; size_of::<libc::sockaddr_in6>()];
    // After the family, all bytes must be zero.
    sys::getsockname(fd, &mut name).is_ok_and(|len| len <= name.len()) && name[2..].iter().all(|byte| *byte == 0)
}

/// Is the socket's receiving side open?
fn is_open(fd: i32) -> bool {
    let mut p = libc::pollfd { fd, events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: the kernel writes one local entry, and the time limit is zero.
    let asked = unsafe { sys::raw(libc::SYS_ppoll, [&raw mut p as usize, 1, &raw const NOW as usize, 0, 0, 0]) };
    asked.is_ok() && p.revents & libc::POLLRDHUP == 0
}

static NOW: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 0 };

fn has_no_owner(fd: i32) -> bool {
    [libc::F_GETOWN, F_GETSIG].iter().all(|question| sys::fcntl(fd, *question, 0) == Ok(0))
}

fn is_as_created(fd: i32) -> bool {
    sys::ownership(fd).is_ok_and(|(mode, uid, gid)| mode == libc::S_IFSOCK | 0o777 && pack(uid, gid) == creator())
}
