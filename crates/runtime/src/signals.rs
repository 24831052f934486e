//! Signal settings of the program: which handlers restart calls, and a signal mask for the time
//! between two sleeps.

use crate::musl;
use core::sync::atomic::{AtomicU32, Ordering};
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

extern "C" {
    /// The return address of a signal handler. libc has such code, too, but it is private.
    fn fsocket_restorer();
}
// Debuggers and unwinders recognize the restorer by exactly these instructions, and look at the
// byte before them.
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

    /// An action for a handler that takes all three arguments.
    pub fn new(handler: usize, flags: u64, mask: u64) -> Action {
        Action { handler, flags: flags | libc::SA_SIGINFO as u64, restorer: 0, mask }
    }

    /// Replaces the action of a signal by `new`, if given. Returns the former action.
    pub fn swap(signal: i32, new: Option<&Action>) -> sys::Result<Action> {
        let mut own = new.copied();
        if let Some(a) = &mut own {
            (a.flags, a.restorer) = (a.flags | Action::RESTORER, fsocket_restorer as *const () as usize);
        }
        let mut old = Action::default();
        let new = own.as_ref().map_or(core::ptr::null(), core::ptr::from_ref);
        let args = [signal as usize, new as usize, &raw mut old as usize, 8, 0, 0];
        // SAFETY: `Action` has the kernel's layout. The handler is one of the program, or
        // `on_fault` of this library.
        unsafe { sys::raw(libc::SYS_rt_sigaction, args) }?;
        Ok(old)
    }
}

/// Signals that a thread itself causes. Language runtimes handle them.
const FAULTS: [i32; 6] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS];

/// Signals that libc uses itself and never blocks: in glibc for cancellation and for `setuid` in
/// all threads, in musl for timers, cancellation and `setuid`.
fn libcs() -> &'static [i32] {
    match musl::is_here() {
        true => &[32, 33, 34],
        false => &[32, 33],
    }
}

/// Kinds of handlers that the program has, apart from libc's own.
#[derive(Clone, Copy)]
pub struct Handlers(u32);

impl Handlers {
    const RESTART: u32 = 1;
    const END: u32 = 2;

    pub fn none(self) -> bool {
        self.0 == 0
    }
    /// Does one have SA_RESTART?
    pub fn some_restart(self) -> bool {
        self.0 & Handlers::RESTART != 0
    }
    /// Has one no SA_RESTART?
    pub fn some_end(self) -> bool {
        self.0 & Handlers::END != 0
    }

    fn of(flags: u64) -> u32 {
        if flags & libc::SA_RESTART as u64 != 0 {
            Handlers::RESTART
        } else {
            Handlers::END
        }
    }
    fn look() -> u32 {
        handled().filter(|(signal, _)| !libcs().contains(signal)).fold(0, |all, (_, a)| all | Handlers::of(a.flags))
    }
}

/// [`Handlers`] by the last look. There is one now and then: a raw system call may set a handler,
/// and handlers may go.
#[link_section = ".data.fsocket_start"]
static HANDLERS: AtomicU32 = AtomicU32::new(0);

/// Called by hooks before libc sets an action.
pub fn sets(handler: usize, flags: u64) {
    if is_handler(handler) {
        HANDLERS.fetch_or(Handlers::of(flags), Ordering::Relaxed);
    }
}

/// The handlers at the beginning of a sleep.
pub fn handlers() -> Handlers {
    const EVERY: u32 = 1024;
    #[link_section = ".data.fsocket_start"]
    static SLEEPS: AtomicU32 = AtomicU32::new(0);
    if SLEEPS.fetch_add(1, Ordering::Relaxed).is_multiple_of(EVERY) {
        HANDLERS.store(Handlers::look(), Ordering::Relaxed);
    }
    Handlers(HANDLERS.load(Ordering::Relaxed))
}

/// Do all handlers of the process ask for interrupted calls to be restarted? The kernel restarts
/// `accept` and `recv`, but never `ppoll` or a futex wait with a limit, on which the library
/// sleeps. The library cannot know which handler has run. If the handlers disagree, it ends the
/// call, as without SA_RESTART.
pub fn all_restart() -> bool {
    handled().all(|(_, a)| Handlers::of(a.flags) == Handlers::RESTART)
}

fn is_handler(handler: usize) -> bool {
    !matches!(handler, libc::SIG_DFL | libc::SIG_IGN)
}

fn handled() -> impl Iterator<Item = (i32, Action)> {
    let of = |signal| Some((signal, Action::swap(signal, None).ok()?));
    (1..=64).filter(|signal| !FAULTS.contains(signal)).filter_map(of).filter(|(_, a)| is_handler(a.handler))
}

/// While this value lives, the thread handles no signal except faults and libc's own signals. Used
/// between the sleeps of one call with a signal mask argument, where the program's own mask must
/// not apply, and before a sleep that a signal must end.
pub struct Held(u64);

impl Held {
    pub fn all() -> Held {
        let mut old = 0;
        let never = FAULTS.iter().chain(libcs()).fold(0, |mask, signal| mask | 1u64 << (signal - 1));
        set_mask(&!never, &mut old);
        Held(old)
    }
    /// The former mask, to be used during a sleep.
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
