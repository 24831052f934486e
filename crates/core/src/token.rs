//! The right to send, or to receive, on a stream: [`fsocket_sync::token`] with
//! this process's threads and system calls.

#[cfg(not(feature = "unshared"))]
use crate::process;
use crate::stats;
use fsocket_abi::arena::{Counter, Half};
use fsocket_sync::token::{self, Env};
use fsocket_sys as sys;

pub use fsocket_sync::token::Busy;
/// Entered; leaves on drop.
#[cfg(not(feature = "unshared"))]
pub type Entered<'a> = token::Entered<'a, Half>;

/// Nothing: to measure what the rest of this file costs (`make bench-sharing`).
#[cfg(feature = "unshared")]
pub struct Entered<'a>(core::marker::PhantomData<&'a Half>);
#[cfg(feature = "unshared")]
#[inline(always)]
pub fn enter(_: &Half) -> Result<Entered<'_>, Busy> {
    let _ = token::enter::<Linux, Half>;
    Ok(Entered(core::marker::PhantomData))
}

#[cfg(feature = "unshared")]
#[inline(always)]
pub fn enter_owned(h: &Half) -> Option<Entered<'_>> {
    enter(h).ok()
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

#[cfg(not(feature = "unshared"))]
#[inline(always)]
pub fn enter_owned(h: &Half) -> Option<token::Owned<'_, Half>> {
    token::enter_owned(h, process::thread())
}

/// No thread of this process has ever entered: values of a recycled socket.
pub fn reset(h: &Half) {
    token::reset(h);
}
