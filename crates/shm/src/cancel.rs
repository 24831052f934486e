//! Thread cancellation.
//!
//! glibc unwinds a cancelled thread out of its system call. It must not unwind frames of the
//! library, which hold tokens, wakers and references. So the hook of `pthread_cancel` notes a
//! request for the thread. The thread's sleep then ends as if a signal had interrupted it, and the
//! thread releases everything. When nothing is left to clean up, the thread's hook calls
//! `pthread_testcancel`. See ADR 31. In musl only the signal differs ([`crate::cancel_in_musl`]).

use crate::cow::Sparing;
use crate::process;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use fsocket_runtime::musl;
use fsocket_sys as sys;

/// Requests that can be pending at a time.
const PENDING: usize = 64;
/// glibc's signal for cancellation. Its handler does nothing unless the thread has asynchronous
/// cancellation.
const SIGCANCEL: i32 = 32;
pub(crate) const SIGCANCEL_OF_MUSL: i32 = 33;
/// A thread waits this many times [`TURN_NS`] for libc to accept or refuse a request.
pub(crate) const TURNS: u32 = 10_000;
pub(crate) const TURN_NS: u64 = 10_000;

/// A thread that the program has cancelled.
pub struct Request {
    /// The value of `pthread_self`; 0: free, 1: being filled in.
    thread: AtomicU64,
    /// The kernel's thread number, because a later thread can have the same handle.
    tid: AtomicU32,
    /// The thread has ended an operation because of the request.
    seen: AtomicBool,
    /// `pthread_cancel` of libc was not called yet, and may still refuse the request.
    announced: AtomicBool,
}

impl Request {
    /// libc has accepted or refused the request.
    pub fn decided(&self, accepted: bool) {
        if !accepted {
            done(self);
        }
        self.announced.store(false, Ordering::Release);
    }

    /// Waits for libc's decision, before the caller runs `pthread_testcancel`.
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
/// Number of pending requests.
static COUNT: AtomicU32 = AtomicU32::new(0);
extern "C" {
    fn pthread_setcancelstate(state: libc::c_int, old: *mut libc::c_int) -> libc::c_int;
    fn pthread_getcpuclockid(thread: libc::pthread_t, clock: *mut libc::clockid_t) -> libc::c_int;
}
const ENABLE: libc::c_int = 0;
const DISABLE: libc::c_int = 1;

/// Does this program cancel threads? Programs that do not cancel threads skip all checks.
#[inline(always)]
pub fn careful() -> bool {
    process::unusual() & process::CANCELS != 0
}

/// Records that the program cancels threads.
pub fn be_careful() {
    process::cancels();
}

/// The kernel's number of a live thread; 0: unknown.
///
/// # Safety
/// `thread` is a thread's handle.
pub unsafe fn tid_of(thread: libc::pthread_t) -> u32 {
    let mut clock = 0;
    // SAFETY: `thread` is the handle of a thread that has not been joined (see `Safety`), so it is
    // valid.
    match unsafe { pthread_getcpuclockid(thread, &mut clock) } {
        // The kernel's number is in the upper bits, inverted (posix-timers_types.h).
        0 => !(clock >> 3) as u32,
        _ => 0,
    }
}

/// Removes requests of threads that have ended for other reasons.
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

/// The calling thread, as `pthread_self` returns it.
#[inline]
pub fn me() -> u64 {
    // The same value as `pthread_self` in glibc and musl. This does not call `pthread_self`, whose
    // code costs a page fault in a forked child.
    sys::cpu::thread_id()
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

/// Is cancellation enabled in the calling thread? (Its type is deferred here.)
fn enabled() -> bool {
    let mut old = DISABLE;
    // SAFETY: both calls always succeed, and together they leave the cancellation state as it was.
    unsafe {
        pthread_setcancelstate(DISABLE, &mut old);
        if old == ENABLE {
            pthread_setcancelstate(ENABLE, core::ptr::null_mut());
        }
    }
    old == ENABLE
}

/// Called before and after a sleep: is the thread cancelled? Then the operation must end as if
/// interrupted.
#[inline]
pub fn hit() -> bool {
    if COUNT.load(Ordering::SeqCst) == 0 {
        return false;
    }
    let Some(r) = mine().filter(|_| enabled()) else { return false };
    r.seen.store(true, Ordering::Relaxed);
    true
}

/// Has the operation just ended because the thread is cancelled? Then the caller must test for
/// cancellation.
pub fn was_hit() -> bool {
    let Some(r) = mine().filter(|r| r.seen.load(Ordering::Relaxed)) else { return false };
    r.await_decision();
    done(r);
    true
}

/// Called at a cancellation point: is there a request to act upon?
pub fn due() -> bool {
    let Some(r) = mine().filter(|_| enabled()) else { return false };
    r.await_decision();
    done(r);
    true
}

/// Called in a forked child: only one thread is left, and glibc knows whether it is cancelled.
pub fn become_child() {
    // Avoids reading the requests, because each page read costs a fault in the child.
    if !careful() {
        return;
    }
    for r in &REQUESTS {
        r.thread.put(0);
    }
    COUNT.put(0);
}

/// Notes the request after `pthread_cancel` has succeeded for another thread. The caller has read
/// `tid_of` before that call. None: there is no room.
pub fn note(thread: libc::pthread_t, tid: u32) -> Option<&'static Request> {
    noted(thread, tid, false)
}

/// Notes the request before the caller calls `pthread_cancel`; [`Request::decided`] must follow.
/// None: there is no room, or the thread has ended.
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
    // SeqCst: this store comes before the search for sleeping threads.
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
        // SAFETY: the function takes no argument and cannot fail.
        assert_eq!(super::me(), unsafe { libc::pthread_self() } as u64);
    }
}
