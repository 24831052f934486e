//! What the application does about signals.

use fsocket_sys as sys;

/// The kernel's `struct sigaction`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Action {
    handler: usize,
    flags: u64,
    restorer: usize,
    mask: u64,
}

/// What a thread does to itself; language runtimes handle these.
const FAULTS: [i32; 6] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS];

/// glibc's own, for cancellation and for `setuid` in all threads; it never blocks them. Who is told of a
/// cancellation that he has switched off must not be interrupted by it.
const LIBC: [i32; 2] = [32, 33];

/// Do all handlers of the process ask for interrupted calls to be restarted?
/// `ppoll` and a futex with a limit are never restarted, `accept` and `recv` are. Which handler has run cannot be
/// known: where they disagree the call is interrupted, as without SA_RESTART.
pub fn all_restart() -> bool {
    (1..=64).filter(|signal| !FAULTS.contains(signal)).all(|signal| {
        let mut a = Action::default();
        let args = [signal as usize, 0, &mut a as *mut Action as usize, 8, 0, 0];
        // SAFETY: nothing is set; `a` has the layout that the kernel fills.
        let known = unsafe { sys::raw(libc::SYS_rt_sigaction, args) }.is_ok();
        !known || matches!(a.handler, libc::SIG_DFL | libc::SIG_IGN) || a.flags & libc::SA_RESTART as u64 != 0
    })
}

/// While it lives no signal is handled, but for faults and libc's own: between the sleeps of one wait with a
/// mask of its own, where the application's mask must not hold; or before a sleep that a signal is
/// to end.
pub struct Held(u64);

impl Held {
    pub fn all() -> Held {
        let mut old = 0;
        let never = FAULTS.iter().chain(&LIBC).fold(0, |mask, signal| mask | 1u64 << (signal - 1));
        set_mask(&!never, &mut old);
        Held(old)
    }
    /// What was blocked before, for a sleep.
    pub fn before(&self) -> u64 {
        self.0
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        set_mask(&self.0, &mut 0);
    }
}

fn set_mask(new: &u64, old: &mut u64) {
    let how = libc::SIG_SETMASK as usize;
    let args = [how, new as *const u64 as usize, old as *mut u64 as usize, 8, 0, 0];
    // SAFETY: the kernel's signal sets are 8 bytes long.
    let _ = unsafe { sys::raw(libc::SYS_rt_sigprocmask, args) };
}
