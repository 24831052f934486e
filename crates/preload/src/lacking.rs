//! Functions that an older libc, or musl, does not have, although the kernel may have the system
//! call. The hooks of these functions then make the system call.

use core::ffi::{c_char, c_int, c_uint, c_void, CStr};
use libc::{c_long, epoll_event, iovec, off_t, sigset_t, ssize_t, timespec};

/// Size of the kernel's signal sets in bytes.
const SIGSET: usize = 8;

fn call(number: c_long, args: [usize; 6]) -> ssize_t {
    // SAFETY: the functions below pass the arguments with which the program has called the
    // function of that name.
    match unsafe { fsocket_sys::raw(number, args) } {
        Ok(n) => n as ssize_t,
        Err(e) => {
            e.set();
            -1
        }
    }
}

/// The function here that makes the system call of that name, or null.
pub fn by_number(name: &CStr) -> *mut c_void {
    match name.to_bytes() {
        b"close_range" => close_range as *mut c_void,
        b"execveat" => execveat as *mut c_void,
        b"epoll_pwait2" => epoll_pwait2 as *mut c_void,
        b"pidfd_getfd" => pidfd_getfd as *mut c_void,
        b"preadv2" | b"preadv64v2" => preadv2 as *mut c_void,
        b"pwritev2" | b"pwritev64v2" => pwritev2 as *mut c_void,
        _ => core::ptr::null_mut(),
    }
}

unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    call(libc::SYS_close_range, [first as usize, last as usize, flags as usize, 0, 0, 0]) as c_int
}

unsafe extern "C" fn execveat(
    dir: c_int,
    path: *const c_char,
    argv: *const *const c_char,
    env: *const *const c_char,
    flags: c_int,
) -> c_int {
    let args = [dir as usize, path as usize, argv as usize, env as usize, flags as usize, 0];
    call(libc::SYS_execveat, args) as c_int
}

unsafe extern "C" fn epoll_pwait2(
    ep: c_int,
    events: *mut epoll_event,
    max: c_int,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    let args = [ep as usize, events as usize, max as usize, timeout as usize, mask as usize, SIGSET];
    call(libc::SYS_epoll_pwait2, args) as c_int
}

unsafe extern "C" fn pidfd_getfd(pidfd: c_int, target: c_int, flags: c_uint) -> c_int {
    call(libc::SYS_pidfd_getfd, [pidfd as usize, target as usize, flags as usize, 0, 0, 0]) as c_int
}

// The offset comes in two halves. On 64 bits the kernel ignores the upper one.
unsafe extern "C" fn preadv2(fd: c_int, iov: *const iovec, n: c_int, offset: off_t, flags: c_int) -> ssize_t {
    call(libc::SYS_preadv2, [fd as usize, iov as usize, n as usize, offset as usize, 0, flags as usize])
}

unsafe extern "C" fn pwritev2(fd: c_int, iov: *const iovec, n: c_int, offset: off_t, flags: c_int) -> ssize_t {
    call(libc::SYS_pwritev2, [fd as usize, iov as usize, n as usize, offset as usize, 0, flags as usize])
}
