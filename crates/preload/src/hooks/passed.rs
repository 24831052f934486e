//! Hooks that call libc's function and do one thing more. The table says what that is (`=
//! form(code)`):
//!
//! - `before(code)`: runs the code, then libc's function.
//! - `then(code)`: a function that gets libc's result and returns the hook's.
//! - `around(code)`: a function that gets a closure with libc's call.
//! - `or(code)`: the hook's result, or None: then libc's function runs.
//! - `instead(code)`: the code is the body.

use super::answer::Answer;
use super::{descriptors, io, process, readiness, signals, uring};
use crate::real;
use crate::table::hooks;
use fsocket_fdtable::pool;
use fsocket_lifecycle::{credentials, locked, pidfd_transfer};
use libc::*;

/// The body of a hook. `$real` is libc's call.
macro_rules! form {
    (before($($code:tt)*) $real:expr) => {{ $($code)*; $real }};
    (then($($code:tt)*) $real:expr) => { ($($code)*)($real) };
    (around($($code:tt)*) $real:expr) => { ($($code)*)(|| $real) };
    (or($($code:tt)*) $real:expr) => { ($($code)*).unwrap_or_else(|| $real) };
    (instead($($code:tt)*) $real:expr) => { $($code)* };
}

macro_rules! one {
    ($name:ident($($arg:ident: $ty:ty),*) -> $ret:ty) => {};
    ($name:ident($($arg:ident: $ty:ty),*) -> $ret:ty = $how:ident($($code:tt)*)) => {
        #[allow(non_snake_case, unused_unsafe)]
        pub unsafe fn $name($($arg: $ty),*) -> $ret {
            // SAFETY: the program has called libc's function of this name with these arguments.
            unsafe { form!($how($($code)*) real::$name($($arg),*)) }
        }
    };
}

macro_rules! define {
    ($($family:ident($($property:ident),*) $what:literal
        fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty $(, lent $lent:ident)?
        $(= $how:ident($($code:tt)*))?;)*) => {
        $(one!($name($($arg: $ty),*) -> $ret $(= $how($($code)*))?);)*
    };
}
hooks!(define);
