//! `syscall`: system calls by number. A call that concerns a descriptor of the library runs the
//! hook of the same name, so both ways to make the call behave alike.

#![allow(non_upper_case_globals)] // system call numbers, with the kernel's names

use super::answer::guarded;
use super::passed::{mlockall, munlockall};
use super::process::{execve, execveat, forked, forks, prctl, seccomp, setns, unshare};
use super::{borrower, descriptors as de, io, passed, readiness as re, sockets as so, threads};
use crate::{init, real};
use fsocket_fdtable::table;
use fsocket_lifecycle::{by_number, credentials};
use fsocket_runtime::process::{self, is_asleep};
use fsocket_runtime::{lent, sealed, user};
use fsocket_shm::cancel;
use libc::*;

/// The target of `syscall` (vfork.rs), for all numbers except a `vfork`.
pub unsafe extern "C-unwind" fn entry(
    number: c_long,
    a: c_ulong,
    b: c_ulong,
    c: c_ulong,
    d: c_ulong,
    e: c_ulong,
    f: c_ulong,
) -> c_long {
    if process::unusual() != 0 {
        // SAFETY: the program's arguments of syscall(2).
        return unsafe { unusual(number, [a, b, c, d, e, f]) };
    }
    // SAFETY: the program's arguments of syscall(2).
    unsafe { syscall(number, a, b, c, d, e, f) }
}

#[cold]
#[inline(never)]
unsafe fn unusual(number: c_long, args: [c_ulong; 6]) -> c_long {
    let [a, b, c, d, e, f] = args;
    if lent::is_borrower() {
        // SAFETY: the program's arguments of syscall(2).
        return unsafe { borrower::by_number(number, args) };
    }
    let kind = if cancel::careful() { threads::enter(false) } else { None };
    // SAFETY: the program's arguments of syscall(2).
    let r = unsafe { syscall(number, a, b, c, d, e, f) };
    if let Some(kind) = kind {
        threads::leave(kind);
    }
    r
}

