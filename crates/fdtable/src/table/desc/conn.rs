//! A connection over shared memory, as this process sees it. The state that the fork group shares
//! is in [`fsocket_abi::sock::Sock`].

use crate::cow::Sparing;
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64};
use fsocket_abi::channel::{Dir, Slot as ChanSlot};
use fsocket_abi::half::Half;
use fsocket_abi::sock::Sock;
use fsocket_ring::Mapped;

/// The fields that each send and receive reads. They share a cache line with the description's
/// header.
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

// "Once attached" below: `attach` stores the pointers before the kind says that there is a
// connection. A segment of a channel stays mapped, or empty memory replaces it, so old pointers
// stay valid.
impl Rings {
    /// # Safety
    /// As for [`super::Desc::attach`].
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
        // SAFETY: once attached, it points to a `Sock` of an arena, which stays mapped.
        unsafe { &*self.sock.load(Relaxed) }
    }
    #[inline(always)]
    pub(super) fn tx_dir(&self) -> &'static Dir {
        // SAFETY: once attached, it points to a direction of a slot, in memory that stays mapped.
        unsafe { &*self.tx_dir.load(Relaxed) }
    }
    #[inline(always)]
    pub(super) fn rx_dir(&self) -> &'static Dir {
        // SAFETY: once attached, it points to a direction of a slot, in memory that stays mapped.
        unsafe { &*self.rx_dir.load(Relaxed) }
    }
    pub(super) fn tx_memory(&self) -> *mut u8 {
        self.tx_ring.load(Relaxed)
    }
    #[inline(always)]
    pub(super) fn tx_ring(&self) -> Mapped {
        // SAFETY: once attached, it points to a ring with its slack, in memory that stays mapped.
        unsafe { Mapped::new(self.tx_ring.load(Relaxed)) }
    }
    #[inline(always)]
    pub(super) fn rx(&self) -> (Mapped, &'static Dir, &'static Half) {
        // SAFETY: once attached, they point to a ring with its slack and to a direction, in memory that stays mapped.
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

/// The remaining state of a connection in this process.
#[repr(C)]
pub struct Conn {
    slot: AtomicPtr<ChanSlot>,
    /// Index of the channel in this process, plus one; 0: none.
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
        // SAFETY: `attach` stores the pointer before the kind says that there is a connection,
        // and the channel stays mapped.
        unsafe { &*self.slot.load(Relaxed) }
    }

    /// Stores where the connection is: the index of its channel in this process's table, and the
    /// slot.
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

    /// Has the sending ring carried bulk data? See `shm::idle`.
    pub fn has_grown(&self) -> bool {
        self.grown.load(Relaxed)
    }
    pub fn set_grown(&self, grown: bool) {
        self.grown.store(grown, Relaxed);
    }

    /// Has a call that consists of several operations finished only some of them so far?
    pub fn is_midway(&self) -> bool {
        self.midway.load(Relaxed) != 0
    }
    /// A call of several operations has finished its first one.
    pub fn begin_midway(&self) {
        self.midway.fetch_add(1, Relaxed);
    }
    pub fn end_midway(&self) {
        self.midway.fetch_sub(1, Relaxed);
    }

    /// A wait for data begins, after the program has sent `sent` bytes in all. Returns the number
    /// of successive waits without a send in between. (A connection with many of them carries a
    /// one-way stream, which is received in batches.)
    pub fn waits_without_send(&self, sent: u64) -> u32 {
        if self.sent_before.swap(sent, Relaxed) != sent {
            self.one_way.store(0, Relaxed);
            return 0;
        }
        self.one_way.fetch_add(1, Relaxed)
    }
}
