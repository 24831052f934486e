//! Descriptor number to what we know of it.
//!
//! A number that is not in the table is the kernel's alone, and costs one load
//! per call. Entries are private to the process (a forked child has a copy).

use crate::cow::Sparing;
use crate::slab::{Slab, Slot};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use fsocket_abi::arena::{Half, Sock};
use fsocket_abi::channel::{Dir, Slot as ChanSlot};
use fsocket_ring::Mapped;

/// Numbers up to here are the kernel's, also as connections: stdio has streams on
/// them that read and write below our hooks.
pub const STDIO: i32 = 2;
/// Descriptors from here on are left to the kernel.
pub use crate::process::MAX_FD;

static FDS: [AtomicPtr<Desc>; MAX_FD] = [const { AtomicPtr::new(core::ptr::null_mut()) }; MAX_FD];
#[link_section = ".data.fsocket_start"]
pub static DESCS: Slab<Desc> = Slab::new(1 << 18);

/// One more than the highest number ever entered.
#[link_section = ".data.fsocket_start"]
static TOP: AtomicUsize = AtomicUsize::new(0);

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
    detached: AtomicI32,
    /// Calls of several operations that have done one of them.
    pub midway: AtomicU32,
    /// A thread is making it the kernel's.
    pub settling: AtomicBool,
    /// CONN, KERNEL: it is the kernel's only as long as an operator wants that.
    pub comes_back: AtomicBool,
    /// In [`retire`]'s list: index + 1 of the next, and since when, nanoseconds.
    retired_next: AtomicU32,
    retired_at: AtomicU64,
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
    pub spin_rx: crate::spin::Memory,
    pub spin_tx: crate::spin::Memory,
    link: AtomicU32,
    /// Options as set before the path was chosen; see `opts`.
    pub opt: [AtomicI32; crate::options::COUNT],
    pub rcvtimeo: AtomicU64,
    pub sndtimeo: AtomicU64,
    /// Options that the placeholder keeps; see `opts::extra`.
    pub extra: [AtomicU32; crate::options::KEPT],
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
    /// [`crate::stream::send_tiny`]: this was a connection then. As quick to ask as for the kind.
    #[inline(always)]
    pub fn sender(&self) -> u64 {
        self.sender.load(Ordering::Relaxed)
    }
    pub fn set_sender(&self, thread: u64) {
        self.sender.store(thread, Ordering::Relaxed);
    }
    /// Likewise of [`crate::stream::recv_on_credit`].
    #[inline(always)]
    pub fn receiver(&self) -> u64 {
        self.receiver.load(Ordering::Relaxed)
    }
    pub fn set_receiver(&self, thread: u64) {
        self.receiver.store(thread, Ordering::Relaxed);
    }
    /// In another process the same thread is somebody else.
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
    // One at a time, for who has no register to spare.
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

#[inline(always)]
pub fn lookup(fd: i32) -> Option<&'static Desc> {
    let p = FDS.get(fd as usize)?.load(Ordering::Acquire);
    // SAFETY: the table holds only pointers into the slab, which stays mapped.
    unsafe { p.as_ref() }
}

/// A new description with one reference, all fields at their start values.
pub fn alloc(kind: u32) -> Option<&'static Desc> {
    let (_, d) = DESCS.alloc()?;
    d.refs.store(1, Ordering::Relaxed);
    d.generation.fetch_add(1, Ordering::Relaxed);
    for f in [&d.chan, &d.slot_index, &d.items, &d.family, &d.object, &d.zone, &d.kernel_family] {
        f.store(0, Ordering::Relaxed);
    }
    d.migrated_to.store(0, Ordering::Relaxed);
    d.detached.store(0, Ordering::Relaxed);
    d.midway.store(0, Ordering::Relaxed);
    d.forget_owners();
    d.options.store(0, Ordering::Relaxed);
    d.settling.store(false, Ordering::Relaxed);
    d.comes_back.store(false, Ordering::Relaxed);
    d.dirty.store(false, Ordering::Relaxed);
    d.watched.store(false, Ordering::Relaxed);
    d.any_port.store(false, Ordering::Relaxed);
    d.grown.store(false, Ordering::Relaxed);
    d.nonblock.store(false, Ordering::Relaxed);
    d.kernel_nonblock.store(false, Ordering::Relaxed);
    d.one_way.store(0, Ordering::Relaxed);
    d.sent_before.store(0, Ordering::Relaxed);
    d.spin_rx.reset();
    d.spin_tx.reset();
    for (o, v) in d.opt.iter().zip(crate::options::DEFAULTS) {
        o.store(v, Ordering::Relaxed);
    }
    for e in &d.extra {
        e.store(0, Ordering::Relaxed);
    }
    d.kernel_only.store(false, Ordering::Relaxed);
    d.forked.store(false, Ordering::Relaxed);
    d.exec_prepared.store(false, Ordering::Relaxed);
    d.held_elsewhere.store(false, Ordering::Relaxed);
    d.accepts.store(false, Ordering::Relaxed);
    d.rcvtimeo.store(0, Ordering::Relaxed);
    d.sndtimeo.store(0, Ordering::Relaxed);
    d.kind.store(kind, Ordering::Release);
    Some(d)
}

