//! An open file description of the library: a header, and a payload for each kind of object.
//!
//! All fields are private to the modules here. Only these methods change the kind of a description:
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
//! Each method stores the kind last, with a release; [`Desc::kind`] pairs with it. The payloads
//! of other kinds keep the values that were stored last, which are never invalid. So an operation
//! that was running when the kind changed reads old but valid values.

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
mod state;
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
/// The first descriptions are in memory that a fork copies anyway. In a server that forks for
/// each connection, these usually are the listener and the connection.
const NEAR: usize = 2;

/// Kinds of descriptions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Kind {
    Free = 0,
    /// A new TCP socket. It is not decided yet whether it uses shared memory or the kernel; the
    /// placeholder is pristine.
    Fresh = 1,
    /// A bound socket, which may become a listener or a kernel connection.
    Bound = 2,
    /// A kernel listener that also has SYN queues.
    Listener = 3,
    /// A connection over shared memory.
    Shm = 4,
    Epoll = 5,
    /// A kernel listener without SYN queues that may have local listen sockets.
    KernelListener = 6,
    /// A kernel connection with a process on this host, which may move to shared memory.
    Kernel = 7,
}

/// One open file description of the library, as this process sees it. Zero is valid.
#[repr(C, align(64))]
pub struct Desc {
    /// A [`Kind`].
    kind: AtomicU32,
    refs: AtomicU32,
    rings: conn::Rings,
    // The second cache line: fields that an operation reads before it sleeps.
    conn: Conn,
    /// Head of the list of epoll items that watch the description (item index + 1).
    items: AtomicU32,
    path: Path,
    /// For a connection: [`SERVER`] or CLIENT.
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

// SAFETY: zero is valid for atomics; only the slab uses `link`.
unsafe impl Slot for Desc {
    fn link(&self) -> &AtomicU32 {
        &self.link
    }
}

/// The kind of the description.
impl Desc {
    #[inline(always)]
    pub fn kind(&self) -> Kind {
        // Acquire: pairs with the release of the method that set the kind.
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
        // Release: makes the payload visible that was stored before.
        self.kind.store(kind as u32, Ordering::Release);
    }
    /// Is the socket new or bound, so that its path is not decided yet?
    pub fn is_unconnected(&self) -> bool {
        matches!(self.kind(), Kind::Fresh | Kind::Bound)
    }
    /// Has the connection moved to the kernel, so that its descriptors are kernel connections?
    pub fn is_gone(&self) -> bool {
        self.path.went_to().is_some()
    }

    /// The program has bound the socket; `any_port`: the kernel has chosen the port.
    pub fn bind(&self, any_port: bool) {
        self.placeholder.mark_changed();
        self.unconnected.set_any_port(any_port);
        self.set_kind(Kind::Bound);
    }
    /// Makes a fresh socket Bound, so that it cannot be connected as a fresh one. False: another
    /// thread has connected it.
    pub fn bind_if_fresh(&self) -> bool {
        let (fresh, bound) = (Kind::Fresh as u32, Kind::Bound as u32);
        let was = self.kind.compare_exchange(fresh, bound, Ordering::AcqRel, Ordering::Acquire);
        was.is_ok() || was == Err(bound)
    }
    /// The socket listens; `place`: its index in the table of listeners.
    pub fn listen(&self, place: u32) {
        self.listening.set_object(place);
        self.set_kind(Kind::Listener);
    }
    /// The socket listens in the kernel alone.
    pub fn listen_in_kernel(&self) {
        self.placeholder.mark_changed();
        self.set_kind(Kind::KernelListener);
    }
    /// The listener has lost its SYN queues. `zoned`: it may have local listen sockets.
    pub fn unlisten(&self, zoned: bool) {
        self.set_kind(if zoned { Kind::KernelListener } else { Kind::Bound });
    }
    /// The description becomes a connection over shared memory. [`Desc::attach`] must come
    /// before.
    pub fn connect(&self) {
        self.set_kind(Kind::Shm);
    }
    /// The description is not a connection over shared memory (any more).
    pub fn disconnect(&self) {
        self.set_kind(Kind::Fresh);
    }
    /// Becomes a kernel connection that may move to shared memory. The call with number
    /// `first_try` tries that first.
    pub fn begin_in_kernel(&self, side: usize, first_try: u32) {
        self.set_side(side);
        self.kernel.begin(first_try);
        self.path.set_comes_back(false);
        self.placeholder.mark_changed();
        self.set_kind(Kind::Kernel);
    }
    /// The description becomes an epoll instance; `place`: its index in the table of instances.
    /// [`super::alloc`] has given it that kind already.
    pub fn become_instance(&self, place: u32) {
        self.listening.set_object(place);
    }

