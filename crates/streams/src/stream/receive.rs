//! Receiving, the first rung: something is in the ring. [`recv_slow`] is the second.

mod after;
mod slow;

pub use after::{behind, rest, ELSEWHERE, WITH_CONTROL};
pub use slow::{recv_slow, Part};

use super::left_rings;
use crate::table::Desc;
use crate::{lengths, token};
pub(super) use after::consumed;
use fsocket_abi::channel::Dir;
use fsocket_abi::half::Half;
use fsocket_ring::{self as ring, Failed};
use fsocket_sys::Result;

/// Flags that change nothing for who finds something.
const PLAIN: i32 = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | WITH_CONTROL;

/// # Safety
/// `buf` is the program's for `len` bytes; it need not be there.
#[inline(always)]
pub unsafe fn recv(d: &'static Desc, buf: *mut u8, len: usize, flags: i32) -> Result<usize> {
    // SAFETY: `len` bytes at `buf` are the program's: only the kernel, and copies that return EFAULT, reach them.
    unsafe { recv_part(d, buf, len, flags, Part::First) }
}

/// [`recv`] of a part of a call.
///
/// # Safety
/// As [`recv`].
#[inline(always)]
pub unsafe fn recv_part(d: &'static Desc, buf: *mut u8, len: usize, flags: i32, part: Part) -> Result<usize> {
    // SAFETY: `len` bytes at `buf` are the program's: only the kernel, and copies that return EFAULT, reach them.
    match unsafe { recv_fast(d, buf, len, flags) } {
        // SAFETY: `len` bytes at `buf` are the program's: only the kernel, and copies that return EFAULT, reach them.
        0 => unsafe { slow::recv_part_slow(d, buf, len, flags, part) },
        // SAFETY: the `len - n` bytes behind those that are filled belong to the program's buffer.
        n if n < len && left_rings(d) => Ok(n + unsafe { rest(d, buf.wrapping_add(n), len - n, flags) }),
        n => Ok(n),
    }
}

/// The common case of [`recv`]: something is there. 0: nothing was done.
///
/// # Safety
/// As [`recv`].
#[inline(always)]
pub unsafe fn recv_fast(d: &'static Desc, buf: *mut u8, len: usize, flags: i32) -> usize {
    if flags & !PLAIN != 0 || !lengths::is_plain(buf, len) {
        return 0;
    }
    let (r, rx, h) = d.rx();
    let Ok(t) = token::enter(h) else { return 0 };
    if !d.is_conn() || !d.sock().flags.get().receives_plainly() {
        return 0;
    }
    // SAFETY: `len` bytes at `buf` are the program's: only the kernel, and copies that return EFAULT, reach them. The token is held.
    // What is wrong with the peer is found again, and dealt with, by the slow path.
    let got = unsafe { ring::recv(r, rx, h, Some(buf), len, false) };
    if token::owned(h) {
        d.set_receiver(token::here());
        h.set_credit(1);
    }
    drop(t);
    received(d, rx, h, got)
}

/// [`recv_fast`] by the only thread that has ever received, and has done so before. Any descriptor
/// may be asked.
///
/// # Safety
/// As [`recv`].
#[inline(always)]
pub unsafe fn recv_on_credit(d: &'static Desc, buf: *mut u8, len: usize, flags: i32) -> usize {
    if flags & !PLAIN != 0 || !lengths::is_plain(buf, len) || !token::is_here(d.receiver()) {
        return 0;
    }
    let (r, rx, h) = d.rx();
    let Some(t) = token::enter_on_credit(h) else { return 0 };
    if h.credit() == 0 || !d.sock().flags.get().receives_plainly() {
        return 0;
    }
    // SAFETY: `len` bytes at `buf` are the program's: only the kernel, and copies that return EFAULT, reach them. The
    // token is held.
    let got = unsafe { ring::recv(r, rx, h, Some(buf), len, false) };
    drop(t);
    received(d, rx, h, got)
}

/// After a [`recv_on_credit`] that has returned 0: is that because nothing is there? Then to look once more
/// would only take the line at which the sender writes away from it. A guess, for who waits next.
#[inline(always)]
pub fn found_nothing(d: &Desc) -> bool {
    token::is_here(d.receiver()) && d.sock().rx.credit() != 0
}

/// What a receive that is out of the ring has got; 0: nothing, or a hostile peer.
#[inline(always)]
fn received(d: &'static Desc, rx: &Dir, h: &Half, got: core::result::Result<usize, Failed>) -> usize {
    match got {
        Ok(n @ 1..) => {
            consumed(d, rx, h);
            n
        }
        _ => 0,
    }
}