/// Descriptions with a `kernel_end`.
static ENDS: AtomicU32 = AtomicU32::new(0);

/// The ring has something left, and `fd` of ours is what comes behind it. False: another thread
/// was faster.
pub fn set_end(d: &Desc, fd: i32) -> bool {
    let set = d.kernel_end.compare_exchange(0, fd + 1, Ordering::AcqRel, Ordering::Acquire).is_ok();
    ENDS.fetch_add(set.into(), Ordering::AcqRel);
    set
}

/// Its kernel end, which is the caller's to close.
pub fn take_end(d: &Desc) -> Option<i32> {
    let end = d.kernel_end.swap(0, Ordering::AcqRel);
    (end != 0).then(|| {
        ENDS.fetch_sub(1, Ordering::AcqRel);
        end - 1
    })
}

fn close_end(d: &Desc) {
    if let Some(end) = take_end(d) {
        crate::process::close_own(end);
    }
}

/// The program gives these numbers up, and they are nobody's here. What a connection that has
/// become the kernel's leaves behind goes with its number: it would keep the connection alive.
#[inline]
pub fn fds_gone(fds: core::ops::RangeInclusive<i32>) {
    if ENDS.load(Ordering::Relaxed) != 0 {
        each_retired(|d| {
            let fd = d.migrated_to.load(Ordering::Relaxed) - 1;
            // (Nobody is in an operation on it.)
            if fds.contains(&fd) && d.refs.load(Ordering::Acquire) == 1 {
                close_end(d);
            }
        });
    }
}

/// Has [`fds_gone`] anything to look for?
#[inline]
pub fn has_ends() -> bool {
    ENDS.load(Ordering::Relaxed) != 0
}

#[cold]
fn each_retired(f: impl Fn(&Desc)) {
    let Ok(q) = RETIRED.lock() else { return };
    let mut at = q.first;
    for _ in 0..DESCS.len() {
        let Some(d) = DESCS.get(at.wrapping_sub(1)) else { return };
        f(d);
        at = d.retired_next.load(Ordering::Relaxed);
    }
}

/// Give a description back; nobody refers to it any more.
pub fn release(d: &Desc) {
    close_end(d);
    d.kind.store(kind::FREE, Ordering::Release);
    DESCS.free(d.index());
}

/// The last reference is gone and has been seen to: give the description back,
/// unless its end has made it wait for others ([`retire`]).
pub fn done_with(d: &Desc) {
    if d.refs.load(Ordering::Acquire) == 0 {
        release(d);
    }
}

/// A description that became the kernel's while other threads may be on their
/// way into an operation on it: it stays what it is for so long that none of
/// them can still be, and is given back then. Nothing is lost by a number of
/// them waiting.
pub fn retire(d: &Desc) {
    const LONG_NS: u64 = 2_000_000_000;
    let Ok(mut q) = RETIRED.lock() else { return };
    let now = fsocket_sys::now_ns();
    d.refs.fetch_add(1, Ordering::AcqRel);
    d.retired_next.store(0, Ordering::Relaxed);
    d.retired_at.store(now, Ordering::Relaxed);
    let me = d.index() + 1;
    match DESCS.get(q.last.wrapping_sub(1)) {
        Some(last) if q.first != 0 => last.retired_next.store(me, Ordering::Relaxed),
        _ => q.first = me,
    }
    q.last = me;
    while let Some(old) = DESCS.get(q.first.wrapping_sub(1)) {
        if now.saturating_sub(old.retired_at.load(Ordering::Relaxed)) < LONG_NS {
            break;
        }
        q.first = old.retired_next.load(Ordering::Relaxed);
        if old.refs.fetch_sub(1, Ordering::AcqRel) == 1 {
            release(old);
        }
    }
}

struct Retired {
    first: u32,
    last: u32,
}
#[link_section = ".data.fsocket_start"]
static RETIRED: crate::lock::Lock<Retired> = crate::lock::Lock::new(Retired { first: 0, last: 0 });

/// In a forked child.
#[link_section = ".text.fsocket_start"]
pub fn become_child() {
    RETIRED.reset_after_fork();
    // The parent's threads may be on their way; we are alone.
    each_retired(close_end);
}

