//! The producer puts records into the ring, and looks how much of it the consumer has read.

use crate::{align8, small, Bytes, Failed, Hostile, CAP, MASK, SMALL};
use fsocket_abi::channel::{record, Dir};
use fsocket_abi::half::Half;
use fsocket_sync::atomic::Ordering;

/// Number of bytes between two looks at the consumer's position, if it has read all: then a rewind
/// may be possible.
pub(crate) const STEP: u64 = if cfg!(loom) { 32 } else { 4096 };
/// The same, if it has not. A look fetches a cache line that the consumer writes all the time.
const STRIDE: u64 = 4 * STEP;

/// Sends one message of up to [`SMALL`] bytes, if that needs no look at the consumer. True:
/// published; the caller rings doorbells.
///
/// `when`: [`record::stamp`] of now, if the thread has just turned to this connection; else 0.
///
/// # Safety
/// `src` points to `len` bytes, as the program passed it, and the caller holds the token of `h`.
#[inline(always)]
pub unsafe fn send_small<B: Bytes>(b: B, d: &Dir, h: &Half, src: *const u8, len: usize, when: u64) -> bool {
    // (This comes first: `len` may be anything, and must not be added to before.)
    if !small(len) {
        return false;
    }
    let pos = h.pos();
    let need = record::HDR + align8(len as u64);
    if pos.wrapping_add(need + record::HDR) > h.limit() {
        return false;
    }
    // SAFETY: `src` is the program's for `len` bytes; a record of that length begins at the offset.
    let fill = |off, n| if unsafe { b.write(off, src, n) } { n } else { 0 };
    // (The limit ends before the ring does, if nobody else has written it.)
    put_record(b, d, h, pos, fill, (len as u64, when)) != 0
}

/// Publishes a record of the bytes that `fill` puts at a ring offset: it gets their greatest number, `len`, and returns
/// how many are there. 0: none, and nothing was done. Else that number.
///
/// `len` is no more than [`record::MAX`], and `pos + HDR + align8(len) + HDR` lies within credit and before the ring's end
/// (the trailing header may lie at offset 0 of the next lap), unless another process of the fork group is hostile.
#[inline(always)]
fn put_record<B: Bytes>(
    b: B,
    d: &Dir,
    h: &Half,
    pos: u64,
    fill: impl FnOnce(usize, usize) -> usize,
    (len, when): (u64, u64),
) -> u64 {
    let base = h.base();
    // Positions of the producer are multiples of 8; the mask tells the compiler so.
    let off = pos.wrapping_sub(base) & MASK & !7;
    let len = fill((off + record::HDR) as usize, len as usize) as u64;
    if len == 0 {
        return 0;
    }
    let step = record::HDR + align8(len);
    b.header(((off + step) & MASK) as usize).store(0, Ordering::Relaxed);
    // Release: payload and the zeroed next header, for the consumer's acquire
    // load of this header in `Rx::header`.
    b.header(off as usize).store(record::pack(record::DATA, len, when), Ordering::Release);
    if pos == base {
        // First record after a rewind: the consumer still polls the header at
        // the old offset. Release: the record above, for the acquire load in
        // `rewound`.
        d.prod.rewind_from.store(pos, Ordering::Release);
    }
    h.go_to(pos.wrapping_add(step));
    h.set_bytes(h.bytes().wrapping_add(len));
    len
}

/// The result of a producer's look at the consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// Number of bytes not yet consumed.
    pub used: u64,
}

/// Looks at the consumer's position, and rewinds if that is possible and the next `len` bytes fit
/// below the old position.
///
/// Until the consumer has followed a rewind it polls the header word at the old
/// offset, so that word (the *fence*) must stay zero.
pub fn look(d: &Dir, h: &Half, len: u64) -> Result<Space, Hostile> {
    let pos = h.pos();
    // Acquire: pairs with the release in `recv`; bytes up to head are consumed
    // and may be overwritten.
    let head = d.cons.head.load(Ordering::Acquire);
    // A head outside of what we wrote would make us overwrite unread data or
    // compute a huge credit; before `base` it would alias the lap before.
    if head > pos || pos - head > CAP || head < h.base() {
        return Err(Hostile);
    }
    if head > h.base() {
        h.set_fence(0);
    }
    let off = pos.wrapping_sub(h.base()) & MASK & !7;
    if head == pos && (STEP..=CAP - STEP).contains(&off) && align8(len) + 2 * record::HDR <= off {
        h.set_base(pos);
        h.set_fence(off);
    }
    Ok(Space { used: pos - head })
}

