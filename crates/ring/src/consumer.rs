//! The consumer takes records out of the ring, and looks at what is there.

use crate::{align8, Bytes, Failed, CAP, MASK};
use fsocket_abi::channel::{record, Dir};
use fsocket_abi::half::Half;
use fsocket_sync::atomic::Ordering;

/// A long receive frees space in pieces of this size, so that the producer goes on meanwhile. (Successive
/// receives of that length would do the same; the models do it that way.)
const PIECE: usize = 128 * 1024;

/// Is there at least one byte (or a FIN's predecessor) to read? It consumes nothing. Without the
/// token the answer is a hint.
#[inline(always)]
pub fn readable<B: Bytes>(b: B, d: &Dir, h: &Half) -> bool {
    if h.limit() != 0 {
        return true;
    }
    let (pos, base) = (h.pos(), h.base());
    // Acquire: see `put_record`.
    b.header((pos.wrapping_sub(base) & MASK & !7) as usize).load(Ordering::Acquire) != 0
        || (d.prod.rewind_from.load(Ordering::Acquire) == pos && base != pos)
}

/// Receives up to `len` bytes, across records; 0: there are none. With `peek` nothing is consumed.
/// Without a `dst` the bytes are discarded. Bytes that cannot be copied, because `dst` is bad, stay
/// with the rest of their record. It is a fault only if no byte was copied.
///
/// # Safety
/// `dst` points to `len` bytes, as the program passed it, and the caller holds the token of `h`.
#[inline(always)]
pub unsafe fn recv<B: Bytes>(
    b: B,
    d: &Dir,
    h: &Half,
    dst: Option<*mut u8>,
    len: usize,
    peek: bool,
) -> Result<usize, Failed> {
    let (mut pos, mut base, mut left) = (h.pos(), h.base(), h.limit());
    let (mut got, mut told, mut pads) = (0usize, 0, 0);
    while got < len {
        if left == 0 {
            // Acquire: pairs with the release in `put_record`. Read once: the
            // peer can change it at any time.
            let hdr = b.header((pos.wrapping_sub(base) & MASK & !7) as usize).load(Ordering::Acquire);
            if hdr == 0 {
                if base != pos && d.prod.rewind_from.load(Ordering::Acquire) == pos {
                    base = pos;
                    continue;
                }
                break;
            }
            let (kind, n) = record::unpack(hdr);
            let off = pos.wrapping_sub(base) & MASK;
            // An honest producer writes no record that is too long, or that crosses the ring's end.
            let legal = n <= CAP && off + record::HDR + align8(n) <= CAP;
            match kind {
                record::DATA if legal && n.wrapping_sub(1) < record::MAX => {
                    pos = pos.wrapping_add(record::HDR);
                    left = n;
                    pads = 0;
                }
                // An honest producer never pads twice in a row. Without this check a ring full of
                // padding would keep the loop busy for ever.
                record::PAD if legal && n % 8 == 0 && pads < 2 => {
                    pads += 1;
                    pos = pos.wrapping_add(record::HDR + n);
                    continue;
                }
                _ => return Err(Failed::Hostile),
            }
        } else if left > record::MAX {
            // (Another process of the fork group claims that a record has this rest.)
            return Err(Failed::Hostile);
        }
        let n = left.min((len - got) as u64);
        if let Some(dst) = dst {
            // SAFETY: an offset in the ring, and no more than the longest record: `left` was
            // checked, and only shrinks.
            if !unsafe { b.read((pos.wrapping_sub(base) & MASK) as usize, dst.wrapping_add(got), n as usize) } {
                if got == 0 {
                    return Err(Failed::Fault);
                }
                break;
            }
        }
        got += n as usize;
        pos = pos.wrapping_add(n);
        left -= n;
        if left == 0 {
            pos = align8(pos);
            if !peek && got - told >= PIECE {
                consumed(d, h, (pos, base, left), got - told);
                told = got;
            }
        }
    }
    if !peek {
        consumed(d, h, (pos, base, left), got - told);
    }
    Ok(got)
}

/// Gives the producer back the space up to `pos`.
#[inline(always)]
fn consumed(d: &Dir, h: &Half, (pos, base, left): (u64, u64, u64), bytes: usize) {
    h.set_base(base);
    h.set_limit(left);
    if pos != h.pos() {
        h.go_to(pos);
        h.set_bytes(h.bytes().wrapping_add(bytes as u64));
        // Release: this side's reads are done before the producer may overwrite; pairs with the
        // acquire in `look`.
        d.cons.head.store(pos, Ordering::Release);
    }
}

/// Bytes that can be read now without waiting, at most `max`.
pub fn available<B: Bytes>(b: B, d: &Dir, h: &Half, max: usize) -> Result<usize, Failed> {
    // SAFETY: there is no destination; peeking changes nothing.
    unsafe { recv(b, d, h, None, max, true) }
}

/// The position behind what was read, or behind what a scan up to `scan` has seen; and the position
/// at offset 0 of the ring.
fn behind<B: Bytes>(b: B, d: &Dir, h: &Half, scan: u64) -> (u64, u64) {
    let (pos, base, left) = (h.pos(), h.base(), h.limit());
    let at = scan.max(align8(pos.wrapping_add(left)));
    let follow = left == 0
        && base != pos
        && b.header((pos.wrapping_sub(base) & MASK & !7) as usize).load(Ordering::Acquire) == 0
        && d.prod.rewind_from.load(Ordering::Acquire) == pos;
    // The reader has not followed the last rewind yet, so this function does.
    (at, if follow { pos } else { base })
}

/// When did the sender's thread turn to this connection, to publish what is new since `scan` (see
/// [`scan`])? [`record::stamp`]; 0: it was at this connection already. None: nothing is new. The
/// answer is a hint, and needs no token.
pub fn turned<B: Bytes>(b: B, d: &Dir, h: &Half, scan: u64) -> Option<u64> {
    if scan == 0 && h.limit() != 0 {
        return Some(0); // the rest of a record
    }
    let (at, base) = behind(b, d, h, scan);
    let hdr = b.header((at.wrapping_sub(base) & MASK & !7) as usize).load(Ordering::Acquire);
    if hdr == 0 && base != at && d.prod.rewind_from.load(Ordering::Acquire) == at {
        return Some(record::when(b.header(0).load(Ordering::Acquire)));
    }
    (hdr != 0).then_some(record::when(hdr))
}

/// Edge detection: has something been published since `scan` (0: since the last
/// read)? Returns the new scan position. It needs no token; a reader at the same time can only
/// cause one edge too many.
pub fn scan<B: Bytes>(b: B, d: &Dir, h: &Half, scan: u64) -> (bool, u64) {
    let (mut at, mut base) = behind(b, d, h, scan);
    // Bytes that were published and read since count as an edge, too, as in the kernel.
    let mut edge = scan != 0 && at > scan;
    for _ in 0..64 {
        let off = at.wrapping_sub(base) & MASK & !7;
        let hdr = b.header(off as usize).load(Ordering::Acquire);
        if hdr == 0 {
            if base != at && d.prod.rewind_from.load(Ordering::Acquire) == at {
                base = at;
                continue;
            }
            break;
        }
        let n = record::unpack(hdr).1.min(CAP);
        at = at.wrapping_add(record::HDR + align8(n));
        edge = true;
    }
    (edge, at)
}
