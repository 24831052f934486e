//! Hooks for the actions that the program sets for faults; see [`fsocket_runtime::faults`].

use super::answer::{failed, Answer};
use fsocket_runtime::signals::Action;
use fsocket_runtime::{faults, user};
use fsocket_sys::{Errno, Result};
use libc::*;

/// A flag that libc adds, and shows.
const RESTORER: u64 = if cfg!(target_arch = "x86_64") { 0x0400_0000 } else { 0 };

fn is_fault(signal: c_int) -> bool {
    matches!(signal, SIGSEGV | SIGBUS)
}

/// sigaction(3); None: libc's function is to do it.
pub unsafe fn act(signal: c_int, new: *const sigaction, old: *mut sigaction) -> Option<c_int> {
    if !is_fault(signal) {
        return None;
    }
    // SAFETY: null, or the program's structure, as for libc's function.
    let new = unsafe { new.as_ref() }.map(|a| Action {
        handler: a.sa_sigaction,
        flags: a.sa_flags as u32 as u64 | RESTORER,
        restorer: 0,
        // The kernel's signals are the first 64.
        // SAFETY: a `sigset_t` has 64 bits at least.
        mask: unsafe { *(&raw const a.sa_mask as *const u64) },
    });
    let r = faults::action(signal, new.as_ref())?.map(|was| {
        // SAFETY: null, or room for a structure, as for libc's function.
        if let Some(old) = unsafe { old.as_mut() } {
            // SAFETY: zero bytes are a `sigaction`.
            *old = unsafe { core::mem::zeroed() };
            old.sa_sigaction = was.handler;
            old.sa_flags = was.flags as c_int;
            // SAFETY: a `sigset_t` has 64 bits at least.
            unsafe { *(&raw mut old.sa_mask as *mut u64) = was.mask };
        }
    });
    Some(r.answer())
}

/// rt_sigaction(2); None: it is none of the two.
pub unsafe fn raw(signal: c_int, new: *const Action, old: *mut Action, size: size_t) -> Option<c_long> {
    if !is_fault(signal) || size != size_of::<u64>() {
        return None;
    }
    let changed = || -> Option<Result<()>> {
        // SAFETY: any bytes are an `Action`; where nothing is, the copy says so.
        let new = match unsafe { user::get_if(new) } {
            Ok(new) => new,
            Err(e) => return Some(Err(e)),
        };
        let was = match faults::action(signal, new.as_ref())? {
            Ok(was) => was,
            Err(e) => return Some(Err(e)),
        };
        // SAFETY: `old` is the program's; where nothing is, the copy says so.
        Some(if old.is_null() { Ok(()) } else { unsafe { user::put(old, was) } })
    };
    changed().map(|r| Answer::<c_int>::answer(r).into())
}

/// signal(3), with the flags that it sets, and whether the signal itself is blocked.
pub unsafe fn simple(signal: c_int, handler: sighandler_t, flags: c_int, blocks: bool) -> Option<sighandler_t> {
    if !is_fault(signal) {
        return None;
    }
    if handler == SIG_ERR {
        return Some(failed(Errno::EINVAL));
    }
    let mask = if blocks { 1 << (signal - 1) } else { 0 };
    let new = Action { handler, flags: flags as u32 as u64 | RESTORER, restorer: 0, mask };
    Some(faults::action(signal, Some(&new))?.map_or_else(failed, |was| was.handler))
}
