//! Thread cancellation.
//!
//! glibc unwinds a cancelled thread out of its own system calls. Out of ours it
//! must not: these frames hold tokens, wakers, references. `pthread_cancel` is hooked: it
//! notes a request for the thread. The sleep ends as if a signal had interrupted it, and
//! everything is given back. Then the hook, where nothing is left to clean up, calls
//! `pthread_testcancel`. ADR 31. Under musl it is the same, but for the signal ([`crate::cancel_in_musl`]).

use crate::cow::Sparing;
use crate::process;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use fsocket_runtime::musl;
use fsocket_sys as sys;

/// Requests that are noted at a time and have not been acted upon.
const PENDING: usize = 64;
/// glibc's signal for cancellation; its handler does nothing to a thread that is not
/// cancelled asynchronously.
const SIGCANCEL: i32 = 32;
pub(crate) const SIGCANCEL_OF_MUSL: i32 = 33;
/// How long a thread waits for libc to know of a request, in turns of [`TURN_NS`].
pub(crate) const TURNS: u32 = 10_000;
pub(crate) const TURN_NS: u64 = 10_000;

/// A thread that the program has cancelled.
pub struct Request {
    /// As `pthread_self` has it; 0: free, 1: being taken.
    thread: AtomicU64,
    /// The kernel's number: a thread that comes later can have the same handle.
    tid: AtomicU32,
    /// The thread has ended an operation because of the request.
    seen: AtomicBool,
    /// libc does not know of it yet, and may refuse it.
    announced: AtomicBool,
}

impl Request {
    /// libc has been told: `accepted`, or not.
    pub fn decided(&self, accepted: bool) {
        if !accepted {
            done(self);
        }
        self.announced.store(false, Ordering::Release);
    }

    /// Before `pthread_testcancel`, which asks libc.
    fn await_decision(&self) {
        for _ in 0..TURNS {
            if !self.announced.load(Ordering::Acquire) {
                return;
            }
            sys::nanosleep(TURN_NS);
        }
    }
}

static REQUESTS: [Request; PENDING] = [const {
    Request {
        thread: AtomicU64::new(0),
        tid: AtomicU32::new(0),
        seen: AtomicBool::new(false),
        announced: AtomicBool::new(false),
    }
}; PENDING];
/// How many of them there are.
static COUNT: AtomicU32 = AtomicU32::new(0);
extern "C" {
    fn pthread_setcancelstate(state: libc::c_int, old: *mut libc::c_int) -> libc::c_int;
    fn pthread_getcpuclockid(thread: libc::pthread_t, clock: *mut libc::clockid_t) -> libc::c_int;
}
const ENABLE: libc::c_int = 0;
const DISABLE: libc::c_int = 1;

/// Does this program cancel threads? Until it does, nobody pays.
#[inline(always)]
pub fn careful() -> bool {
    process::unusual() & process::CANCELS != 0
}

/// The program cancels threads from now on.
pub fn be_careful() {
    process::cancels();
}

/// The kernel's number of a thread that is alive; 0: not known.
///
/// # Safety
/// `thread` is a thread's handle.
pub unsafe fn tid_of(thread: libc::pthread_t) -> u32 {
    let mut clock = 0;
    // SAFETY: `thread` is the handle of a thread that has not been joined.
    match unsafe { pthread_getcpuclockid(thread, &mut clock) } {
        // The number is in the upper bits, inverted (posix-timers_types.h).
        0 => !(clock >> 3) as u32,
        _ => 0,
    }
}

/// Forget threads that have ended otherwise.
fn purge() {
    for r in REQUESTS.iter().filter(|r| r.thread.load(Ordering::Relaxed) > 1) {
        if sys::tgkill(sys::getpid(), r.tid.load(Ordering::Relaxed) as i32, 0) == Err(sys::Errno::ESRCH) {
            done(r);
        }
    }
}

