//! Descriptors that go to another process: in a message (SCM_RIGHTS), or taken by `pidfd_getfd`.
//!
//! The sender cannot know which process receives them, or whether it has the library. So a kernel socket
//! travels, which every process can use, and the process that receives it brings it
//! back to shared memory: a listener by showing it to the monitor, as one that it has inherited
//! ([`crate::inherit`]), a connection by the way of all that begin in the kernel ([`crate::upgrade`]), as soon as it
//! has it alone. See ADR 52.

use crate::chan;
use crate::table::{self, Desc, Kind};
use crate::{close, epoll, inherit, listen, musl, path, pool, upgrade};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::Reason;
use fsocket_proto::values::{Passing, Unpublishing};
use fsocket_sys::{Errno, Result};

/// `fd` goes to another process: what goes with it must be the real thing. False: it is not, the connection stays
/// in shared memory.
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

/// A program that passes one connection that it has accepted will pass more: from here on that listener's come over
/// the kernel, and go over to shared memory where they are served.
fn share_connection(fd: i32, d: &'static Desc) -> bool {
    let is_watched = d.has_items();
    let shared = d.sock().is_shared();
    if d.is_server() {
        if let Some(c) = chan::of(d) {
            listen::unpublish_id(c.listener.load(Ordering::Relaxed), Unpublishing::ForGood);
        }
    }
    // Its client may go over again, to where it is served.
    d.path().set_comes_back(true);
    // (An instance that watches it in the kernel would not know it under a description of ours.)
    let is_kernels = path::materialize_one(d, Reason::Option);
    if is_kernels && !is_watched {
        upgrade::sent(fd);
        if let Some(d) = table::lookup(fd).filter(|_| shared) {
            upgrade::tell(d, Passing::Shared);
        }
    }
    is_kernels
}

/// It may become a listener, by this process or by another one.
fn share_unused(d: &'static Desc) {
    if d.has_items() {
        epoll::leave_to_kernel(d);
        return table::forget(d);
    }
    d.listening().set_held_elsewhere(true);
    listen::keep_for_fork_group(d);
}

/// Descriptors that a message passes to another process: what goes with them is the
/// kernel socket alone.
///
/// # Errors
/// ETOOMANYREFS: the path of a connection could not be switched (ADR 8), and the receiver would get an
/// unconnected socket. The message must not be sent. The kernel fails like this where too many descriptors are on
/// their way: a program keeps the descriptor, and may try later.
///
/// # Safety
/// `m` is null or a message.
pub unsafe fn passing(m: *const libc::msghdr) -> Result<()> {
    let mut all = true;
    // SAFETY: `m` is null, or a message: the hook has looked at it, the kernel has filled it, or the program submits
    // it.
    unsafe { each_descriptor(m, |fd| all &= passed(fd)) };
    if all {
        Ok(())
    } else {
        Err(Errno::ETOOMANYREFS)
    }
}

/// The message was not sent.
///
/// # Safety
/// As [`passing`].
pub unsafe fn kept(m: *const libc::msghdr) {
    let kept = |fd| {
        if let Some(d) = table::lookup(fd).filter(|d| d.kind() == Kind::Kernel) {
            upgrade::tell(d, Passing::NotSent);
        }
    };
    // SAFETY: `m` is null, or a message: the hook has looked at it, the kernel has filled it, or the program submits
    // it.
    unsafe { each_descriptor(m, kept) }
}

/// Descriptors that a message has brought; `peeked`: and will bring again.
///
/// # Safety
/// `m` is null or a message, as the kernel has filled it.
pub unsafe fn arriving(m: *const libc::msghdr, peeked: bool) {
    let arrived = |fd| {
        arrived(fd);
        if let Some(d) = table::lookup(fd).filter(|d| peeked && d.kind() == Kind::Kernel) {
            upgrade::give_up(d);
        }
    };
    // SAFETY: `m` is null, or a message: the hook has looked at it, the kernel has filled it, or the program submits
    // it.
    unsafe { each_descriptor(m, arrived) }
}

/// `fd` comes from another process.
pub fn arrived(fd: i32) {
    // If that number is known it was closed below us.
    close::overwritten(fd);
    pool::kernel_allocated(fd);
    inherit::received(fd);
}

/// # Safety
/// `m` is null or a message.
unsafe fn each_descriptor(m: *const libc::msghdr, mut f: impl FnMut(i32)) {
    // SAFETY: null, or a header: the hook has looked at it, the kernel has filled it, or the program submits it.
    let Some(m) = (unsafe { m.as_ref() }).filter(|m| m.msg_controllen != 0) else { return };
    const HEADER: usize = size_of::<libc::cmsghdr>();
    let (control, len) = (m.msg_control as *const u8, musl::length(m.msg_controllen));
    if len > i32::MAX as usize {
        return; // the kernel refuses it, and the sums below do not overflow
    }
    let mut at = 0;
    while at + HEADER <= len {
        // SAFETY: `control` has `len` bytes, and a header begins at `at` and ends within them.
        let h = unsafe { control.add(at).cast::<libc::cmsghdr>().read_unaligned() };
        let size = musl::length(h.cmsg_len);
        if !(HEADER..=len - at).contains(&size) {
            // The kernel refuses it.
            return;
        }
        if h.cmsg_level == libc::SOL_SOCKET && h.cmsg_type == libc::SCM_RIGHTS {
            for i in (HEADER..size - size % size_of::<i32>()).step_by(size_of::<i32>()) {
                // SAFETY: four bytes at `at + i`, before `at + size`, which is `len` at most.
                f(unsafe { control.add(at + i).cast::<i32>().read_unaligned() });
            }
        }
        at += size.next_multiple_of(size_of::<usize>());
    }
}

/// The program ends. Where no other process with the library accepts on a listener that others hold, what waits
/// for it goes into the kernel's queue, for them.
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
