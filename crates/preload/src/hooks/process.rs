//! What changes the process under the sockets.

#![allow(non_upper_case_globals)] // system call numbers, as the kernel spells them

use super::answer::guarded;
use crate::real;
use core::ffi::CStr;
use core::sync::atomic::{AtomicU8, Ordering};
use fsocket_core::exec::environment;
use fsocket_core::table::{self, kind};
use fsocket_core::{credentials, epoll, exec, fork, limit, pool, process, sandbox, sealed, upgrade, user};
use libc::*;

pub unsafe fn vfork() -> pid_t {
    // Not the real one: its child runs in our memory and would take the
    // parent's connections down with each close().
    unsafe { fork() }
}

pub unsafe fn unshare(flags: c_int) -> c_int {
    // (In a new user namespace it has other credentials.)
    let r = credentials::changing(|| unsafe { real::unshare(flags) });
    process::namespaces_changed();
    if r == 0 && flags & CLONE_NEWNET != 0 {
        process::disable();
    }
    r
}

pub unsafe fn setns(fd: c_int, kind: c_int) -> c_int {
    let r = credentials::changing(|| unsafe { real::setns(fd, kind) });
    process::namespaces_changed();
    if r == 0 && (kind == 0 || kind & CLONE_NEWNET != 0) {
        process::disable();
    }
    r
}

/// A number that we keep for the next socket may lie above the new limit; the
/// kernel would not give it out any more.
fn limited(r: c_int, resource: c_uint) -> c_int {
    if r == 0 && resource == RLIMIT_NOFILE as c_uint {
        let _errno = fsocket_sys::errno::Saved::errno();
        pool::drain();
    }
    if r == 0 && resource == RLIMIT_AS as c_uint {
        let _errno = fsocket_sys::errno::Saved::errno();
        limit::limited(single_threaded());
    }
    r
}

/// What libc says; an old one says nothing.
fn single_threaded() -> bool {
    let p = real::object(c"__libc_single_threaded") as *const c_char;
    // SAFETY: glibc's symbol is a `char`.
    !p.is_null() && unsafe { p.read_volatile() } != 0
}

/// [`limit::limiting`] for this process.
unsafe fn limiting(resource: c_uint, new: *const rlimit64) {
    if resource == RLIMIT_AS as c_uint {
        let _errno = fsocket_sys::errno::Saved::errno();
        guarded(|| unsafe { limit::limiting(new) });
    }
}

pub unsafe fn setrlimit(resource: c_uint, limit: *const rlimit) -> c_int {
    unsafe { limiting(resource, limit.cast()) };
    limited(unsafe { real::setrlimit(resource, limit) }, resource)
}

pub unsafe fn setrlimit64(resource: c_uint, limit: *const rlimit) -> c_int {
    unsafe { limiting(resource, limit.cast()) };
    limited(unsafe { real::setrlimit64(resource, limit) }, resource)
}

pub unsafe fn prlimit(pid: pid_t, resource: c_uint, new: *const rlimit, old: *mut rlimit) -> c_int {
    if pid == 0 {
        unsafe { limiting(resource, new.cast()) };
    }
    limited(unsafe { real::prlimit(pid, resource, new, old) }, if new.is_null() { c_uint::MAX } else { resource })
}

pub unsafe fn prlimit64(pid: pid_t, resource: c_uint, new: *const rlimit, old: *mut rlimit) -> c_int {
    if pid == 0 {
        unsafe { limiting(resource, new.cast()) };
    }
    limited(unsafe { real::prlimit64(pid, resource, new, old) }, if new.is_null() { c_uint::MAX } else { resource })
}

