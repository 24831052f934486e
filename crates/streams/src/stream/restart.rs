//! A call that has not begun, and whose number refers to something else by now, if to anything.

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
