//! The addresses of bytes in a ring, for a system call that reads them directly.

use crate::{consumer, Bytes, Failed, Mapped};
use core::cell::Cell;
use core::ptr;
use fsocket_abi::channel::Dir;
use fsocket_abi::half::Half;
use fsocket_sync::atomic::AtomicU64;

/// Maximum number of segments of one list. A list takes 1 KiB of stack.
pub const MOST: usize = 64;

/// The bytes of one record. The layout is that of `iovec`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Segment {
    pub at: *const u8,
    pub len: usize,
}

impl Segment {
    const NONE: Segment = Segment { at: ptr::null(), len: 0 };
}

/// The segments, in the order in which they were sent.
pub struct Segments {
    n: Cell<usize>,
    bytes: usize,
    list: [Cell<Segment>; MOST],
}

impl Segments {
    /// The first readable bytes, `len` at most. They stay unread. None: there are none.
    ///
    /// # Errors
    /// The peer broke the protocol.
    ///
    /// # Safety
    /// The caller holds the token of `h`.
    pub unsafe fn unread(ring: Mapped, d: &Dir, h: &Half, len: usize) -> Result<Option<Segments>, Failed> {
        let mut all = Segments { n: Cell::new(0), bytes: 0, list: [const { Cell::new(Segment::NONE) }; MOST] };
        // SAFETY: `List` writes nothing to the destination; this thread alone uses `h`, because
        // it has the token.
        all.bytes = unsafe { consumer::recv(List { ring, all: &all }, d, h, Some(ptr::dangling_mut()), len, true) }?;
        Ok((all.bytes > 0).then_some(all))
    }

    /// Number of bytes in all segments together.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn len(&self) -> usize {
        self.n.get()
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// The first of [`Segments::len`] segments.
    pub fn first(&self) -> *const Segment {
        self.list.as_ptr().cast()
    }
}

/// A ring whose reader notes the addresses of the bytes, instead of copying them.
#[derive(Clone, Copy)]
struct List<'a> {
    ring: Mapped,
    all: &'a Segments,
}

// SAFETY: headers are those of a mapped ring; `read` and `write` copy nothing.
unsafe impl Bytes for List<'_> {
    fn header(&self, off: usize) -> &AtomicU64 {
        self.ring.header(off)
    }
    unsafe fn write(&self, _: usize, _: *const u8, _: usize) -> bool {
        false
    }
    unsafe fn read(&self, off: usize, _: *mut u8, n: usize) -> bool {
        let i = self.all.n.get();
        let Some(place) = self.all.list.get(i) else { return false };
        place.set(Segment { at: self.ring.place(off), len: n });
        self.all.n.set(i + 1);
        true
    }
}
