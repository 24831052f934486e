//! The right to send, or to receive, on a stream: [`fsocket_sync::token`] with
//! this process's threads and system calls.

use crate::{process, stats};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::{Counter, Half};
use fsocket_sync::token::{self, Env};
use fsocket_sys as sys;

pub use fsocket_sync::token::Busy;
/// Entered; leaves on drop.
#[cfg(not(feature = "unshared"))]
pub type Entered<'a> = token::Entered<'a, Half>;

/// For one thread and its signal handlers only: to measure what the rest costs
/// (`make bench-sharing`). With the feature `unguarded` not for these, either.
#[cfg(feature = "unshared")]
pub struct Entered<'a>(&'a Half);
#[cfg(feature = "unshared")]
#[inline(always)]
pub fn enter(h: &Half) -> Result<Entered<'_>, Busy> {
    let _ = token::enter::<Linux, Half>;
    if cfg!(not(feature = "unguarded")) {
        if h.busy.load(Ordering::Relaxed) != 0 {
            return Err(Busy);
        }
        h.busy.store(1, Ordering::Relaxed);
        fsocket_sync::light_fence();
    }
    Ok(Entered(h))
}
#[cfg(feature = "unshared")]
impl Drop for Entered<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if cfg!(not(feature = "unguarded")) {
            self.0.busy.store(0, Ordering::Release);
        }
    }
}

#[cfg(feature = "unshared")]
#[inline(always)]
pub fn enter_on_credit(h: &Half) -> Option<Entered<'_>> {
    enter(h).ok()
}

#[cfg(feature = "unshared")]
pub fn owned(_: &Half) -> bool {
    true
}

/// The only thread.
#[cfg(feature = "unshared")]
#[inline(always)]
pub fn here() -> u64 {
    1
}

#[cfg(feature = "unshared")]
#[inline(always)]
pub fn is_here(id: u64) -> bool {
    id == here()
}

#[cfg(feature = "unshared")]
#[inline(always)]
pub fn if_here(id: u64) -> Option<Here> {
    is_here(id).then_some(Here(()))
}
#[cfg(feature = "unshared")]
pub struct Here(());
#[cfg(feature = "unshared")]
impl Here {
    #[inline(always)]
    pub fn cpu_mark(self) -> u32 {
        sys::cpu::mark()
    }
}

struct Linux;
impl Env for Linux {
    fn heavy_fence() {
        sys::heavy_fence();
    }
    fn pause(turn: u32) {
        match turn {
            0..=200 => core::hint::spin_loop(),
            201..=400 => sys::sched_yield(),
            _ => sys::nanosleep(50_000),
        }
    }
    fn took_over() {
        stats::count(Counter::TakeOvers);
    }
}

#[cfg(not(feature = "unshared"))]
#[inline(always)]
pub fn enter(h: &Half) -> Result<Entered<'_>, Busy> {
    token::enter::<Linux, Half>(h, process::thread())
}

/// [`enter`] by the thread that has given credit; see [`fsocket_sync::token`].
#[cfg(not(feature = "unshared"))]
#[inline(always)]
pub fn enter_on_credit(h: &Half) -> Option<token::Owned<'_, Half>> {
    token::enter_on_credit(h)
}

/// Is the token the calling thread's own?
#[cfg(not(feature = "unshared"))]
pub fn owned(h: &Half) -> bool {
    h.owner.load(Ordering::Relaxed) == process::thread()
}

/// The calling thread, within the process.
#[cfg(not(feature = "unshared"))]
#[inline(always)]
pub fn here() -> u64 {
    sys::cpu::thread_id()
}

/// `id ==` [`here`].
#[cfg(not(feature = "unshared"))]
#[inline(always)]
pub fn is_here(id: u64) -> bool {
    sys::cpu::is_thread(id)
}

/// [`is_here`] for who has a register left: what it has loaded serves once more.
#[cfg(not(feature = "unshared"))]
#[inline(always)]
pub fn if_here(id: u64) -> Option<Here> {
    let me = sys::cpu::thread_id_in_place();
    (id == me).then_some(Here(me))
}
/// The calling thread.
#[cfg(not(feature = "unshared"))]
pub struct Here(u64);
#[cfg(not(feature = "unshared"))]
impl Here {
    /// [`sys::cpu::mark`].
    #[inline(always)]
    pub fn cpu_mark(self) -> u32 {
        // SAFETY: `if_here` has asked for it.
        unsafe { sys::cpu::mark_of(self.0) }
    }
}

/// No thread of this process has ever entered: values of a recycled socket.
pub fn reset(h: &Half) {
    token::reset(h);
}
