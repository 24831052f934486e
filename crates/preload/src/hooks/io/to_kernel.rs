//! Calls that are the kernel's in any case: a connection of ours becomes a kernel connection first.

use super::super::answer::guarded;
use crate::real;
use fsocket_lifecycle::pool;
use libc::*;

fn to_kernel(fd: c_int) {
    pool::let_go(fd);
    guarded(|| fsocket_lifecycle::exec::hand_over(fd));
}

pub unsafe fn splice(
    input: c_int,
    in_off: *mut loff_t,
    out: c_int,
    out_off: *mut loff_t,
    n: size_t,
    flags: c_uint,
) -> ssize_t {
    to_kernel(input);
    to_kernel(out);
    unsafe { real::splice(input, in_off, out, out_off, n, flags) }
}

pub unsafe fn tee(input: c_int, out: c_int, n: size_t, flags: c_uint) -> ssize_t {
    to_kernel(input);
    to_kernel(out);
    unsafe { real::tee(input, out, n, flags) }
}

pub unsafe fn vdprintf(fd: c_int, format: *const c_char, args: *mut c_void) -> c_int {
    to_kernel(fd);
    unsafe { real::vdprintf(fd, format, args) }
}

pub unsafe fn __vdprintf_chk(fd: c_int, flag: c_int, format: *const c_char, args: *mut c_void) -> c_int {
    to_kernel(fd);
    unsafe { real::__vdprintf_chk(fd, flag, format, args) }
}

/// The descriptor is the first member of an `aiocb`.
unsafe fn aio_to_kernel(cb: *mut c_void) {
    if let Some(fd) = unsafe { (cb as *const c_int).as_ref() } {
        to_kernel(*fd);
    }
}

pub unsafe fn aio_read(cb: *mut c_void) -> c_int {
    unsafe {
        aio_to_kernel(cb);
        real::aio_read(cb)
    }
}

pub unsafe fn aio_write(cb: *mut c_void) -> c_int {
    unsafe {
        aio_to_kernel(cb);
        real::aio_write(cb)
    }
}

pub unsafe fn aio_read64(cb: *mut c_void) -> c_int {
    unsafe {
        aio_to_kernel(cb);
        real::aio_read64(cb)
    }
}

pub unsafe fn aio_write64(cb: *mut c_void) -> c_int {
    unsafe {
        aio_to_kernel(cb);
        real::aio_write64(cb)
    }
}

pub unsafe fn lio_listio(mode: c_int, list: *const *mut c_void, n: c_int, event: *mut c_void) -> c_int {
    unsafe {
        for i in 0..n.max(0) as usize {
            aio_to_kernel(*list.add(i));
        }
        real::lio_listio(mode, list, n, event)
    }
}

pub unsafe fn lio_listio64(mode: c_int, list: *const *mut c_void, n: c_int, event: *mut c_void) -> c_int {
    unsafe {
        for i in 0..n.max(0) as usize {
            aio_to_kernel(*list.add(i));
        }
        real::lio_listio64(mode, list, n, event)
    }
}
