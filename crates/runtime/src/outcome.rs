//! What a hook shall do.

use crate::stats;
use fsocket_abi::arena::Reason;

/// What a hook shall do: the answer, or "let libc do it" and why.
#[must_use]
pub enum Outcome<T> {
    /// Done here.
    Done(T),
    /// libc's function does the call.
    Kernel(Cause),
}

/// Why libc's function does a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The descriptor, or what is asked of it, was never ours, or has become the kernel's before.
    NotOurs,
    /// The arguments are wrong whatever the descriptor is, and the kernel says how.
    Invalid,
    /// The connection is ours; the kernel's socket below it keeps this, or has the answer.
    Below,
    /// What could have been ours is the kernel's from now on: made by [`Cause::fallback`], which counts it.
    Fallback(Counted),
}

/// A reason that has been counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted(Reason);

impl Cause {
    /// A call falls back to the kernel. Counted here: before what tells the monitor of the call.
    pub fn fallback(why: Reason) -> Cause {
        stats::fall_back(why);
        Cause::Fallback(Counted(why))
    }
}

impl<T> Outcome<T> {
    /// The answer; else `kernel` does the call.
    #[inline]
    pub fn or_kernel<R>(self, done: impl FnOnce(T) -> R, kernel: impl FnOnce() -> R) -> R {
        match self {
            Outcome::Done(v) => done(v),
            Outcome::Kernel(_) => kernel(),
        }
    }

    /// Look at, or change, an answer of ours.
    pub fn map_done<U>(self, f: impl FnOnce(T) -> U) -> Outcome<U> {
        match self {
            Outcome::Done(v) => Outcome::Done(f(v)),
            Outcome::Kernel(why) => Outcome::Kernel(why),
        }
    }
}
