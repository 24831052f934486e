//! Hooks that wait for many descriptors. They read the program's times and masks once, and pass
//! the wait to `fsocket_readiness`, or to the kernel if no descriptor belongs to the library.

use super::answer::{caught_here, completed, either, gone, guarded};
use crate::real;
use fsocket_fdtable::{pool, table};
use fsocket_migrate::upgrade;
use fsocket_ops::close;
use fsocket_readiness::{epoll, poll as ops};
use fsocket_runtime::{making, user};
use libc::*;

fn ms(timeout: c_int) -> Option<u64> {
    (timeout >= 0).then(|| timeout as u64 * 1_000_000)
}

/// Reads the timeout, and checks the mask. Ok(None): no timeout. Err: one of them is invalid or
/// unreadable; the kernel then reports the error.
unsafe fn ts(t: *const timespec, mask: *const sigset_t) -> Result<Option<u64>, ()> {
    if !mask.is_null() && !user::readable(mask as *const u64, 1) {
        return Err(());
    }
    // SAFETY: null, or a pointer of the program; the guarded copy reports a bad one.
    match unsafe { user::get_if(t) } {
        Ok(None) => Ok(None),
        Ok(Some(t)) if t.tv_sec >= 0 && (0..1_000_000_000).contains(&t.tv_nsec) => {
            Ok(Some((t.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(t.tv_nsec as u64)))
        }
        _ => Err(()),
    }
}

pub unsafe fn poll(fds: *mut pollfd, n: nfds_t, timeout: c_int) -> c_int {
    // SAFETY: the program passes `n` entries at `fds`; they are checked before they are read.
    either(guarded(|| unsafe { ops::poll(fds, n as usize, ms(timeout), core::ptr::null()) }), || {
        real!(poll(fds, n, timeout))
    })
}

pub unsafe fn ppoll(fds: *mut pollfd, n: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int {
    // SAFETY: `timeout` and `mask` are null or pointers of the program; they are checked.
    match unsafe { ts(timeout, mask) } {
        Ok(t) => {
            // SAFETY: the program passes `n` entries at `fds`, which are checked; the mask is null
            // or readable.
            either(guarded(|| unsafe { ops::poll(fds, n as usize, t, mask) }), || real!(ppoll(fds, n, timeout, mask)))
        }
        Err(()) => real!(ppoll(fds, n, timeout, mask)),
    }
}

pub unsafe fn __poll_chk(fds: *mut pollfd, n: nfds_t, timeout: c_int, cap: size_t) -> c_int {
    if (n as usize).saturating_mul(size_of::<pollfd>()) > cap {
        return real!(__poll_chk(fds, n, timeout, cap));
    }
    // SAFETY: the buffer has room for `n` entries, so the arguments are valid for `poll`.
    unsafe { poll(fds, n, timeout) }
}

pub unsafe fn __ppoll_chk(
    fds: *mut pollfd,
    n: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
    cap: size_t,
) -> c_int {
    if (n as usize).saturating_mul(size_of::<pollfd>()) > cap {
        return real!(__ppoll_chk(fds, n, timeout, mask, cap));
    }
    // SAFETY: the buffer has room for `n` entries, so the arguments are valid for `ppoll`.
    unsafe { ppoll(fds, n, timeout, mask) }
}

pub unsafe fn select(n: c_int, r: *mut fd_set, w: *mut fd_set, x: *mut fd_set, timeout: *mut timeval) -> c_int {
    // SAFETY: the program's arguments of `select`, for this function and for libc's.
    unsafe { select_or(n, r, w, x, timeout, || real::select(n, r, w, x, timeout)) }
}

/// `kernel`: the same call, if the kernel must do it. (libc's function writes the time back
/// itself, and faults at a bad address; select(2) ignores that.)
pub unsafe fn select_or(
    n: c_int,
    r: *mut fd_set,
    w: *mut fd_set,
    x: *mut fd_set,
    timeout: *mut timeval,
    kernel: impl FnOnce() -> c_int,
) -> c_int {
    // SAFETY: null, or a pointer of the program; the guarded copy reports a bad one.
    let t = match unsafe { user::get_if(timeout) } {
        Ok(Some(t)) if t.tv_sec < 0 || t.tv_usec < 0 => return kernel(),
        Err(_) => return kernel(),
        Ok(Some(t)) => Some((t.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(t.tv_usec as u64 * 1000)),
        Ok(None) => None,
    };
    let start = fsocket_sys::now_ns();
    either(
        // SAFETY: the sets are null, or the program's sets of `n` bits, which are copied.
        guarded(|| unsafe { ops::select(n, r, w, x, t, core::ptr::null()) }).map_done(|v| {
            // Like Linux, writes back the time that is left, if possible.
            if let Some(t) = t {
                let rest = t.saturating_sub(fsocket_sys::now_ns() - start);
                let tv_sec = (rest / 1_000_000_000) as time_t;
                // SAFETY: the guarded copy reports a bad address; the time was read from there
                // before.
                let _ = unsafe {
                    user::put(timeout, timeval { tv_sec, tv_usec: (rest / 1000 % 1_000_000) as suseconds_t })
                };
            }
            v
        }),
        kernel,
    )
}

pub unsafe fn pselect(
    n: c_int,
    r: *mut fd_set,
    w: *mut fd_set,
    x: *mut fd_set,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: `timeout` and `mask` are null or pointers of the program; they are checked.
    match unsafe { ts(timeout, mask) } {
        // SAFETY: the sets are null, or the program's sets of `n` bits, which are copied; the mask
        // is null or readable.
        Ok(t) => either(guarded(|| unsafe { ops::select(n, r, w, x, t, mask) }), || {
            real!(pselect(n, r, w, x, timeout, mask))
        }),
        Err(()) => real!(pselect(n, r, w, x, timeout, mask)),
    }
}

/// Is `time` null or readable? For raw system calls, which write back the time that is left.
pub fn is_there<T>(time: *const T) -> bool {
    time.is_null() || user::readable(time, 1)
}

/// Is there no mask, or one of the kernel's size? For raw system calls.
pub fn whole_mask(mask: *const sigset_t, size: c_ulong) -> bool {
    mask.is_null() || size as usize == size_of::<u64>()
}

/// The mask from the sixth argument of pselect6(2), which points to a pseudo-structure of pointer
/// and size. None: the kernel refuses it.
pub unsafe fn mask_of_pselect(both: *const [c_ulong; 2]) -> Option<*const sigset_t> {
    // SAFETY: null, or a pointer of the program; the guarded copy reports a bad one.
    let [mask, size] = unsafe { user::get_if(both) }.ok()?.unwrap_or_default();
    let mask = mask as *const sigset_t;
    whole_mask(mask, size).then_some(mask)
}

/// Like the system call ppoll(2), writes back the time that is left.
pub unsafe fn ppoll_telling(fds: *mut pollfd, n: nfds_t, timeout: *mut timespec, mask: *const sigset_t) -> c_int {
    // SAFETY: the program's array and mask, for the hook of this call. The time is null or
    // readable.
    unsafe { telling(timeout, || ppoll(fds, n, timeout, mask)) }
}

/// Like the system call pselect6(2), writes back the time that is left.
pub unsafe fn pselect_telling(
    n: c_int,
    r: *mut fd_set,
    w: *mut fd_set,
    x: *mut fd_set,
    timeout: *mut timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the program's sets and mask, for the hook of this call. The time is null or readable.
    unsafe { telling(timeout, || pselect(n, r, w, x, timeout, mask)) }
}

unsafe fn telling(timeout: *mut timespec, wait: impl FnOnce() -> c_int) -> c_int {
    // SAFETY: `timeout` is null or a pointer of the program; it is checked.
    let (start, limit) = (fsocket_sys::now_ns(), unsafe { ts(timeout, core::ptr::null()) });
    let r = wait();
    if let Ok(Some(limit)) = limit {
        let rest = limit.saturating_sub(fsocket_sys::now_ns() - start);
        let tv_sec = (rest / 1_000_000_000) as time_t;
        // SAFETY: the guarded copy reports a bad address; the time was read from there before.
        let _ = unsafe { user::put(timeout, timespec { tv_sec, tv_nsec: (rest % 1_000_000_000) as c_long }) };
    }
    r
}

/// Runs `make`, by which the program makes an epoll instance, and enters the instance into the
/// tables.
pub fn made(make: impl FnOnce() -> c_int) -> c_int {
    making::making(|| {
        let fd = make();
        if fd >= 0 {
            completed(created(fd));
        }
        fd
    })
}

/// A separate function, because `layout.ld` places it by its name.
#[inline(never)]
fn created(fd: c_int) -> c_int {
    caught_here(|| {
        pool::kernel_allocated(fd);
        close::overwritten(fd);
        epoll::created(fd);
        0
    })
}

pub unsafe fn epoll_ctl(ep: c_int, op: c_int, fd: c_int, ev: *mut epoll_event) -> c_int {
    if gone(ep) || gone(fd) {
        return -1;
    }
    if op != EPOLL_CTL_DEL && !user::readable(ev, 1) {
        return real!(epoll_ctl(ep, op, fd, ev));
    }
    if op == EPOLL_CTL_ADD && upgrade::unix::may_connect(fd) {
        let unknown = table::lookup(ep).is_none();
        guarded(|| upgrade::unix::before_connect(fd, unknown));
    }
    match table::lookup(ep) {
        Some(d) if epoll::ctl_of_kernel_fd(d, fd) => real!(epoll_ctl(ep, op, fd, ev)),
        // SAFETY: `ev` is readable, or `op` does not use it.
        Some(d) => either(guarded(|| unsafe { epoll::ctl(d, op, fd, ev) }), || real!(epoll_ctl(ep, op, fd, ev))),
        None => {
            epoll::ctl_elsewhere(op, fd);
            real!(epoll_ctl(ep, op, fd, ev))
        }
    }
}

pub unsafe fn epoll_wait(ep: c_int, evs: *mut epoll_event, max: c_int, timeout: c_int) -> c_int {
    match table::lookup(ep) {
        // SAFETY: the program passes room for `max` events at `evs`; the guarded copy reports a
        // bad address.
        Some(d) => either(guarded(|| unsafe { epoll::wait(d, evs, max, ms(timeout), core::ptr::null()) }), || {
            real!(epoll_wait(ep, evs, max, timeout))
        }),
        None => real!(epoll_wait(ep, evs, max, timeout)),
    }
}

pub unsafe fn epoll_pwait(
    ep: c_int,
    evs: *mut epoll_event,
    max: c_int,
    timeout: c_int,
    mask: *const sigset_t,
) -> c_int {
    match table::lookup(ep).filter(|_| mask.is_null() || user::readable(mask as *const u64, 1)) {
        // SAFETY: the program passes room for `max` events at `evs`, which the guarded copy
        // checks; the mask is null or readable.
        Some(d) => either(guarded(|| unsafe { epoll::wait(d, evs, max, ms(timeout), mask) }), || {
            real!(epoll_pwait(ep, evs, max, timeout, mask))
        }),
        None => real!(epoll_pwait(ep, evs, max, timeout, mask)),
    }
}

pub unsafe fn epoll_pwait2(
    ep: c_int,
    evs: *mut epoll_event,
    max: c_int,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: `timeout` and `mask` are null or pointers of the program; they are checked.
    match (table::lookup(ep), unsafe { ts(timeout, mask) }) {
        // SAFETY: the program passes room for `max` events at `evs`, which the guarded copy
        // checks; the mask is null or readable.
        (Some(d), Ok(t)) => either(guarded(|| unsafe { epoll::wait(d, evs, max, t, mask) }), || {
            real!(epoll_pwait2(ep, evs, max, timeout, mask))
        }),
        _ => real!(epoll_pwait2(ep, evs, max, timeout, mask)),
    }
}
