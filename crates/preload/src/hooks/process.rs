//! Calls that change the process: fork, exec, credentials, limits, filters. Each hook lets
//! `fsocket_lifecycle` act before the kernel does, because afterwards the library may lack the
//! right or the memory to do so.
//!
//! Long: one hook after the other.

use super::answer::guarded;
use crate::{init, real};
use core::ffi::CStr;
use core::sync::atomic::{AtomicU8, Ordering};
use fsocket_fdtable::pool;
use fsocket_fdtable::table;
use fsocket_lifecycle::exec::environment;
use fsocket_lifecycle::{credentials, exec, limit, locked, sandbox, unshared};
use fsocket_listeners::short_lived;
use fsocket_migrate::upgrade;
use fsocket_readiness::epoll;
use fsocket_runtime::{lent, musl, process, user};
use libc::*;

pub unsafe fn unshare(flags: c_int) -> c_int {
    if flags & CLONE_FILES != 0 {
        unshared::begin();
    }
    // In a new user namespace the process has other credentials.
    let r = credentials::changing(|| real!(unshare(flags)));
    process::namespaces_changed();
    if r == 0 && flags & CLONE_NEWNET != 0 {
        process::disable();
    }
    r
}

pub unsafe fn setns(fd: c_int, kind: c_int) -> c_int {
    let r = credentials::changing(|| real!(setns(fd, kind)));
    process::namespaces_changed();
    if r == 0 && (kind == 0 || kind & CLONE_NEWNET != 0) {
        process::disable();
    }
    r
}

/// `f` sets the limit of a resource, of this process if `pid` is 0. If the limit of descriptors
/// gets lower, the library closes spare descriptors above it, because the kernel would not give
/// out these numbers again.
///
/// # Safety
/// `new` is null (no limit is set), or a pointer of the program.
pub unsafe fn limiting(pid: pid_t, resource: c_uint, new: *const rlimit64, f: impl FnOnce() -> c_int) -> c_int {
    if pid == 0 && resource == RLIMIT_AS as c_uint {
        let _errno = fsocket_sys::errno::Saved::errno();
        // SAFETY: the guarded copy reports a bad pointer.
        guarded(|| unsafe { limit::limiting(new) });
    }
    let r = f();
    if r == 0 && !new.is_null() {
        let _errno = fsocket_sys::errno::Saved::errno();
        if resource == RLIMIT_NOFILE as c_uint {
            pool::limited();
        } else if [RLIMIT_AS, RLIMIT_DATA].map(|limit| limit as c_uint).contains(&resource) {
            limit::limited(single_threaded());
        }
    }
    r
}

/// Called with the result of `munlockall`.
pub fn unlocked(r: c_int) -> c_int {
    if r == 0 {
        locked::unlocked();
    }
    r
}

/// Has the process only one thread? libc's answer; false in an old libc, which cannot tell.
pub fn single_threaded() -> bool {
    let p = real::object(c"__libc_single_threaded") as *const c_char;
    // SAFETY: glibc's variable of this name is a `char`.
    !p.is_null() && unsafe { p.read_volatile() } != 0
}

/// Does clone(2) with these flags make a process with its own memory?
pub(super) fn forks(flags: c_ulong) -> bool {
    flags & (CLONE_VM | CLONE_THREAD) as c_ulong == 0
}

/// Called before a fork. If the child shares the descriptor table with this process, but not the
/// memory, a `close` in one process would end a connection of the other. So both processes then
/// use the kernel.
fn before_fork(flags: c_ulong) {
    if shares_descriptors(flags) {
        init::never();
        let _errno = fsocket_sys::errno::Saved::errno();
        unshared::begin_beside();
    }
    init::before_fork();
}

fn shares_descriptors(flags: c_ulong) -> bool {
    flags & CLONE_FILES as c_ulong != 0
}

/// Runs a fork that does not call the handlers of `pthread_atfork`. The library's own handlers are
/// called here.
pub(super) fn forked(flags: c_ulong, call: impl FnOnce() -> c_long) -> c_long {
    before_fork(flags);
    let r = call();
    let _errno = fsocket_sys::errno::Saved::errno();
    match r {
        0 => born(flags),
        _ => init::after_fork(),
    }
    r
}

fn born(flags: c_ulong) {
    if shares_descriptors(flags) {
        // Parent and child share one descriptor table. A close of the library in the child would
        // close the parent's connection.
        return init::after_fork();
    }
    init::born();
    if flags & CLONE_NEWNET as c_ulong != 0 {
        process::disable();
    }
}

pub unsafe fn _exit(status: c_int) {
    short_lived::at_exit();
    if crate::summary::is_wanted() {
        guarded(crate::summary::print);
    }
    // libc's function does no more than this system call. No symbol is looked up here, because the
    // caller may be a signal handler.
    // SAFETY: the call takes numbers only.
    let _ = unsafe { fsocket_sys::raw(SYS_exit_group, [status as usize, 0, 0, 0, 0, 0]) };
    // A system-call filter has refused the exit. The caller has no code after this call.
    std::process::abort()
}

