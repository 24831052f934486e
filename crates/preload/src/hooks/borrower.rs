//! Hooks in a child that runs in its parent's memory (`vfork`). Calls go to the kernel, which
//! knows the child's descriptors. A connection over shared memory that the child itself uses moves
//! to kernel TCP first.

#![allow(non_upper_case_globals)] // system call numbers, with the kernel's names

use super::process;
use crate::real;
use fsocket_lifecycle::exec::borrower::{copied, touch};
use fsocket_runtime::lent::{borrowed, Loan};
use fsocket_sys as sys;
use libc::*;

/// The child's end of the socket pair for questions to its parent; -1: none.
fn end(loan: Option<&Loan>) -> c_int {
    loan.map_or(-1, |l| l.end.get())
}

pub unsafe fn close(fd: c_int) -> c_int {
    let loan = borrowed();
    if fd >= 0 && fd == end(loan) {
        // The program does not know this descriptor.
        sys::Errno::EBADF.set();
        return -1;
    }
    let r = real!(close(fd));
    if let Some(loan) = loan.filter(|_| r == 0) {
        loan.note(fd, 0);
    }
    r
}

pub unsafe fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let own = end(borrowed());
    if own < 0 || !(first..=last).contains(&(own as c_uint)) {
        return real!(close_range(first, last, flags));
    }
    let own = own as c_uint;
    let parts = [(own > first).then(|| (first, own - 1)), (own < last).then(|| (own + 1, last))];
    for (first, last) in parts.into_iter().flatten() {
        let r = real!(close_range(first, last, flags));
        if r != 0 {
            return r;
        }
    }
    0
}

pub unsafe fn closefrom(first: c_int) {
    // SAFETY: the call takes numbers only.
    let _ = unsafe { close_range(first.max(0) as c_uint, c_uint::MAX, 0) };
}

/// Moves the child's end of the socket pair away from number `new`, which the program wants for
/// another file.
fn make_way(new: c_int) {
    let Some(loan) = borrowed().filter(|l| new >= 0 && l.end.get() == new) else { return };
    let moved = sys::fcntl(new, F_DUPFD_CLOEXEC, new as usize + 1).unwrap_or(-1);
    loan.end.set(moved);
}

fn duplicated(old: c_int, new: c_int) -> c_int {
    if let Some(loan) = borrowed().filter(|_| new >= 0) {
        copied(loan, old, new);
    }
    new
}

pub unsafe fn dup(old: c_int) -> c_int {
    duplicated(old, real!(dup(old)))
}

pub unsafe fn dup2(old: c_int, new: c_int) -> c_int {
    if old == new {
        return real!(dup2(old, new));
    }
    make_way(new);
    duplicated(old, real!(dup2(old, new)))
}

pub unsafe fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    make_way(new);
    duplicated(old, real!(dup3(old, new, flags)))
}

pub unsafe fn fcntl(fd: c_int, command: c_int, arg: c_ulong) -> c_int {
    // SAFETY: the program's arguments, for the hook of this function.
    unsafe { fcntl_with(fd, command, arg, real::fcntl) }
}

pub unsafe fn fcntl64(fd: c_int, command: c_int, arg: c_ulong) -> c_int {
    // SAFETY: the program's arguments, for the hook of this function.
    unsafe { fcntl_with(fd, command, arg, real::fcntl64) }
}

unsafe fn fcntl_with(
    fd: c_int,
    command: c_int,
    arg: c_ulong,
    real: unsafe fn(c_int, c_int, c_ulong) -> c_int,
) -> c_int {
    if matches!(command, F_SETFL | F_GETFL) {
        touch(fd);
    }
    // SAFETY: `real` is libc's `fcntl`, called with the program's arguments.
    let r = unsafe { real(fd, command, arg) };
    match command {
        F_DUPFD | F_DUPFD_CLOEXEC => duplicated(fd, r),
        F_SETFD if r == 0 && arg as c_int & FD_CLOEXEC == 0 => {
            duplicated(fd, fd);
            r
        }
        _ => r,
    }
}

pub unsafe fn ioctl(fd: c_int, request: c_ulong, arg: c_ulong) -> c_int {
    if request == FIONBIO {
        touch(fd);
    }
    let r = real!(ioctl(fd, request, arg));
    if request == FIONCLEX && r == 0 {
        duplicated(fd, fd);
    }
    r
}

pub unsafe fn _exit(status: c_int) {
    // Does nothing else: at the end of the process, the parent does the library's work.
    // SAFETY: the call takes numbers only.
    let _ = unsafe { sys::raw(SYS_exit_group, [status as usize, 0, 0, 0, 0, 0]) };
    std::process::abort()
}

pub use _exit as _Exit;

/// The hook of `syscall` in such a child.
pub unsafe fn by_number(number: c_long, [a, b, c, d, e, f]: [c_ulong; 6]) -> c_long {
    let fd = a as c_int;
    // SAFETY: each arm passes the arguments of the system call, which are also those of the libc
    // function.
    unsafe {
        match number {
            SYS_close => close(fd) as c_long,
            SYS_close_range => close_range(a as _, b as _, c as _) as c_long,
            SYS_dup => dup(fd) as c_long,
            SYS_dup2 => dup2(fd, b as _) as c_long,
            SYS_dup3 => dup3(fd, b as _, c as _) as c_long,
            SYS_fcntl => fcntl(fd, b as _, c) as c_long,
            SYS_ioctl => ioctl(fd, b, c) as c_long,
            SYS_execve => process::execve(a as _, b as _, c as _) as c_long,
            SYS_execveat => process::execveat(fd, b as _, c as _, d as _, e as _) as c_long,
            SYS_read | SYS_write | SYS_readv | SYS_writev | SYS_recvfrom | SYS_sendto | SYS_recvmsg | SYS_sendmsg
            | SYS_getpeername | SYS_getsockname | SYS_shutdown | SYS_setsockopt | SYS_getsockopt => {
                touch(fd);
                real::syscall(number, a, b, c, d, e, f)
            }
            _ => real::syscall(number, a, b, c, d, e, f),
        }
    }
}

/// Called for a function whose first argument is a descriptor.
pub fn touched(arguments: &[usize]) {
    if let Some(fd) = arguments.first() {
        touch(*fd as c_int);
    }
}
