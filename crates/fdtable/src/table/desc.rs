//! An open file description of ours: a header, and a payload for each kind of object.
//!
//! All fields are private to the modules here. What a description is changes only by these methods:
//!
//! | from | to | method |
//! | --- | --- | --- |
//! | Free | any | [`super::alloc`] |
//! | Fresh | Bound | [`Desc::bind`], [`Desc::bind_if_fresh`] |
//! | Fresh, Bound | Listener | [`Desc::listen`] |
//! | Fresh, Bound | KernelListener | [`Desc::listen_in_kernel`] |
//! | Listener, KernelListener | KernelListener, Bound | [`Desc::unlisten`] |
//! | Fresh, Kernel | Shm | [`Desc::connect`] |
//! | Fresh, Shm | Kernel | [`Desc::begin_in_kernel`] |
//! | Shm, Kernel | Fresh | [`Desc::disconnect`] |
//! | Fresh | Epoll | [`Desc::become_instance`] |
//! | any | Free | [`super::release`] |
//!
//! Each stores the kind last, with a release; [`Desc::kind`] pairs with it. A payload of another kind than the present one
//! holds what was stored last, which is never invalid: a thread that was in the middle of an operation when the kind
//! changed reads old values.

use crate::slab::{Slab, Slot};
use core::sync::atomic::{AtomicU32, Ordering};
use fsocket_abi::channel::{Dir, Slot as ChanSlot, SERVER};
use fsocket_abi::half::Half;
use fsocket_abi::sock::Sock;
use fsocket_ring::Mapped;

mod conn;
mod kernel;
mod listening;
mod options;
mod path;
mod placeholder;
mod unconnected;

pub use conn::Conn;
pub use kernel::KernelConn;
pub use listening::Listening;
pub use options::{Kept, KeptOption, Options};
pub use path::Path;
pub use placeholder::Placeholder;
pub use unconnected::Unconnected;

#[link_section = ".data.fsocket_start"]
pub static DESCS: Slab<Desc, { 1 << 18 }, NEAR> = Slab::new();
/// The first lie beside what a fork writes: a server that forks for each connection has its listener and the
/// connection there, as a rule.
const NEAR: usize = 2;

/// What a description is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Kind {
    Free = 0,
    /// A TCP socket of which nothing is decided: the placeholder is pristine.
    Fresh = 1,
    /// Bound; a listener or a kernel connection to be.
    Bound = 2,
    /// A kernel listener that also has SYN queues.
    Listener = 3,
    /// A connection over shared memory.
    Shm = 4,
    Epoll = 5,
    /// A kernel listener without SYN queues that may have local listen sockets.
    KernelListener = 6,
    /// A kernel connection with somebody on this host.
    Kernel = 7,
}

/// One open file description of ours, as this process sees it. Zero is valid.
#[repr(C, align(64))]
pub struct Desc {
    /// A [`Kind`].
    kind: AtomicU32,
    refs: AtomicU32,
    rings: conn::Rings,
    // Second line: what an operation looks at before it sleeps.
    conn: Conn,
    /// Head (item index + 1) of the epoll items that watch it.
    items: AtomicU32,
    path: Path,
    /// [`SERVER`] or CLIENT, of a connection.
    side: AtomicU32,
    family: AtomicU32,
    generation: AtomicU32,
    placeholder: Placeholder,
    unconnected: Unconnected,
    listening: Listening,
    kernel: KernelConn,
    options: Options,
    spin_rx: crate::spin::Memory,
    spin_tx: crate::spin::Memory,
    link: AtomicU32,
}

const _: () = {
    use core::mem::offset_of;
    assert!(offset_of!(Desc, conn) == 64);
    assert!(offset_of!(Desc, items) + 16 <= 128);
};

// SAFETY: zero is valid for atomics; `link` is used by the slab alone.
unsafe impl Slot for Desc {
    fn link(&self) -> &AtomicU32 {
        &self.link
    }
}

/// What it is.
impl Desc {
    #[inline(always)]
    pub fn kind(&self) -> Kind {
        // Acquire: pairs with the release of the method that made it this.
        match self.kind.load(Ordering::Acquire) {
            1 => Kind::Fresh,
            2 => Kind::Bound,
            3 => Kind::Listener,
            4 => Kind::Shm,
            5 => Kind::Epoll,
            6 => Kind::KernelListener,
            7 => Kind::Kernel,
            _ => Kind::Free,
        }
    }
    #[inline(always)]
    pub fn is_conn(&self) -> bool {
        self.is(Kind::Shm)
    }
    #[inline(always)]
    pub fn is(&self, kind: Kind) -> bool {
        self.kind.load(Ordering::Acquire) == kind as u32
    }
    pub(super) fn set_kind(&self, kind: Kind) {
        // Release: what its payload was given before.
        self.kind.store(kind as u32, Ordering::Release);
    }
    /// Nothing is decided yet: new, or bound.
    pub fn is_unconnected(&self) -> bool {
        matches!(self.kind(), Kind::Fresh | Kind::Bound)
    }
    /// A connection that has become the kernel's: its numbers are not ours any more.
    pub fn is_gone(&self) -> bool {
        self.path.went_to().is_some()
    }