/// System calls made by number (libuv closes descriptors like this). Those that
/// concern a descriptor of ours are the hooks of the same name; the arguments
/// lie in the same registers.
pub unsafe fn syscall(
    number: c_long,
    a: c_ulong,
    b: c_ulong,
    c: c_ulong,
    d: c_ulong,
    e: c_ulong,
    f: c_ulong,
) -> c_long {
    use super::{descriptors as de, io, readiness as re, sockets as so};
    let fd = a as c_int;
    // Each arm passes the arguments of the system call, which are those of the
    // libc function, in order.
    unsafe {
        match number {
            SYS_socket => guarded(|| so::socket(fd, b as _, c as _)) as c_long,
            SYS_epoll_create1 => guarded(|| re::epoll_create1(fd)) as c_long,
            SYS_close => de::close(fd) as c_long,
            SYS_close_range => guarded(|| de::close_range(a as _, b as _, c as _)) as c_long,
            SYS_unshare => guarded(|| unshare(fd)) as c_long,
            SYS_setns => guarded(|| setns(fd, b as _)) as c_long,
            SYS_rt_sigaction => super::signals::raw(fd, b as _, c as _, d as _)
                .unwrap_or_else(|| real::syscall(number, a, b, c, d, e, f)),
            SYS_prctl => guarded(|| prctl(fd, b, c, d, e)) as c_long,
            // (All of them by the kernel's numbers: libc's would change every thread.)
            SYS_setuid | SYS_setreuid | SYS_setresuid | SYS_setgid | SYS_setregid | SYS_setresgid | SYS_setgroups
            | SYS_capset => guarded(|| credentials::changing(|| real::syscall(number, a, b, c, d, e, f))),
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
            #[cfg(target_arch = "x86_64")]
            SYS_fork => guarded(|| forked(0, || real::syscall(number, a, b, c, d, e, f))),
            SYS_clone if forks(a) && b == 0 => guarded(|| forked(a, || real::syscall(number, a, b, c, d, e, f))),
            SYS_clone3 => match clone3_flags(a, b) {
                Some(flags) => guarded(|| forked(flags, || real::syscall(number, a, b, c, d, e, f))),
                None => real::syscall(number, a, b, c, d, e, f),
            },
            SYS_pidfd_getfd => guarded(|| de::pidfd_getfd(fd, b as _, c as _)) as c_long,
            SYS_dup3 => guarded(|| de::dup3(fd, b as _, c as _)) as c_long,
            #[cfg(target_arch = "x86_64")]
            SYS_dup2 => guarded(|| de::dup2(fd, b as _)) as c_long,
            #[cfg(target_arch = "x86_64")]
            SYS_poll => re::poll(a as _, b as _, c as _) as c_long,
            SYS_ppoll if re::whole_mask(d as _, e) && re::is_there(c as *const timespec) => {
                re::ppoll_telling(a as _, b as _, c as _, d as _) as c_long
            }
            #[cfg(target_arch = "x86_64")]
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
            _ if !descriptor_first(number) || table::lookup(fd).is_none() => real::syscall(number, a, b, c, d, e, f),
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
            SYS_recvmsg => io::recvmsg(fd, b as _, c as _) as c_long,
            SYS_sendmsg => io::sendmsg(fd, b as _, c as _) as c_long,
            SYS_recvmmsg => io::recvmmsg(fd, b as _, c as _, d as _, e as _) as c_long,
            SYS_sendmmsg => io::sendmmsg(fd, b as _, c as _, d as _) as c_long,
            SYS_dup => guarded(|| de::dup(fd)) as c_long,
            SYS_fcntl => de::fcntl(fd, b as _, c) as c_long,
            SYS_ioctl => guarded(|| de::ioctl(fd, b as _, c)) as c_long,
            SYS_epoll_ctl => guarded(|| re::epoll_ctl(fd, b as _, c as _, d as _)) as c_long,
            #[cfg(target_arch = "x86_64")]
            SYS_epoll_wait => re::epoll_wait(fd, b as _, c as _, d as _) as c_long,
            SYS_epoll_pwait if re::whole_mask(e as _, f) => {
                re::epoll_pwait(fd, b as _, c as _, d as _, e as _) as c_long
            }
            SYS_epoll_pwait2 if re::whole_mask(e as _, f) => {
                re::epoll_pwait2(fd, b as _, c as _, d as _, e as _) as c_long
            }
            // (The offset in two halves, the upper of which means nothing with 64 bits.)
            SYS_preadv2 => io::preadv2(fd, b as _, c as _, d as _, f as _) as c_long,
            SYS_pwritev2 => io::pwritev2(fd, b as _, c as _, d as _, f as _) as c_long,
            _ => real::syscall(number, a, b, c, d, e, f),
        }
    }
}

/// Does clone(2) with these flags make a process with memory of its own?
fn forks(flags: c_ulong) -> bool {
    flags & (CLONE_VM | CLONE_THREAD) as c_ulong == 0
}