fn done(r: &Request) {
    if r.thread.swap(0, Ordering::AcqRel) != 0 {
        COUNT.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(target_arch = "x86_64")]
/// The calling thread, as `pthread_self` has it.
#[inline]
pub fn me() -> u64 {
    // What `pthread_self` says in glibc and musl. (Not called: in a forked child its code is a page fault.)
    sys::cpu::thread_id()
}
#[cfg(not(target_arch = "x86_64"))]
pub fn me() -> u64 {
    // SAFETY: no argument.
    unsafe { libc::pthread_self() as u64 }
}

/// The request for the calling thread.
fn mine() -> Option<&'static Request> {
    static LOOKS: AtomicU32 = AtomicU32::new(0);
    if COUNT.load(Ordering::SeqCst) == 0 {
        return None;
    }
    if LOOKS.fetch_add(1, Ordering::Relaxed).is_multiple_of(256) {
        purge();
    }
    let me = me() as libc::pthread_t;
    let here =
        |r: &&Request| r.thread.load(Ordering::SeqCst) == me && r.tid.load(Ordering::Relaxed) == sys::gettid() as u32;
    REQUESTS.iter().find(here)
}

/// Has the calling thread cancellation switched on? Its type is deferred here.
fn enabled() -> bool {
    let mut old = DISABLE;
    // SAFETY: two calls that always succeed; the state is as before.
    unsafe {
        pthread_setcancelstate(DISABLE, &mut old);
        if old == ENABLE {
            pthread_setcancelstate(ENABLE, core::ptr::null_mut());
        }
    }
    old == ENABLE
}

/// Before a sleep and after it: the thread is cancelled, and the operation is to end
/// as if interrupted.
#[inline]
pub fn hit() -> bool {
    if COUNT.load(Ordering::SeqCst) == 0 {
        return false;
    }
    let Some(r) = mine().filter(|_| enabled()) else { return false };
    r.seen.store(true, Ordering::Relaxed);
    true
}

/// Has the operation that has just ended done so for that? The caller tests for
/// cancellation.
pub fn was_hit() -> bool {
    let Some(r) = mine().filter(|r| r.seen.load(Ordering::Relaxed)) else { return false };
    r.await_decision();
    done(r);
    true
}

/// At a cancellation point: is there something to act upon?
pub fn due() -> bool {
    let Some(r) = mine().filter(|_| enabled()) else { return false };
    r.await_decision();
    done(r);
    true
}

/// In a forked child: one thread is left, which glibc knows to be cancelled or not.
pub fn become_child() {
    // (Not even read: a page less to map.)
    if !careful() {
        return;
    }
    for r in &REQUESTS {
        r.thread.put(0);
    }
    COUNT.put(0);
}

/// `pthread_cancel` has succeeded for another thread, `tid_of` which was asked before: noted. None: there
/// is no room.
pub fn note(thread: libc::pthread_t, tid: u32) -> Option<&'static Request> {
    noted(thread, tid, false)
}

/// `pthread_cancel` is about to be called for a thread: noted, until [`Request::decided`]. None: there is no room, or
/// the thread has ended.
pub fn announce(thread: libc::pthread_t, tid: u32) -> Option<&'static Request> {
    (tid != 0).then(|| noted(thread, tid, true)).flatten()
}

fn noted(thread: libc::pthread_t, tid: u32, announced: bool) -> Option<&'static Request> {
    purge();
    let r = REQUESTS.iter().find(|r| {
        r.thread.load(Ordering::Relaxed) == 0
            && r.thread.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    })?;
    r.tid.store(tid, Ordering::Relaxed);
    r.seen.store(false, Ordering::Relaxed);
    r.announced.store(announced, Ordering::Relaxed);
    COUNT.fetch_add(1, Ordering::SeqCst);
    // SeqCst: before the look at the threads that sleep.
    r.thread.store(thread, Ordering::SeqCst);
    Some(r)
}

/// Interrupts a system call of thread `tid`.
pub fn poke(tid: u32) {
    let signal = if musl::is_here() { SIGCANCEL_OF_MUSL } else { SIGCANCEL };
    let _ = sys::tgkill(sys::getpid(), tid as i32, signal);
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_thread_is_what_libc_calls_it() {
        // SAFETY: no argument.
        assert_eq!(super::me(), unsafe { libc::pthread_self() } as u64);
    }
}
