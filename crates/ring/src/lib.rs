//! The byte ring: one producer, one consumer, bytes in order, each message one
//! in-band record so that a small one costs a single cache-line transfer.
//!
//! A record is an 8-byte header (length and kind, never zero), the payload,
//! and padding to 8 bytes. The producer zeroes the *next* header before it
//! release-stores this one, so a consumer that polls the header at its position
//! sees zero until there is something to read. No record straddles the end of
//! the ring. When the ring is empty and the producer has left its first page,
//! it *rewinds* to offset 0, so that small-message traffic touches one page and
//! stays in cache.
//!
//! Nothing here makes a system call. Both sides keep their positions in a
//! private [`Half`]; what the peer writes (`head`, record headers,
//! `rewind_from`) is read once, checked, and a value that breaks the protocol
//! gives [`Hostile`].
//!
//! A [`Half`] is private to the processes that share the socket by fork, and one
//! of them may write anything into it at any time. That breaks the connection,
//! and nothing else: whatever the words say, every access begins at an offset
//! that is masked to the ring, and is no longer than a record ([`record::MAX`]), for
//! which there is room behind the ring ([`fsocket_abi::channel::RING_SLACK`]).
#![cfg_attr(not(loom), no_std)]

use fsocket_abi::arena::Half;
#[cfg(not(loom))]
use fsocket_abi::channel::RING_SLACK;
use fsocket_abi::channel::{record, Dir, POS_START, RING_CAP};
use fsocket_sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
use fsocket_uaccess as uaccess;

pub use credit::{give_credit, on_credit, send_on_credit, send_tiny, slot, Slot};

const CAP: u64 = RING_CAP as u64;
const MASK: u64 = CAP - 1;
/// Bytes between two looks at the consumer's position, where it has read all: then it may be that
/// the ring can be rewound.
const STEP: u64 = if cfg!(loom) { 32 } else { 4096 };
/// The same where it has not. A look fetches a line that the consumer writes all the time.
const STRIDE: u64 = 4 * STEP;

/// The peer broke the protocol: close this connection, nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hostile;

/// Why nothing was sent or received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failed {
    /// As [`Hostile`].
    Hostile,
    /// The program's memory is not there.
    Fault,
}
impl From<Hostile> for Failed {
    fn from(_: Hostile) -> Failed {
        Failed::Hostile
    }
}

/// Where the bytes of a ring lie.
///
/// # Safety
/// `header` must return the aligned word at byte offset `off` (a multiple of 8,
/// below the capacity) of the memory that `write` and `read` copy to and from,
/// and that memory must stay mapped while the value lives.
pub unsafe trait Bytes: Copy {
    fn header(&self, off: usize) -> &AtomicU64;
    /// False: `src` is not there.
    ///
    /// # Safety
    /// `src` is the program's for `n` bytes; `off` is at most a header behind the capacity, `n` at most
    /// [`record::MAX`] and not 0.
    unsafe fn write(&self, off: usize, src: *const u8, n: usize) -> bool;
    /// Writes `n` bytes behind the header at `off`, the empty header that follows them, and
    /// then that header, released. False: `src` is not there, and nothing is published.
    ///
    /// # Safety
    /// As `write`; `n` is [`tiny`], and `off` below the capacity.
    #[inline(always)]
    unsafe fn put_tiny(&self, off: usize, src: *const u8, n: usize, header: u64) -> bool {
        // SAFETY: the caller's.
        if !unsafe { self.write(off + record::HDR as usize, src, n) } {
            return false;
        }
        self.header(off + (record::HDR + align8(n as u64)) as usize).store(0, Ordering::Relaxed);
        self.header(off).store(header, Ordering::Release);
        true
    }
    /// False: `dst` is not there.
    ///
    /// # Safety
    /// `dst` is the program's for `n` bytes; `off` is below the capacity, `n` at most [`record::MAX`]
    /// and not 0.
    unsafe fn read(&self, off: usize, dst: *mut u8, n: usize) -> bool;
}

/// A ring in mapped memory.
#[cfg(not(loom))]
#[derive(Clone, Copy)]
pub struct Mapped(*mut u8);

#[cfg(not(loom))]
impl Mapped {
    /// # Safety
    /// `base` is 8-aligned and mapped, readable and writable, for `RING_CAP + RING_SLACK`
    /// bytes for as long as the value is used.
    #[inline(always)]
    pub const unsafe fn new(base: *mut u8) -> Self {
        Mapped(base)
    }
}

