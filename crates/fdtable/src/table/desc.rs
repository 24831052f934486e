//! An open file description of ours.

use crate::cow::Sparing;
use crate::slab::{Slab, Slot};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicU8, Ordering};
use fsocket_abi::arena::{Half, Sock};
use fsocket_abi::channel::{Dir, Slot as ChanSlot};
use fsocket_ring::Mapped;

#[link_section = ".data.fsocket_start"]
pub static DESCS: Slab<Desc, { 1 << 18 }, NEAR> = Slab::new();
/// The first lie beside what a fork writes: a server that forks for each connection has its listener and the
/// connection there, as a rule.
const NEAR: usize = 2;

/// What a descriptor is, [`Desc::kind`].
pub mod kind {
    pub const FREE: u32 = 0;
    /// A TCP socket of which nothing is decided: the placeholder is pristine.
    pub const FRESH: u32 = 1;
    /// Bound; a listener or a kernel connection to be.
    pub const BOUND: u32 = 2;
    /// A kernel listener that also has SYN queues.
    pub const LISTENER: u32 = 3;
    /// A connection over shared memory.
    pub const CONN: u32 = 4;
    pub const EPOLL: u32 = 5;
    /// A kernel listener without SYN queues that may have local listen sockets.
    pub const KLISTENER: u32 = 6;
    /// A kernel connection with somebody on this host; see `upgrade`.
    pub const KERNEL: u32 = 7;
}