    /// Sets all fields to their initial values, except those that count uses.
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

/// References: descriptors of this process, and operations that may outlive a descriptor.
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
    /// Adds a reference. False: the last one was gone already.
    pub fn add_ref_if_used(&self) -> bool {
        let add = |n: u32| (n != 0).then(|| n + 1);
        self.refs.fetch_update(Ordering::AcqRel, Ordering::Relaxed, add).is_ok()
    }
    /// Drops a reference. True: it was the last one.
    pub fn drop_ref(&self) -> bool {
        self.drop_refs(1)
    }
    /// Drops `n` references. True: they were the last ones.
    pub fn drop_refs(&self, n: u32) -> bool {
        self.refs.fetch_sub(n, Ordering::AcqRel) == n
    }
    /// Drops all references: they belonged to the program that this one has replaced by `exec`.
    pub fn forget_refs(&self) {
        self.refs.store(0, Ordering::Relaxed);
    }

    pub fn index(&self) -> u32 {
        DESCS.index(self)
    }
    /// Number of times that this description was allocated, to recognize a stale reference.
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
    /// Is this a Unix socket? Its connections begin in the kernel, and keep their kernel socket
    /// as placeholder.
    pub fn is_unix(&self) -> bool {
        self.family() == libc::AF_UNIX as u32
    }
    /// Sets the family of the socket and of its placeholder.
    pub fn set_families(&self, family: u32) {
        self.set_family(family);
        self.placeholder.set_family(family);
    }
    pub fn set_family(&self, family: u32) {
        self.family.store(family, Ordering::Relaxed);
    }
    /// For a connection: [`SERVER`] or [`fsocket_abi::channel::CLIENT`].
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
    /// The first epoll item that watches the description: its index, plus one. 0: none.
    #[inline]
    pub fn first_item(&self) -> u32 {
        // Acquire: pairs with the release in `set_first_item`, and makes the item's fields visible.
        self.items.load(Ordering::Acquire)
    }
    pub fn set_first_item(&self, item: u32) {
        self.items.store(item, Ordering::Release);
    }
    /// Does an epoll instance of the library watch the description?
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
    /// The recent lengths of waits for data (`rx`) or for space (`tx`).
    pub fn spin_rx(&self) -> &crate::spin::Memory {
        &self.spin_rx
    }
    pub fn spin_tx(&self) -> &crate::spin::Memory {
        &self.spin_tx
    }
}

/// Connections over shared memory: the fields for sending and receiving.
impl Desc {
    /// Attaches the parts of a connection; [`Desc::connect`] follows.
    ///
    /// # Safety
    /// All must stay mapped for the life of the process, and the ring pointers must satisfy
    /// [`Mapped::new`].
    pub unsafe fn attach(&self, sock: &Sock, slot: &ChanSlot, side: usize, tx: *mut u8, rx: *mut u8) {
        // SAFETY: all stay mapped, and the rings satisfy `Mapped::new`, as this function demands.
        unsafe { self.rings.attach(sock, slot, side, tx, rx) };
        self.conn.attach(slot);
        self.set_side(side);
    }

    /// The thread of this process that has credit to send by `stream::send_tiny`; set only while
    /// this was a connection. Reading it costs no more than reading the kind.
    #[inline(always)]
    pub fn sender(&self) -> u64 {
        self.rings.sender()
    }
    pub fn set_sender(&self, thread: u64) {
        self.rings.set_sender(thread);
    }
    /// The same for receiving by `stream::recv_on_credit`.
    #[inline(always)]
    pub fn receiver(&self) -> u64 {
        self.rings.receiver()
    }
    pub fn set_receiver(&self, thread: u64) {
        self.rings.set_receiver(thread);
    }
    /// Forgets these threads: in another process the same thread number means another thread.
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
    // Separate accessors for one value each, for code that has no register to spare.
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
