//! `splice` between a connection and a pipe, in both directions, by one copy between ring and
//! pipe. Bytes for which the destination has no room stay at the source.

mod into;

pub use into::splice_to;

use super::receive::{behind, consumed, recv_slow};
use super::restart;
use super::{blocks, left_rings, path_taken, poison, ring_has, throughout, Midway};
use crate::lengths::MOST;
use crate::pipe::{is_refused, splice, Pipe};
use crate::table::{self, Desc};
use crate::{path, token};
use fsocket_abi::arena::Reason;
use fsocket_ring::{self as ring, Segments};
use fsocket_runtime::{Cause, Outcome};
use fsocket_sys::{self as sys, Errno, Result};

const KNOWN: u32 = libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MORE | libc::SPLICE_F_GIFT;
/// Maximum number of looks of one call that find nothing, although something was there. (As
/// `Wait::was_in_vain`.)
const MOST_IN_VAIN: u32 = 1 << 16;

/// Are these arguments valid for a `splice`? If not, the kernel returns its error for the
/// placeholder.
fn is_valid(len: usize, flags: u32) -> bool {
    (1..=isize::MAX as usize).contains(&len) && flags & !KNOWN == 0
}

/// `splice` from a connection to `out`.
pub fn splice_from(d: &'static Desc, out: i32, len: usize, flags: u32) -> Outcome<Result<usize>> {
    let Some(pipe) = Pipe::of(out).filter(|p| is_valid(len, flags) && p.can_write()) else {
        return Outcome::Kernel(Cause::Invalid);
    };
    Outcome::Done(from_ring(d, &pipe, len.min(MOST), flags))
}

fn from_ring(d: &'static Desc, pipe: &Pipe, len: usize, flags: u32) -> Result<usize> {
    let first = (!left_rings(d)).then(|| take(d, pipe, len));
    match first {
        Some(Taken::Bytes(n)) if n == len || !left_rings(d) => Ok(n),
        _ => throughout(d, |call| from_slowly(d, pipe, len, flags, (first, call))),
    }
}

/// Result of [`take`].
enum Taken {
    Bytes(usize),
    /// The ring is empty, or may not be read.
    Nothing,
    /// The pipe refused the bytes.
    Error(Errno),
    /// This is a signal handler, which has interrupted a call on the same connection.
    Reentered,
}

/// Moves bytes from the ring to the pipe, as many as fit.
fn take(d: &'static Desc, pipe: &Pipe, len: usize) -> Taken {
    let (r, rx, h) = d.rx();
    let Ok(t) = token::enter(h) else { return Taken::Reentered };
    let f = || d.sock().flags.get();
    let (mut done, mut error, mut hostile) = (0, None, false);
    while done < len && d.is_conn() && !f().is_poisoned() && !f().is_drained() {
        // SAFETY: the token is held.
        let all = match unsafe { Segments::unread(r, rx, h, len - done) } {
            Ok(Some(all)) => all,
            Ok(None) => break,
            Err(_) => {
                hostile = true;
                break;
            }
        };
        let n = match pipe.put(&all) {
            Ok(n) => n,
            Err(e) => {
                error = Some(e);
                break;
            }
        };
        // SAFETY: nothing is copied, and the token is held. (An honest peer does not change
        // unread records.)
        hostile = unsafe { ring::recv(r, rx, h, None, n, false) } != Ok(n);
        done += n;
        if hostile || n < all.bytes() {
            break;
        }
    }
    drop(t);
    if hostile {
        poison(d);
    }
    match error {
        _ if done > 0 => {
            consumed(d, rx, h);
            Taken::Bytes(done)
        }
        Some(e) => Taken::Error(e),
        None => Taken::Nothing,
    }
}

