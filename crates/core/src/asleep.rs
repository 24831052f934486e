//! Who sleeps in us, on what, and what it holds meanwhile.
//!
//! Two things end a sleep from outside: `pthread_cancel`, which must find the
//! thread ([`crate::cancel`]), and a signal handler that leaves by `siglongjmp`
//! (old time limits around `read` and `connect`): then nothing of our frames runs
//! again, and what the sleep held is given back when the thread next comes by.

use crate::stream::Hold;
use crate::{bell, cancel, epoll};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use fsocket_sync::atomic::AtomicU32 as Word;
use fsocket_sys::{self as sys, Errno, Result};

/// Threads that can be found.
const PLACES: usize = 512;
/// Places that one thread may have; those of others may lie among them.
const NEAR: usize = 8;

pub struct Place {
    /// As `pthread_self` has it; 0: free.
    thread: AtomicU64,
    /// Where its frame is, and what it has written there: a frame that is left by a
    /// jump is overwritten by those that come after it.
    frame: AtomicUsize,
    mark: AtomicU64,
    /// Address of the futex, if it sleeps on one.
    word: AtomicUsize,
    /// It sleeps, or is about to; else it only holds.
    sleeps: AtomicBool,
    /// Indices + 1 of the connection held, the bell, the epoll instance.
    hold: AtomicU32,
    bell: AtomicU32,
    ep: AtomicU32,
    /// It waits in the instance as one in which nothing is ours.
    plain: AtomicBool,
    inside: AtomicBool,
    /// A signal is on its way, and means nothing to the program.
    poked: AtomicBool,
}

static PLACE: [Place; PLACES] = [const {
    Place {
        thread: AtomicU64::new(0),
        frame: AtomicUsize::new(0),
        mark: AtomicU64::new(0),
        word: AtomicUsize::new(0),
        sleeps: AtomicBool::new(false),
        hold: AtomicU32::new(0),
        bell: AtomicU32::new(0),
        ep: AtomicU32::new(0),
        plain: AtomicBool::new(false),
        inside: AtomicBool::new(false),
        poked: AtomicBool::new(false),
    }
}; PLACES];
/// Places in use.
static COUNT: AtomicU32 = AtomicU32::new(0);

/// What a sleep is about.
#[derive(Default)]
pub struct On<'a> {
    pub word: Option<&'a Word>,
    pub bell: Option<&'a bell::Bell>,
    /// Index of the epoll instance.
    pub ep: Option<u32>,
    /// It waits in the instance as one in which nothing is ours.
    pub plain: bool,
    /// And in the application's instance itself.
    pub inside: bool,
}

/// Places of the calling thread, and free ones for it.
fn near(thread: u64) -> impl Iterator<Item = &'static Place> {
    let at = (thread >> 12) as usize;
    (0..NEAR).map(move |i| &PLACE[(at + i) % PLACES])
}

fn me() -> u64 {
    // SAFETY: no argument.
    unsafe { libc::pthread_self() as u64 }
}

/// Sleep by `f`, a system call that a signal interrupts or a futex that is woken.
/// EINTR: it was, or the thread is cancelled.
pub fn sleep<R>(on: &On, mut f: impl FnMut() -> Result<R>) -> Result<R> {
    let mark = Mark::new();
    let place = enter(on, &mark);
    if let Some(p) = place {
        // SeqCst: who cancels writes that down and looks here; we look there next.
        p.sleeps.store(true, Ordering::SeqCst);
    }
    loop {
        let r = if cancel::hit() { Err(Errno::EINTR) } else { f() };
        // Poked, and cancellation is off: nothing has happened.
        let again = place.is_some_and(|p| p.poked.swap(false, Ordering::AcqRel));
        if again && matches!(r, Err(Errno::EINTR)) && !cancel::hit() {
            continue;
        }
        if let Some(p) = place {
            leave(p);
        }
        return r;
    }
}

/// A word in the frame of an operation, by which it is known that the frame lives.
#[derive(Default)]
pub struct Mark(AtomicU64);

