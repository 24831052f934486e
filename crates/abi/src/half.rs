//! Token and positions of one direction of a connection, in the socket that a fork group shares.
//!
//! The token orders the accesses of its holders, so most are relaxed. Other processes may write anything there at any time.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use fsocket_sync::atomic::{AtomicU32, AtomicU64};

/// Touched by the owner of the token only.
#[derive(Default)]
#[repr(C, align(128))]
pub struct Half {
    /// Thread that holds the token; see [`fsocket_sync::token`].
    owner: AtomicU64,
    /// Not `pos`: the owner is inside an operation; written by the owner only.
    in_flight: AtomicU64,
    /// Position of the next byte to write or read; written by who is inside an operation.
    pos: AtomicU64,
    /// Position that lies at offset 0 of the ring.
    base: AtomicU64,
    /// tx: may write up to here without looking. rx: bytes left in the record.
    limit: AtomicU64,
    /// Bytes carried so far.
    bytes: AtomicU64,
    /// As long as the thread that owns the token need not look whether it still does: tx: `limit` less a
    /// header, rx: 1.
    credit: AtomicU64,
    /// Mark of the CPU last published (`fsocket_sys::cpu::mark`); all bits: none yet.
    cpu: AtomicU32,
    /// tx: bytes of the ring this side's buffer allows ([`channel::Cons::window`]
    /// comes on top); 0: all of it.
    ///
    /// [`channel::Cons::window`]: crate::channel::Cons::window
    cap: AtomicU32,
    /// Lock once several threads share the direction.
    shared: AtomicU64,
    /// tx: ring offset that must stay untouched until the receiver has followed
    /// the last rewind; 0: none.
    fence: AtomicU64,
    /// tx: ring offset up to which pages are known to exist.
    populated: AtomicU64,
    /// tx: TCP_NOTSENT_LOWAT, bytes; 0: none.
    lowat: AtomicU32,
}

macro_rules! words {
    ($($name:ident $set:ident: $word:ty;)*) => {
        $(
            #[inline(always)]
            pub fn $name(&self) -> $word {
                self.$name.load(Relaxed)
            }
            #[inline(always)]
            pub fn $set(&self, value: $word) {
                self.$name.store(value, Relaxed);
            }
        )*
    };
}

/// Each word is described at its field.
impl Half {
    words! {
        pos set_pos: u64;
        base set_base: u64;
        limit set_limit: u64;
        bytes set_bytes: u64;
        credit set_credit: u64;
        fence set_fence: u64;
        populated set_populated: u64;
        cpu set_cpu: u32;
        cap set_cap: u32;
        lowat set_lowat: u32;
    }

    /// Moves the position, which is [`fsocket_sync::token::Words::position`]: the last step of an operation on credit.
    #[inline(always)]
    pub fn go_to(&self, pos: u64) {
        self.pos.store(pos, Release);
    }
    /// Position, base and limit, for a process that never enters.
    pub fn from_outside(&self) -> (u64, u64, u64) {
        // Acquire: pairs with `go_to`, so the ring is at least as new.
        (self.pos.load(Acquire), self.base.load(Acquire), self.limit.load(Acquire))
    }
    /// The bytes carried so far are counted elsewhere from here on.
    pub fn take_bytes(&self) -> u64 {
        self.bytes.swap(0, Relaxed)
    }
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
        self.set_credit(0);
    }
}

#[cfg(not(loom))]
const _: () = assert!(core::mem::size_of::<Half>() == 128);
