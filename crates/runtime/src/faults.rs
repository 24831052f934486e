//! The handler of SIGSEGV and SIGBUS that turns a fault in a copy of ours ([`fsocket_uaccess`]) into
//! EFAULT. All other faults are the program's: its own handler gets them, or the default action.
//!
//! It is installed with the first thing that may fault. From then on the program's actions for the
//! two signals are kept here, and `sigaction` and its like answer from here. The kernel's action
//! has the flags and the mask of the program's, so that the program's handler finds all as if it had
//! been called by the kernel: its stack, what is blocked, whether calls are restarted.
//!
//! The handler itself calls nothing and holds nothing: the program's may never return.

use crate::lock::Lock;
use crate::signals::Action;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use fsocket_sys::{self as sys, Result};
use fsocket_uaccess::{self as uaccess, Resume};

const SIGNALS: [i32; 2] = [libc::SIGSEGV, libc::SIGBUS];
const RESET: u64 = libc::SA_RESETHAND as u32 as u64;

/// The program's action, for the handler.
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

/// From here on a fault of ours is an error.
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

/// What the kernel is told where the program wants `a`.
fn for_kernel(a: &Action) -> Action {
    match a.handler {
        // A fault that is ignored ends the process. It is not worth a handler that ignores what others
        // send: `exec` would give the next program the default action.
        libc::SIG_IGN => *a,
        libc::SIG_DFL => {
            Action::new(on_fault as *const () as usize, libc::SA_ONSTACK as u64 | libc::SA_RESTART as u64, 0)
        }
        _ => Action::new(on_fault as *const () as usize, a.flags & !RESET, a.mask),
    }
}

/// The program's `sigaction` for one of the two signals; None: it is the kernel's to answer.
pub fn action(signal: i32, new: Option<&Action>) -> Option<Result<Action>> {
    let own = own(signal)?;
    let _lock = CHANGE.lock();
    if !INSTALLED.load(Ordering::Acquire) {
        return Some(Action::swap(signal, new));
    }
    let old = own.load();
    if let Some(new) = new {
        // Before the kernel's: a handler must not be called with the flags of another one.
        own.store(new);
        if let Err(e) = Action::swap(signal, Some(&for_kernel(new))) {
            own.store(&old);
            return Some(Err(e));
        }
    }
    Some(Ok(old))
}

extern "C" fn on_fault(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel's, as for any handler with SA_SIGINFO.
    let sent = unsafe { (*info).si_code } <= 0;
    // SAFETY: the kernel passes a handler with SA_SIGINFO the context of the thread, which is its own until it
    // returns.
    if !sent && unsafe { resumed(&mut *(context as *mut libc::ucontext_t)) } {
        return;
    }
    let Some(own) = own(signal) else { return };
    let a = own.load();
    match a.handler {
        libc::SIG_IGN => {}
        libc::SIG_DFL => {
            // At the return: the same fault once more, or the same signal.
            let _ = Action::swap(signal, Some(&a));
            if sent {
                let (process, thread) = (sys::getpid() as usize, sys::gettid() as usize);
                let args = [process, thread, signal as usize, info as usize, 0, 0];
                // SAFETY: what the kernel has given.
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
            // SAFETY: a handler of the program's; one that takes the number alone does not see the rest.
            let handler = unsafe { core::mem::transmute::<usize, Handler>(handler) };
            handler(signal, info, context);
        }
    }
}

/// Goes on behind the copy, if it was one of ours.
///
/// # Safety
/// The context of a thread that has faulted.
#[cfg(target_arch = "x86_64")]
unsafe fn resumed(context: &mut libc::ucontext_t) -> bool {
    let r = &mut context.uc_mcontext.gregs;
    let sp = r[libc::REG_RSP as usize];
    // SAFETY: a function was called, and the address is there to which it returns.
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

/// # Safety
/// As above.
#[cfg(target_arch = "aarch64")]
unsafe fn resumed(context: &mut libc::ucontext_t) -> bool {
    const LINK: usize = 30;
    let m = &mut context.uc_mcontext;
    match uaccess::resume(m.pc as usize, || m.regs[LINK] as usize) {
        Some(Resume::At(pc)) => m.pc = pc as u64,
        Some(Resume::Returned(pc)) => (m.pc, m.regs[0]) = (pc as u64, 0),
        None => return false,
    }
    true
}

/// In a forked child. Written only if another thread of the parent's had it: its page would be copied.
pub fn become_child() {
    if CHANGE.is_held() {
        CHANGE.reset_after_fork();
    }
}
