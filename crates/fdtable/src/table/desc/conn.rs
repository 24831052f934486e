//! A connection over shared memory, as this process sees it. What its fork group shares of it is
//! [`fsocket_abi::sock::Sock`].

use crate::cow::Sparing;
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64};
use fsocket_abi::channel::{Dir, Slot as ChanSlot};
use fsocket_abi::half::Half;
use fsocket_abi::sock::Sock;
use fsocket_ring::Mapped;

/// What each send and receive reads: one cache line with the header.
#[repr(C)]
pub struct Rings {
    sock: AtomicPtr<Sock>,
    tx_dir: AtomicPtr<Dir>,
    rx_dir: AtomicPtr<Dir>,
    tx_ring: AtomicPtr<u8>,
    rx_ring: AtomicPtr<u8>,
    sender: AtomicU64,
    receiver: AtomicU64,
}

// The pointers are valid once the description has been a connection: it is never detached again while it is in the slab
// (stale pointers lead to memory that is still mapped), and `attach` comes before the kind.
impl Rings {
    /// # Safety
    /// As [`super::Desc::attach`].
    pub(super) unsafe fn attach(&self, sock: &Sock, slot: &ChanSlot, side: usize, tx: *mut u8, rx: *mut u8) {
        self.sock.store(core::ptr::from_ref(sock).cast_mut(), Relaxed);
        self.tx_dir.store(core::ptr::from_ref(&slot.dir[side]).cast_mut(), Relaxed);
        self.rx_dir.store(core::ptr::from_ref(&slot.dir[1 - side]).cast_mut(), Relaxed);
        self.tx_ring.store(tx, Relaxed);
        self.rx_ring.store(rx, Relaxed);
    }
    #[inline(always)]
    pub(super) fn sock(&self) -> &'static Sock {
        debug_assert!(!self.sock.load(Relaxed).is_null());
        // SAFETY: see above.
        unsafe { &*self.sock.load(Relaxed) }
    }
    #[inline(always)]
    pub(super) fn tx_dir(&self) -> &'static Dir {
        // SAFETY: see above.
        unsafe { &*self.tx_dir.load(Relaxed) }
    }
    #[inline(always)]
    pub(super) fn rx_dir(&self) -> &'static Dir {
        // SAFETY: see above.
        unsafe { &*self.rx_dir.load(Relaxed) }
    }
    pub(super) fn tx_memory(&self) -> *mut u8 {
        self.tx_ring.load(Relaxed)
    }
    #[inline(always)]
    pub(super) fn tx_ring(&self) -> Mapped {
        // SAFETY: see above; the memory is as `attach` wants it.
        unsafe { Mapped::new(self.tx_ring.load(Relaxed)) }
    }
    #[inline(always)]
    pub(super) fn rx(&self) -> (Mapped, &'static Dir, &'static Half) {
        // SAFETY: see above; the memory is as `attach` wants it.
        unsafe { (Mapped::new(self.rx_ring.load(Relaxed)), &*self.rx_dir.load(Relaxed), &self.sock().rx) }
    }
    #[inline(always)]
    pub(super) fn sender(&self) -> u64 {
        self.sender.load(Relaxed)
    }
    pub(super) fn set_sender(&self, thread: u64) {
        self.sender.store(thread, Relaxed);
    }
    #[inline(always)]
    pub(super) fn receiver(&self) -> u64 {
        self.receiver.load(Relaxed)
    }
    pub(super) fn set_receiver(&self, thread: u64) {
        self.receiver.store(thread, Relaxed);
    }
    pub(super) fn forget_owners(&self) {
        self.sender.put(0);
        self.receiver.put(0);
    }
}

/// The rest of a connection's state in this process.
#[repr(C)]
pub struct Conn {
    slot: AtomicPtr<ChanSlot>,
    /// Local channel number plus one; 0: none.
    channel: AtomicU32,
    slot_index: AtomicU32,
    sent_before: AtomicU64,
    midway: AtomicU32,
    one_way: AtomicU32,
    grown: AtomicBool,
}

impl Conn {
    pub(super) fn reset(&self) {
        for word in [&self.channel, &self.slot_index, &self.midway, &self.one_way] {
            word.store(0, Relaxed);
        }
        self.sent_before.store(0, Relaxed);
        self.grown.store(false, Relaxed);
    }
    pub(super) fn attach(&self, slot: &ChanSlot) {
        self.slot.store(core::ptr::from_ref(slot).cast_mut(), Relaxed);
    }
    #[inline(always)]
    pub(super) fn slot(&self) -> &'static ChanSlot {
        // SAFETY: a connection's channel stays mapped, and `attach` comes before the kind.
        unsafe { &*self.slot.load(Relaxed) }
    }

    /// Where it lives: the channel's place in this process's table, and the slot.
    pub fn set_place(&self, channel: u32, slot: usize) {
        self.channel.store(channel + 1, Relaxed);
        self.slot_index.store(slot as u32, Relaxed);
    }
    pub fn channel(&self) -> Option<u32> {
        self.channel.load(Relaxed).checked_sub(1)
    }
    pub fn forget_channel(&self) {
        self.channel.store(0, Relaxed);
    }
    pub fn slot_index(&self) -> usize {
        self.slot_index.load(Relaxed) as usize
    }

    /// The sending ring carried bulk data; see `shm::idle`.
    pub fn has_grown(&self) -> bool {
        self.grown.load(Relaxed)
    }
    pub fn set_grown(&self, grown: bool) {
        self.grown.store(grown, Relaxed);
    }

    /// Is a call of several operations under way that has done one of them?
    pub fn is_midway(&self) -> bool {
        self.midway.load(Relaxed) != 0
    }
    /// Such a call has done its first operation.
    pub fn begin_midway(&self) {
        self.midway.fetch_add(1, Relaxed);
    }
    pub fn end_midway(&self) {
        self.midway.fetch_sub(1, Relaxed);
    }

    /// A wait for data begins, when `sent` bytes have been sent in all. Returns how many such waits came in a row without
    /// a send in between: a one-way stream is received in batches.
    pub fn waits_without_send(&self, sent: u64) -> u32 {
        if self.sent_before.swap(sent, Relaxed) != sent {
            self.one_way.store(0, Relaxed);
            return 0;
        }
        self.one_way.fetch_add(1, Relaxed)
    }
}
