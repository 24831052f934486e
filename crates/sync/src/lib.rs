//! Atomics facade (`core` or `loom`), the asymmetric fence, and the lock-free protocols that are
//! built on them, one in each module. Nothing here makes a system call: the caller passes in the
//! expensive half of the fence as a function, so that loom can stand in for the kernel.
#![cfg_attr(not(loom), no_std)]

pub mod arrivals;
pub mod atomic;
pub mod block;
pub mod doorbell;
pub mod handover;
pub mod idle;
pub mod inside;
pub mod news;
mod omit;
pub mod segments;
mod step;
pub mod token;
pub mod trim;
pub mod unsubscribed;

#[cfg(loom)]
pub mod model;

/// The cheap half of the asymmetric fence, for the side that runs often.
///
/// Orders an earlier store before a later load *only* together with a [heavy
/// fence](doorbell::Want::arm) on the other side. `membarrier(2)` supplies that fence: every
/// running thread of a registered process passes a full barrier before the call returns. Here it
/// only restrains the compiler. Under loom see [`model`].
#[inline(always)]
pub fn light_fence() {
    #[cfg(not(loom))]
    core::sync::atomic::compiler_fence(core::sync::atomic::Ordering::SeqCst);
    #[cfg(loom)]
    model::light_fence();
}

/// A value that has a cache line for itself.
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