#[cfg(not(loom))]
// SAFETY: `new` promised the mapping; offsets are the implementor's contract.
unsafe impl Bytes for Mapped {
    #[inline(always)]
    fn header(&self, off: usize) -> &AtomicU64 {
        debug_assert!(off.is_multiple_of(8) && off < RING_CAP);
        // SAFETY: masking keeps the word inside the mapping that `new` was promised.
        unsafe { &*(self.0.add(off & (MASK as usize & !7)) as *const AtomicU64) }
    }
    #[inline(always)]
    unsafe fn write(&self, off: usize, src: *const u8, n: usize) -> bool {
        debug_assert!(off + n <= RING_CAP + RING_SLACK);
        // SAFETY: the caller's bounds, which the slack covers; application memory and the ring do not
        // overlap (a concurrent write by a hostile peer only garbles its bytes).
        unsafe { uaccess::copy(src, self.0.add(off), n) }
    }
    #[inline(always)]
    unsafe fn put_tiny(&self, off: usize, src: *const u8, n: usize, header: u64) -> bool {
        debug_assert!(off.is_multiple_of(8) && off < RING_CAP && tiny(n));
        // SAFETY: the caller's bounds, and the slack. The consumer reads the empty header only after it has
        // seen the one before, so it need not be written as an atomic. Stores wait for the
        // line to come from the consumer's cache: the fewer, the more messages wait at a time.
        unsafe {
            let at = self.0.add(off);
            if !uaccess::tiny::<{ record::HDR as usize }>(src, at, n) {
                return false;
            }
            (*(at as *const AtomicU64)).store(header, Ordering::Release);
        }
        true
    }
    #[inline(always)]
    unsafe fn read(&self, off: usize, dst: *mut u8, n: usize) -> bool {
        debug_assert!(off + n <= RING_CAP + RING_SLACK);
        // SAFETY: as in `write`.
        unsafe { uaccess::copy(self.0.add(off), dst, n) }
    }
}

#[inline(always)]
const fn align8(n: u64) -> u64 {
    n.wrapping_add(7) & !7
}
#[inline(always)]
fn get(a: &AtomicU64) -> u64 {
    // Relaxed: fields of a Half are touched by the holder of its token only;
    // the token orders them.
    a.load(Ordering::Relaxed)
}
#[inline(always)]
fn put(a: &AtomicU64, v: u64) {
    a.store(v, Ordering::Relaxed)
}

/// Move the position, which is [`fsocket_sync::token::Words::place`].
#[inline(always)]
fn go_to(h: &Half, pos: u64) {
    h.pos.store(pos, Ordering::Release);
}

/// Start values of a fresh direction; both sides call it on their own half.
pub fn init_half(h: &Half) {
    put(&h.pos, POS_START);
    put(&h.base, POS_START);
    put(&h.limit, 0);
    put(&h.credit, 0);
    put(&h.bytes, 0);
    put(&h.populated, 0);
    put(&h.fence, 0);
    h.cpu.store(u32::MAX, Ordering::Relaxed);
    h.cap.store(0, Ordering::Relaxed);
}

/// Start values of the shared lines of a direction, and the first header; the
/// client, before it publishes the SYN, while no other party uses the slot.
pub fn init_dir<B: Bytes>(b: B, d: &Dir) {
    d.prod.status.store(0, Ordering::Relaxed);
    d.prod.cpu.store(0, Ordering::Relaxed);
    d.prod.rewind_from.store(0, Ordering::Relaxed);
    d.prod.space_at.store(0, Ordering::Relaxed);
    d.prod.ns.store(0, Ordering::Relaxed);
    d.prod.options.store(0, Ordering::Relaxed);
    d.prod.pids.iter().for_each(|n| n.store(0, Ordering::Relaxed));
    d.cons.head.store(POS_START, Ordering::Relaxed);
    d.cons.cpu.store(0, Ordering::Relaxed);
    d.cons.window.store(0, Ordering::Relaxed);
    d.want_data.reset();
    d.want_space.reset();
    b.header(0).store(0, Ordering::Relaxed);
}

