//! The errors that a system call can really return where the library or the monitor makes it.
//!
//! The list has only errors that the kernel may return at any moment, whatever the caller did: no
//! descriptors (EMFILE, ENFILE), no memory (ENOMEM, ENOBUFS), signals (EINTR), a security module or
//! a filter (EPERM, EACCES). Calls that cannot fail are not failed: `close`, FUTEX_WAKE,
//! EPOLL_CTL_DEL, F_GETFL. A socket does not report either that its other side is gone while it is
//! there (EPIPE, ECONNRESET on the control socket): the tests that kill the monitor cover that.

// libc's names are lower-case.
#![allow(non_upper_case_globals)]

use libc::*;

/// A system call number and its arguments.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub number: i64,
    pub args: [u64; 6],
}

/// The calls that the filter reports, with their names.
pub const CALLS: &[(i64, &str)] = &[
    (SYS_accept4, "accept4"),
    (SYS_bind, "bind"),
    (SYS_connect, "connect"),
    (SYS_dup3, "dup3"),
    (SYS_epoll_create1, "epoll_create1"),
    (SYS_epoll_ctl, "epoll_ctl"),
    (SYS_epoll_pwait, "epoll_pwait"),
    (SYS_epoll_pwait2, "epoll_pwait2"),
    (SYS_eventfd2, "eventfd2"),
    (SYS_fcntl, "fcntl"),
    (SYS_fstat, "fstat"),
    (SYS_ftruncate, "ftruncate"),
    (SYS_futex, "futex"),
    (SYS_getdents64, "getdents64"),
    (SYS_getpeername, "getpeername"),
    (SYS_getrandom, "getrandom"),
    (SYS_getsockname, "getsockname"),
    (SYS_getsockopt, "getsockopt"),
    (SYS_listen, "listen"),
    (SYS_madvise, "madvise"),
    (SYS_membarrier, "membarrier"),
    (SYS_memfd_create, "memfd_create"),
    (SYS_mmap, "mmap"),
    (SYS_mprotect, "mprotect"),
    (SYS_munmap, "munmap"),
    (SYS_nanosleep, "nanosleep"),
    (SYS_newfstatat, "newfstatat"),
    (SYS_openat, "openat"),
    (SYS_pidfd_getfd, "pidfd_getfd"),
    (SYS_pidfd_open, "pidfd_open"),
    (SYS_pipe2, "pipe2"),
    (SYS_ppoll, "ppoll"),
    (SYS_pread64, "pread64"),
    (SYS_prlimit64, "prlimit64"),
    (SYS_read, "read"),
    (SYS_readlinkat, "readlinkat"),
    (SYS_recvfrom, "recvfrom"),
    (SYS_recvmsg, "recvmsg"),
    (SYS_sched_getaffinity, "sched_getaffinity"),
    (SYS_sched_setaffinity, "sched_setaffinity"),
    (SYS_sendmsg, "sendmsg"),
    (SYS_sendto, "sendto"),
    (SYS_setsockopt, "setsockopt"),
    (SYS_shutdown, "shutdown"),
    (SYS_socket, "socket"),
    (SYS_socketpair, "socketpair"),
    (SYS_statx, "statx"),
    (SYS_timer_create, "timer_create"),
    (SYS_write, "write"),
];

/// The name of a call in [`CALLS`].
pub fn name(number: i64) -> &'static str {
    CALLS.iter().find(|c| c.0 == number).map_or("?", |c| c.1)
}

/// Distinguishes calls of one place in the code: the command of `fcntl` and the like.
pub fn detail(call: &Call) -> u64 {
    match call.number {
        SYS_fcntl | SYS_futex | SYS_epoll_ctl => call.args[1] & 0xffff,
        SYS_membarrier => call.args[0],
        SYS_getsockopt | SYS_setsockopt => call.args[1] << 16 | call.args[2],
        _ => 0,
    }
}

