//! Descriptors that go to another process: in a message (SCM_RIGHTS), or taken with `pidfd_getfd`.
//!
//! The sender cannot know which process receives a descriptor, or whether that process has the
//! library. So a kernel socket travels, which every process can use. The receiver returns it to
//! shared memory. It shows a listener to the monitor, like an inherited one ([`crate::inherit`]).
//! A connection moves like all connections that begin in the kernel ([`crate::upgrade`]), as soon
//! as only the receiver has it. See ADR 52.

use crate::chan;
use crate::table::{self, Desc, Kind};
use crate::{close, epoll, inherit, listen, musl, path, pool, upgrade};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::Reason;
use fsocket_proto::values::{Passing, Unpublishing};
use fsocket_sys::{Errno, Result};

/// Prepares `fd` for another process: its connection must use the kernel socket. False: it could
/// not move, and stays in shared memory.
pub fn passed(fd: i32) -> bool {
    let Some(d) = table::lookup(fd) else { return true };
    d.placeholder().mark_changed();
    match d.kind() {
        Kind::Fresh | Kind::Bound => share_unused(d),
        Kind::Kernel => upgrade::sent(fd),
        Kind::Shm => return share_connection(fd, d),
        Kind::Listener => {
            d.listening().set_held_elsewhere(true);
            path::share(d);
        }
        _ => {}
    }
    true
}

/// Moves a connection that is passed on. A program that passes one accepted connection will pass
/// more. So from now on the connections of this listener begin in the kernel, and move to shared
/// memory in the process that serves them.
fn share_connection(fd: i32, d: &'static Desc) -> bool {
    let is_watched = d.has_items();
    let shared = d.sock().is_shared();
    if d.is_server() {
        if let Some(c) = chan::of(d) {
            listen::unpublish_id(c.listener.load(Ordering::Relaxed), Unpublishing::ForGood);
        }
    }
    // The client's end may move again, to the process that serves the connection.
    d.path().set_comes_back(true);
    let is_kernels = path::materialize_one(d, Reason::Option);
    let now = table::lookup(fd).filter(|d| is_kernels && d.kind() == Kind::Kernel);
    if is_watched {
        // Kernel instances that watch the number would not recognize the socket after another move.
        now.into_iter().for_each(upgrade::give_up);
    } else if is_kernels {
        upgrade::sent(fd);
        if let Some(d) = table::lookup(fd).filter(|_| shared) {
            upgrade::tell(d, Passing::Shared);
        }
    }
    is_kernels
}

/// Prepares an unconnected socket, which this or another process may turn into a listener.
fn share_unused(d: &'static Desc) {
    if d.has_items() {
        epoll::leave_to_kernel(d);
        return table::forget(d);
    }
    d.listening().set_held_elsewhere(true);
    listen::keep_for_fork_group(d);
}

/// Prepares the descriptors in a message for another process, so that only kernel sockets travel.
///
/// # Errors
/// ETOOMANYREFS: a connection could not move to the kernel (ADR 8), so the receiver would get an
/// unconnected socket. The caller must not send the message. The kernel returns the same error if
/// too many descriptors are in flight: the program keeps the descriptor, and may try later.
///
/// # Safety
/// `m` is null, or a valid message.
pub unsafe fn passing(m: *const libc::msghdr) -> Result<()> {
    let mut all = true;
    // SAFETY: `m` is null or a valid message. The hook has checked it, or the kernel has filled
    // it, or the program submits it to the kernel.
    unsafe { each_descriptor(m, |fd| all &= passed(fd)) };
    if all {
        Ok(())
    } else {
        Err(Errno::ETOOMANYREFS)
    }
}

/// Called if the message was not sent.
///
/// # Safety
/// As for [`passing`].
pub unsafe fn kept(m: *const libc::msghdr) {
    let kept = |fd| {
        if let Some(d) = table::lookup(fd).filter(|d| d.kind() == Kind::Kernel) {
            upgrade::tell(d, Passing::NotSent);
        }
    };
    // SAFETY: `m` is null or a valid message. The hook has checked it, or the kernel has filled
    // it, or the program submits it to the kernel.
    unsafe { each_descriptor(m, kept) }
}

/// Called when a message has brought descriptors. `peeked`: the message stays in the queue, and
/// will bring them again.
///
/// # Safety
/// `m` is null, or a message that the kernel has filled.
pub unsafe fn arriving(m: *const libc::msghdr, peeked: bool) {
    let arrived = |fd| {
        arrived(fd);
        if let Some(d) = table::lookup(fd).filter(|d| peeked && d.kind() == Kind::Kernel) {
            upgrade::give_up(d);
        }
    };
    // SAFETY: `m` is null or a valid message. The hook has checked it, or the kernel has filled
    // it, or the program submits it to the kernel.
    unsafe { each_descriptor(m, arrived) }
}

/// Called when `fd` has come from another process.
pub fn arrived(fd: i32) {
    // If the library knows the number, the program has closed it below the hooks.
    close::overwritten(fd);
    pool::kernel_allocated(fd);
    inherit::received(fd);
}

/// # Safety
/// `m` is null, or a valid message.
unsafe fn each_descriptor(m: *const libc::msghdr, mut f: impl FnMut(i32)) {
    // SAFETY: `m` is null or a valid header. The hook has checked it, or the kernel has filled it,
    // or the program submits it to the kernel.
    let Some(m) = (unsafe { m.as_ref() }).filter(|m| m.msg_controllen != 0) else { return };
    const HEADER: usize = size_of::<libc::cmsghdr>();
    let (control, len) = (m.msg_control as *const u8, musl::length(m.msg_controllen));
    if len > i32::MAX as usize {
        return; // the kernel refuses such a length; below it, the sums do not overflow
    }
    let mut at = 0;
    while at + HEADER <= len {
        // SAFETY: `control` has `len` bytes, and the header at `at` ends within them (the loop's
        // condition).
        let h = unsafe { control.add(at).cast::<libc::cmsghdr>().read_unaligned() };
        let size = musl::length(h.cmsg_len);
        if !(HEADER..=len - at).contains(&size) {
            // The kernel refuses such a message.
            return;
        }
        if h.cmsg_level == libc::SOL_SOCKET && h.cmsg_type == libc::SCM_RIGHTS {
            for i in (HEADER..size - size % size_of::<i32>()).step_by(size_of::<i32>()) {
                // SAFETY: the four bytes end before `at + size`, which is at most `len`.
                f(unsafe { control.add(at + i).cast::<i32>().read_unaligned() });
            }
        }
        at += size.next_multiple_of(size_of::<usize>());
    }
}

/// Called when the program ends. If no other process with the library accepts on a shared
/// listener, its waiting connections move to the kernel's queue, for the processes that still hold
/// the listener.
#[link_section = ".text.fsocket_start"]
pub fn at_exit() {
    if listen::any() {
        leave_shared();
    }
}

#[inline(never)]
fn leave_shared() {
    let works = |d: &&Desc| listen::of(d).is_some_and(listen::Listener::is_worker);
    for d in table::all().filter(|d| d.listening().is_held_elsewhere()).filter(works) {
        path::leave_to_kernel(d);
    }
}