/// Send one message of up to [`SMALL`] bytes if that needs no look at the
/// consumer. True: published; the caller rings doorbells.
///
/// `when`: [`record::stamp`] of now, if the thread has just turned to this connection; else 0.
///
/// # Safety
/// `src` is the program's for `len` bytes; the caller holds the token of `h`.
#[inline(always)]
pub unsafe fn send_small<B: Bytes>(b: B, d: &Dir, h: &Half, src: *const u8, len: usize, when: u64) -> bool {
    let pos = get(&h.pos);
    let need = record::HDR + align8(len as u64);
    if !small(len) || pos.wrapping_add(need + record::HDR) > get(&h.limit) {
        return false;
    }
    // SAFETY: a small record; the limit ends before the ring does, if nobody else has written it.
    unsafe { put_record(b, d, h, pos, src, (len as u64, when)) }
}
/// Is `len` one for [`send_tiny`]: 8 to 16 bytes?
#[inline(always)]
pub const fn tiny(len: usize) -> bool {
    len.wrapping_sub(8) <= 8
}

/// Largest message for [`send_small`], bytes.
pub const SMALL: usize = 2048;
/// Is `len` one for [`send_small`]?
#[inline(always)]
pub const fn small(len: usize) -> bool {
    len.wrapping_sub(1) < SMALL
}

/// False: `src` is not there, and nothing was done.
///
/// # Safety
/// `src` is the program's for `len` bytes, which are no more than [`record::MAX`].
///
/// `pos + HDR + align8(len) + HDR` lies within credit and before the ring's end
/// (the trailing header may lie at offset 0 of the next lap), unless another process of the fork group is hostile.
#[inline(always)]
unsafe fn put_record<B: Bytes>(b: B, d: &Dir, h: &Half, pos: u64, src: *const u8, (len, when): (u64, u64)) -> bool {
    let base = get(&h.base);
    // Positions of the producer are multiples of 8; the mask says so to the compiler.
    let off = pos.wrapping_sub(base) & MASK & !7;
    let step = record::HDR + align8(len);
    // SAFETY: an offset in the ring, and the caller's length.
    if !unsafe { b.write((off + record::HDR) as usize, src, len as usize) } {
        return false;
    }
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
    go_to(h, pos.wrapping_add(step));
    put(&h.bytes, get(&h.bytes).wrapping_add(len));
    true
}

/// What a producer learns when it looks at the consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// Bytes not yet consumed.
    pub used: u64,
}

/// Look at the consumer's position; rewind if that is possible and the next
/// `len` bytes fit below the old position.
///
/// Until the consumer has followed a rewind it polls the header word at the old
/// offset, so that word (the *fence*) must stay zero.
pub fn look(d: &Dir, h: &Half, len: u64) -> Result<Space, Hostile> {
    let pos = get(&h.pos);
    // Acquire: pairs with the release in `recv`; bytes up to head are consumed
    // and may be overwritten.
    let head = d.cons.head.load(Ordering::Acquire);
    // A head outside of what we wrote would make us overwrite unread data or
    // compute a huge credit; before `base` it would alias the lap before.
    if head > pos || pos - head > CAP || head < get(&h.base) {
        return Err(Hostile);
    }
    if head > get(&h.base) {
        put(&h.fence, 0);
    }
    let off = pos.wrapping_sub(get(&h.base)) & MASK & !7;
    if head == pos && (STEP..=CAP - STEP).contains(&off) && align8(len) + 2 * record::HDR <= off {
        put(&h.base, pos);
        put(&h.fence, off);
    }
    Ok(Space { used: pos - head })
}

/// Bytes that may be under way, headers included: the whole ring, unless this
/// side has chosen the size of its buffer. The peer's word only shrinks or grows
/// that within the ring.
#[inline]
fn capacity(d: &Dir, h: &Half) -> u64 {
    match h.cap.load(Ordering::Relaxed) as u64 {
        0 => CAP,
        own => (own + d.cons.window.load(Ordering::Relaxed) as u64).min(CAP),
    }
}

