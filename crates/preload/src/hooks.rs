//! Exported functions, by family.

mod descriptors;
mod io;
mod process;
mod readiness;
mod sockets;
mod uring;
mod variadic;

use fsocket_core::{Outcome, Result};
use libc::*;

macro_rules! hook_table {
    ($($family:ident: $what:literal fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)*) => {
        $(
            #[no_mangle]
            pub unsafe extern "C" fn $name($($arg: $ty),*) -> $ret {
                // SAFETY: the contract is libc's, and the caller keeps it.
                unsafe { $family!($family::$name($($arg),*)) }
            }
        )*
    };
}
// No panic crosses the boundary: a bug in us fails one call. The `io` family
// guards itself, behind its fast path.
macro_rules! guarded_family {
    ($e:expr) => {
        guarded(|| $e)
    };
}
use guarded_family as sockets;
use guarded_family as descriptors;
use guarded_family as readiness;
use guarded_family as process;
use guarded_family as uring;
macro_rules! io {
    ($e:expr) => {
        $e
    };
}
macro_rules! variadic_table {
    ($($family:ident: $what:literal $first:ident fn $name:ident;)*) => {
        $(variadic::trampoline!($first, $name);)*
    };
}
macro_rules! limit_table {
    ($($rest:tt)*) => {};
}
include!("table.rs");

/// Run `f`; should it panic, the call fails with EIO.
#[inline]
fn guarded<R: Failure>(f: impl FnOnce() -> R) -> R {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).unwrap_or_else(|_| {
        fsocket_sys::Errno::EIO.set();
        R::failure()
    })
}

/// What a function of this type returns when it fails.
trait Failure {
    fn failure() -> Self;
}
impl Failure for c_int {
    fn failure() -> Self {
        -1
    }
}
impl Failure for ssize_t {
    fn failure() -> Self {
        -1
    }
}
impl Failure for c_longlong {
    fn failure() -> Self {
        -1
    }
}
impl Failure for () {
    fn failure() -> Self {}
}
impl Failure for *mut c_void {
    fn failure() -> Self {
        core::ptr::null_mut()
    }
}

/// An answer as libc gives it: a value, or -1 and errno.
trait Answer<R> {
    fn answer(self) -> R;
}
impl Answer<ssize_t> for Result<usize> {
    #[inline(always)]
    fn answer(self) -> ssize_t {
        match self {
            Ok(v) => v as ssize_t,
            Err(e) => {
                e.set();
                -1
            }
        }
    }
}
impl Answer<c_int> for Result<usize> {
    fn answer(self) -> c_int {
        Answer::<ssize_t>::answer(self) as c_int
    }
}
impl Answer<c_int> for Result<i32> {
    fn answer(self) -> c_int {
        self.map(|v| v as usize).answer()
    }
}
impl Answer<c_int> for Result<()> {
    fn answer(self) -> c_int {
        self.map(|()| 0usize).answer()
    }
}

/// A number that the application has closed while its placeholder waits for the
/// next connection: EBADF, as it would be.
#[inline(always)]
fn gone(fd: c_int) -> bool {
    let gone = fsocket_core::pool::holds(fd);
    if gone {
        fsocket_sys::Errno::EBADF.set();
    }
    gone
}

/// Ours, or libc's.
fn either<T, R>(o: Outcome<T>, real: impl FnOnce() -> R) -> R
where
    T: Answer<R>,
{
    match o {
        Outcome::Done(v) => v.answer(),
        Outcome::Kernel => real(),
    }
}