/// One open file description of ours, as this process sees it. Zero is valid.
#[repr(C, align(64))]
pub struct Desc {
    pub kind: AtomicU32,
    /// Descriptor numbers that refer to it in this process.
    pub refs: AtomicU32,
    /// CONN: shared state, control block, rings.
    sock: AtomicPtr<Sock>,
    tx_dir: AtomicPtr<Dir>,
    rx_dir: AtomicPtr<Dir>,
    tx_ring: AtomicPtr<u8>,
    rx_ring: AtomicPtr<u8>,
    /// CONN: see [`Desc::sender`].
    sender: AtomicU64,
    receiver: AtomicU64,
    // Second line: rarely used.
    slot: AtomicPtr<ChanSlot>,
    /// CONN: local channel number + 1.
    pub chan: AtomicU32,
    pub slot_index: AtomicU32,
    pub side: AtomicU32,
    /// Head (item index + 1) of the epoll items that watch it.
    pub items: AtomicU32,
    /// AF_INET or AF_INET6.
    pub family: AtomicU32,
    /// The placeholder carries state and cannot be used again.
    pub dirty: AtomicBool,
    /// The placeholder was another connection's before, and the kernel was not asked everything ([`crate::pristine`]).
    pub recycled: AtomicBool,
    /// See [`Desc::close_on_exec`].
    cloexec: AtomicU32,
    /// An epoll instance of the kernel's watches it, and would go on.
    pub watched: AtomicBool,
    /// The kernel chose the port that it is bound to.
    pub any_port: AtomicBool,
    /// CONN: the sending ring carried bulk data; see `idle`.
    pub grown: AtomicBool,
    /// FRESH: O_NONBLOCK as last set.
    pub nonblock: AtomicBool,
    /// What the placeholder is in the kernel, when the pool gets it: its
    /// family (0: AF_INET) and O_NONBLOCK.
    pub kernel_family: AtomicU32,
    pub kernel_nonblock: AtomicBool,
    /// LISTENER: index + 1 into the listener table. EPOLL: into the epoll table.
    pub object: AtomicU32,
    /// CONN whose path was switched while the ring still has something to read:
    /// our own number of the kernel end, plus one.
    pub kernel_end: AtomicI32,
    /// See [`detached`]: that number plus one, negative if something else has taken its place.
    pub(super) detached: AtomicI32,
    /// Calls of several operations that have done one of them.
    pub midway: AtomicU32,
    /// A thread is making it the kernel's.
    pub settling: AtomicBool,
    /// CONN, KERNEL: it is the kernel's only as long as an operator wants that.
    pub comes_back: AtomicBool,
    /// In [`retire`]'s list: index + 1 of the next, and since when, nanoseconds.
    pub(super) retired_next: AtomicU32,
    pub(super) retired_at: AtomicU64,
    /// A number of the kernel connection that this one has become, plus one.
    pub migrated_to: AtomicI32,
    /// LISTENER, KLISTENER: index + 1 into the table of zoned listeners.
    pub zone: AtomicU32,
    /// LISTENER: its options are known as of this change of them.
    pub options: AtomicU32,
    /// Counts uses, so that a stale reference can be told.
    pub generation: AtomicU32,
    /// Waits for data in a row without a send in between, and bytes sent at
    /// the last of them: a one-way stream is received in batches.
    pub one_way: AtomicU32,
    pub sent_before: AtomicU64,
    /// KERNEL: calls under way and what is decided, calls so far, tries to go over.
    pub using: fsocket_sync::handover::Calls,
    pub calls: AtomicU32,
    pub tries: AtomicU32,
    /// The number of the call that tries next.
    pub next_try: AtomicU32,
    /// KERNEL: its other end may be in another network namespace; and something was received since
    /// the last send.
    pub across: AtomicBool,
    pub heard: AtomicBool,
    /// KERNEL, or CONN that has gone over from there: its last try; see `upgrade::worth`.
    pub tried: AtomicU8,
    /// KERNEL: it was, since a first try.
    pub seen_nonblocking: AtomicBool,
    /// KERNEL: its number (SO_COOKIE) if it has come from, or gone to, another process, and the monitor counts who
    /// has it.
    pub passed_as: AtomicU64,
    /// KERNEL: handed down over a fork, see `upgrade::hand_down`; 0: it was not.
    pub ticket: AtomicU32,
    pub spin_rx: crate::spin::Memory,
    pub spin_tx: crate::spin::Memory,
    link: AtomicU32,
    /// Options as set before the path was chosen; see `opts`.
    pub opt: [AtomicI32; crate::options::COUNT],
    pub rcvtimeo: AtomicU64,
    pub sndtimeo: AtomicU64,
    /// Options that the placeholder keeps; see `opts::extra`.
    pub extra: [AtomicU32; crate::options::KEPT],
    /// FRESH, CONN: the identity of the thread that has made the socket ([`crate::identity`]).
    pub identity: AtomicU64,
    /// FRESH, BOUND: something was asked for that only the kernel's can do.
    pub kernel_only: AtomicBool,
    /// BOUND: the process has forked meanwhile; see `listen::keep_for_fork_group`.
    pub forked: AtomicBool,
    /// LISTENER: the program has seen to it that the next one finds it: `dup2`, or no longer
    /// close-on-exec.
    pub exec_prepared: AtomicBool,
    /// BOUND, LISTENER: processes that the monitor does not know of may hold it: it was passed in a message, or
    /// comes from a program without the library.
    pub held_elsewhere: AtomicBool,
    /// LISTENER: this process, or one that it was forked from, accepts on it.
    pub accepts: AtomicBool,
}

// SAFETY: zero is valid for atomics; `link` is used by the slab alone.
unsafe impl Slot for Desc {
    fn link(&self) -> &AtomicU32 {
        &self.link
    }
}

impl Desc {
    #[inline(always)]
    pub fn kind(&self) -> u32 {
        // Acquire: pairs with the release that made it a CONN or LISTENER.
        self.kind.load(Ordering::Acquire)
    }
    #[inline(always)]
    pub fn is_conn(&self) -> bool {
        self.kind() == kind::CONN
    }
    /// A connection that has become the kernel's: its numbers are not ours any more.
    pub fn is_gone(&self) -> bool {
        self.migrated_to.load(Ordering::Acquire) != 0
    }
    pub fn index(&self) -> u32 {
        DESCS.index(self)
    }
    pub fn placeholder_family(&self) -> u32 {
        match self.kernel_family.load(Ordering::Relaxed) {
            0 => libc::AF_INET as u32,
            f => f,
        }
    }
    /// Whether the placeholder's number, the only one, is close-on-exec; None: not known.
    pub fn close_on_exec(&self) -> Option<bool> {
        self.cloexec.load(Ordering::Relaxed).checked_sub(1).map(|on| on != 0)
    }
    pub fn set_close_on_exec(&self, on: Option<bool>) {
        self.cloexec.store(on.map_or(0, |on| 1 + u32::from(on)), Ordering::Relaxed);
    }
    pub fn placeholder_nonblock(&self) -> bool {
        self.kernel_nonblock.load(Ordering::Relaxed)
    }