    /// The program has bound it; `any_port`: to a port that the kernel has chosen.
    pub fn bind(&self, any_port: bool) {
        self.placeholder.mark_changed();
        self.unconnected.set_any_port(any_port);
        self.set_kind(Kind::Bound);
    }
    /// It is to be left as it is from now on. False: another thread has connected it.
    pub fn bind_if_fresh(&self) -> bool {
        let (fresh, bound) = (Kind::Fresh as u32, Kind::Bound as u32);
        let was = self.kind.compare_exchange(fresh, bound, Ordering::AcqRel, Ordering::Acquire);
        was.is_ok() || was == Err(bound)
    }
    /// It listens, at this place of the table of listeners.
    pub fn listen(&self, place: u32) {
        self.listening.set_object(place);
        self.set_kind(Kind::Listener);
    }
    /// It listens in the kernel alone.
    pub fn listen_in_kernel(&self) {
        self.placeholder.mark_changed();
        self.set_kind(Kind::KernelListener);
    }
    /// Its SYN queues are gone. `zoned`: it may have local listen sockets.
    pub fn unlisten(&self, zoned: bool) {
        self.set_kind(if zoned { Kind::KernelListener } else { Kind::Bound });
    }
    /// It is a connection in this slot from now on. [`Desc::attach`] came before.
    pub fn connect(&self) {
        self.set_kind(Kind::Shm);
    }
    /// It is no connection of ours any more, or never became one.
    pub fn disconnect(&self) {
        self.set_kind(Kind::Fresh);
    }
    /// It is a kernel connection that may go over; the call with number `first_try` tries first.
    pub fn begin_in_kernel(&self, side: usize, first_try: u32) {
        self.set_side(side);
        self.kernel.begin(first_try);
        self.path.set_comes_back(false);
        self.placeholder.mark_changed();
        self.set_kind(Kind::Kernel);
    }
    /// It is an epoll instance, at this place of the table of instances. [`super::alloc`] made it one.
    pub fn become_instance(&self, place: u32) {
        self.listening.set_object(place);
    }

    /// All fields at their start values, but for what counts uses.
    pub(super) fn reset(&self) {
        self.refs.store(1, Ordering::Relaxed);
        self.generation.fetch_add(1, Ordering::Relaxed);
        self.items.store(0, Ordering::Relaxed);
        self.family.store(0, Ordering::Relaxed);
        self.rings.forget_owners();
        self.conn.reset();
        self.path.reset();
        self.placeholder.reset();
        self.unconnected.reset();
        self.listening.reset();
        self.kernel.reset();
        self.options.reset();
        self.spin_rx.reset();
        self.spin_tx.reset();
    }
}

/// References: numbers of this process, and operations that outlive a number.
impl Desc {
    pub fn refs(&self) -> u32 {
        self.refs.load(Ordering::Acquire)
    }
    pub fn is_used(&self) -> bool {
        self.refs() > 0
    }
    pub fn add_ref(&self) {
        self.refs.fetch_add(1, Ordering::AcqRel);
    }
    /// False: its last reference was gone already.
    pub fn add_ref_if_used(&self) -> bool {
        let add = |n: u32| (n != 0).then(|| n + 1);
        self.refs.fetch_update(Ordering::AcqRel, Ordering::Relaxed, add).is_ok()
    }
    /// True: it was the last one.
    pub fn drop_ref(&self) -> bool {
        self.drop_refs(1)
    }
    /// True: they were the last ones.
    pub fn drop_refs(&self, n: u32) -> bool {
        self.refs.fetch_sub(n, Ordering::AcqRel) == n
    }
    /// Its references belong to a program that this one has replaced.
    pub fn forget_refs(&self) {
        self.refs.store(0, Ordering::Relaxed);
    }

    pub fn index(&self) -> u32 {
        DESCS.index(self)
    }
    /// Counts uses, so that a stale reference can be told.
    pub fn generation(&self) -> u32 {
        self.generation.load(Ordering::Relaxed)
    }
}

