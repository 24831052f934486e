//! Besides options, a policy of the kernel can distinguish sockets by the user, group and cgroup
//! of the thread that makes them. This module combines such facts into one number, the *identity*
//! (ADR 36).
//!
//! If the kernel has allowed a handshake, that only says something about sockets of the same
//! identity. A process that no policy concerns computes no identity.
//!
//! Effective user and group are asked each time, because a thread may change them by a raw system
//! call. The file-system user and group follow them, unless a hook has seen a call that sets them
//! separately.

use crate::fnv::Fnv;
use crate::{process, rights};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use fsocket_sys as sys;

/// Identity of a socket that is not known yet.
pub const UNKNOWN: u64 = 0;
/// Identity of a placeholder that served an earlier connection: another user may have made it.
pub const RECYCLED: u64 = 1;

/// Has the monitor reported that a policy may concern a connection of this process?
#[link_section = ".data.fsocket_start"]
static POLICED: AtomicBool = AtomicBool::new(false);
/// May threads of this process differ in more than their effective user and group?
#[link_section = ".data.fsocket_start"]
static APART: AtomicBool = AtomicBool::new(false);
/// Counts changes of facts that are not asked each time (groups).
#[link_section = ".data.fsocket_start"]
static CHANGES: AtomicU64 = AtomicU64::new(0);
/// A pidfd of this process + 1. 0: not opened yet; -1: it cannot be opened.
#[link_section = ".data.fsocket_start"]
static SELF: AtomicI32 = AtomicI32::new(0);

/// Has the monitor reported a policy for this process?
#[inline(always)]
pub fn is_policed() -> bool {
    POLICED.load(Ordering::Relaxed)
}

/// Records that the monitor has reported a policy. True: this is the first time.
pub fn meet_policy() -> bool {
    !POLICED.swap(true, Ordering::Relaxed)
}

/// Records that the groups of the whole process may have changed.
pub fn regrouped() {
    CHANGES.fetch_add(1, Ordering::Relaxed);
}

/// Records that a thread may have changed only its own user or groups, or its file-system user.
pub fn set_apart() {
    APART.store(true, Ordering::Relaxed);
    regrouped();
}

/// The identity of this thread, a number above [`RECYCLED`].
pub fn now() -> u64 {
    let mut hash = Fnv::new();
    let mut add = |v: u64| hash.add(&v.to_ne_bytes());
    add(u64::from(sys::geteuid()) << 32 | u64::from(sys::getegid()));
    add(CHANGES.load(Ordering::Relaxed));
    add(cgroup());
    if APART.load(Ordering::Relaxed) {
        add(rights::for_files());
        add(rights::groups());
    }
    hash.value().max(RECYCLED + 1)
}

/// Does the socket `fd`, which the program has just made, have the user and group of this thread?
pub fn has_made(fd: i32) -> bool {
    sys::ownership(fd).is_ok_and(|(_, uid, gid)| (uid, gid) == (sys::geteuid(), sys::getegid()))
}

/// The number of this process's cgroup (version 2). 0: the kernel does not tell it (before 6.13).
fn cgroup() -> u64 {
    let fd = match SELF.load(Ordering::Relaxed) {
        0 => open(),
        fd => fd,
    };
    if fd < 0 {
        return 0;
    }
    /// From linux/pidfd.h.
    const PIDFD_INFO_CGROUPID: u64 = 1 << 2;
    const PIDFD_GET_INFO: usize = 0xc040_ff0b;
    // `struct pidfd_info` in its first version: a mask, the cgroup, and twelve numbers of 32 bits.
    let mut info = [PIDFD_INFO_CGROUPID, 0, 0, 0, 0, 0, 0, 0];
    // SAFETY: the request's number includes the size of the structure, which `info` has.
    let asked =
        unsafe { sys::raw(libc::SYS_ioctl, [(fd - 1) as usize, PIDFD_GET_INFO, info.as_mut_ptr() as usize, 0, 0, 0]) };
    match asked {
        Ok(_) if info[0] & PIDFD_INFO_CGROUPID != 0 => info[1],
        _ => 0,
    }
}

#[cold]
fn open() -> i32 {
    // A seccomp filter may kill a process for a call that its program would not make, so this asks
    // first.
    // SAFETY: the call takes numbers only.
    let filtered = unsafe { sys::raw(libc::SYS_prctl, [libc::PR_GET_SECCOMP as usize, 0, 0, 0, 0, 0]) } != Ok(0);
    let opened = || {
        // SAFETY: the call takes numbers only.
        let fd = unsafe { sys::raw(libc::SYS_pidfd_open, [sys::getpid() as usize, 0, 0, 0, 0, 0]) }.ok()?;
        Some(process::high_fd(fd as i32) + 1)
    };
    let fd = if filtered { None } else { opened() }.unwrap_or(-1);
    match SELF.compare_exchange(0, fd, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => fd,
        Err(others) => {
            if fd > 0 {
                process::close_own(fd - 1);
            }
            others
        }
    }
}

/// The library has moved one of its descriptors from number `old` to `new`. True: it belongs to
/// this module.
pub fn renumbered(old: i32, new: i32) -> bool {
    SELF.compare_exchange(old + 1, new + 1, Ordering::Relaxed, Ordering::Relaxed).is_ok()
}

/// In a forked child: closes the inherited pidfd, which names the parent.
pub fn become_child() {
    let fd = SELF.swap(0, Ordering::Relaxed);
    if fd > 0 {
        process::close_own(fd - 1);
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;

    #[test]
    fn threads_that_are_apart_differ() {
        let before = now();
        assert_eq!(before, now());
        assert!(before > RECYCLED);
        regrouped();
        assert_ne!(before, now());
        let fd = sys::socket(libc::AF_INET, libc::SOCK_STREAM, 0).unwrap();
        assert!(has_made(fd));
        let _ = sys::close(fd);
        // SAFETY: the call has no argument.
        if unsafe { libc::geteuid() } != 0 {
            return std::eprintln!("SKIPPED: threads_that_are_apart_differ: not root");
        }
        set_apart();
        let here = now();
        let there = std::thread::spawn(|| {
            // SAFETY: system calls with numbers only. The first concerns only this thread.
            unsafe { libc::syscall(libc::SYS_setfsuid, 65534) };
            let fd = sys::socket(libc::AF_INET, libc::SOCK_STREAM, 0).unwrap();
            let made = has_made(fd);
            let _ = sys::close(fd);
            (now(), made)
        });
        let (there, made) = there.join().unwrap();
        assert_ne!(here, there);
        assert!(!made, "its owner is the user for files");
        assert_eq!(here, now());
    }
}
