//! The end of a call that cannot go on: its result, and how it starts again if its descriptor
//! refers to another file before it has begun.

use crate::pool;
use crate::table::{self, Desc};
use fsocket_sys::{Errno, Result};

/// Starts the call again for the present file behind `fd`: by `ours` on a connection over shared
/// memory, else by `socket`. For a file that is no socket: by `file`, if the call has no `flags`.
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

/// The result after `done` bytes were moved and then `r` came: the next call reports an error.
pub(super) fn after(done: usize, r: Result<usize>) -> Result<usize> {
    match r {
        Ok(n) => Ok(done + n),
        Err(_) if done > 0 => Ok(done),
        e => e,
    }
}

/// The call cannot go on because of error `e`. EBADF: the program has closed the descriptor of
/// `d`. If the call has not begun yet, it starts `again` with the file that the descriptor refers
/// to now.
pub(super) fn stop(d: &Desc, done: usize, e: Errno, again: impl FnOnce(i32) -> Result<usize>) -> Result<usize> {
    match table::detached(d) {
        Some(detached) if done == 0 && e == Errno::EBADF => again(detached.fd),
        _ => after(done, Err(e)),
    }
}