/// The first function of a child made by [`clone`].
struct Start {
    f: extern "C" fn(*mut c_void) -> c_int,
    arg: *mut c_void,
    flags: c_ulong,
}

extern "C" fn begin(start: *mut c_void) -> c_int {
    // SAFETY: `start` is the address of a local variable in the parent's `clone`. The child has a
    // copy of that stack.
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
        if flags & (CLONE_VM | CLONE_THREAD) == CLONE_VM && !f.is_null() && !stack.is_null() {
            let r = match process::is_asleep() {
                true => None,
                // SAFETY: the program's arguments, with a function and a stack.
                false => unsafe { super::clone::clone([f, stack, arg], flags, parent_tid, tls) },
            };
            if let Some(r) = r {
                return r;
            }
            init::lends_memory();
        }
        if flags & (CLONE_VM | CLONE_FILES) == CLONE_VM && !process::is_asleep() {
            guarded(unshared::begin_beside);
        }
        return real!(clone(f, stack, flags, arg, parent_tid, tls, child_tid));
    }
    // SAFETY: `f` is the function argument of `clone`, and not null.
    let f: extern "C" fn(*mut c_void) -> c_int = unsafe { core::mem::transmute(f) };
    let mut start = Start { f, arg, flags: flags as c_ulong };
    guarded(|| before_fork(flags as c_ulong));
    let first = &raw mut start as *mut c_void;
    let r = real!(clone(begin as *mut c_void, stack, flags, first, parent_tid, tls, child_tid));
    let _errno = fsocket_sys::errno::Saved::errno();
    init::after_fork();
    r
}

/// Called before a system-call filter is set. (A call without a filter only asks whether filters
/// are possible, and gets EFAULT.)
pub(super) fn seccomp(operation: c_ulong, filter: c_ulong) {
    let sets = operation == SECCOMP_SET_MODE_STRICT as c_ulong
        || operation == SECCOMP_SET_MODE_FILTER as c_ulong && filter != 0;
    if sets {
        init::never();
        let _errno = fsocket_sys::errno::Saved::errno();
        sandbox::enter();
    }
}

pub unsafe fn prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int {
    if option == PR_SET_SECCOMP {
        // The modes of prctl are the operations of seccomp(2) plus one.
        seccomp(a.wrapping_sub(1), b);
    }
    real!(prctl(option, a, b, c, d))
}

type Strings = *const *const c_char;

extern "C" {
    static environ: Strings;
}

/// The present environment of the program.
pub fn current() -> Strings {
    // SAFETY: `environ` is libc's variable; only its value is copied.
    unsafe { environ }
}

/// Describes the program in `file`, relative to `dir`; `search`: by PATH. None: an argument is
/// unreadable, and the kernel will report that. Or the library has nothing to do: then it does not
/// check the arguments, because installing a fault handler takes four system calls, which each
/// child of a shell would pay.
fn program<'a>(dir: c_int, file: *const c_char, search: bool, argv: Strings, env: Strings) -> Option<exec::Start<'a>> {
    if let Some(loan) = lent::borrowed() {
        let there = loan.is_served() && exec::borrower::are_strings(file, [argv, env]);
        return there.then(|| start(dir, file, search, env));
    }
    if !exec::is_concerned() || !user::is_string(file) || !user::are_strings(argv) || !user::are_strings(env) {
        return None;
    }
    Some(start(dir, file, search, env))
}

/// Describes the program to execute. Its arguments are readable.
fn start<'a>(dir: c_int, file: *const c_char, search: bool, env: Strings) -> exec::Start<'a> {
    // SAFETY: `is_string` or `probe` has found the string with its end.
    let file = unsafe { CStr::from_ptr(file) };
    let path = search.then(|| environment::value(current(), b"PATH=").unwrap_or_default());
    exec::Start { dir, file, path, env }
}

/// Calls `f`, which replaces this program, with the environment for the next program.
fn replaced_by(start: Option<exec::Start>, env: Strings, f: impl FnOnce(Strings) -> c_int) -> c_int {
    if let (Some(loan), Some(start)) = (lent::borrowed(), &start) {
        return exec::borrower::execute(loan, start, env, f);
    }
    let Some(start) = start else { return exec::with_environment(env, f) };
    let next = exec::prepare(&start, None);
    let r = next.with_environment(start.env, f);
    let _errno = fsocket_sys::errno::Saved::errno();
    next.failed();
    r
}

