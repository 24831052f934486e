//! io_uring: a socket that a program names in a ring entry moves to the kernel before the kernel
//! sees the entry.
//!
//! The kernel works on descriptors below the hooks. For a connection over shared memory it would
//! find an unconnected socket, and an accept would never see the connections that wait in SYN
//! queues. (A ring that only reads files, as in mariadb, does not affect the sockets.)
//!
//! The library knows a ring that was made through libc's `syscall` or liburing's functions. It
//! reads the entries when they are submitted. [`crate::unhooked`] finds rings that a program has
//! made by its own system calls. In that case everything moves to the kernel, as for a ring that a
//! kernel thread polls without any call.

use crate::table::{self, Kind};
use crate::{close, epoll, leave, passing, pool, process, Outcome};
use fsocket_abi::arena::Reason;
use fsocket_compat::entry::{self, Entry};
use fsocket_compat::rings;
use fsocket_sys::Errno;

pub use rings::{become_child, closed, closed_range, is_unused, known, Queue};

/// IORING_SETUP_SQPOLL: a kernel thread takes entries as soon as they are written.
const SETUP_SQPOLL: u32 = 1 << 1;
/// IORING_ENTER_REGISTERED_RING: the number is not a descriptor.
const ENTER_REGISTERED: u32 = 1 << 4;

/// Called when `io_uring_setup(2)` has returned `fd`.
///
/// # Safety
/// `params` is the `struct io_uring_params` of the call.
pub unsafe fn made(fd: i32, params: *const u8) {
    // SAFETY: io_uring_setup(2) has succeeded, so the kernel has filled the 120 bytes at `params`.
    let p = unsafe { rings::Params::read(params) };
    if p.flags & SETUP_SQPOLL != 0 || !rings::map(fd, &p) {
        rings::remember(fd, None);
        leave::everything(Reason::Uring);
    }
}

/// Called when liburing has made a ring, with its queue and descriptor.
pub fn made_by_liburing(fd: i32, q: Queue) {
    rings::remember(fd, Some(q));
}

/// Called before `io_uring_enter(2)`.
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

/// Called when the entries of `q` up to `tail` are about to be submitted.
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
        // SAFETY: the entry is about to be submitted, so the kernel reads the same memory through
        // its pointers.
        unsafe { e.further(used) };
        if let Some(m) = e.message() {
            // A submission cannot fail here, so a connection that could not move is sent as it is.
            // SAFETY: the program is about to submit the entry, which names the message.
            let _ = unsafe { passing::passing(m) };
        }
        if let Some(ep) = e.instance().and_then(table::lookup) {
            epoll::has_kernel_fds(ep);
        }
        if let Some(fd) = e.closes() {
            // The description of an epoll instance, or of a listener in the kernel, can still be
            // there.
            if table::lookup(fd).is_some() {
                close::overwritten(fd);
            }
            pool::kernel_freed(fd);
        }
    });
}

/// libuv (node, uvloop) makes `epoll_ctl` calls through a ring. If the library knows the instance
/// and the descriptor, it makes the call itself, and marks the entry as done. libuv may also add a
/// descriptor that is already there, and expects an error. Other failures are left to the kernel:
/// it finds the same error once the connection has moved there.
fn registered(e: &Entry) -> bool {
    let Some((ep, op, fd, event)) = e.epoll_ctl() else { return false };
    let Some(ed) = table::lookup(ep).filter(|d| d.kind() == Kind::Epoll) else { return false };
    let Some(d) = table::lookup(fd) else { return false };
    // SAFETY: the event is memory of the program that the kernel would read, too.
    match unsafe { epoll::ctl(ed, op, fd, event) } {
        Outcome::Done(Ok(())) => {
            // SAFETY: the entry is not submitted yet, so it may be written.
            unsafe { e.is_done() };
            true
        }
        Outcome::Done(Err(Errno::EEXIST)) => {
            let Some((home, member)) = epoll::member(ed) else { return false };
            // SAFETY: the entry is not submitted yet, so it may be written.
            unsafe { e.names(home, member) };
            true
        }
        // The kernel's instance has no such connection, either.
        Outcome::Done(Err(Errno::ENOENT)) => d.kind() == Kind::Shm,
        _ => false,
    }
}

/// Called before `io_uring_register(2)`.
///
/// # Safety
/// `arg` and `n` must be valid for the operation.
pub unsafe fn registering(op: u32, arg: *const u8, n: u32) {
    if !arg.is_null() && process::nonce() != 0 {
        // SAFETY: the program passes `arg` and `n` as io_uring_register(2) defines them.
        unsafe { entry::registered(op, arg, n, used) };
    }
}

/// Moves the connections to the kernel, which gets their descriptors.
///
/// # Safety
/// `fds` points to `n` descriptors.
pub unsafe fn named(fds: *const i32, n: u32) {
    if !fds.is_null() && process::nonce() != 0 {
        // SAFETY: the program passes `n` descriptors at `fds`, as io_uring_register(2) wants them.
        unsafe { entry::fds_of(fds, n as usize, used) };
    }
}

/// Moves `fd` to the kernel, which is about to use it below the hooks.
fn used(fd: i32) {
    leave::used_below(fd, Reason::Uring);
}
