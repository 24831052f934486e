//! io_uring: what a program names on a ring becomes the kernel's before the
//! kernel sees the entry.
//!
//! The kernel works on descriptors below us: on a connection of ours it would find
//! an unconnected socket, and an accept would never see who waits in our queues. A
//! ring that only reads files (mariadb) costs its sockets nothing.
//!
//! A ring is known if it was made through libc's `syscall` or liburing's functions;
//! entries are then looked at when they are submitted. Rings made by system calls
//! of a program's own are found by [`crate::unhooked`], and everything is left to the
//! kernel, as for a ring that a kernel thread polls without any call.

use crate::table::{self, Kind};
use crate::{close, epoll, leave, passing, pool, process, Outcome};
use fsocket_abi::arena::Reason;
use fsocket_compat::entry::{self, Entry};
use fsocket_compat::rings;
use fsocket_sys::Errno;

pub use rings::{become_child, closed, closed_range, is_unused, known, Queue};

/// IORING_SETUP_SQPOLL: a kernel thread takes entries as they are written.
const SETUP_SQPOLL: u32 = 1 << 1;
/// IORING_ENTER_REGISTERED_RING: the number is not a descriptor.
const ENTER_REGISTERED: u32 = 1 << 4;

/// `io_uring_setup(2)` has returned `fd`.
///
/// # Safety
/// `params` is the call's `struct io_uring_params`.
pub unsafe fn made(fd: i32, params: *const u8) {
    // SAFETY: the kernel has filled the 120 bytes at `params`.
    let p = unsafe { rings::Params::read(params) };
    if p.flags & SETUP_SQPOLL != 0 || !rings::map(fd, &p) {
        rings::remember(fd, None);
        leave::everything(Reason::Uring);
    }
}

/// liburing has made a ring: its queue, and the ring's descriptor.
pub fn made_by_liburing(fd: i32, q: Queue) {
    rings::remember(fd, Some(q));
}

/// Before `io_uring_enter(2)`.
pub fn entering(fd: i32, to_submit: u32, flags: u32) {
    if to_submit == 0 {
        return;
    }
    if flags & ENTER_REGISTERED == 0 && rings::known(fd) {
        if let Some(q) = rings::queue(fd) {
            submitting(&q, q.tail());
        }
        return;
    }
    rings::each(|q| submitting(q, q.tail()));
}

/// Entries of `q` up to `tail` are about to be submitted.
pub fn submitting(q: &Queue, tail: u32) {
    if process::nonce() == 0 {
        return;
    }
    let mut waits = false;
    q.each(tail, |e| {
        let waited = core::mem::replace(&mut waits, e.links());
        if !waited && registered(e) {
            return;
        }
        for fd in e.descriptors() {
            used(fd);
        }
        // SAFETY: the kernel reads the same through the entry's pointers.
        unsafe { e.further(used) };
        if let Some(m) = e.message() {
            // (The entry is the kernel's: it cannot fail here. docs/limits.md.)
            // SAFETY: the entry is one of the program's that is about to be submitted, and names the message.
            let _ = unsafe { passing::passing(m) };
        }
        if let Some(ep) = e.instance().and_then(table::lookup) {
            epoll::has_kernel_fds(ep);
        }
        if let Some(fd) = e.closes() {
            // What is left of ours is an instance, or a listener of the kernel's.
            if table::lookup(fd).is_some() {
                close::overwritten(fd);
            }
            pool::kernel_freed(fd);
        }
    });
}

/// libuv (node, uvloop) hands `epoll_ctl` to a ring: what the instance watches is ours, and so is
/// the call. It also adds what is there already and expects to be told so. What fails otherwise is
/// left to the kernel, which finds the same once the descriptor is the kernel's.
fn registered(e: &Entry) -> bool {
    let Some((ep, op, fd, event)) = e.epoll_ctl() else { return false };
    let Some(ed) = table::lookup(ep).filter(|d| d.kind() == Kind::Epoll) else { return false };
    let Some(d) = table::lookup(fd) else { return false };
    // SAFETY: the kernel would read the event as well.
    match unsafe { epoll::ctl(ed, op, fd, event) } {
        Outcome::Done(Ok(())) => {
            // SAFETY: the kernel has not been told of the entry yet.
            unsafe { e.is_done() };
            true
        }
        Outcome::Done(Err(Errno::EEXIST)) => {
            let Some((home, member)) = epoll::member(ed) else { return false };
            // SAFETY: the entry has not been submitted: it is still the program's to write.
            unsafe { e.names(home, member) };
            true
        }
        // The kernel does not have a connection of ours in there, either.
        Outcome::Done(Err(Errno::ENOENT)) => d.kind() == Kind::Shm,
        _ => false,
    }
}

/// Before `io_uring_register(2)`.
///
/// # Safety
/// `arg` and `n` are what the operation wants.
pub unsafe fn registering(op: u32, arg: *const u8, n: u32) {
    if !arg.is_null() && process::nonce() != 0 {
        // SAFETY: `arg` and `n` are the program's for this operation, as io_uring_register(2) wants them.
        unsafe { entry::registered(op, arg, n, used) };
    }
}

/// The kernel is told of these descriptors.
///
/// # Safety
/// `fds` points to `n` numbers.
pub unsafe fn named(fds: *const i32, n: u32) {
    if !fds.is_null() && process::nonce() != 0 {
        // SAFETY: the program says that `n` numbers are at `fds`.
        unsafe { entry::fds_of(fds, n as usize, used) };
    }
}

/// The kernel is about to use `fd` below us.
fn used(fd: i32) {
    leave::used_below(fd, Reason::Uring);
}