/// Number of bytes that may be under way, headers included: the whole ring, unless this side has
/// chosen the size of its buffer. The peer's word only changes it within the ring.
#[inline]
fn capacity(d: &Dir, h: &Half) -> u64 {
    let all = buffers(d, h);
    match h.lowat() as u64 {
        0 => all,
        n => all.min(in_flight(d) + n.max(LEAST)),
    }
}

/// [`capacity`] from the buffers of the two sides.
#[inline]
fn buffers(d: &Dir, h: &Half) -> u64 {
    match h.cap() as u64 {
        0 => CAP,
        own => (own + d.cons.window.load(Ordering::Relaxed) as u64).min(CAP),
    }
}

/// [`fsocket_abi::channel::Cons::window`] of a buffer of the default size, for a connection that nobody has
/// accepted.
const USUAL: u64 = 131_072 / 4 * 5;

/// Number of bytes that the kernel would have sent to a receiver that reads nothing: its buffer. Any further
/// bytes are unsent.
fn in_flight(d: &Dir) -> u64 {
    match d.cons.window.load(Ordering::Relaxed) as u64 {
        0 => USUAL / 5 * 4,
        window => window / 5 * 4,
    }
}

/// Unsent bytes that the lowest mark (TCP_NOTSENT_LOWAT) allows: the kernel fills a segment that it has begun.
const LEAST: u64 = 4096;

/// As long as at most this many bytes are under way, a program that waits for room gets an event. Above that there
/// is still room for a record.
#[inline]
fn mark(d: &Dir, h: &Half) -> u64 {
    let third = buffers(d, h) / 3 * 2;
    match h.lowat() as u64 {
        0 => third,
        n => third.min(in_flight(d) + (n - 1) / 2),
    }
}

/// Sends up to `len` bytes. Returns how many fitted into one record (0: there is no space). The
/// caller calls it again for the rest, with 0 for `when`.
///
/// # Safety
/// As [`send_small`].
pub unsafe fn send<B: Bytes>(b: B, d: &Dir, h: &Half, src: *const u8, len: usize, when: u64) -> Result<usize, Failed> {
    // SAFETY: `src` is the program's for `len` bytes, and `send_by` asks for no more of them.
    send_by(b, d, h, len, when, |off, n| if unsafe { b.write(off, src, n) } { n } else { 0 })
}

/// [`send`] of what `fill` puts into the ring. `fill` gets the offset and the greatest number of bytes, at most
/// [`record::MAX`] and `len`, which the ring has there. It returns how many it has put there. 0: none, and so the ring stays
/// as it is ([`Failed::Fault`]). The caller holds the token of `h`.
// Long: each step goes by what the ones before have left of the ring.
pub fn send_by<B: Bytes>(
    b: B,
    d: &Dir,
    h: &Half,
    len: usize,
    when: u64,
    fill: impl FnOnce(usize, usize) -> usize,
) -> Result<usize, Failed> {
    if len == 0 {
        return Ok(0);
    }
    let len = len as u64;
    let mut allowed = None;
    // A PAD that still has to be published: there must be a record behind it, or the consumer would
    // hear of data where there is none.
    let mut padding = None;
    h.set_credit(0);
    loop {
        let used = look(d, h, len.min(record::MAX))?.used;
        let free = CAP - used;
        // This is decided before any padding: a step over the ring's end must not use up a small
        // buffer, because a record has to follow it.
        let allowed = *allowed.get_or_insert_with(|| capacity(d, h).saturating_sub(used) & !7);
        let pos = h.pos();
        let off = pos.wrapping_sub(h.base()) & MASK & !7;
        // A record, and the zeroed header behind it, which must not touch
        // unread bytes; at the ring's end that header is at offset 0.
        if free < 4 * record::HDR || allowed <= 2 * record::HDR {
            h.set_limit(0);
            return Ok(0);
        }
        let len = len.min(allowed - record::HDR);
        let fence = h.fence();
        if fence != 0 && (!(off..=CAP).contains(&fence) || fence & 7 != 0) {
            return Err(Failed::Hostile);
        }
        if fence != 0 && off + align8(len.min(record::MAX)) + 2 * record::HDR > fence {
            // Steps over the fence. The fence is skipped, not written.
            let skip = fence + record::HDR - off;
            if free < skip + 4 * record::HDR {
                h.set_limit(0);
                return Ok(0);
            }
            padding = Some((pad(b, h, off, skip, when), pos, fence));
            h.set_fence(0);
            continue;
        }
        let to_end = CAP - off;
        if fence == 0 && to_end < 2 * record::HDR {
            if free < to_end + 4 * record::HDR {
                h.set_limit(0);
                return Ok(0);
            }
            padding = Some((pad(b, h, off, to_end, when), pos, fence));
            continue;
        }
        let room = (free - 2 * record::HDR).min(to_end - record::HDR) & !7;
        let n = len.min(room).min(record::MAX);
        // n bytes and two headers fit, see `room`; no more than the longest record.
        let n = put_record(b, d, h, pos, fill, (n, when));
        if n == 0 {
            if let Some((_, pos, fence)) = padding {
                // The step is not visible yet, because the header there is still empty.
                h.set_fence(fence);
                h.go_to(pos);
            }
            h.set_limit(0);
            return Err(Failed::Fault);
        }
        if let Some(((at, header), ..)) = padding {
            // Release: the record behind it, for the acquire load in `recv`.
            b.header(at).store(header, Ordering::Release);
        }
        // Lets small sends run up to the next step, the credit, the fence or the ring's end.
        let taken = record::HDR + align8(n);
        let off = (off + taken) & MASK;
        let end = if fence != 0 { fence } else { CAP };
        let free = free.min(allowed.max(taken));
        let step = if used == 0 { STEP } else { STRIDE };
        let span = (step - (off & (step - 1))).min(free - taken).min(end - off);
        h.set_limit(h.pos().wrapping_add(span));
        return Ok(n as usize);
    }
}