    /// Attach the parts of a connection; the caller then sets `kind`.
    ///
    /// # Safety
    /// All stay mapped for as long as the process lives; the ring pointers
    /// are as [`Mapped::new`] wants them.
    pub unsafe fn attach(&self, sock: &Sock, slot: &ChanSlot, side: usize, tx: *mut u8, rx: *mut u8) {
        self.sock.store(sock as *const _ as *mut _, Ordering::Relaxed);
        self.slot.store(slot as *const _ as *mut _, Ordering::Relaxed);
        self.tx_dir.store(&slot.dir[side] as *const _ as *mut _, Ordering::Relaxed);
        self.rx_dir.store(&slot.dir[1 - side] as *const _ as *mut _, Ordering::Relaxed);
        self.tx_ring.store(tx, Ordering::Relaxed);
        self.rx_ring.store(rx, Ordering::Relaxed);
        self.side.store(side as u32, Ordering::Relaxed);
    }

    /// Thread of this process that gave the sending direction credit for
    /// `stream::send_tiny`: this was a connection then. As quick to ask as for the kind.
    #[inline(always)]
    pub fn sender(&self) -> u64 {
        self.sender.load(Ordering::Relaxed)
    }
    pub fn set_sender(&self, thread: u64) {
        self.sender.store(thread, Ordering::Relaxed);
    }
    /// Likewise of `stream::recv_on_credit`.
    #[inline(always)]
    pub fn receiver(&self) -> u64 {
        self.receiver.load(Ordering::Relaxed)
    }
    pub fn set_receiver(&self, thread: u64) {
        self.receiver.store(thread, Ordering::Relaxed);
    }
    /// In another process the same number is another thread.
    pub fn forget_owners(&self) {
        self.sender.put(0);
        self.receiver.put(0);
    }

    // The accessors below are for descriptors of kind CONN. A descriptor is
    // never detached again while it is in the slab (stale pointers lead to
    // memory that is still mapped), and `attach` comes before the kind.

    #[inline(always)]
    pub fn sock(&self) -> &'static Sock {
        debug_assert!(!self.sock.load(Ordering::Relaxed).is_null());
        // SAFETY: CONN, see above.
        unsafe { &*self.sock.load(Ordering::Relaxed) }
    }
    #[inline(always)]
    pub fn slot(&self) -> &'static ChanSlot {
        // SAFETY: CONN, see above.
        unsafe { &*self.slot.load(Ordering::Relaxed) }
    }
    // One at a time, for code that has no register to spare.
    #[inline(always)]
    pub fn rx_dir(&self) -> &'static Dir {
        // SAFETY: CONN, see above.
        unsafe { &*self.rx_dir.load(Ordering::Relaxed) }
    }
    #[inline(always)]
    pub fn tx_dir(&self) -> &'static Dir {
        // SAFETY: CONN, see above.
        unsafe { &*self.tx_dir.load(Ordering::Relaxed) }
    }
    /// The sending ring, [`fsocket_abi::channel::RING_CAP`] bytes.
    pub fn tx_memory(&self) -> *mut u8 {
        self.tx_ring.load(Ordering::Relaxed)
    }
    #[inline(always)]
    pub fn tx_ring(&self) -> Mapped {
        // SAFETY: CONN, see above.
        unsafe { Mapped::new(self.tx_ring.load(Ordering::Relaxed)) }
    }
    #[inline(always)]
    pub fn tx(&self) -> (Mapped, &'static Dir, &'static Half) {
        (self.tx_ring(), self.tx_dir(), &self.sock().tx)
    }
    #[inline(always)]
    pub fn rx(&self) -> (Mapped, &'static Dir, &'static Half) {
        // SAFETY: CONN, see above.
        unsafe {
            (Mapped::new(self.rx_ring.load(Ordering::Relaxed)), &*self.rx_dir.load(Ordering::Relaxed), &self.sock().rx)
        }
    }
}
