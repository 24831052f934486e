//! How a call ends that cannot go on: what it returns, and a call that has not begun and whose number refers to
//! something else by now, if to anything.

use crate::pool;
use crate::table::{self, Desc};
use fsocket_sys::{Errno, Result};

/// Begins again on what `fd` is now: by `ours` on a connection of ours, else by `socket`, and by `file` on what
/// is no socket, where the call has no `flags`.
#[cold]
pub(super) fn restart_on_fd(
    fd: i32,
    flags: i32,
    ours: impl FnOnce(&'static Desc) -> Result<usize>,
    socket: impl FnOnce() -> Result<usize>,
    file: impl FnOnce() -> Result<usize>,
) -> Result<usize> {
    match table::lookup(fd) {
        Some(d) if d.is_conn() => ours(d),
        _ if pool::holds(fd) => Err(Errno::EBADF),
        _ => match socket() {
            Err(Errno::ENOTSOCK) if flags == 0 => file(),
            r => r,
        },
    }
}

/// `done` bytes are through, then comes `r`: an error is the next call's.
pub(super) fn after(done: usize, r: Result<usize>) -> Result<usize> {
    match r {
        Ok(n) => Ok(done + n),
        Err(_) if done > 0 => Ok(done),
        e => e,
    }
}

/// The call cannot go on, for `e`. EBADF: `d` is not the program's any more; a call that has not begun does so
/// `again`, on what its number refers to by now.
pub(super) fn stop(d: &Desc, done: usize, e: Errno, again: impl FnOnce(i32) -> Result<usize>) -> Result<usize> {
    match table::detached(d) {
        Some(detached) if done == 0 && e == Errno::EBADF => again(detached.fd),
        _ => after(done, Err(e)),
    }
}