/// Passes a call that concerns a descriptor of the library to the hook of the same name, with the
/// same arguments. (libuv, for example, closes descriptors in this way.)
// Long: a table.
unsafe fn syscall(number: c_long, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong, e: c_ulong, f: c_ulong) -> c_long {
    let fd = a as c_int;
    if is_asleep() {
        match number {
            SYS_socket
            | SYS_accept
            | SYS_accept4
            | SYS_connect
            | SYS_listen
            | SYS_epoll_create1
            | SYS_pidfd_getfd
            | SYS_recvmsg
            | SYS_recvmmsg
            | SYS_io_uring_setup
            | SYS_unshare
            | SYS_setns
            | SYS_chroot
            | SYS_pivot_root
            | SYS_setuid
            | SYS_setreuid
            | SYS_setresuid
            | SYS_setgid
            | SYS_setregid
            | SYS_setresgid
            | SYS_setgroups
            | SYS_setfsuid
            | SYS_setfsgid
            | SYS_capset
            | SYS_landlock_restrict_self => init::wake(),
            SYS_clone3 | SYS_clone => init::lends_memory(),
            SYS_prctl | SYS_seccomp | SYS_execve | SYS_execveat | SYS_mlockall | SYS_munlockall => {}
            SYS_fork | SYS_epoll_create => {}
            _ => return real!(syscall(number, a, b, c, d, e, f)),
        }
    }
    if !by_number::may_have(number, &[a, b, c, d, e, f]) {
        return super::answer::failed(fsocket_sys::Errno::EBADF);
    }
    // SAFETY: the program's arguments. Each arm passes those of the system call, which are also
    // those of the libc function, in order.
    unsafe {
        match number {
            SYS_socket => guarded(|| so::socket(fd, b as _, c as _)) as c_long,
            SYS_epoll_create1 => guarded(|| passed::epoll_create1(fd)) as c_long,
            SYS_close => de::close(fd) as c_long,
            SYS_close_range => guarded(|| de::close_range(a as _, b as _, c as _)) as c_long,
            SYS_unshare => guarded(|| unshare(fd)) as c_long,
            SYS_setns => guarded(|| setns(fd, b as _)) as c_long,
            SYS_rt_sigaction => super::signals::raw(fd, b as _, c as _, d as _)
                .unwrap_or_else(|| real::syscall(number, a, b, c, d, e, f)),
            SYS_prctl => guarded(|| prctl(fd, b, c, d, e)) as c_long,
            // Made by number, because libc's functions would change every thread.
            SYS_setuid | SYS_setreuid | SYS_setresuid | SYS_setgid | SYS_setregid | SYS_setresgid | SYS_setgroups
            | SYS_setfsuid | SYS_setfsgid => {
                guarded(|| credentials::changing_thread(|| real::syscall(number, a, b, c, d, e, f)))
            }
            SYS_capset => guarded(|| credentials::changing(|| real::syscall(number, a, b, c, d, e, f))),
            SYS_mlockall => guarded(|| mlockall(fd)) as c_long,
            SYS_munlockall => guarded(|| munlockall()) as c_long,
            SYS_landlock_restrict_self => guarded(|| {
                let r = real::syscall(number, a, b, c, d, e, f);
                if r == 0 {
                    sealed::restrict();
                    credentials::entered_domain();
                }
                r
            }),
            SYS_seccomp => {
                guarded(|| seccomp(a, c));
                real::syscall(number, a, b, c, d, e, f)
            }
            SYS_fork => guarded(|| forked(0, || real::syscall(number, a, b, c, d, e, f))),
            SYS_clone if forks(a) && b == 0 => guarded(|| forked(a, || real::syscall(number, a, b, c, d, e, f))),
            SYS_clone3 => match clone3_flags(a, b) {
                Some(flags) => guarded(|| forked(flags, || real::syscall(number, a, b, c, d, e, f))),
                None => real::syscall(number, a, b, c, d, e, f),
            },
            SYS_pidfd_getfd => guarded(|| passed::pidfd_getfd(fd, b as _, c as _)) as c_long,
            SYS_dup3 => guarded(|| de::dup3(fd, b as _, c as _)) as c_long,
            SYS_dup2 => guarded(|| de::dup2(fd, b as _)) as c_long,
            SYS_poll => re::poll(a as _, b as _, c as _) as c_long,
            SYS_ppoll if re::whole_mask(d as _, e) && re::is_there(c as *const timespec) => {
                re::ppoll_telling(a as _, b as _, c as _, d as _) as c_long
            }
            SYS_select => {
                re::select_or(fd, b as _, c as _, d as _, e as _, || real::syscall(number, a, b, c, d, e, f) as c_int)
                    as c_long
            }
            SYS_pselect6 => match re::mask_of_pselect(f as _) {
                Some(mask) if re::is_there(e as *const timespec) => {
                    re::pselect_telling(fd, b as _, c as _, d as _, e as _, mask) as c_long
                }
                _ => real::syscall(number, a, b, c, d, e, f),
            },
            SYS_sendfile => io::sendfile(fd, b as _, c as _, d as _) as c_long,
            SYS_execve => guarded(|| execve(a as _, b as _, c as _)) as c_long,
            SYS_execveat => guarded(|| execveat(fd, b as _, c as _, d as _, e as _)) as c_long,
            SYS_io_uring_setup => guarded(|| super::uring::setup(b, real::syscall(number, a, b, c, d, e, f))),
            SYS_io_uring_enter => {
                guarded(|| super::uring::enter(fd, b as _, d as _));
                real::syscall(number, a, b, c, d, e, f)
            }
            SYS_io_uring_register => {
                guarded(|| super::uring::register(b as _, c as _, d as _));
                real::syscall(number, a, b, c, d, e, f)
            }
            SYS_splice => io::splice(fd, b as _, c as _, d as _, e as _, f as _) as c_long,
            SYS_bpf => {
                guarded(|| by_number::bpf(a, b, c));
                real::syscall(number, a, b, c, d, e, f)
            }
            SYS_ioctl => guarded(|| de::ioctl(fd, b as _, c)) as c_long,
            SYS_tee => passed::tee(fd, b as _, c as _, d as _) as c_long,
            // These take any file: a message may carry descriptors, and the epoll instance may be
            // one that only the kernel serves.
            SYS_sendmsg => io::sendmsg(fd, b as _, c as _) as c_long,
            SYS_sendmmsg => io::sendmmsg(fd, b as _, c as _, d as _) as c_long,
            SYS_recvmsg => io::recvmsg(fd, b as _, c as _) as c_long,
            SYS_recvmmsg => io::recvmmsg(fd, b as _, c as _, d as _, e as _) as c_long,
            SYS_epoll_ctl => guarded(|| re::epoll_ctl(fd, b as _, c as _, d as _)) as c_long,
            SYS_io_submit => {
                guarded(|| by_number::io_submit(b, c));
                real::syscall(number, a, b, c, d, e, f)
            }
            _ if table::lookup(fd).is_some() => on_descriptor(number, [a, b, c, d, e, f]),
            _ => real::syscall(number, a, b, c, d, e, f),
        }
    }
}