/// The slow part of [`from_ring`]. `looked`: the result of a first look at the ring. A hold keeps
/// `d` alive.
fn from_slowly(
    d: &'static Desc,
    pipe: &Pipe,
    len: usize,
    flags: u32,
    (mut looked, call): (Option<Taken>, &Midway),
) -> Result<usize> {
    // (As in the kernel: for TCP only the socket's own flag counts, not that of `splice`.)
    let waits = blocks(d, 0) && !(d.is_unix() && flags & libc::SPLICE_F_NONBLOCK != 0);
    let how = if waits { 0 } else { libc::MSG_DONTWAIT };
    for _ in 0..MOST_IN_VAIN {
        if looked.is_none() && !ring_has(d) {
            if let Some(fd) = path_taken(d, how) {
                return splice(fd?, pipe.fd, len, flags);
            }
        }
        match looked.take().unwrap_or_else(|| take(d, pipe, len)) {
            Taken::Bytes(n) if n < len => return Ok(n + rest(d, pipe, len - n, flags)),
            Taken::Bytes(n) => return Ok(n),
            Taken::Reentered => return Err(Errno::EAGAIN),
            Taken::Error(Errno::EAGAIN) => wait_room(pipe, flags, call)?,
            Taken::Error(e) if is_refused(e) => leave(d)?,
            Taken::Error(e) => return Err(e),
            Taken::Nothing if !has_room(pipe)? => wait_room(pipe, flags, call)?,
            Taken::Nothing => {
                let mut byte = 0u8;
                // SAFETY: one byte.
                if unsafe { recv_slow(d, &mut byte, 1, libc::MSG_PEEK | how) }? == 0 {
                    return Ok(0);
                }
                // (If the wait has slept, the ring has something.)
                if let Some(was) = table::detached(d).filter(|_| !call.begun.get() && !ring_has(d)) {
                    let kernel = || splice(was.fd, pipe.fd, len, flags);
                    return again(was.fd, |d| from_ring(d, pipe, len, flags), kernel);
                }
                call.begun();
            }
        }
    }
    poison(d);
    Err(Errno::ECONNRESET)
}

/// Moves what the kernel socket has behind the last bytes of the ring: the kernel returns both in one
/// call.
fn rest(d: &'static Desc, pipe: &Pipe, len: usize, flags: u32) -> usize {
    let Some(fd) = behind(d, libc::MSG_DONTWAIT, false) else { return 0 };
    splice(fd, pipe.fd, len, flags | libc::SPLICE_F_NONBLOCK).unwrap_or(0)
}

/// Starts the call again for the present file behind its descriptor: `ours` on a connection, else
/// in the kernel.
fn again(
    fd: i32,
    ours: impl FnOnce(&'static Desc) -> Result<usize>,
    kernel: impl FnOnce() -> Result<usize>,
) -> Result<usize> {
    // (The flag prevents that the call is taken for a `read`.)
    restart::restart_on_fd(fd, libc::MSG_PEEK, ours, kernel, || Err(Errno::ENOTSOCK))
}

/// Has the pipe room? The kernel checks the pipe before the socket (`wait_for_space`).
fn has_room(pipe: &Pipe) -> Result<bool> {
    match pipe.events(libc::POLLOUT)? {
        e if e & libc::POLLNVAL != 0 => Err(Errno::EBADF),
        e if e & libc::POLLERR != 0 => {
            // The pipe has no reader.
            let _ = sys::tgkill(sys::getpid(), sys::gettid(), libc::SIGPIPE);
            Err(Errno::EPIPE)
        }
        e => Ok(e & libc::POLLOUT != 0),
    }
}

/// Sleeps until the pipe has room, or has no reader.
fn wait_room(pipe: &Pipe, flags: u32, call: &Midway) -> Result<()> {
    if !pipe.waits(flags) {
        return Err(Errno::EAGAIN);
    }
    call.begun();
    pipe.wait(libc::POLLOUT)
}

/// Moves the connection to the kernel, which then does this call.
#[cold]
fn leave(d: &'static Desc) -> Result<()> {
    if d.is_conn() && !left_rings(d) {
        path::materialize_one(d, Reason::Option);
    }
    match left_rings(d) {
        true => Ok(()),
        // The error of a socket that cannot be spliced.
        false => Err(Errno::EINVAL),
    }
}
