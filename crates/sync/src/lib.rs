//! Atomics facade (`core` or `loom`), the asymmetric fence, and the protocols that are built on
//! them: counts of arrivals, doorbells, the second word of a sleep, tokens, the handover of a connection, idle
//! watchers, subscriptions, memory that is mapped in segments, or freed. Nothing here makes a system call:
//! the expensive half of the fence is handed in by the caller, so that loom can stand in for the
//! kernel.
#![cfg_attr(not(loom), no_std)]

pub mod arrivals;
pub mod atomic;
pub mod doorbell;
pub mod handover;
pub mod idle;
pub mod news;
pub mod segments;
mod step;
pub mod token;
pub mod trim;
pub mod unsubscribed;

#[cfg(loom)]
pub mod model;

/// The cheap half of the asymmetric fence, for the side that runs often.
///
/// Orders an earlier store before a later load *only* together with a
/// [heavy fence](doorbell::Want::arm) on the other side, which
/// `membarrier(2)` supplies: every running thread of a registered process
/// passes a full barrier before that call returns. Here it only stops the
/// compiler. Under loom see [`model`].
#[inline(always)]
pub fn light_fence() {
    #[cfg(not(loom))]
    core::sync::atomic::compiler_fence(core::sync::atomic::Ordering::SeqCst);
    #[cfg(loom)]
    model::light_fence();
}

/// A value alone on its cache line.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Line<T>(pub T);

impl<T> core::ops::Deref for Line<T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        &self.0
    }
}