/// Send up to `len` bytes. Returns how many fitted into at most one record
/// (0: no space). Call again for the rest, with 0 for `when`.
///
/// # Safety
/// As [`send_small`].
pub unsafe fn send<B: Bytes>(b: B, d: &Dir, h: &Half, src: *const u8, len: usize, when: u64) -> Result<usize, Failed> {
    let len = len as u64;
    let mut allowed = None;
    // A PAD that still has to be published: behind it there must be a record, or
    // the consumer would be told of data where there is none.
    let mut padding = None;
    put(&h.credit, 0);
    loop {
        let used = look(d, h, len.min(record::MAX))?.used;
        let free = CAP - used;
        // Decided before any padding: a small buffer must not be used up by a
        // step over the ring's end, behind which there has to be a record.
        let allowed = *allowed.get_or_insert_with(|| capacity(d, h).saturating_sub(used) & !7);
        let pos = get(&h.pos);
        let off = pos.wrapping_sub(get(&h.base)) & MASK & !7;
        // A record, and the zeroed header behind it, which must not touch
        // unread bytes; at the ring's end that header is at offset 0.
        if free < 4 * record::HDR || allowed <= 2 * record::HDR {
            put(&h.limit, 0);
            return Ok(0);
        }
        let len = len.min(allowed - record::HDR);
        let fence = get(&h.fence);
        if fence != 0 && (!(off..=CAP).contains(&fence) || fence & 7 != 0) {
            return Err(Failed::Hostile);
        }
        if fence != 0 && off + align8(len.min(record::MAX)) + 2 * record::HDR > fence {
            // Step over the fence. It is skipped, not written.
            let skip = fence + record::HDR - off;
            if free < skip + 4 * record::HDR {
                put(&h.limit, 0);
                return Ok(0);
            }
            padding = Some((pad(b, h, off, skip, when), pos, fence));
            put(&h.fence, 0);
            continue;
        }
        let to_end = CAP - off;
        if fence == 0 && to_end < 2 * record::HDR {
            if free < to_end + 4 * record::HDR {
                put(&h.limit, 0);
                return Ok(0);
            }
            padding = Some((pad(b, h, off, to_end, when), pos, fence));
            continue;
        }
        let room = (free - 2 * record::HDR).min(to_end - record::HDR) & !7;
        let n = len.min(room).min(record::MAX);
        // SAFETY: n bytes and two headers fit, see `room`; no more than the longest record.
        if !unsafe { put_record(b, d, h, pos, src, (n, when)) } {
            if let Some((_, pos, fence)) = padding {
                // Nobody has seen the step that was made: the header there is still empty.
                put(&h.fence, fence);
                go_to(h, pos);
            }
            put(&h.limit, 0);
            return Err(Failed::Fault);
        }
        if let Some(((at, header), ..)) = padding {
            // Release: the record behind it, for the acquire load in `recv`.
            b.header(at).store(header, Ordering::Release);
        }
        // Let small sends run up to the next step, the credit, the fence or the
        // ring's end.
        let taken = record::HDR + align8(n);
        let off = (off + taken) & MASK;
        let end = if fence != 0 { fence } else { CAP };
        let free = free.min(allowed.max(taken));
        let step = if used == 0 { STEP } else { STRIDE };
        let span = (step - (off & (step - 1))).min(free - taken).min(end - off);
        put(&h.limit, get(&h.pos).wrapping_add(span));
        return Ok(n as usize);
    }
}

/// Go on `span` bytes behind ring offset `off`; the header there is zeroed.
/// Returns where to store the PAD header, and which, once a record follows.
fn pad<B: Bytes>(b: B, h: &Half, off: u64, span: u64, when: u64) -> (usize, u64) {
    b.header(((off + span) & MASK) as usize).store(0, Ordering::Relaxed);
    go_to(h, get(&h.pos).wrapping_add(span));
    (off as usize, record::pack(record::PAD, span - record::HDR, when))
}

/// Ring offset at which the producer stands; pages beyond it are untouched
/// unless the ring has been there before.
pub fn offset(h: &Half) -> u64 {
    get(&h.pos).wrapping_sub(get(&h.base)) & MASK
}

/// Is there at least one byte (or a FIN's predecessor) to read? Does not
/// consume; may be asked without the token, the answer is then a hint.
#[inline(always)]
pub fn readable<B: Bytes>(b: B, d: &Dir, h: &Half) -> bool {
    if get(&h.limit) != 0 {
        return true;
    }
    let (pos, base) = (get(&h.pos), get(&h.base));
    // Acquire: see `put_record`.
    b.header((pos.wrapping_sub(base) & MASK & !7) as usize).load(Ordering::Acquire) != 0
        || (d.prod.rewind_from.load(Ordering::Acquire) == pos && base != pos)
}

