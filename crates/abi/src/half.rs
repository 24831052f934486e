//! Token and positions of one direction of a connection, in the socket that a fork group shares.

use fsocket_sync::atomic::{AtomicU32, AtomicU64};

/// Touched by the owner of the token only.
#[cfg_attr(loom, derive(Default))]
#[repr(C, align(128))]
pub struct Half {
    /// Thread that holds the token; see [`fsocket_sync::token`].
    pub owner: AtomicU64,
    /// Not `pos`: the owner is inside an operation; written by the owner only.
    pub in_flight: AtomicU64,
    /// Position of the next byte to write or read; written by who is inside an operation.
    pub pos: AtomicU64,
    /// Position that lies at offset 0 of the ring.
    pub base: AtomicU64,
    /// tx: may write up to here without looking. rx: bytes left in the record.
    pub limit: AtomicU64,
    /// Bytes carried so far.
    pub bytes: AtomicU64,
    /// As long as the thread that owns the token need not look whether it still does: tx: `limit` less a
    /// header, rx: 1.
    pub credit: AtomicU64,
    /// Mark of the CPU last published (`fsocket_sys::cpu::mark`); all bits: none yet.
    pub cpu: AtomicU32,
    /// tx: bytes of the ring this side's buffer allows ([`channel::Cons::window`]
    /// comes on top); 0: all of it.
    ///
    /// [`channel::Cons::window`]: crate::channel::Cons::window
    pub cap: AtomicU32,
    /// Lock once several threads share the direction.
    pub shared: AtomicU64,
    /// tx: ring offset that must stay untouched until the receiver has followed
    /// the last rewind; 0: none.
    pub fence: AtomicU64,
    /// tx: ring offset up to which pages are known to exist.
    pub populated: AtomicU64,
    /// tx: TCP_NOTSENT_LOWAT, bytes; 0: none.
    pub lowat: AtomicU32,
}

impl fsocket_sync::token::Words for Half {
    #[inline(always)]
    fn owner(&self) -> &AtomicU64 {
        &self.owner
    }
    #[inline(always)]
    fn in_flight(&self) -> &AtomicU64 {
        &self.in_flight
    }
    #[inline(always)]
    fn position(&self) -> &AtomicU64 {
        &self.pos
    }
    #[inline(always)]
    fn shared(&self) -> &AtomicU64 {
        &self.shared
    }
    #[inline(always)]
    fn withdraw(&self) {
        self.credit.store(0, core::sync::atomic::Ordering::Relaxed);
    }
}

#[cfg(not(loom))]
const _: () = assert!(core::mem::size_of::<Half>() == 128);
