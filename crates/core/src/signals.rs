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

/// Do all handlers of the process ask for interrupted calls to be restarted?
/// `ppoll` is never restarted, `accept` is. Which handler has run cannot be
/// known: where they disagree the call is interrupted, as without SA_RESTART.
pub fn all_restart() -> bool {
    /// What a thread does to itself; language runtimes handle these.
    const FAULTS: [i32; 6] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS];
    (1..=64).filter(|signal| !FAULTS.contains(signal)).all(|signal| {
        let mut a = Action::default();
        let args = [signal as usize, 0, &mut a as *mut Action as usize, 8, 0, 0];
        // SAFETY: nothing is set; `a` has the layout that the kernel fills.
        let known = unsafe { sys::raw(libc::SYS_rt_sigaction, args) }.is_ok();
        !known || matches!(a.handler, libc::SIG_DFL | libc::SIG_IGN) || a.flags & libc::SA_RESTART as u64 != 0
    })
}
