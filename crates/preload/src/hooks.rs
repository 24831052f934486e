//! Exported functions, by family.

mod answer;
mod borrower;
mod clone;
mod descriptors;
mod io;
mod points;
mod process;
mod readiness;
mod rights;
mod signals;
mod sockets;
mod syscall;
mod threads;
mod uring;
mod variadic;
mod vfork;

use crate::real;
use answer::guarded;
use fsocket_lifecycle::{cancel, lent, process as state};
use libc::*;

macro_rules! hook_table {
    ($($family:ident: $what:literal fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)*) => {
        $(
            #[no_mangle]
            pub unsafe extern "C-unwind" fn $name($($arg: $ty),*) -> $ret {
                // A cancelled thread is unwound out of libc's function through this
                // frame, or from here: nothing is to be cleaned up in it.
                const WHO: (&str, &str) = (stringify!($family), stringify!($name));
                // SAFETY: the contract is libc's, and the caller keeps it.
                // No panic crosses the boundary: a bug in us fails one call.
                #[inline(always)]
                unsafe fn call($($arg: $ty),*) -> $ret {
                    match const { points::guards_itself(WHO) } {
                        true => unsafe { $family::$name($($arg),*) },
                        false => guarded(|| unsafe { $family::$name($($arg),*) }),
                    }
                }
                // In a program that cancels threads.
                #[cold]
                #[inline(never)]
                unsafe fn carefully($($arg: $ty),*) -> $ret {
                    let kind = threads::enter(const { points::is_point(WHO) });
                    let r = unsafe { call($($arg),*) };
                    if let Some(kind) = kind {
                        threads::leave(kind);
                    }
                    r
                }
                // A function of its own: what lies around the call there would cost others a tenth of a send
                // of 8 bytes.
                #[cold]
                #[inline(never)]
                unsafe fn unusual($($arg: $ty),*) -> $ret {
                    if state::is_asleep() {
                        if const { points::passes(WHO) } {
                            return unsafe { real::$name($($arg),*) };
                        }
                        if const { points::wakes(WHO) } {
                            crate::init::wake();
                        }
                    }
                    if lent::is_borrower() {
                        return unsafe { borrowed($($arg),*) };
                    }
                    match const { points::sets_type(WHO) } || !cancel::careful() {
                        true => unsafe { again($($arg),*) },
                        false => unsafe { carefully($($arg),*) },
                    }
                }
                // In a child that runs in its parent's memory.
                #[cold]
                #[inline(never)]
                #[allow(clippy::unnecessary_cast)]
                unsafe fn borrowed($($arg: $ty),*) -> $ret {
                    unsafe { borrower::borrower_call!($name, WHO, $($arg),*) }
                }
                #[cold]
                #[inline(never)]
                unsafe fn again($($arg: $ty),*) -> $ret {
                    unsafe { call($($arg),*) }
                }
                if state::unusual() != 0 {
                    return unsafe { unusual($($arg),*) };
                }
                unsafe { call($($arg),*) }
            }
        )*
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
