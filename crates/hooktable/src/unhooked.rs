//! Socket functions of libc that are not hooked.
//!
//! The errors named here were observed on a connection over shared memory and compared with stock (x86-64, glibc,
//! Linux 6.18). The errors of `clone` follow from how `clone` works.

/// Functions that are not hooked, and the reason or the consequence.
pub struct Unhooked {
    pub names: &'static [&'static str],
    pub why: &'static str,
}

const fn u(names: &'static [&'static str], why: &'static str) -> Unhooked {
    Unhooked { names, why }
}

/// Functions that need no hook: no descriptor of the library is involved, or the placeholder answers as a
/// connection would.
pub const HARMLESS: &[Unhooked] = &[
    u(&["io_uring_get_sqe", "io_uring_wait_cqes", "__io_uring_get_cqe"], "They submit nothing (from Linux 5.11 on)."),
    u(&["pread", "pwrite", "preadv", "pwritev", "lseek"], "`ESPIPE`, as on any socket; the placeholder gives it."),
    u(&["fsync", "fdatasync", "ftruncate", "copy_file_range"], "`EINVAL`, as on any socket."),
    u(&["vmsplice"], "`EBADF`, as on any socket."),
    u(&["fstatat", "isfdtype"], "The placeholder is a TCP socket; owner, mode and type are right."),
    u(&["socketpair", "pipe", "pipe2"], "Never TCP. Numbers that they return are noticed when they are used."),
    u(&["eventfd", "signalfd", "timerfd_create", "inotify_init"], "They use the kernel; `poll` and `epoll_wait` pass them on."),
    u(&["fork"], "Reached by `pthread_atfork`: the child holds the same connections."),
    u(&["pthread_create", "pthread_setcancelstate", "pthread_testcancel"], "Threads need no preparation."),
    u(&["getaddrinfo", "gethostbyname", "res_query"], "libc's resolver calls its own internal `socket`, `connect` and `sendto`, which no preloaded library sees: it uses the kernel from end to end."),
    u(&["__fdelt_chk", "FD_SET"], "Arithmetic on a bit set."),
];

/// Functions whose use on a connection over shared memory is visible to the program.
pub const VISIBLE: &[Unhooked] = &[
    u(
        &["clone (sharing memory)"],
        "With `CLONE_VM` and without `CLONE_THREAD`, a `close` in the child closes the parent's connection.",
    ),
    u(
        &["io_submit"],
        "libaio makes the system call itself: reads and writes fail with `ENOTCONN`. By `syscall` they work.",
    ),
];