/// Handles calls whose first argument is a descriptor of the library.
///
/// # Safety
/// As for [`syscall`].
unsafe fn on_descriptor(number: c_long, [a, b, c, d, e, f]: [c_ulong; 6]) -> c_long {
    let fd = a as c_int;
    // SAFETY: the program's arguments of the system call, which are also those of the libc
    // function, in order.
    unsafe {
        match number {
            SYS_bind => guarded(|| so::bind(fd, b as _, c as _)) as c_long,
            SYS_listen => guarded(|| so::listen(fd, b as _)) as c_long,
            SYS_accept => so::accept(fd, b as _, c as _) as c_long,
            SYS_accept4 => so::accept4(fd, b as _, c as _, d as _) as c_long,
            SYS_connect => so::connect(fd, b as _, c as _) as c_long,
            SYS_shutdown => guarded(|| so::shutdown(fd, b as _)) as c_long,
            SYS_getsockname => guarded(|| so::getsockname(fd, b as _, c as _)) as c_long,
            SYS_getpeername => guarded(|| so::getpeername(fd, b as _, c as _)) as c_long,
            SYS_setsockopt => guarded(|| so::setsockopt(fd, b as _, c as _, d as _, e as _)) as c_long,
            SYS_getsockopt => guarded(|| so::getsockopt(fd, b as _, c as _, d as _, e as _)) as c_long,
            SYS_read => io::read(fd, b as _, c as _) as c_long,
            SYS_write => io::write(fd, b as _, c as _) as c_long,
            SYS_readv => io::readv(fd, b as _, c as _) as c_long,
            SYS_writev => io::writev(fd, b as _, c as _) as c_long,
            SYS_recvfrom => io::recvfrom(fd, b as _, c as _, d as _, e as _, f as _) as c_long,
            SYS_sendto => io::sendto(fd, b as _, c as _, d as _, e as _, f as _) as c_long,
            SYS_dup => guarded(|| de::dup(fd)) as c_long,
            SYS_fcntl => passed::fcntl(fd, b as _, c) as c_long,
            SYS_epoll_wait => re::epoll_wait(fd, b as _, c as _, d as _) as c_long,
            SYS_epoll_pwait if re::whole_mask(e as _, f) => {
                re::epoll_pwait(fd, b as _, c as _, d as _, e as _) as c_long
            }
            SYS_epoll_pwait2 if re::whole_mask(e as _, f) => {
                re::epoll_pwait2(fd, b as _, c as _, d as _, e as _) as c_long
            }
            // The offset comes in two halves. On 64 bits the kernel ignores the upper one.
            SYS_preadv2 => io::preadv2(fd, b as _, c as _, d as _, f as _) as c_long,
            SYS_pwritev2 => io::pwritev2(fd, b as _, c as _, d as _, f as _) as c_long,
            _ => {
                // The kernel may change the placeholder, or tell which file it is.
                table::reached_kernel(fd);
                real::syscall(number, a, b, c, d, e, f)
            }
        }
    }
}

/// The flags of a clone3(2) that forks on the caller's stack. None: it does something else.
///
/// # Safety
/// `args` comes from the program, with `size`.
unsafe fn clone3_flags(args: c_ulong, size: c_ulong) -> Option<c_ulong> {
    // struct clone_args: members of 64 bits. The first is the flags, the sixth the stack.
    if size < 64 {
        return None;
    }
    // SAFETY: any bytes are numbers; the guarded copy reports a bad pointer.
    let [flags, _, _, _, _, stack] = unsafe { user::get(args as *const [u64; 6]) }.ok()?;
    (forks(flags) && stack == 0).then_some(flags)
}
