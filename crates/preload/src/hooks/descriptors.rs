//! Closing and duplicating descriptors, and their flags. After each hook the table of descriptions
//! agrees with the kernel's descriptors.

use super::answer::{caught_here, completed, either, gone, guarded, Answer};
use fsocket_fdtable::{pristine, table};
use fsocket_lifecycle::{by_number, unshared};
use fsocket_migrate::upgrade;
use fsocket_ops::{close as ops, opts};
use fsocket_runtime::Outcome;
use fsocket_sys as sys;
use fsocket_sys::Result;
use libc::*;

pub unsafe fn close(fd: c_int) -> c_int {
    if ops::is_kernel_only(fd) {
        return real!(close(fd));
    }
    /// A separate function, because `layout.ld` places it by its name.
    #[inline(never)]
    fn close_ours(fd: c_int) -> Outcome<Result<()>> {
        caught_here(|| ops::close(fd))
    }
    either(completed(close_ours(fd)), || real!(close(fd)))
}

pub unsafe fn dup(fd: c_int) -> c_int {
    if gone(fd) {
        return -1;
    }
    let new = real!(dup(fd));
    if new >= 0 {
        return duplicated(fd, new, EMFILE);
    }
    new
}

/// The kernel has made the duplicate `new`. Enters it into the table. `refused`: the error if that
/// is impossible.
fn duplicated(fd: c_int, new: c_int, refused: c_int) -> c_int {
    if upgrade::unix::may_connect(fd) {
        guarded(|| upgrade::unix::before_connect(fd, false));
    }
    if !ops::duplicated(fd, new) {
        // SAFETY: the kernel has just made this descriptor, and the program does not know it.
        unsafe { close(new) };
        fsocket_sys::Errno::new(refused).set();
        return -1;
    }
    new
}

/// Called before a call that tells which file is behind `fd` (programs use such calls to test
/// whether a number is open), or changes the file. Afterwards the placeholder cannot be reused for
/// another socket. Some: the call fails.
pub fn gone_or_shown(fd: c_int) -> Option<c_int> {
    if let Some(d) = table::lookup(fd) {
        pristine::settle(fd, d);
    }
    table::reached_kernel(fd);
    gone(fd).then_some(-1)
}

pub unsafe fn dup2(old: c_int, new: c_int) -> c_int {
    if old == new {
        return real!(dup2(old, new));
    }
    if let Some(r) = before_dup(old, new) {
        return r;
    }
    let r = real!(dup2(old, new));
    if r >= 0 {
        return duplicated(old, new, EBUSY);
    }
    r
}

pub unsafe fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    if let Some(r) = before_dup(old, new) {
        return r;
    }
    let r = real!(dup3(old, new, flags));
    if r >= 0 {
        return duplicated(old, new, EBUSY);
    }
    r
}

/// Called before `dup2`, which closes `new` silently.
fn before_dup(old: c_int, new: c_int) -> Option<c_int> {
    if gone(old) {
        return Some(-1);
    }
    let may = || match ops::may_duplicate(old, new) {
        true => 0,
        false => {
            fsocket_sys::Errno::new(EBUSY).set();
            -1
        }
    };
    if old != new && guarded(may) < 0 {
        return Some(-1);
    }
    if fsocket_runtime::process::owns(new) {
        // The program wants this number, so the library's descriptor moves away.
        fsocket_lifecycle::lifecycle::make_way(new);
    }
    None
}

/// The hook of `fcntl` and `fcntl64`; `real` is libc's function.
pub unsafe fn fcntl_with(
    fd: c_int,
    cmd: c_int,
    arg: c_ulong,
    real: unsafe fn(c_int, c_int, c_ulong) -> c_int,
) -> c_int {
    if gone(fd) {
        return -1;
    }
    if matches!(cmd, F_DUPFD | F_DUPFD_CLOEXEC) {
        // SAFETY: `real` is libc's `fcntl`, called with the program's arguments.
        let new = unsafe { real(fd, cmd, arg) };
        if new >= 0 && (table::lookup(fd).is_some() || upgrade::unix::may_connect(fd)) {
            return guarded(|| duplicated(fd, new, EMFILE));
        }
        return new;
    }
    if let Some(d) = table::lookup(fd).filter(|_| cmd == F_SETFD) {
        d.placeholder().set_close_on_exec(None);
    }
    match table::lookup(fd) {
        // SAFETY: `real` is libc's `fcntl`, called with the program's arguments.
        Some(d) if opts::is_kernels(d, cmd, arg as usize) => unsafe { real(fd, cmd, arg) },
        // SAFETY: `real` is libc's `fcntl`, called with the program's arguments.
        Some(d) => either(guarded(|| opts::fcntl(fd, d, cmd, arg as usize)), || unsafe { real(fd, cmd, arg) }),
        // SAFETY: `real` is libc's `fcntl`, called with the program's arguments.
        None => unsafe { real(fd, cmd, arg) },
    }
}

pub unsafe fn ioctl(fd: c_int, request: c_ulong, arg: c_ulong) -> c_int {
    match table::lookup(fd) {
        Some(d) if matches!(request, FIONCLEX | FIOCLEX) => {
            d.placeholder().set_close_on_exec(None);
            if request == FIONCLEX {
                opts::survives(d);
            }
            real!(ioctl(fd, request, arg))
        }
        Some(d) if arg != 0 => {
            // SAFETY: for these requests `arg` is the address of an `int`; the guarded copy
            // reports a bad one.
            either(unsafe { opts::ioctl(fd, d, request, arg as *mut i32) }, || real!(ioctl(fd, request, arg)))
        }
        _ if gone(fd) => -1,
        _ => {
            guarded(|| by_number::ioctl(request, arg));
            real!(ioctl(fd, request, arg))
        }
    }
}

pub unsafe fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    const CLOSE_RANGE_UNSHARE: c_int = 2;
    const CLOSE_RANGE_CLOEXEC: c_int = 4;
    if first <= last && flags & !CLOSE_RANGE_CLOEXEC == CLOSE_RANGE_UNSHARE {
        unshared::begin();
    }
    if first > last || flags & !CLOSE_RANGE_UNSHARE != 0 {
        // With CLOEXEC the kernel closes nothing now. A call with other flags fails in the kernel.
        table::each(|_, d| d.placeholder().set_close_on_exec(None));
        return real!(close_range(first, last, flags));
    }
    ops::range(first, last, |a, b| sys::close_range(a, b, flags as u32)).answer()
}

pub unsafe fn closefrom(first: c_int) {
    let _ = ops::range(first.max(0) as u32, u32::MAX, |a, b| sys::close_range(a, b, 0));
}