/// Receive up to `len` bytes, across records; 0: nothing there. With `peek`
/// nothing is consumed. Without a `dst` they are discarded. What does not get there, because `dst` is not
/// there, stays, with the rest of its record; a fault it is if nothing got there.
///
/// # Safety
/// `dst` is the program's for `len` bytes; the caller holds the token of `h`.
#[inline(always)]
pub unsafe fn recv<B: Bytes>(
    b: B,
    d: &Dir,
    h: &Half,
    dst: Option<*mut u8>,
    len: usize,
    peek: bool,
) -> Result<usize, Failed> {
    let (mut pos, mut base, mut left) = (get(&h.pos), get(&h.base), get(&h.limit));
    let (mut got, mut pads) = (0usize, 0);
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
            // What is longer than a record, or goes beyond the ring's end, no honest producer has
            // written.
            let legal = n <= CAP && off + record::HDR + align8(n) <= CAP;
            match kind {
                record::DATA if legal && n.wrapping_sub(1) < record::MAX => {
                    pos = pos.wrapping_add(record::HDR);
                    left = n;
                    pads = 0;
                }
                // An honest producer never pads twice in a row; a ring full of
                // padding would keep us here for ever.
                record::PAD if legal && n % 8 == 0 && pads < 2 => {
                    pads += 1;
                    pos = pos.wrapping_add(record::HDR + n);
                    continue;
                }
                _ => return Err(Failed::Hostile),
            }
        } else if left > record::MAX {
            // (The rest of a record, as another process of the fork group says.)
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
        }
    }
    if !peek {
        put(&h.base, base);
        put(&h.limit, left);
        if pos != get(&h.pos) {
            go_to(h, pos);
            put(&h.bytes, get(&h.bytes).wrapping_add(got as u64));
            // Release: our reads are done before the producer may overwrite;
            // pairs with the acquire in `look`.
            d.cons.head.store(pos, Ordering::Release);
        }
    }
    Ok(got)
}

/// Bytes that can be read now without waiting, at most `max`.
pub fn available<B: Bytes>(b: B, d: &Dir, h: &Half, max: usize) -> Result<usize, Failed> {
    // SAFETY: there is no destination; peeking changes nothing.
    unsafe { recv(b, d, h, None, max, true) }
}

/// Behind what was read, or seen by a scan that ended at `scan`: the position there, and that at
/// offset 0 of the ring.
fn behind<B: Bytes>(b: B, d: &Dir, h: &Half, scan: u64) -> (u64, u64) {
    let (pos, base, left) = (get(&h.pos), get(&h.base), get(&h.limit));
    let at = scan.max(align8(pos.wrapping_add(left)));
    let follow = left == 0
        && base != pos
        && b.header((pos.wrapping_sub(base) & MASK & !7) as usize).load(Ordering::Acquire) == 0
        && d.prod.rewind_from.load(Ordering::Acquire) == pos;
    // The reader has not followed the last rewind yet; we have to.
    (at, if follow { pos } else { base })
}

/// When did the sender turn to this connection to publish what is new since `scan` (see [`scan`])?
/// [`record::stamp`]; 0: it was here already. None: nothing is new. A hint; asked without the token.
pub fn turned<B: Bytes>(b: B, d: &Dir, h: &Half, scan: u64) -> Option<u64> {
    if scan == 0 && get(&h.limit) != 0 {
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
/// read)? Returns the new scan position. Asked without the token; a racing reader can only cause an
/// edge too many.
pub fn scan<B: Bytes>(b: B, d: &Dir, h: &Half, scan: u64) -> (bool, u64) {
    let (mut at, mut base) = behind(b, d, h, scan);
    // What was published and read since is an edge, too, as in the kernel.
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

/// Bytes sent and not consumed by the peer, headers included; for readiness. A peer that lies about it gets "full".
pub fn unread(d: &Dir, h: &Half) -> u64 {
    let pos = get(&h.pos);
    let head = d.cons.head.load(Ordering::Acquire);
    if head > pos || pos - head > CAP {
        CAP
    } else {
        pos - head
    }
}

/// May a send make progress, as the kernel sees it: a third of the buffer free?
#[inline]
pub fn writable(d: &Dir, h: &Half) -> bool {
    get(&h.limit) > get(&h.pos).wrapping_add(SMALL as u64) || unread(d, h) <= capacity(d, h) / 3 * 2
}

/// Position of the consumer at which a sleeping producer wants to be woken.
pub fn space_target(d: &Dir, h: &Half) -> u64 {
    get(&h.pos).saturating_sub(capacity(d, h) / 3 * 2)
}

/// Of the bytes not yet consumed, those that the receiver's kernel would not
/// have acknowledged: what exceeds its buffer. For SIOCOUTQ.
pub fn unacknowledged(d: &Dir, h: &Half) -> u64 {
    // Nobody has accepted it yet: a buffer of the usual size.
    const USUAL: u64 = 131_072 / 4 * 5;
    let window = match d.cons.window.load(Ordering::Relaxed) {
        0 => USUAL,
        w => w as u64,
    };
    unread(d, h).saturating_sub(window)
}

mod credit;
pub mod dispatch;
pub mod syn;

#[cfg(all(test, loom))]
mod model;
#[cfg(all(test, not(loom)))]
mod tests;