/// The errors that this call may return. Short runs only try the first one.
pub fn errors(call: &Call) -> &'static [i32] {
    let [_, second, third, fourth, ..] = call.args;
    match call.number {
        SYS_socket | SYS_socketpair | SYS_eventfd2 | SYS_pipe2 => &[EMFILE, ENFILE, ENOMEM],
        SYS_accept4 => &[EMFILE, ENOMEM, EINTR],
        SYS_memfd_create | SYS_epoll_create1 | SYS_openat | SYS_pidfd_open => &[EMFILE, ENOMEM],
        SYS_pidfd_getfd => &[EMFILE, EPERM],
        SYS_dup3 => &[EBUSY],
        SYS_fcntl => match second as i32 {
            F_DUPFD | F_DUPFD_CLOEXEC => &[EMFILE, ENOMEM],
            F_ADD_SEALS => &[EPERM],
            _ => &[],
        },
        SYS_bind => &[EADDRINUSE, EACCES],
        SYS_listen => &[EADDRINUSE],
        SYS_connect => &[EADDRNOTAVAIL, ENOBUFS],
        SYS_shutdown => &[ENOTCONN],
        SYS_epoll_ctl if second as i32 == EPOLL_CTL_ADD => &[ENOMEM, ENOSPC],
        SYS_epoll_pwait | SYS_epoll_pwait2 | SYS_nanosleep => &[EINTR],
        SYS_ppoll => &[EINTR, ENOMEM],
        SYS_futex => match second as i32 & !(FUTEX_PRIVATE_FLAG | FUTEX_CLOCK_REALTIME) {
            // EAGAIN: the value has just changed. EINTR: a signal.
            FUTEX_WAIT | FUTEX_WAIT_BITSET => &[EAGAIN, EINTR],
            _ => &[],
        },
        SYS_ftruncate => &[ENOMEM, EPERM],
        SYS_mmap | SYS_mprotect => &[ENOMEM],
        // The call may split a mapping when there are too many of them.
        SYS_munmap => &[ENOMEM],
        SYS_madvise => &[ENOMEM, EAGAIN],
        SYS_membarrier => &[EPERM, ENOMEM],
        SYS_getrandom => &[EAGAIN],
        SYS_prlimit64 | SYS_sched_setaffinity => &[EPERM],
        SYS_getsockopt => &[EACCES],
        SYS_setsockopt => &[ENOBUFS, EPERM],
        SYS_getsockname | SYS_getpeername => &[ENOBUFS],
        SYS_newfstatat | SYS_statx | SYS_readlinkat => &[EACCES],
        SYS_timer_create => &[EAGAIN],
        SYS_sendmsg if third & MSG_DONTWAIT as u64 != 0 => &[EAGAIN, ENOBUFS, ETOOMANYREFS],
        SYS_sendmsg => &[EINTR, ENOBUFS, ETOOMANYREFS],
        SYS_recvmsg if third & MSG_DONTWAIT as u64 != 0 => &[ENOMEM],
        // EAGAIN: SO_RCVTIMEO has expired, because the other side did not answer in time.
        SYS_recvmsg => &[EINTR, EAGAIN],
        SYS_recvfrom if fourth & MSG_DONTWAIT as u64 != 0 => &[ENOMEM],
        SYS_recvfrom | SYS_sendto => &[EINTR, ENOMEM],
        SYS_write => &[ENOMEM],
        _ => &[],
    }
}

/// EINTR if a signal may end this call. A signal may if the call waits, or if a supervisor
/// (seccomp_unotify(2)) or a file system answers it.
pub fn by_signal(call: &Call) -> &'static [i32] {
    match call.number {
        SYS_fcntl if call.args[1] as i32 != F_ADD_SEALS => &[],
        SYS_accept4 | SYS_epoll_pwait | SYS_epoll_pwait2 | SYS_fcntl | SYS_ftruncate | SYS_memfd_create
        | SYS_openat | SYS_ppoll | SYS_pread64 | SYS_read | SYS_recvfrom | SYS_recvmsg | SYS_sendmsg | SYS_sendto
        | SYS_write => &[EINTR],
        _ => &[],
    }
}

const NAMES: &[(i32, &str)] = &[
    (EACCES, "EACCES"),
    (EADDRINUSE, "EADDRINUSE"),
    (EADDRNOTAVAIL, "EADDRNOTAVAIL"),
    (EAGAIN, "EAGAIN"),
    (EBUSY, "EBUSY"),
    (ECONNRESET, "ECONNRESET"),
    (EINTR, "EINTR"),
    (EMFILE, "EMFILE"),
    (ENFILE, "ENFILE"),
    (ENOBUFS, "ENOBUFS"),
    (ENOMEM, "ENOMEM"),
    (ENOSPC, "ENOSPC"),
    (ENOTCONN, "ENOTCONN"),
    (EPERM, "EPERM"),
    (EPIPE, "EPIPE"),
    (ETOOMANYREFS, "ETOOMANYREFS"),
];

pub fn error_name(error: i32) -> String {
    NAMES.iter().find(|n| n.0 == error).map_or_else(|| error.to_string(), |n| n.1.to_owned())
}

pub fn error_number(name: &str) -> Option<i32> {
    NAMES.iter().find(|n| n.1 == name).map(|n| n.0).or_else(|| name.parse().ok())
}

/// Does a program's output name this error, in the way of C, Python, Node.js or the servers?
pub fn is_named(error: i32, output: &str) -> bool {
    // SAFETY: `strerror` returns a static or thread-local string.
    let words = unsafe { std::ffi::CStr::from_ptr(strerror(error)) }.to_string_lossy().into_owned();
    let forms = [words, error_name(error), format!("Errno {error}]"), format!("errno {error}")];
    forms.iter().any(|form| output.contains(form.as_str()))
}