impl Mark {
    pub const fn new() -> Mark {
        Mark(AtomicU64::new(0))
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

/// The operation whose frame `mark` is in has a [`Hold`] on the description with this
/// index, until [`let_go`].
pub fn holds(index: u32, mark: &Mark) -> Option<&'static Place> {
    let p = enter(&On::default(), mark)?;
    p.hold.store(index + 1, Ordering::Release);
    Some(p)
}

pub fn let_go(p: &Place) {
    leave(p);
}

fn enter(on: &On, Mark(mark): &Mark) -> Option<&'static Place> {
    static MARKS: AtomicU64 = AtomicU64::new(0x5EE9_0000_0000_0001);
    let me = me();
    let frame = mark as *const AtomicU64 as usize;
    if COUNT.load(Ordering::Relaxed) != 0 {
        reap_mine(frame);
    }
    mark.store(MARKS.fetch_add(2, Ordering::Relaxed), Ordering::Relaxed);
    let p = near(me).find(|p| {
        p.thread.load(Ordering::Relaxed) == 0
            && p.thread.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    })?;
    COUNT.fetch_add(1, Ordering::Relaxed);
    let index = |i: Option<u32>| i.map_or(0, |i| i + 1);
    p.frame.store(frame, Ordering::Relaxed);
    p.mark.store(mark.load(Ordering::Relaxed), Ordering::Relaxed);
    p.word.store(on.word.map_or(0, |w| w as *const Word as usize), Ordering::Relaxed);
    p.hold.store(0, Ordering::Relaxed);
    p.sleeps.store(false, Ordering::Relaxed);
    p.bell.store(index(on.bell.map(|b| b.index() as u32)), Ordering::Relaxed);
    p.ep.store(index(on.ep), Ordering::Relaxed);
    p.plain.store(on.plain, Ordering::Relaxed);
    p.inside.store(on.inside, Ordering::Relaxed);
    p.poked.store(false, Ordering::Relaxed);
    p.thread.store(me, Ordering::Release);
    Some(p)
}

fn leave(p: &Place) {
    COUNT.fetch_sub(1, Ordering::Relaxed);
    p.thread.store(0, Ordering::Release);
}

/// Give back what sleeps of this thread hold that will never end.
#[inline]
pub fn reap() {
    if COUNT.load(Ordering::Relaxed) != 0 {
        let here = 0u64;
        reap_mine(core::hint::black_box(&here) as *const u64 as usize);
    }
}

#[cold]
#[inline(never)]
fn reap_mine(here: usize) {
    let me = me();
    for p in near(me).filter(|p| p.thread.load(Ordering::Relaxed) == me) {
        if on_another_stack() || lives(p, here) {
            continue;
        }
        let of = |v: &AtomicU32| v.load(Ordering::Relaxed).checked_sub(1);
        let (hold, bell, ep) = (of(&p.hold), of(&p.bell), of(&p.ep));
        let (plain, inside) = (p.plain.load(Ordering::Relaxed), p.inside.load(Ordering::Relaxed));
        leave(p);
        if let Some(i) = ep {
            epoll::sleep_abandoned(i, plain, inside);
        }
        if let Some(b) = bell.and_then(|i| bell::at(i as usize)) {
            b.set_sleeping(false);
            sys::eventfd_clear(b.fd());
            b.release();
        }
        if let Some(i) = hold {
            drop(Hold::abandoned(i));
        }
    }
}

/// Is the frame that sleeps still there, so that we are in a signal handler on top
/// of it?
fn lives(p: &Place, here: usize) -> bool {
    let frame = p.frame.load(Ordering::Relaxed);
    // SAFETY: further out on this thread's stack, or where the caller's frame is.
    let mark = || unsafe { (frame as *const u64).read_volatile() };
    frame > here && mark() == p.mark.load(Ordering::Relaxed)
}

/// A signal handler may have a stack of its own, which tells nothing.
fn on_another_stack() -> bool {
    let mut s = libc::stack_t { ss_sp: core::ptr::null_mut(), ss_flags: 0, ss_size: 0 };
    let args = [0, &raw mut s as usize, 0, 0, 0, 0];
    // SAFETY: only asked; `s` is ours.
    unsafe { sys::raw(libc::SYS_sigaltstack, args) }.is_ok() && s.ss_flags & libc::SS_ONSTACK != 0
}

/// Make a thread (as `pthread_self` has it) look whether it is cancelled. `poke`
/// interrupts its system call. False: it does not sleep, or has looked. It may be
/// just before its sleep, so the caller comes again.
pub fn disturb(thread: u64, first: bool, poke: impl Fn()) -> bool {
    let mut wait = false;
    let asleep = |p: &&Place| p.thread.load(Ordering::SeqCst) == thread && p.sleeps.load(Ordering::SeqCst);
    for p in near(thread).filter(asleep) {
        if first {
            p.poked.store(true, Ordering::Release);
        }
        if p.poked.load(Ordering::Acquire) {
            match p.word.load(Ordering::Relaxed) {
                0 => poke(),
                // The sleeper may be gone, and the word with it: an address, not read here.
                word => sys::futex_wake_at(word),
            }
            wait = true;
        }
    }
    wait
}

/// In a forked child: nobody sleeps.
pub fn become_child() {
    for p in &PLACE {
        p.thread.store(0, Ordering::Relaxed);
    }
    COUNT.store(0, Ordering::Relaxed);
}
