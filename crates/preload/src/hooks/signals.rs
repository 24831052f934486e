//! Hooks for the actions that the program sets for signals. For SIGSEGV and SIGBUS the library's
//! handler stays installed, and calls the program's handler ([`fsocket_runtime::faults`]).

use super::answer::{failed, Answer};
use fsocket_runtime::signals::{self, Action};
use fsocket_runtime::{faults, user};
use fsocket_sys::{Errno, Result};
use libc::*;

/// A flag that libc adds, and that the kernel returns.
const RESTORER: u64 = 0x0400_0000;

fn is_fault(signal: c_int) -> bool {
    matches!(signal, SIGSEGV | SIGBUS)
}

/// The hook of sigaction(3). None: the signal is another one, and libc's function must act.
pub unsafe fn act(signal: c_int, new: *const sigaction, old: *mut sigaction) -> Option<c_int> {
    if !is_fault(signal) {
        // SAFETY: any bytes are a `sigaction`; the guarded copy reports a bad pointer.
        if let Ok(Some(a)) = unsafe { user::get_if(new) } {
            signals::sets(a.sa_sigaction, a.sa_flags as u32 as u64);
        }
        return None;
    }
    // SAFETY: null, or a structure of the program, as sigaction(3) wants it.
    let new = unsafe { new.as_ref() }.map(|a| Action {
        handler: a.sa_sigaction,
        flags: a.sa_flags as u32 as u64 | RESTORER,
        restorer: 0,
        // The kernel has 64 signals.
        // SAFETY: a `sigset_t` has at least 64 bits.
        mask: unsafe { *(&raw const a.sa_mask as *const u64) },
    });
    let r = faults::action(signal, new.as_ref())?.map(|was| {
        // SAFETY: null, or room for a structure, as sigaction(3) wants it.
        if let Some(old) = unsafe { old.as_mut() } {
            // SAFETY: zero bytes are a valid `sigaction`.
            *old = unsafe { core::mem::zeroed() };
            old.sa_sigaction = was.handler;
            old.sa_flags = was.flags as c_int;
            // SAFETY: a `sigset_t` has at least 64 bits.
            unsafe { *(&raw mut old.sa_mask as *mut u64) = was.mask };
        }
    });
    Some(r.answer())
}

/// The hook of rt_sigaction(2). None: the signal is another one.
pub unsafe fn raw(signal: c_int, new: *const Action, old: *mut Action, size: size_t) -> Option<c_long> {
    if size != size_of::<u64>() {
        return None;
    }
    if !is_fault(signal) {
        // SAFETY: any bytes are an `Action`; the guarded copy reports a bad pointer.
        if let Ok(Some(a)) = unsafe { user::get_if(new) } {
            signals::sets(a.handler, a.flags);
        }
        return None;
    }
    let changed = || -> Option<Result<()>> {
        // SAFETY: any bytes are an `Action`; the guarded copy reports a bad pointer.
        let new = match unsafe { user::get_if(new) } {
            Ok(new) => new,
            Err(e) => return Some(Err(e)),
        };
        let was = match faults::action(signal, new.as_ref())? {
            Ok(was) => was,
            Err(e) => return Some(Err(e)),
        };
        // SAFETY: `old` comes from the program; the guarded copy reports a bad pointer.
        Some(if old.is_null() { Ok(()) } else { unsafe { user::put(old, was) } })
    };
    changed().map(|r| Answer::<c_int>::answer(r).into())
}

/// The hook of signal(3) and its variants. `flags`: the flags that the variant sets. `blocks`:
/// whether it blocks the signal during the handler.
pub unsafe fn simple(signal: c_int, handler: sighandler_t, flags: c_int, blocks: bool) -> Option<sighandler_t> {
    if !is_fault(signal) {
        signals::sets(handler, flags as u32 as u64);
        return None;
    }
    if handler == SIG_ERR {
        return Some(failed(Errno::EINVAL));
    }
    let mask = if blocks { 1 << (signal - 1) } else { 0 };
    let new = Action { handler, flags: flags as u32 as u64 | RESTORER, restorer: 0, mask };
    Some(faults::action(signal, Some(&new))?.map_or_else(failed, |was| was.handler))
}
