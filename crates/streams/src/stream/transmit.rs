//! Sending, the first rung: the ring has room. [`send_slow`] is the second.

mod slow;

pub use slow::{blocks, send_slow};
pub(super) use slow::{give_credit, look_for_raw_calls};

use super::{notify, publish_cpu, turn};
use crate::table::Desc;
use crate::token;
use fsocket_abi::half::Half;
use fsocket_abi::path_switch::PeerStatus;
use fsocket_ring as ring;
use fsocket_sys::{cpu, Result};
use slow::send_until;

/// Flags that change nothing for us.
const SEND_PLAIN: i32 =
    libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT | libc::MSG_MORE | libc::MSG_DONTROUTE | libc::MSG_CONFIRM;

/// Do these flags leave a send as it is?
#[inline(always)]
pub fn plain_send(flags: i32) -> bool {
    flags & !SEND_PLAIN == 0
}

/// # Safety
/// `buf` is the program's for `len` bytes; it need not be there.
#[inline(always)]
pub unsafe fn send(d: &'static Desc, buf: *const u8, len: usize, flags: i32) -> Result<usize> {
    // SAFETY: the program says that `len` bytes are at `buf`; only copies that return EFAULT, and the kernel, reach
    // them.
    if plain_send(flags) && unsafe { send_fast(d, buf, len) } {
        return Ok(len);
    }
    // SAFETY: the program says that `len` bytes are at `buf`; only copies that return EFAULT, and the kernel, reach
    // them.
    unsafe { send_slow(d, buf, len, flags) }
}

/// The common case of [`send`]: it needs neither the kernel nor a look at the
/// peer. False: nothing was done.
///
/// This rung between [`send_tiny`] and [`send_slow`], and the same of a receive, save 8 to 12 % of the CPU time of
/// redis with 50 clients, whose one thread sends on many connections (`bench/builds.py` with `--only redis-50`).
///
/// # Safety
/// As [`send`].
#[inline(always)]
pub unsafe fn send_fast(d: &'static Desc, buf: *const u8, len: usize) -> bool {
    if !token::is_here(d.sender()) {
        // SAFETY: the program says that `len` bytes are at `buf`; only copies that return EFAULT, and the kernel,
        // reach them.
        return unsafe { send_after_another(d, buf, len) };
    }
    // SAFETY: the program says that `len` bytes are at `buf`; only copies that return EFAULT, and the kernel, reach
    // them.
    unsafe { send_on(d, buf, len, || 0) }
}

/// The same by a thread that has sent on another connection last, or is not the only one here.
#[inline(never)]
unsafe fn send_after_another(d: &'static Desc, buf: *const u8, len: usize) -> bool {
    // SAFETY: the program says that `len` bytes are at `buf`; only copies that return EFAULT, and the kernel, reach
    // them.
    unsafe { send_on(d, buf, len, || turn::to(d)) }
}

/// `when`: see [`turn::to`].
///
/// # Safety
/// As [`send`].
#[inline(always)]
unsafe fn send_on(d: &'static Desc, buf: *const u8, len: usize, when: impl FnOnce() -> u64) -> bool {
    let s = d.sock();
    let (r, tx, h) = d.tx();
    let (_, rx, _) = d.rx();
    // A path switch leaves no room to `send_small` while it has the
    // token: these may be looked at before.
    if !s.flags.get().sends_plainly() || !PeerStatus::hint(&rx.prod).sends_plainly() {
        return false;
    }
    let Ok(t) = token::enter(h) else { return false };
    let when = when();
    // SAFETY: the program says that `len` bytes are at `buf`, and only copies that return EFAULT, and the kernel,
    // reach them. The token is held until the ring has them.
    let sent = d.is_conn() && unsafe { ring::send_small(r, tx, h, buf, len, when) };
    if when != 0 {
        turned(d, h, sent);
    }
    drop(t);
    if sent {
        notify(d, &tx.want_data);
        publish_cpu(h, &tx.prod.cpu);
    }
    sent
}

/// After [`turn::to`], with the token.
fn turned(d: &Desc, h: &Half, sent: bool) {
    if !sent {
        turn::back(d);
    } else if token::owned(h) {
        d.set_sender(token::here());
    }
}

/// What [`send_tiny`] and [`send_small`] have done.
pub enum Tiny {
    /// All of it.
    Sent,
    /// The bytes are on their way; [`sent_tiny`] does the rest.
    Tell,
    /// Nothing.
    No,
    /// Nothing: EFAULT. (The caller needs none of the arguments any more.)
    Fault,
}