/// Flags of a clone3(2) that is a fork on the caller's stack.
///
/// # Safety
/// `args` is readable for `size` bytes.
unsafe fn clone3_flags(args: c_ulong, size: c_ulong) -> Option<c_ulong> {
    // struct clone_args: u64 each; the first is the flags, the sixth the stack.
    if size < 64 {
        return None;
    }
    let [flags, _, _, _, _, stack] = unsafe { user::get(args as *const [u64; 6]) }.ok()?;
    (forks(flags) && stack == 0).then_some(flags)
}

/// A fork that runs none of the handlers of `pthread_atfork`: ours run here.
fn forked(flags: c_ulong, call: impl FnOnce() -> c_long) -> c_long {
    fork::prepare();
    let r = call();
    let _errno = fsocket_sys::errno::Saved::errno();
    match r {
        0 => born(flags),
        _ => fork::parent(),
    }
    r
}

fn born(flags: c_ulong) {
    fork::child();
    if flags & CLONE_NEWNET as c_ulong != 0 {
        process::disable();
    }
}

#[allow(non_snake_case)] // libc's name
pub unsafe fn _Fork() -> pid_t {
    forked(0, || unsafe { real::_Fork() } as c_long) as pid_t
}

/// What a child made by [`clone`] does first.
struct Start {
    f: extern "C" fn(*mut c_void) -> c_int,
    arg: *mut c_void,
    flags: c_ulong,
}

extern "C" fn begin(start: *mut c_void) -> c_int {
    // The parent's `clone` has it on its stack, of which the child has a copy.
    let Start { f, arg, flags } = unsafe { core::ptr::read(start as *const Start) };
    guarded(|| born(flags));
    f(arg)
}

pub unsafe fn clone(
    f: *mut c_void,
    stack: *mut c_void,
    flags: c_int,
    arg: *mut c_void,
    parent_tid: *mut c_void,
    tls: *mut c_void,
    child_tid: *mut c_void,
) -> c_int {
    if !forks(flags as c_ulong) || f.is_null() || stack.is_null() {
        return unsafe { real::clone(f, stack, flags, arg, parent_tid, tls, child_tid) };
    }
    let f: extern "C" fn(*mut c_void) -> c_int = unsafe { core::mem::transmute(f) };
    let mut start = Start { f, arg, flags: flags as c_ulong };
    fork::prepare();
    let first = &raw mut start as *mut c_void;
    let r = unsafe { real::clone(begin as *mut c_void, stack, flags, first, parent_tid, tls, child_tid) };
    let _errno = fsocket_sys::errno::Saved::errno();
    fork::parent();
    r
}

/// A filter of system calls is about to be set, unless the call only asks
/// whether there could be one (no filter: EFAULT).
fn seccomp(operation: c_ulong, filter: c_ulong) {
    let sets = operation == SECCOMP_SET_MODE_STRICT as c_ulong
        || operation == SECCOMP_SET_MODE_FILTER as c_ulong && filter != 0;
    if sets {
        let _errno = fsocket_sys::errno::Saved::errno();
        sandbox::enter();
    }
}

pub unsafe fn prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int {
    if option == PR_SET_SECCOMP {
        // Its modes are one more than the operations of seccomp(2).
        seccomp(a.wrapping_sub(1), b);
    }
    unsafe { real::prctl(option, a, b, c, d) }
}

/// Is the first argument a descriptor, and the call one of those above?
fn descriptor_first(number: c_long) -> bool {
    #[cfg(target_arch = "x86_64")]
    if number == SYS_epoll_wait {
        return true;
    }
    matches!(
        number,
        SYS_bind
            | SYS_listen
            | SYS_accept
            | SYS_accept4
            | SYS_connect
            | SYS_shutdown
            | SYS_getsockname
            | SYS_getpeername
            | SYS_setsockopt
            | SYS_getsockopt
            | SYS_read
            | SYS_write
            | SYS_readv
            | SYS_writev
            | SYS_recvfrom
            | SYS_sendto
            | SYS_recvmsg
            | SYS_sendmsg
            | SYS_recvmmsg
            | SYS_sendmmsg
            | SYS_dup
            | SYS_fcntl
            | SYS_ioctl
            | SYS_epoll_ctl
            | SYS_epoll_pwait
            | SYS_epoll_pwait2
            | SYS_preadv2
            | SYS_pwritev2
    )
}