/// Header and payloads.
impl Desc {
    /// AF_INET, AF_INET6 or AF_UNIX.
    pub fn family(&self) -> u32 {
        self.family.load(Ordering::Relaxed)
    }
    /// A Unix socket: its connections begin in the kernel, and the kernel's socket stays behind them.
    pub fn is_unix(&self) -> bool {
        self.family() == libc::AF_UNIX as u32
    }
    /// Of the socket and of its placeholder.
    pub fn set_families(&self, family: u32) {
        self.set_family(family);
        self.placeholder.set_family(family);
    }
    pub fn set_family(&self, family: u32) {
        self.family.store(family, Ordering::Relaxed);
    }
    /// [`SERVER`] or [`fsocket_abi::channel::CLIENT`], of a connection.
    #[inline(always)]
    pub fn side(&self) -> usize {
        (self.side.load(Ordering::Relaxed) & 1) as usize
    }
    pub fn is_server(&self) -> bool {
        self.side() == SERVER
    }
    pub fn set_side(&self, side: usize) {
        self.side.store(side as u32, Ordering::Relaxed);
    }
    /// The first epoll item that watches it: its index, plus one; 0: none does.
    #[inline]
    pub fn first_item(&self) -> u32 {
        // Acquire: pairs with the release in `set_first_item`; what the item says.
        self.items.load(Ordering::Acquire)
    }
    pub fn set_first_item(&self, item: u32) {
        self.items.store(item, Ordering::Release);
    }
    /// Does an epoll instance of ours watch it?
    #[inline]
    pub fn has_items(&self) -> bool {
        self.items.load(Ordering::Relaxed) != 0
    }
    pub fn placeholder(&self) -> &Placeholder {
        &self.placeholder
    }
    pub fn unconnected(&self) -> &Unconnected {
        &self.unconnected
    }
    pub fn listening(&self) -> &Listening {
        &self.listening
    }
    pub fn conn(&self) -> &Conn {
        &self.conn
    }
    pub fn kernel(&self) -> &KernelConn {
        &self.kernel
    }
    pub fn options(&self) -> &Options {
        &self.options
    }
    pub fn path(&self) -> &Path {
        &self.path
    }
    /// How long waits for data, or for space, lasted lately.
    pub fn spin_rx(&self) -> &crate::spin::Memory {
        &self.spin_rx
    }
    pub fn spin_tx(&self) -> &crate::spin::Memory {
        &self.spin_tx
    }
}

/// Connections over shared memory: what sending and receiving use.
impl Desc {
    /// Attach the parts of a connection; [`Desc::connect`] follows.
    ///
    /// # Safety
    /// All stay mapped for as long as the process lives; the ring pointers
    /// are as [`Mapped::new`] wants them.
    pub unsafe fn attach(&self, sock: &Sock, slot: &ChanSlot, side: usize, tx: *mut u8, rx: *mut u8) {
        // SAFETY: the condition of this function.
        unsafe { self.rings.attach(sock, slot, side, tx, rx) };
        self.conn.attach(slot);
        self.set_side(side);
    }

    /// Thread of this process that gave the sending direction credit for
    /// `stream::send_tiny`: this was a connection then. As quick to ask as for the kind.
    #[inline(always)]
    pub fn sender(&self) -> u64 {
        self.rings.sender()
    }
    pub fn set_sender(&self, thread: u64) {
        self.rings.set_sender(thread);
    }
    /// Likewise of `stream::recv_on_credit`.
    #[inline(always)]
    pub fn receiver(&self) -> u64 {
        self.rings.receiver()
    }
    pub fn set_receiver(&self, thread: u64) {
        self.rings.set_receiver(thread);
    }
    /// In another process the same number is another thread.
    pub fn forget_owners(&self) {
        self.rings.forget_owners();
    }

    #[inline(always)]
    pub fn sock(&self) -> &'static Sock {
        self.rings.sock()
    }
    #[inline(always)]
    pub fn slot(&self) -> &'static ChanSlot {
        self.conn.slot()
    }
    // One at a time, for code that has no register to spare.
    #[inline(always)]
    pub fn rx_dir(&self) -> &'static Dir {
        self.rings.rx_dir()
    }
    #[inline(always)]
    pub fn tx_dir(&self) -> &'static Dir {
        self.rings.tx_dir()
    }
    /// The sending ring, [`fsocket_abi::channel::RING_CAP`] bytes.
    pub fn tx_memory(&self) -> *mut u8 {
        self.rings.tx_memory()
    }
    #[inline(always)]
    pub fn tx_ring(&self) -> Mapped {
        self.rings.tx_ring()
    }
    #[inline(always)]
    pub fn tx(&self) -> (Mapped, &'static Dir, &'static Half) {
        (self.tx_ring(), self.tx_dir(), &self.sock().tx)
    }
    #[inline(always)]
    pub fn rx(&self) -> (Mapped, &'static Dir, &'static Half) {
        self.rings.rx()
    }
}
