//! What the kernel's policy may tell a new socket by, beyond its options: user, group and cgroup of the thread that makes
//! it, as one number.
//!
//! A handshake that the kernel has allowed proves something for sockets of the same identity only. A process that has
//! met no policy asks for nothing here.
//!
//! Effective user and group are asked for each time: one thread may change its own by a raw system call. The
//! file-system user and group follow them, unless a call has been seen that sets them apart.

use crate::fnv::Fnv;
use crate::{process, rights};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use fsocket_sys as sys;

/// Of a socket: not known yet.
pub const UNKNOWN: u64 = 0;
/// Of a socket that the program gets for a new one: the placeholder of a connection before, which another user may have
/// made.
pub const RECYCLED: u64 = 1;

/// Has the monitor said that a policy may be against a connection of this process?
#[link_section = ".data.fsocket_start"]
static POLICED: AtomicBool = AtomicBool::new(false);
/// May threads differ in more than their effective user and group?
#[link_section = ".data.fsocket_start"]
static APART: AtomicBool = AtomicBool::new(false);
/// Changes of what is not asked for each time (groups).
#[link_section = ".data.fsocket_start"]
static CHANGES: AtomicU64 = AtomicU64::new(0);
/// A pidfd of this process, plus one; 0: not asked for; -1: not to be had.
#[link_section = ".data.fsocket_start"]
static SELF: AtomicI32 = AtomicI32::new(0);

/// Whether this process has met a policy.
#[inline(always)]
pub fn is_policed() -> bool {
    POLICED.load(Ordering::Relaxed)
}

/// The monitor has said so. True: it is the first time.
pub fn meet_policy() -> bool {
    !POLICED.swap(true, Ordering::Relaxed)
}

/// The groups of the whole process may have changed.
pub fn regrouped() {
    CHANGES.fetch_add(1, Ordering::Relaxed);
}

/// One thread may have changed its user or groups, or those for files.
pub fn set_apart() {
    APART.store(true, Ordering::Relaxed);
    regrouped();
}

/// That of this thread; above [`RECYCLED`].
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

/// Whether the socket `fd`, which the program has just made, has the user and group that this thread has.
pub fn has_made(fd: i32) -> bool {
    sys::ownership(fd).is_ok_and(|(_, uid, gid)| (uid, gid) == (sys::geteuid(), sys::getegid()))
}

/// The number of the cgroup (version 2); 0: the kernel does not tell (before 6.13).
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
    // struct pidfd_info, as it was first: a mask, the cgroup, and twelve numbers of 32 bits.
    let mut info = [PIDFD_INFO_CGROUPID, 0, 0, 0, 0, 0, 0, 0];
    // SAFETY: the structure is as long as the request says.
    let asked =
        unsafe { sys::raw(libc::SYS_ioctl, [(fd - 1) as usize, PIDFD_GET_INFO, info.as_mut_ptr() as usize, 0, 0, 0]) };
    match asked {
        Ok(_) if info[0] & PIDFD_INFO_CGROUPID != 0 => info[1],
        _ => 0,
    }
}

#[cold]
fn open() -> i32 {
    // A filter of system calls may end a process that makes one which its program would not make.
    // SAFETY: numbers only.
    let filtered = unsafe { sys::raw(libc::SYS_prctl, [libc::PR_GET_SECCOMP as usize, 0, 0, 0, 0, 0]) } != Ok(0);
    let opened = || {
        // SAFETY: numbers only.
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

/// Our descriptor got another number.
pub fn renumbered(old: i32, new: i32) -> bool {
    SELF.compare_exchange(old + 1, new + 1, Ordering::Relaxed, Ordering::Relaxed).is_ok()
}

/// In a forked child, which is another process.
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
        // SAFETY: a plain system call.
        if unsafe { libc::geteuid() } != 0 {
            return std::eprintln!("SKIPPED: threads_that_are_apart_differ: not root");
        }
        set_apart();
        let here = now();
        let there = std::thread::spawn(|| {
            // SAFETY: plain system calls; the first concerns this thread alone.
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