type Strings = *const *const c_char;

extern "C" {
    static environ: Strings;
}

/// The environment of the program as it is now.
fn current() -> Strings {
    // SAFETY: libc's variable; a copy of the pointer.
    unsafe { environ }
}

/// The program in `file`, relative to `dir`; `search`: by PATH. None: the kernel will say that
/// something is not there.
fn program<'a>(dir: c_int, file: *const c_char, search: bool, argv: Strings, env: Strings) -> Option<exec::Start<'a>> {
    if !user::is_string(file) || !user::are_strings(argv) || !user::are_strings(env) {
        return None;
    }
    // SAFETY: a C string of the caller's.
    let file = unsafe { CStr::from_ptr(file) };
    let path = search.then(|| environment::value(current(), b"PATH=").unwrap_or_default());
    Some(exec::Start { dir, file, path, env })
}

/// `f` replaces this program, with the environment that it is given.
fn replaced_by(start: Option<exec::Start>, env: Strings, f: impl FnOnce(Strings) -> c_int) -> c_int {
    let Some(start) = start else { return f(env) };
    let next = exec::prepare(&start, None);
    let r = next.with_environment(start.env, f);
    let _errno = fsocket_sys::errno::Saved::errno();
    next.failed();
    r
}

/// `f` starts another program, after these file actions.
unsafe fn started(
    start: Option<exec::Start>,
    actions: *const c_void,
    env: Strings,
    f: impl FnOnce(Strings) -> c_int,
) -> c_int {
    let Some(start) = start else { return f(env) };
    let actions = match actions.is_null() || actions_are_known() {
        // SAFETY: the program's, as libc has made them.
        true => unsafe { exec::Actions::of(actions) },
        false => exec::Actions::Unknown,
    };
    exec::one_at_a_time(|| {
        let next = exec::prepare(&start, Some(&actions));
        let r = next.with_environment(start.env, f);
        let _errno = fsocket_sys::errno::Saved::errno();
        match r {
            0 => next.spawned(),
            _ => next.failed(),
        }
        r
    })
}

/// Whether this libc's file actions are laid out as we read them: tried once, with two.
fn actions_are_known() -> bool {
    const YES: u8 = 1;
    const NO: u8 = 2;
    static KNOWN: AtomicU8 = AtomicU8::new(0);
    if KNOWN.load(Ordering::Relaxed) == 0 {
        // SAFETY: libc makes it and ends it.
        let known = unsafe {
            let mut sample: posix_spawn_file_actions_t = core::mem::zeroed();
            let made = posix_spawn_file_actions_init(&raw mut sample) == 0
                && posix_spawn_file_actions_adddup2(&raw mut sample, 1, 2) == 0
                && posix_spawn_file_actions_addclose(&raw mut sample, 3) == 0;
            let known = made && exec::as_we_know_them((&raw const sample).cast());
            posix_spawn_file_actions_destroy(&raw mut sample);
            known
        };
        KNOWN.store(if known { YES } else { NO }, Ordering::Relaxed);
    }
    KNOWN.load(Ordering::Relaxed) == YES
}

pub unsafe fn execve(path: *const c_char, argv: Strings, envp: Strings) -> c_int {
    replaced_by(program(AT_FDCWD, path, false, argv, envp), envp, |env| unsafe { real::execve(path, argv, env) })
}

pub unsafe fn execv(path: *const c_char, argv: Strings) -> c_int {
    unsafe { execve(path, argv, current()) }
}

pub unsafe fn execvpe(file: *const c_char, argv: Strings, envp: Strings) -> c_int {
    replaced_by(program(AT_FDCWD, file, true, argv, envp), envp, |env| unsafe { real::execvpe(file, argv, env) })
}

pub unsafe fn execvp(file: *const c_char, argv: Strings) -> c_int {
    unsafe { execvpe(file, argv, current()) }
}

pub unsafe fn fexecve(fd: c_int, argv: Strings, envp: Strings) -> c_int {
    replaced_by(program(fd, c"".as_ptr(), false, argv, envp), envp, |env| unsafe { real::fexecve(fd, argv, env) })
}