/// Goes on `span` bytes behind ring offset `off`; the header there is zeroed. Returns where to
/// store the PAD header, and its value, once a record follows.
fn pad<B: Bytes>(b: B, h: &Half, off: u64, span: u64, when: u64) -> (usize, u64) {
    b.header(((off + span) & MASK) as usize).store(0, Ordering::Relaxed);
    h.go_to(h.pos().wrapping_add(span));
    (off as usize, record::pack(record::PAD, span - record::HDR, when))
}

/// The producer's offset in the ring; pages beyond it are untouched unless the ring has been there
/// before.
pub fn offset(h: &Half) -> u64 {
    h.pos().wrapping_sub(h.base()) & MASK
}

/// Number of bytes sent and not consumed by the peer, headers included; for readiness. If the peer lies about
/// it, the ring counts as full.
pub fn unread(d: &Dir, h: &Half) -> u64 {
    let pos = h.pos();
    let head = d.cons.head.load(Ordering::Acquire);
    if head > pos || pos - head > CAP {
        CAP
    } else {
        pos - head
    }
}

/// The bytes that the consumer has not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unread {
    /// The consumer's `pos`, `base` and `limit`.
    pub pos: u64,
    pub base: u64,
    pub limit: u64,
    /// Payload.
    pub bytes: u64,
}

/// The consumer's position, found by the producer from the records in front of it. None: they have been overwritten,
/// because the ring was never empty for a whole lap, or another process has written there.
pub fn unread_records<B: Bytes>(b: B, d: &Dir, h: &Half) -> Option<Unread> {
    let (pos, base) = (h.pos(), h.base());
    let head = d.cons.head.load(Ordering::Acquire);
    if pos.checked_sub(base)? >= CAP || !(base..=pos).contains(&head) {
        return None;
    }
    let (mut at, mut found) = (base, Unread { pos: head, base, limit: 0, bytes: 0 });
    while at < pos {
        let (kind, n) = record::unpack(b.header((at.wrapping_sub(base) & MASK & !7) as usize).load(Ordering::Acquire));
        let payload = at.checked_add(record::HDR)?;
        let end = payload.checked_add(align8(n.min(CAP)))?;
        let legal = kind == record::DATA && n.wrapping_sub(1) < record::MAX || kind == record::PAD && n <= CAP;
        if !legal || end > pos {
            return None;
        }
        let left = match head {
            _ if kind == record::PAD || head >= end => 0,
            _ if head <= at => n,
            // Within the record.
            _ => {
                found.limit = (payload + n).checked_sub(head).filter(|left| (1..n).contains(left))?;
                found.limit
            }
        };
        found.bytes += left;
        at = end;
    }
    Some(found)
}

/// May a send make progress, as the kernel sees it: a third of the buffer free, and half of what may be unsent?
#[inline]
pub fn writable(d: &Dir, h: &Half) -> bool {
    let has_room = h.lowat() == 0 && h.limit() > h.pos().wrapping_add(SMALL as u64);
    has_room || unread(d, h) <= mark(d, h)
}

/// Position of the consumer at which a sleeping producer wants to be woken.
pub fn space_target(d: &Dir, h: &Half) -> u64 {
    h.pos().saturating_sub(mark(d, h))
}

/// Number of unread bytes that the receiver's kernel would not have acknowledged, because they
/// exceed its buffer. For SIOCOUTQ.
pub fn unacknowledged(d: &Dir, h: &Half) -> u64 {
    let window = match d.cons.window.load(Ordering::Relaxed) {
        0 => USUAL,
        w => w as u64,
    };
    unread(d, h).saturating_sub(window)
}
