//! Variants of `read`, `recv` and the vector calls that have one more argument: the size of the
//! destination, or an offset. Each does the same as the function without this argument.

use super::super::answer::{gone, guarded, Answer};
use super::{conn, read, recv, recvfrom};
use fsocket_fdtable::pool;
use fsocket_fdtable::table::{self, Kind};
use fsocket_migrate::upgrade;
use fsocket_streams::msg as ops_msg;
use libc::*;

/// Is `fd` a connection over shared memory, or one that may become such, or one that was just
/// closed?
fn candidate(fd: c_int) -> bool {
    pool::holds(fd) || table::lookup(fd).is_some_and(|d| matches!(d.kind(), Kind::Shm | Kind::Kernel))
}

// The FORTIFY variants check the size of the destination first. If the check fails, libc's own
// function ends the program, as it must.

pub unsafe fn __read_chk(fd: c_int, buf: *mut c_void, n: size_t, cap: size_t) -> ssize_t {
    match candidate(fd) {
        // SAFETY: `cap` is at least `n`: the arguments are those of `read`.
        true if n <= cap => unsafe { read(fd, buf, n) },
        _ => real!(__read_chk(fd, buf, n, cap)),
    }
}

pub unsafe fn __recv_chk(fd: c_int, buf: *mut c_void, n: size_t, cap: size_t, flags: c_int) -> ssize_t {
    match candidate(fd) {
        // SAFETY: `cap` is at least `n`: the arguments are those of `recv`.
        true if n <= cap => unsafe { recv(fd, buf, n, flags) },
        _ => real!(__recv_chk(fd, buf, n, cap, flags)),
    }
}

pub unsafe fn __recvfrom_chk(
    fd: c_int,
    buf: *mut c_void,
    n: size_t,
    cap: size_t,
    flags: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> ssize_t {
    match candidate(fd) {
        // SAFETY: `cap` is at least `n`: the arguments are those of `recvfrom`.
        true if n <= cap => unsafe { recvfrom(fd, buf, n, flags, addr, len) },
        _ => real!(__recvfrom_chk(fd, buf, n, cap, flags, addr, len)),
    }
}

/// Vector calls with an offset: -1 means the descriptor's own position, so the call is a plain
/// `readv` or `writev`. Another offset is an error for a connection.
macro_rules! vectors_at {
    ($name:ident, $ours:ident) => {
        pub unsafe fn $name(fd: c_int, iov: *const iovec, n: c_int, off: off_t, flags: c_int) -> ssize_t {
            upgrade::give_up_fd(fd);
            match conn(fd) {
                // SAFETY: the program passes `n` vectors at `iov`; they are checked before they
                // are read.
                Some(d) if off == -1 => guarded(|| unsafe { ops_msg::$ours(d, iov, n as usize, flags) }.answer()),
                // For a connection, the kernel returns the right error on the placeholder.
                None if gone(fd) => -1,
                _ => real!($name(fd, iov, n, off, flags)),
            }
        }
    };
}
vectors_at!(preadv2, readv);
vectors_at!(pwritev2, writev);
vectors_at!(preadv64v2, readv);
vectors_at!(pwritev64v2, writev);