pub unsafe fn execveat(dir: c_int, path: *const c_char, argv: Strings, envp: Strings, flags: c_int) -> c_int {
    replaced_by(program(dir, path, false, argv, envp), envp, |env| unsafe {
        real::execveat(dir, path, argv, env, flags)
    })
}

pub unsafe fn posix_spawn(
    pid: *mut pid_t,
    path: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    argv: Strings,
    envp: Strings,
) -> c_int {
    let call = |env| unsafe { real::posix_spawn(pid, path, actions, attributes, argv, env) };
    unsafe { started(program(AT_FDCWD, path, false, argv, envp), actions, envp, call) }
}

pub unsafe fn posix_spawnp(
    pid: *mut pid_t,
    file: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    argv: Strings,
    envp: Strings,
) -> c_int {
    let call = |env| unsafe { real::posix_spawnp(pid, file, actions, attributes, argv, env) };
    unsafe { started(program(AT_FDCWD, file, true, argv, envp), actions, envp, call) }
}

// The shell of these two is started inside libc, with an environment that we do
// not see.

pub unsafe fn system(command: *const c_char) -> c_int {
    guarded(exec::before_unknown);
    unsafe { real::system(command) }
}

pub unsafe fn popen(command: *const c_char, mode: *const c_char) -> *mut c_void {
    exec::before_unknown();
    unsafe { real::popen(command, mode) }
}

pub unsafe fn fdopen(fd: c_int, mode: *const c_char) -> *mut c_void {
    // stdio reads and writes below our hooks.
    upgrade::give_up_fd(fd);
    match table::lookup(fd) {
        Some(d) if matches!(d.kind(), kind::FRESH | kind::BOUND) && d.refs.load(Ordering::Relaxed) > 0 => {
            epoll::leave_to_kernel(d);
            table::forget(d);
        }
        Some(d) if d.is_conn() => return unsafe { stream_over(fd, mode) },
        _ => {}
    }
    unsafe { real::fdopen(fd, mode) }
}

#[repr(C)]
struct Cookie {
    read: unsafe extern "C" fn(*mut c_void, *mut c_char, size_t) -> ssize_t,
    write: unsafe extern "C" fn(*mut c_void, *const c_char, size_t) -> ssize_t,
    seek: Option<unsafe extern "C" fn(*mut c_void, *mut off64_t, c_int) -> c_int>,
    close: unsafe extern "C" fn(*mut c_void) -> c_int,
}
extern "C" {
    fn fopencookie(cookie: *mut c_void, mode: *const c_char, functions: Cookie) -> *mut c_void;
}

unsafe extern "C" fn cookie_read(cookie: *mut c_void, buf: *mut c_char, n: size_t) -> ssize_t {
    unsafe { super::io::read(cookie as usize as c_int, buf as *mut c_void, n) }
}
unsafe extern "C" fn cookie_write(cookie: *mut c_void, buf: *const c_char, n: size_t) -> ssize_t {
    let mut done = 0;
    while done < n {
        let r = unsafe { super::io::write(cookie as usize as c_int, buf.add(done) as *const c_void, n - done) };
        if r <= 0 {
            // A cookie's writer says 0 for an error.
            return done as ssize_t;
        }
        done += r as usize;
    }
    n as ssize_t
}
unsafe extern "C" fn cookie_close(cookie: *mut c_void) -> c_int {
    unsafe { super::descriptors::close(cookie as usize as c_int) }
}

/// A stdio stream over a connection of ours. The cookie is the descriptor.
unsafe fn stream_over(fd: c_int, mode: *const c_char) -> *mut c_void {
    let functions = Cookie { read: cookie_read, write: cookie_write, seek: None, close: cookie_close };
    let file = unsafe { fopencookie(fd as usize as *mut c_void, mode, functions) };
    if !file.is_null() {
        // fileno() answers from here; the place has been part of glibc's ABI
        // (`struct _IO_FILE`, bits/types/struct_FILE.h) for decades.
        #[cfg(all(target_env = "gnu", target_pointer_width = "64"))]
        unsafe {
            *((file as *mut u8).add(112) as *mut c_int) = fd;
        }
    }
    file
}
