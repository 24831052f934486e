//! The handler of SIGSEGV and SIGBUS. A fault while the library copies program memory
//! ([`fsocket_uaccess`]) becomes EFAULT (ADR 40). For all other faults the program's own handler
//! runs, or the default action.
//!
//! The library installs the handler before the first call that may fault. From then on this module
//! keeps the program's actions for the two signals, and answers `sigaction` and similar calls. The
//! library's handler is installed with the flags and the mask of the program's action. So the
//! program's handler finds its stack, its blocked signals and restarted calls as if the kernel had
//! called it.
//!
//! The handler itself calls no library code and holds no lock, because the program's handler may
//! never return.

use crate::lock::Lock;
use crate::signals::Action;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use fsocket_sys::{self as sys, Result};
use fsocket_uaccess::{self as uaccess, Resume};

const SIGNALS: [i32; 2] = [libc::SIGSEGV, libc::SIGBUS];
const RESET: u64 = libc::SA_RESETHAND as u32 as u64;

/// The program's action, which `on_fault` runs.
struct Own {
    handler: AtomicUsize,
    flags: AtomicU64,
    mask: AtomicU64,
}
static OWN: [Own; 2] =
    [const { Own { handler: AtomicUsize::new(0), flags: AtomicU64::new(0), mask: AtomicU64::new(0) } }; 2];
static INSTALLED: AtomicBool = AtomicBool::new(false);
static CHANGE: Lock<()> = Lock::new(());

impl Own {
    fn load(&self) -> Action {
        Action {
            handler: self.handler.load(Ordering::Relaxed),
            flags: self.flags.load(Ordering::Relaxed),
            restorer: 0,
            mask: self.mask.load(Ordering::Relaxed),
        }
    }
    fn store(&self, a: &Action) {
        self.flags.store(a.flags, Ordering::Relaxed);
        self.mask.store(a.mask, Ordering::Relaxed);
        self.handler.store(a.handler, Ordering::Relaxed);
    }
}

fn own(signal: i32) -> Option<&'static Own> {
    OWN.get(SIGNALS.iter().position(|s| *s == signal)?)
}

/// Installs the handler, if necessary. From then on a fault in a copy is an error of that copy.
#[inline(always)]
pub fn are_handled() {
    if !INSTALLED.load(Ordering::Relaxed) {
        install();
    }
}

#[cold]
#[inline(never)]
fn install() {
    let _lock = CHANGE.lock();
    if INSTALLED.swap(true, Ordering::AcqRel) {
        return;
    }
    for (signal, own) in SIGNALS.into_iter().zip(&OWN) {
        if let Ok(a) = Action::swap(signal, None) {
            own.store(&a);
            let _ = Action::swap(signal, Some(&for_kernel(&a)));
        }
    }
}

/// The kernel's action if the program's action is `a`.
fn for_kernel(a: &Action) -> Action {
    match a.handler {
        // The library installs no handler here. A handler that ignored the signals of other
        // processes would be replaced by the default action at `exec`, while SIG_IGN stays. (A
        // fault ends the process even if the signal is ignored.)
        libc::SIG_IGN => *a,
        libc::SIG_DFL => {
            Action::new(on_fault as *const () as usize, libc::SA_ONSTACK as u64 | libc::SA_RESTART as u64, 0)
        }
        _ => Action::new(on_fault as *const () as usize, a.flags & !RESET, a.mask),
    }
}

/// Answers the program's `sigaction` for one of the two signals. None: another signal, which the
/// kernel answers.
pub fn action(signal: i32, new: Option<&Action>) -> Option<Result<Action>> {
    let own = own(signal)?;
    let _lock = CHANGE.lock();
    if !INSTALLED.load(Ordering::Acquire) {
        return Some(Action::swap(signal, new));
    }
    let old = own.load();
    if let Some(new) = new {
        // Stored before the kernel's action changes: the kernel must not call a handler with the
        // flags of another one.
        own.store(new);
        if let Err(e) = Action::swap(signal, Some(&for_kernel(new))) {
            own.store(&old);
            return Some(Err(e));
        }
    }
    Some(Ok(old))
}

extern "C" fn on_fault(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the handler has SA_SIGINFO, so the kernel passes a valid description of the signal.
    let sent = unsafe { (*info).si_code } <= 0;
    // SAFETY: the handler has SA_SIGINFO, so the kernel passes the context of the thread, which no
    // other code uses until the handler returns.
    if !sent && unsafe { resumed(&mut *(context as *mut libc::ucontext_t)) } {
        return;
    }
    let Some(own) = own(signal) else { return };
    let a = own.load();
    match a.handler {
        libc::SIG_IGN => {}
        libc::SIG_DFL => {
            // With the default action restored, the fault happens again after the return. A signal
            // that was sent is sent again.
            let _ = Action::swap(signal, Some(&a));
            if sent {
                let (process, thread) = (sys::getpid() as usize, sys::gettid() as usize);
                let args = [process, thread, signal as usize, info as usize, 0, 0];
                // SAFETY: `info` is the valid description that the kernel has passed.
                let _ = unsafe { sys::raw(libc::SYS_rt_tgsigqueueinfo, args) };
            }
        }
        handler => {
            if a.flags & RESET != 0 {
                let default = Action { handler: libc::SIG_DFL, ..a };
                own.store(&default);
                let _ = Action::swap(signal, Some(&for_kernel(&default)));
            }
            type Handler = extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void);
            // SAFETY: the program has installed this address as a handler. A handler that takes
            // only the number ignores the other arguments.
            let handler = unsafe { core::mem::transmute::<usize, Handler>(handler) };
            handler(signal, info, context);
        }
    }
}

/// Continues after the copy if the fault was in one of the library's copies.
///
/// # Safety
/// `context` is the context of a thread that has faulted.
unsafe fn resumed(context: &mut libc::ucontext_t) -> bool {
    let r = &mut context.uc_mcontext.gregs;
    let sp = r[libc::REG_RSP as usize];
    // SAFETY: `resume` calls the closure only if the fault is in libc's `memcpy`, a function
    // without a frame. So the stack pointer is the address of its return address.
    match uaccess::resume(r[libc::REG_RIP as usize] as usize, || unsafe { *(sp as *const usize) }) {
        Some(Resume::At(pc)) => r[libc::REG_RIP as usize] = pc as i64,
        Some(Resume::Returned(pc)) => {
            r[libc::REG_RIP as usize] = pc as i64;
            r[libc::REG_RSP as usize] = sp + 8;
            r[libc::REG_RAX as usize] = 0;
        }
        None => return false,
    }
    true
}

/// In a forked child: frees the lock if another thread of the parent held it. Otherwise it stores
/// nothing, because each written page is copied.
pub fn become_child() {
    if CHANGE.is_held() {
        CHANGE.reset_after_fork();
    }
}
