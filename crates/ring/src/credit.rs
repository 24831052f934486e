//! Sends *on credit*: by the thread that owns the token, up to where it has said itself
//! (see [`fsocket_sync::token`]).

#[cfg(doc)]
use crate::send_small;
use crate::{align8, get, go_to, put, small, tiny, Bytes, MASK};
use fsocket_abi::channel::record;
use fsocket_abi::half::Half;
use fsocket_sync::atomic::Ordering;

/// Where a message goes that is sent on credit: its own header, and the one behind it.
#[derive(Clone, Copy)]
pub struct Slot {
    pub pos: u64,
    pub end: u64,
}
/// For a message of so many bytes, [`crate::SMALL`] at most. Without the token a guess.
#[inline(always)]
pub fn slot(h: &Half, len: usize) -> Slot {
    let pos = get(&h.pos);
    Slot { pos, end: pos.wrapping_add(record::HDR + align8(len as u64)) }
}
/// Is there credit for it? The caller has entered on credit, and then found the position where it was.
#[inline(always)]
pub fn on_credit(h: &Half, slot: Slot) -> bool {
    slot.end <= get(&h.credit)
}
/// What small messages may still take is credit: by the thread that owns the token, inside.
pub fn give_credit(h: &Half) {
    // The header behind a message is taken off here, once, and not by each send.
    put(&h.credit, get(&h.limit).saturating_sub(record::HDR));
}

/// [`send_small`] for [`tiny`] lengths: as few instructions and registers as it takes. As its
/// last the position moves to the slot's end, and the caller is outside
/// ([`fsocket_sync::token::OnCredit::begin`]). False: `src` is not there, nothing was done, and the
/// caller is still inside.
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
    put(&h.bytes, get(&h.bytes).wrapping_add(len as u64));
    go_to(h, slot.end);
    true
}
/// The same for all that is [`small`].
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
    // Looked up again: to keep it over a call of memcpy costs more.
    let at = slot(h, len);
    let off = offset_on_credit(h, &at);
    b.header((off + at.end.wrapping_sub(at.pos) as usize) & MASK as usize).store(0, Ordering::Relaxed);
    // Release: as in `put_record`.
    b.header(off).store(record::pack(record::DATA, len as u64, 0), Ordering::Release);
    put(&h.bytes, get(&h.bytes).wrapping_add(len as u64));
    go_to(h, at.end);
    true
}
#[inline(always)]
fn offset_on_credit(h: &Half, slot: &Slot) -> usize {
    let base = get(&h.base);
    // (Whoever gave the credit has sent the first record behind `base` himself.)
    (slot.pos.wrapping_sub(base) & MASK & !7) as usize
}
