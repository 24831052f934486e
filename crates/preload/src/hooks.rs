//! The exported functions, by family. The macro here puts guards around each body: for a library
//! that has not started, for lent memory, cancellation and panics.

mod answer;
mod borrower;
mod clone;
mod descriptors;
mod io;
mod passed;
mod process;
mod readiness;
mod signals;
mod sockets;
mod syscall;
mod threads;
mod uring;
mod variadic;
mod vfork;

use crate::hook::{Asleep, Hook};
use crate::real;
use crate::table::{hooks, variadic_hooks};
use answer::guarded;
use fsocket_runtime::{lent, process as state};
use fsocket_shm::cancel;
use libc::*;

/// The body of a hook: written by hand, or made from the table.
macro_rules! body {
    ($family:ident $name:ident($($arg:ident),*)) => { $family::$name($($arg),*) };
    ($family:ident $name:ident($($arg:ident),*) $how:ident) => { passed::$name($($arg),*) };
}

/// The action of a hook in a child that runs in its parent's memory.
macro_rules! lent {
    ($hook:ident $family:ident $name:ident($($arg:ident),*) [own] $($how:ident)?) => { borrower::$name($($arg),*) };
    ($hook:ident $family:ident $name:ident($($arg:ident),*) [same] $($how:ident)?) => {
        body!($family $name($($arg),*) $($how)?)
    };
    ($hook:ident $family:ident $name:ident($($arg:ident),*) [] $($how:ident)?) => {{
        if const { $hook.names_one } {
            let arguments: &[usize] = &[$($arg as usize),*];
            borrower::touched(arguments);
        }
        real::$name($($arg),*)
    }};
}

macro_rules! export {
    ($($family:ident($($property:ident),*) $what:literal
        fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty $(, lent $lent:ident)?
        $(= $how:ident($($code:tt)*))?;)*) => {
        $(
            #[no_mangle]
            pub unsafe extern "C-unwind" fn $name($($arg: $ty),*) -> $ret {
                // libc's function, or this line, may unwind a cancelled thread through this frame.
                // So nothing in the frame may need cleanup.
                const HOOK: Hook = Hook::$family()$(.$property())*;
                // No panic leaves the hook: a bug in the library fails only one call.
                #[inline(always)]
                unsafe fn call($($arg: $ty),*) -> $ret {
                    match const { HOOK.catches } {
                        // SAFETY: the program has called libc's function of this name with these
                        // arguments.
                        true => unsafe { body!($family $name($($arg),*) $($how)?) },
                        // SAFETY: the program has called libc's function of this name with these arguments.
                        false => guarded(|| unsafe { body!($family $name($($arg),*) $($how)?) }),
                    }
                }
                // Used in a program that cancels threads.
                #[cold]
                #[inline(never)]
                unsafe fn carefully($($arg: $ty),*) -> $ret {
                    let kind = threads::enter(const { HOOK.point });
                    // SAFETY: the program has called libc's function of this name with these arguments.
                    let r = unsafe { call($($arg),*) };
                    if let Some(kind) = kind {
                        threads::leave(kind);
                    }
                    r
                }
                // A separate function: the registers that must be saved around this call would
                // otherwise cost every call, a tenth of a send of 8 bytes.
                #[cold]
                #[inline(never)]
                unsafe fn unusual($($arg: $ty),*) -> $ret {
                    if state::is_asleep() {
                        match const { HOOK.asleep } {
                            Asleep::Passes => return real!($name($($arg),*)),
                            Asleep::Wakes => crate::init::wake(),
                            Asleep::Runs => {}
                        }
                    }
                    // SAFETY: the program has called libc's function of this name with these arguments.
                    unsafe {
                        if lent::is_borrower() {
                            return borrowed($($arg),*);
                        }
                        match const { HOOK.sets_type } || !cancel::careful() {
                            true => again($($arg),*),
                            false => carefully($($arg),*),
                        }
                    }
                }
                // Used in a child that runs in its parent's memory.
                #[cold]
                #[inline(never)]
                #[allow(clippy::unnecessary_cast)]
                unsafe fn borrowed($($arg: $ty),*) -> $ret {
                    // SAFETY: the program has called libc's function of this name with these arguments.
                    unsafe { lent!(HOOK $family $name($($arg),*) [$($lent)?] $($how)?) }
                }
                #[cold]
                #[inline(never)]
                unsafe fn again($($arg: $ty),*) -> $ret {
                    // SAFETY: the program has called libc's function of this name with these arguments.
                    unsafe { call($($arg),*) }
                }
                // SAFETY: the program has called libc's function of this name with these arguments.
                unsafe {
                    if state::unusual() != 0 {
                        return unusual($($arg),*);
                    }
                    call($($arg),*)
                }
            }
        )*
    };
}
hooks!(export);

macro_rules! export_variadic {
    ($($family:ident $what:literal $first:ident fn $name:ident;)*) => {
        $(variadic::trampoline!($first, $name);)*
    };
}
variadic_hooks!(export_variadic);