/// Calls `f`, which starts another program in a child after these file actions.
unsafe fn started(
    start: Option<exec::Start>,
    actions: *const c_void,
    env: Strings,
    f: impl FnOnce(Strings) -> c_int,
) -> c_int {
    let Some(start) = start else { return exec::with_environment(env, |env| exec::one_at_a_time(|| f(env))) };
    let actions = match actions.is_null() || actions_are_known() {
        // SAFETY: null, or file actions that libc has made.
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

/// Has this libc the layout of file actions that the library reads? Tested once, with two actions.
fn actions_are_known() -> bool {
    const YES: u8 = 1;
    const NO: u8 = 2;
    static KNOWN: AtomicU8 = AtomicU8::new(0);
    if KNOWN.load(Ordering::Relaxed) == 0 {
        // SAFETY: libc initializes the structure, changes it and destroys it.
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
    replaced_by(program(AT_FDCWD, path, false, argv, envp), envp, |env| real!(execve(path, argv, env)))
}

pub unsafe fn execvpe(file: *const c_char, argv: Strings, envp: Strings) -> c_int {
    replaced_by(program(AT_FDCWD, file, true, argv, envp), envp, |env| real!(execvpe(file, argv, env)))
}

pub unsafe fn fexecve(fd: c_int, argv: Strings, envp: Strings) -> c_int {
    replaced_by(program(fd, c"".as_ptr(), false, argv, envp), envp, |env| real!(fexecve(fd, argv, env)))
}

pub unsafe fn execveat(dir: c_int, path: *const c_char, argv: Strings, envp: Strings, flags: c_int) -> c_int {
    replaced_by(program(dir, path, false, argv, envp), envp, |env| real!(execveat(dir, path, argv, env, flags)))
}

pub unsafe fn posix_spawn(
    pid: *mut pid_t,
    path: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    argv: Strings,
    envp: Strings,
) -> c_int {
    let call = |env| real!(posix_spawn(pid, path, actions, attributes, argv, env));
    // SAFETY: the program's arguments of `posix_spawn`; `actions` is null or was made by libc.
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
    let call = |env| real!(posix_spawnp(pid, file, actions, attributes, argv, env));
    // SAFETY: the program's arguments of `posix_spawnp`; `actions` is null or was made by libc.
    unsafe { started(program(AT_FDCWD, file, true, argv, envp), actions, envp, call) }
}

/// Called before libc starts a shell, with an environment that the hook does not see.
pub fn before_shell() {
    guarded(exec::before_unknown);
}

pub unsafe fn fdopen(fd: c_int, mode: *const c_char) -> *mut c_void {
    // A stdio stream reads and writes below the hooks.
    upgrade::give_up_fd(fd);
    match table::lookup(fd) {
        Some(d) if d.is_unconnected() && d.is_used() => {
            epoll::leave_to_kernel(d);
            table::forget(d);
        }
        // SAFETY: `mode` is the argument with which the program has called `fdopen`.
        Some(d) if d.is_conn() && !left_to_musl(fd) => return unsafe { stream_over(fd, mode) },
        _ => {}
    }
    real!(fdopen(fd, mode))
}

/// In musl, a stream over functions has no `fileno`. So the connection moves to kernel TCP, and
/// musl makes an ordinary stream. False: the libc is glibc, or the other side of the connection
/// does not answer.
fn left_to_musl(fd: c_int) -> bool {
    if musl::is_here() {
        guarded(|| exec::hand_over(fd));
    }
    !table::lookup(fd).is_some_and(|d| d.is_conn())
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
    // SAFETY: stdio passes its own buffer, which has room for `n` bytes.
    unsafe { super::io::read(cookie as usize as c_int, buf as *mut c_void, n) }
}
unsafe extern "C" fn cookie_write(cookie: *mut c_void, buf: *const c_char, n: size_t) -> ssize_t {
    let mut done = 0;
    while done < n {
        // SAFETY: `done` is less than `n`, and stdio has passed `n` bytes at `buf`.
        let r = unsafe { super::io::write(cookie as usize as c_int, buf.add(done) as *const c_void, n - done) };
        if r <= 0 {
            // The write function of a cookie must return 0 for an error.
            return done as ssize_t;
        }
        done += r as usize;
    }
    n as ssize_t
}
unsafe extern "C" fn cookie_close(cookie: *mut c_void) -> c_int {
    // SAFETY: the cookie is the descriptor, which the closing stream owned.
    unsafe { super::descriptors::close(cookie as usize as c_int) }
}

/// Opens a stdio stream over a connection in shared memory. Its cookie is the descriptor.
unsafe fn stream_over(fd: c_int, mode: *const c_char) -> *mut c_void {
    let functions = Cookie { read: cookie_read, write: cookie_write, seek: None, close: cookie_close };
    // SAFETY: the functions have the types that `fopencookie` wants, and `mode` is the program's
    // string.
    let file = unsafe { fopencookie(fd as usize as *mut c_void, mode, functions) };
    if !file.is_null() {
        // fileno() reads this field. Its offset has been part of glibc's ABI (`struct _IO_FILE`,
        // bits/types/struct_FILE.h) for decades.
        #[cfg(all(target_env = "gnu", target_pointer_width = "64"))]
        if !musl::is_here() {
            // SAFETY: glibc has just made this stream of 216 bytes, and no other code knows it.
            unsafe {
                *((file as *mut u8).add(112) as *mut c_int) = fd;
            }
        }
    }
    file
}
