//! Sends *on credit*: the thread that owns the token sends up to a limit that it has set itself
//! (see [`fsocket_sync::token`]).

#[cfg(doc)]
use crate::send_small;
use crate::{align8, small, tiny, Bytes, MASK};
use fsocket_abi::channel::record;
use fsocket_abi::half::Half;
use fsocket_sync::atomic::Ordering;

/// Where a message on credit goes: its own header, and the next one.
#[derive(Clone, Copy)]
pub struct Slot {
    pub pos: u64,
    pub end: u64,
}
/// The place for a message of this many bytes, at most [`crate::SMALL`]. Without the token it is a
/// guess.
#[inline(always)]
pub fn slot(h: &Half, len: usize) -> Slot {
    let pos = h.pos();
    Slot { pos, end: pos.wrapping_add(record::HDR + align8(len as u64)) }
}
/// Is there credit for this message? The caller has entered on credit, and then found the position
/// unchanged.
#[inline(always)]
pub fn on_credit(h: &Half, slot: Slot) -> bool {
    slot.end <= h.credit()
}
/// The space that small messages may still take is credit. Called only by the thread that owns the
/// token, inside.
pub fn give_credit(h: &Half) {
    // The header behind a message is subtracted here, once, and not by each send.
    h.set_credit(h.limit().saturating_sub(record::HDR));
}

/// [`send_small`] for [`tiny`] lengths, with as few instructions and registers as possible. Its
/// last step moves the position to the slot's end, and then the caller is outside
/// ([`fsocket_sync::token::OnCredit::begin`]). False: `src` is not readable, nothing was done, and
/// the caller is still inside.
///
/// # Safety
/// As [`send_small`]; `len` is [`tiny`], and the slot, for it, is [`on_credit`].
#[inline(always)]
pub unsafe fn send_tiny<B: Bytes>(b: B, h: &Half, slot: Slot, src: *const u8, len: usize) -> bool {
    debug_assert!(tiny(len));
    let off = offset_on_credit(h, &slot);
    // SAFETY: an offset in the ring, and a tiny length. (The credit ends before the ring does, unless a
    // process of the fork group is hostile.)
    if !unsafe { b.put_tiny(off, src, len, record::pack(record::DATA, len as u64, 0)) } {
        return false;
    }
    h.set_bytes(h.bytes().wrapping_add(len as u64));
    h.go_to(slot.end);
    true
}
/// The same for all [`small`] lengths.
///
/// # Safety
/// As [`send_small`]; `len` is [`small`], and the slot, for it, is [`on_credit`].
#[inline(always)]
pub unsafe fn send_on_credit<B: Bytes>(b: B, h: &Half, at: Slot, src: *const u8, len: usize) -> bool {
    debug_assert!(small(len));
    // SAFETY: an offset in the ring, and a small length, which the credit covers.
    if !unsafe { b.write(offset_on_credit(h, &at) + record::HDR as usize, src, len) } {
        return false;
    }
    // It is looked up again: to keep it over a call of memcpy costs more.
    let at = slot(h, len);
    let off = offset_on_credit(h, &at);
    b.header((off + at.end.wrapping_sub(at.pos) as usize) & MASK as usize).store(0, Ordering::Relaxed);
    // Release: as in `put_record`.
    b.header(off).store(record::pack(record::DATA, len as u64, 0), Ordering::Release);
    h.set_bytes(h.bytes().wrapping_add(len as u64));
    h.go_to(at.end);
    true
}
#[inline(always)]
fn offset_on_credit(h: &Half, slot: &Slot) -> usize {
    let base = h.base();
    // (The thread that gave the credit has itself sent the first record behind `base`.)
    (slot.pos.wrapping_sub(base) & MASK & !7) as usize
}
