//! Functions of glibc that musl 1.2.3 lacks, by the system call of the same name. (The library hooks `syscall`.)

use libc::{c_int, c_long, c_uint, epoll_event, iovec, off_t, sigset_t, ssize_t, timespec};

/// # Safety
/// As preadv2(2).
#[no_mangle]
pub unsafe extern "C" fn preadv2(fd: c_int, v: *const iovec, n: c_int, at: off_t, flags: c_int) -> ssize_t {
    // SAFETY: only the kernel follows the pointers, and it checks them: EFAULT where nothing is.
    unsafe { libc::syscall(libc::SYS_preadv2, fd, v, n as c_long, at, 0 as c_long, flags) as ssize_t }
}

/// # Safety
/// As pwritev2(2).
#[no_mangle]
pub unsafe extern "C" fn pwritev2(fd: c_int, v: *const iovec, n: c_int, at: off_t, flags: c_int) -> ssize_t {
    // SAFETY: only the kernel follows the pointers, and it checks them: EFAULT where nothing is.
    unsafe { libc::syscall(libc::SYS_pwritev2, fd, v, n as c_long, at, 0 as c_long, flags) as ssize_t }
}

/// # Safety
/// As epoll_pwait2(2).
#[no_mangle]
pub unsafe extern "C" fn epoll_pwait2(
    instance: c_int,
    events: *mut epoll_event,
    n: c_int,
    limit: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    /// Bytes of the kernel's signal mask.
    const MASK: usize = 8;
    // SAFETY: only the kernel follows the pointers, and it checks them: EFAULT where nothing is.
    unsafe { libc::syscall(libc::SYS_epoll_pwait2, instance, events, n, limit, mask, MASK) as c_int }
}

/// # Safety
/// As close_range(2).
#[no_mangle]
pub unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    // SAFETY: the call takes numbers only.
    unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) as c_int }
}
