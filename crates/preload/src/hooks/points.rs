//! What is special about which hook, known when the library is compiled.

/// glibc's cancellation points. libc's function of that name unwinds a cancelled
/// thread through the frame of the hook.
const POINTS: [&str; 36] = [
    "accept",
    "accept4",
    "connect",
    "close",
    "fcntl",
    "fcntl64",
    "poll",
    "ppoll",
    "__poll_chk",
    "__ppoll_chk",
    "select",
    "pselect",
    "epoll_wait",
    "epoll_pwait",
    "epoll_pwait2",
    "system",
    "read",
    "write",
    "readv",
    "writev",
    "recv",
    "send",
    "recvfrom",
    "sendto",
    "recvmsg",
    "sendmsg",
    "recvmmsg",
    "sendmmsg",
    "__read_chk",
    "__recv_chk",
    "__recvfrom_chk",
    "preadv2",
    "pwritev2",
    "preadv64v2",
    "pwritev64v2",
    "splice",
];

/// A hook: its family and its name.
type Who = (&'static str, &'static str);

pub const fn is_point(who: Who) -> bool {
    among(who.1, &POINTS)
}

/// Panics are caught inside: around what is unwound by cancellation nothing may be
/// caught, and around a fast path nothing should be.
pub const fn guards_itself(who: Who) -> bool {
    is_point(who)
        || among(who.0, &["io", "readiness", "threads"])
        || among(who.1, &["syscall", "shutdown", "setsockopt", "_exit", "_Exit"])
}

/// The library begins before it, if it has not.
pub const fn wakes(who: Who) -> bool {
    among(who.0, &["rights", "uring"])
        || among(
            who.1,
            &[
                "socket",
                "accept",
                "accept4",
                "connect",
                "listen",
                "epoll_create",
                "epoll_create1",
                "pidfd_getfd",
                "recvmsg",
                "recvmmsg",
                "unshare",
                "setns",
                "chroot",
            ],
        )
}

/// It starts another program.
const fn starts(who: Who) -> bool {
    const STARTERS: [&str; 8] =
        ["execve", "execv", "execvp", "execvpe", "fexecve", "execveat", "posix_spawn", "posix_spawnp"];
    among(who.1, &STARTERS)
}

/// It is libc's alone while the library has not begun.
pub const fn passes(who: Who) -> bool {
    !wakes(who)
        && !starts(who)
        && !among(who.0, &["threads"])
        && !among(who.1, &["_Fork", "clone", "prctl", "syscall", "mlockall", "munlockall", "_exit", "_Exit"])
}

/// Its first argument is a descriptor, through which it transfers bytes or asks about a connection.
pub const fn uses(who: Who) -> bool {
    among(who.0, &["io"])
        && !among(who.1, &["aio_read", "aio_write", "aio_read64", "aio_write64", "lio_listio", "lio_listio64"])
        || among(who.0, &["sockets"]) && !among(who.1, &["socket"])
        || among(who.1, &["fdopen"])
}

/// It sets what the others have to find.
pub const fn sets_type(who: Who) -> bool {
    among(who.0, &["threads"])
}

const fn among(name: &str, list: &[&str]) -> bool {
    let mut i = 0;
    while i < list.len() {
        if same(name.as_bytes(), list[i].as_bytes()) {
            return true;
        }
        i += 1;
    }
    false
}

const fn same(a: &[u8], b: &[u8]) -> bool {
    let mut i = 0;
    while i < a.len() && i < b.len() && a[i] == b[i] {
        i += 1;
    }
    i == a.len() && i == b.len()
}
