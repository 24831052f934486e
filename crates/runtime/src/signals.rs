//! What the application does about signals.

use crate::musl;
use fsocket_sys as sys;

/// The kernel's `struct sigaction`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Action {
    pub handler: usize,
    pub flags: u64,
    pub restorer: usize,
    pub mask: u64,
}

#[cfg(target_arch = "x86_64")]
extern "C" {
    /// Where a handler returns to: libc's own is not to be had.
    fn fsocket_restorer();
}
// Debuggers and unwinders know it by these instructions, and look at what stands before it.
#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(
    ".pushsection .text.fsocket_restorer,\"ax\",@progbits",
    "nop",
    ".hidden fsocket_restorer",
    ".globl fsocket_restorer",
    "fsocket_restorer:",
    "mov rax, 15",
    "syscall",
    ".popsection",
);

impl Action {
    const RESTORER: u64 = 0x0400_0000;

    /// For a handler that wants all three arguments.
    pub fn new(handler: usize, flags: u64, mask: u64) -> Action {
        Action { handler, flags: flags | libc::SA_SIGINFO as u64, restorer: 0, mask }
    }

    /// The action for a signal; then it is `new`.
    pub fn swap(signal: i32, new: Option<&Action>) -> sys::Result<Action> {
        let mut own = new.copied();
        #[cfg(target_arch = "x86_64")]
        if let Some(a) = &mut own {
            (a.flags, a.restorer) = (a.flags | Action::RESTORER, fsocket_restorer as *const () as usize);
        }
        let mut old = Action::default();
        let new = own.as_ref().map_or(core::ptr::null(), core::ptr::from_ref);
        let args = [signal as usize, new as usize, &raw mut old as usize, 8, 0, 0];
        // SAFETY: the kernel's layout. A handler is one of the program's, or ours.
        unsafe { sys::raw(libc::SYS_rt_sigaction, args) }?;
        Ok(old)
    }
}

/// What a thread does to itself; language runtimes handle these.
const FAULTS: [i32; 6] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS];

/// libc's own, which it never blocks: of glibc for cancellation and for `setuid` in all threads, of musl for timers,
/// for cancellation, and for `setuid`. A thread that has switched cancellation off must not be interrupted by it.
fn libcs() -> &'static [i32] {
    match musl::is_here() {
        true => &[32, 33, 34],
        false => &[32, 33],
    }
}

/// Do all handlers of the process ask for interrupted calls to be restarted?
/// `ppoll` and a futex with a limit are never restarted, `accept` and `recv` are. Which handler has run cannot be
/// known: where they disagree the call is interrupted, as without SA_RESTART.
pub fn all_restart() -> bool {
    handled().all(|(_, a)| restarts(&a))
}

/// Does none of them? (libc's own interrupt a program once in its life.)
pub fn none_restarts() -> bool {
    !handled().any(|(signal, a)| restarts(&a) && !libcs().contains(&signal))
}

fn restarts(a: &Action) -> bool {
    a.flags & libc::SA_RESTART as u64 != 0
}

fn handled() -> impl Iterator<Item = (i32, Action)> {
    let of = |signal| Some((signal, Action::swap(signal, None).ok()?));
    let handled = |(_, a): &(i32, Action)| !matches!(a.handler, libc::SIG_DFL | libc::SIG_IGN);
    (1..=64).filter(|signal| !FAULTS.contains(signal)).filter_map(of).filter(handled)
}

/// While it lives no signal is handled, but for faults and libc's own: between the sleeps of one wait with a
/// mask of its own, where the application's mask must not hold; or before a sleep that a signal is
/// to end.
pub struct Held(u64);

impl Held {
    pub fn all() -> Held {
        let mut old = 0;
        let never = FAULTS.iter().chain(libcs()).fold(0, |mask, signal| mask | 1u64 << (signal - 1));
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