/// [`send_fast`] for a few bytes by the only thread that has ever sent: the case in which
/// a call costs as much as the work. Nothing in it calls a function, so that it needs no
/// stack (see docs/performance.md). Any descriptor may be asked. `SPARE`: the caller has so few
/// arguments that a register is left over.
///
/// # Safety
/// As [`send`].
#[inline(always)]
pub unsafe fn send_tiny<const SPARE: bool>(d: &'static Desc, buf: *const u8, len: usize) -> Tiny {
    if !ring::tiny(len) {
        return Tiny::No;
    }
    let me = if SPARE { token::if_here(d.sender()) } else { None };
    if me.is_none() && (SPARE || !token::is_here(d.sender())) {
        return Tiny::No;
    }
    let Some((h, slot)) = on_credit(d, len) else { return Tiny::No };
    // SAFETY: the program says that `len` bytes are at `buf`, and only copies that return EFAULT, and the kernel,
    // reach them. The token is held until the ring has them.
    if !unsafe { ring::send_tiny(d.tx_ring(), h, slot, buf, len) } {
        return not_there(h);
    }
    published(d, h, || me.map_or_else(cpu::mark, token::Here::cpu_mark))
}

/// The same for up to [`ring::SMALL`] bytes.
///
/// # Safety
/// As [`send`].
#[inline(always)]
pub unsafe fn send_small(d: &'static Desc, buf: *const u8, len: usize) -> Tiny {
    if !ring::small(len) || !token::is_here(d.sender()) {
        return Tiny::No;
    }
    let Some((h, slot)) = on_credit(d, len) else { return Tiny::No };
    // SAFETY: the program says that `len` bytes are at `buf`, and only copies that return EFAULT, and the kernel,
    // reach them. The token is held until the ring has them.
    if !unsafe { ring::send_on_credit(d.tx_ring(), h, slot, buf, len) } {
        return not_there(h);
    }
    published(d, h, cpu::mark)
}

/// The message is not there. (Without a call, for which [`send_tiny`] would need a stack.)
#[inline(always)]
fn not_there(h: &Half) -> Tiny {
    fsocket_sync::token::not_done(h);
    Tiny::Fault
}

/// By [`Desc::sender`], which the caller is: what `len` bytes are sent on, and where they go. The
/// caller is inside until they have gone.
#[inline(always)]
fn on_credit(d: &'static Desc, len: usize) -> Option<(&'static Half, ring::Slot)> {
    if !PeerStatus::hint(&d.rx_dir().prod).sends_plainly() {
        return None;
    }
    let h = &d.sock().tx;
    let slot = ring::slot(h, len);
    let t = token::on_credit(h, slot.pos, slot.end)?;
    // There is no credit on a direction that was shut down, closed, switched or shared. Closed or reset
    // connections are caught by the next credit check. Until then the sender may write a few bytes that
    // nobody reads, as it may with TCP.
    ring::on_credit(h, slot).then(|| {
        t.begin();
        (h, slot)
    })
}

/// After a send on credit.
#[inline(always)]
fn published(d: &'static Desc, h: &Half, cpu_mark: impl FnOnce() -> u32) -> Tiny {
    if !d.tx_dir().want_data.is_silent() || h.cpu() != cpu_mark() {
        return Tiny::Tell;
    }
    Tiny::Sent
}

/// After [`Tiny::Tell`].
pub fn sent_tiny(d: &'static Desc) {
    let (_, tx, h) = d.tx();
    notify(d, &tx.want_data);
    publish_cpu(h, &tx.prod.cpu);
}

/// [`send`] of a part. `block`: see [`blocks`]. `before`: so much the call has sent in earlier parts.
///
/// # Safety
/// As [`send`].
pub unsafe fn send_part(
    d: &'static Desc,
    buf: *const u8,
    len: usize,
    flags: i32,
    (block, before): (bool, usize),
) -> Result<usize> {
    // SAFETY: the program says that `len` bytes are at `buf`; only copies that return EFAULT, and the kernel, reach
    // them.
    if plain_send(flags) && unsafe { send_fast(d, buf, len) } {
        return Ok(len);
    }
    // SAFETY: the program says that `len` bytes are at `buf`; only copies that return EFAULT, and the kernel, reach
    // them.
    unsafe { send_until(d, buf, len, flags, (block, before)) }
}
