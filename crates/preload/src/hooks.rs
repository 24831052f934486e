//! Exported functions, by family.

mod descriptors;
mod io;
mod process;
mod readiness;
mod sockets;

use fsocket_core::{Outcome, Result};
use libc::*;

macro_rules! hook_table {
    ($($family:ident: $what:literal fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)*) => {
        $(
            #[no_mangle]
            pub unsafe extern "C" fn $name($($arg: $ty),*) -> $ret {
                // SAFETY: the contract is libc's, and the caller keeps it.
                unsafe { $family::$name($($arg),*) }
            }
        )*
    };
}
include!("table.rs");

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
