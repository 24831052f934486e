//! The decision of a hook: either the library has done the call, or libc does it. In the second
//! case the value carries the counted reason, so no fallback goes uncounted.

use crate::stats;
use fsocket_abi::arena::Reason;

/// The library's answer, or "let libc do it" with the cause.
#[must_use]
pub enum Outcome<T> {
    /// The library has done the call.
    Done(T),
    /// libc's function does the call.
    Kernel(Cause),
}

/// Why libc's function does a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The descriptor never belonged to the library, or has moved to the kernel already.
    NotOurs,
    /// The arguments are wrong for any descriptor. The kernel reports the error.
    Invalid,
    /// The connection is in shared memory, but its placeholder (a kernel socket) keeps this
    /// setting or has the answer.
    Below,
    /// The socket could have used shared memory or a zone, and uses the kernel from now on. Made
    /// by [`Cause::fallback`], which also counts the reason.
    Fallback(Counted),
}

/// A reason that was counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted(Reason);

impl Cause {
    /// Counts the reason why a call falls back to the kernel, before any message to the monitor.
    pub fn fallback(why: Reason) -> Cause {
        stats::fall_back(why);
        Cause::Fallback(Counted(why))
    }
}

impl<T> Outcome<T> {
    /// The library's answer through `done`, or the result of `kernel`.
    #[inline]
    pub fn or_kernel<R>(self, done: impl FnOnce(T) -> R, kernel: impl FnOnce() -> R) -> R {
        match self {
            Outcome::Done(v) => done(v),
            Outcome::Kernel(_) => kernel(),
        }
    }

    /// Changes the library's answer by `f`.
    pub fn map_done<U>(self, f: impl FnOnce(T) -> U) -> Outcome<U> {
        match self {
            Outcome::Done(v) => Outcome::Done(f(v)),
            Outcome::Kernel(why) => Outcome::Kernel(why),
        }
    }
}