/// Enter a number. False: the number is too high for the table.
pub fn install(fd: i32, d: &'static Desc) -> bool {
    match FDS.get(fd as usize) {
        Some(e) => {
            if fd as usize >= TOP.load(Ordering::Relaxed) {
                TOP.fetch_max(fd as usize + 1, Ordering::Relaxed);
            }
            e.store(d as *const Desc as *mut Desc, Ordering::Release);
            true
        }
        None => false,
    }
}

/// Take a number out and say what it was.
pub fn remove(fd: i32) -> Option<&'static Desc> {
    let e = FDS.get(fd as usize)?;
    // Most are the kernel's, and a swap would have the line for itself.
    if e.load(Ordering::Relaxed).is_null() {
        return None;
    }
    let p = e.swap(core::ptr::null_mut(), Ordering::AcqRel);
    // SAFETY: as in `lookup`.
    unsafe { p.as_ref() }
}

/// A number that refers to `d`.
pub fn fd_of(d: &Desc) -> Option<i32> {
    let me = d as *const Desc as *mut Desc;
    FDS.iter().take(scan_limit()).position(|e| e.load(Ordering::Relaxed) == me).map(|fd| fd as i32)
}

/// A number that the program has taken from a description.
pub struct Detached {
    pub fd: i32,
    /// By putting something else in its place, not by `close`.
    pub replaced: bool,
}

/// `fd` has left the table, where it referred to `d`.
pub fn detach(d: &Desc, fd: i32, replaced: bool) {
    let entry = fd + 1;
    // Release: that; pairs with the acquire in `detached`.
    d.detached.store(if replaced { -entry } else { entry }, Ordering::Release);
}

/// The number by which an operation on `d` was called, if the program has given it up since, and
/// no other refers to `d`.
#[inline]
pub fn detached(d: &Desc) -> Option<Detached> {
    // Acquire: pairs with the release in `detach`; the number has left the table.
    match d.detached.load(Ordering::Acquire) {
        0 => None,
        n => sole(d, n),
    }
}

#[cold]
fn sole(d: &Desc, entry: i32) -> Option<Detached> {
    let mut left = false;
    each_fd(d, |_| left = true);
    if left {
        // Until another one is: this is asked before each sleep.
        let _ = d.detached.compare_exchange(entry, 0, Ordering::Relaxed, Ordering::Relaxed);
    }
    (!left).then_some(Detached { fd: entry.abs() - 1, replaced: entry < 0 })
}

/// Highest number that a scan must look at.
pub fn scan_limit() -> usize {
    let mut r = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `r` is ours.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut r) };
    (r.rlim_cur.max(1024) as usize).min(MAX_FD)
}

/// All descriptions in use.
pub fn all() -> impl Iterator<Item = &'static Desc> {
    (0..DESCS.len()).filter_map(|i| DESCS.get(i)).filter(|d| d.refs.load(Ordering::Relaxed) > 0)
}

/// Forget a description that turned out to be the kernel's business: every
/// number that refers to it leaves the table.
pub fn forget(d: &Desc) {
    remove_fds(d);
    release(d);
}

/// [`forget`], where `fd` is one of its numbers, and mostly the only one.
pub fn forget_fd(fd: i32, d: &Desc) {
    let me = d as *const Desc as *mut Desc;
    let entry = FDS.get(fd as usize).filter(|_| d.refs.load(Ordering::Acquire) == 1);
    // A table of many connections is long to look through.
    let only = entry
        .is_some_and(|e| e.compare_exchange(me, core::ptr::null_mut(), Ordering::AcqRel, Ordering::Relaxed).is_ok());
    match only {
        true => release(d),
        false => forget(d),
    }
}

/// Every number that refers to `d` leaves the table.
pub fn remove_fds(d: &Desc) {
    let me = d as *const Desc as *mut Desc;
    each_entry(d, |_, e| {
        let _ = e.compare_exchange(me, core::ptr::null_mut(), Ordering::AcqRel, Ordering::Relaxed);
    });
}

/// Do `f` for every number that refers to `d`.
pub fn each_fd(d: &Desc, mut f: impl FnMut(i32)) {
    each_entry(d, |fd, _| f(fd));
}

fn each_entry(d: &Desc, mut f: impl FnMut(i32, &AtomicPtr<Desc>)) {
    let me = d as *const Desc as *mut Desc;
    for (fd, e) in FDS.iter().take(TOP.load(Ordering::Relaxed)).enumerate() {
        if e.load(Ordering::Relaxed) == me {
            f(fd as i32, e);
        }
    }
}
