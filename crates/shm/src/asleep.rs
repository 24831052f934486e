//! Threads that sleep in the library, on what, and what they hold meanwhile.
//!
//! Two things end a sleep from outside: `pthread_cancel`, which must find the
//! thread ([`crate::cancel`]), and a signal handler that leaves by `siglongjmp`
//! (old time limits around `read` and `connect`): then nothing of our frames runs
//! again, and what the sleep held is given back when the thread next comes by.

use crate::cancel::me;
use crate::conn::Hold;
use crate::pieces::{Pieces, Zero};
use crate::upcalls::watcher;
use crate::{cancel, peers, process, waker};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use fsocket_sync::atomic::AtomicU32 as Word;
use fsocket_sys::{self as sys, Errno, Result};

/// Places lie in groups; a thread uses those of one group.
const GROUPS: usize = 256;
const GROUP: usize = 8;
/// Descriptions that one operation holds, at most.
pub const HOLDS: usize = 16;

/// No thread's.
const BEING_TAKEN: u64 = 1;

/// What is written down of a sleep.
pub struct Place {
    /// Where its frame is, and what it has written there: a frame that is left by a
    /// jump is overwritten by those that come after it.
    frame: AtomicUsize,
    mark: AtomicU64,
    /// Address of the futex, if it sleeps on one.
    word: AtomicUsize,
    /// It sleeps, or is about to; else it only holds.
    sleeps: AtomicBool,
    /// Indices + 1 of the descriptions held, until the first 0.
    hold: [AtomicU32; HOLDS],
    /// Indices + 1 of the waker, the epoll instance.
    waker: AtomicU32,
    ep: AtomicU32,
    /// It waits in the instance as one in which nothing is ours.
    plain: AtomicBool,
    inside: AtomicBool,
    /// The descriptor + 1 of [`crate::peers::beside`]; 0: none.
    beside: AtomicI32,
    /// A signal is on its way, and means nothing to the program.
    poked: AtomicBool,
}

/// Owners, of each place as `pthread_self` has it (0: free; a line, looked at as a whole), beside
/// their places: a thread of a forked child copies one page when it sleeps.
#[repr(C, align(64))]
struct Group {
    owners: [AtomicU64; GROUP],
    places: [Place; GROUP],
}

/// (A page has four groups.)
static SLEEPS: Pieces<Group, 4, { GROUPS / 4 }> = Pieces::new();
// SAFETY: atomics of integers.
unsafe impl Zero for Group {}

impl Group {
    fn pairs(&'static self) -> impl Iterator<Item = (&'static AtomicU64, &'static Place)> {
        self.owners.iter().zip(&self.places)
    }
}

/// What a sleep is about.
#[derive(Default)]
pub struct On<'a> {
    pub word: Option<&'a Word>,
    pub waker: Option<&'a waker::Waker>,
    /// Index of the epoll instance.
    pub ep: Option<u32>,
    /// It waits in the instance as one in which nothing is ours.
    pub plain: bool,
    /// And in the application's instance itself.
    pub inside: bool,
    /// See [`crate::peers::beside`]; given back when the sleep is over.
    pub beside: Option<i32>,
}

/// The places of a thread's group, and whose they are.
fn near(thread: u64) -> impl Iterator<Item = (&'static AtomicU64, &'static Place)> {
    SLEEPS.get(group(thread)).into_iter().flat_map(Group::pairs)
}

fn group(thread: u64) -> usize {
    ((thread >> 12).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as usize % GROUPS
}

/// Those that are a thread's.
fn of(thread: u64) -> impl Iterator<Item = (&'static AtomicU64, &'static Place)> {
    near(thread).filter(move |(owner, _)| owner.load(Ordering::SeqCst) == thread)
}

/// Sleep by `f`, a system call that a signal interrupts or a futex that is woken.
/// EINTR: it was, or the thread is cancelled.
// Frames are told apart by their addresses: this one is further in than the caller's.
#[inline(never)]
pub fn sleep<R>(on: &On, mut f: impl FnMut() -> Result<R>) -> Result<R> {
    let mark = Mark::new();
    let place = enter(on, &mark);
    if let Some((_, p)) = place {
        // SeqCst: the thread that cancels notes its request and looks here; this one looks there next.
        p.sleeps.store(true, Ordering::SeqCst);
    }
    loop {
        let r = if cancel::hit() { Err(Errno::EINTR) } else { f() };
        let again = place.is_some_and(|(_, p)| p.poked.swap(false, Ordering::AcqRel));
        // Whoever cancels may not have come to poke yet: libc's own signal has ended the sleep. The hook acts upon a
        // request only that was seen here.
        let is_cancelled = matches!(r, Err(Errno::EINTR)) && cancel::hit();
        // Poked, and cancellation is off: nothing has happened.
        if again && !is_cancelled && matches!(r, Err(Errno::EINTR)) {
            continue;
        }
        if on.beside.is_some() {
            // (It may have got another number meanwhile.)
            let fd = place.map_or(on.beside, |(_, p)| p.take_beside());
            fd.into_iter().for_each(peers::not_beside);
        }
        if let Some((owner, _)) = place {
            owner.store(0, Ordering::Release);
        }
        return r;
    }
}

/// A descriptor of a sleep got another number.
pub fn renumbered(old: i32, new: i32) -> bool {
    let swap = |p: &Place| p.beside.compare_exchange(old + 1, new + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    SLEEPS.all().flat_map(|g| &g.places).any(swap)
}

/// How many threads sleep in the epoll instance with this index.
#[cold]
pub fn threads_in(ep: u32) -> u32 {
    let places = SLEEPS.all().flat_map(Group::pairs);
    let sleeps = |p: &Place| p.sleeps.load(Ordering::SeqCst) && p.ep.load(Ordering::Relaxed) == ep + 1;
    places.filter(|(owner, p)| owner.load(Ordering::SeqCst) > BEING_TAKEN && sleeps(p)).count() as u32
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

/// The operation whose frame `mark` is in, or one that it serves, has a [`Hold`] on
/// the descriptions with these indices, until [`let_go`].
pub fn holds(indices: impl Iterator<Item = u32>, mark: &Mark) -> Option<Held> {
    let (owner, p) = enter(&On::default(), mark)?;
    for (h, i) in p.hold.iter().zip(indices) {
        h.store(i + 1, Ordering::Release);
    }
    Some(Held(owner))
}

/// See [`holds`].
pub struct Held(&'static AtomicU64);

pub fn let_go(Held(owner): Held) {
    owner.store(0, Ordering::Release);
}

fn enter(on: &On, Mark(mark): &Mark) -> Option<(&'static AtomicU64, &'static Place)> {
    let me = me();
    let frame = mark as *const AtomicU64 as usize;
    reap_of(me, frame);
    let (owner, p) = SLEEPS.make(group(me))?.pairs().find(|(owner, _)| {
        owner.load(Ordering::Relaxed) == 0
            && owner.compare_exchange(0, BEING_TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    })?;
    let index = |i: Option<u32>| i.map_or(0, |i| i + 1);
    // A word that no other frame has by chance.
    let word = p.mark.load(Ordering::Relaxed).wrapping_add(2) | 0x5EE9_0000_0000_0001;
    mark.store(word, Ordering::Relaxed);
    p.mark.store(word, Ordering::Relaxed);
    p.frame.store(frame, Ordering::Relaxed);
    p.word.store(on.word.map_or(0, |w| w as *const Word as usize), Ordering::Relaxed);
    for h in p.hold.iter().take_while(|h| h.load(Ordering::Relaxed) != 0) {
        h.store(0, Ordering::Relaxed);
    }
    p.sleeps.store(false, Ordering::Relaxed);
    p.waker.store(index(on.waker.map(|b| b.index() as u32)), Ordering::Relaxed);
    p.ep.store(index(on.ep), Ordering::Relaxed);
    p.plain.store(on.plain, Ordering::Relaxed);
    p.inside.store(on.inside, Ordering::Relaxed);
    p.beside.store(on.beside.map_or(0, |fd| fd + 1), Ordering::Relaxed);
    p.poked.store(false, Ordering::Relaxed);
    owner.store(me, Ordering::Release);
    Some((owner, p))
}

/// Give back what sleeps of this thread hold that will never end.
#[inline(never)]
pub fn reap() {
    let here = 0u64;
    reap_of(me(), core::hint::black_box(&here) as *const u64 as usize);
}

#[inline]
fn reap_of(me: u64, here: usize) {
    for (owner, p) in of(me) {
        // Another stack, a signal handler's, tells nothing.
        if !lives(p, here) && !on_another_stack() {
            reap_one(owner, p);
        }
    }
}

#[cold]
#[inline(never)]
fn reap_one(owner: &AtomicU64, p: &Place) {
    let of = |v: &AtomicU32| v.load(Ordering::Relaxed).checked_sub(1);
    let (hold, waker, ep) = (p.held(), of(&p.waker), of(&p.ep));
    let (plain, inside) = (p.plain.load(Ordering::Relaxed), p.inside.load(Ordering::Relaxed));
    let beside = p.take_beside();
    owner.store(0, Ordering::Release);
    beside.into_iter().for_each(peers::not_beside);
    if let Some(i) = ep {
        (watcher().sleep_abandoned)(i, plain, inside);
    }
    if let Some(b) = waker.and_then(|i| waker::at(i as usize)) {
        b.is_abandoned();
        b.clear();
        b.release();
    }
    hold.iter().map_while(|h| h.checked_sub(1)).for_each(|i| drop(Hold::abandoned(i)));
}

impl Place {
    fn held(&self) -> [u32; HOLDS] {
        core::array::from_fn(|i| self.hold[i].load(Ordering::Acquire))
    }
    fn take_beside(&self) -> Option<i32> {
        self.beside.swap(0, Ordering::AcqRel).checked_sub(1).filter(|fd| *fd >= 0)
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

/// In a signal handler: has the signal interrupted a sleep?
pub fn is_interrupted() -> bool {
    let here = 0u64;
    // (Below every frame, where the handler's own stack tells nothing.)
    let here = if on_another_stack() { 0 } else { core::hint::black_box(&here) as *const u64 as usize };
    of(me()).any(|(_, p)| p.sleeps.load(Ordering::SeqCst) && lives(p, here))
}

/// A signal handler may have a stack of its own.
fn on_another_stack() -> bool {
    let mut s = libc::stack_t { ss_sp: core::ptr::null_mut(), ss_flags: 0, ss_size: 0 };
    let args = [0, &raw mut s as usize, 0, 0, 0, 0];
    // SAFETY: only asked; `s` is ours.
    unsafe { sys::raw(libc::SYS_sigaltstack, args) }.is_ok() && s.ss_flags & libc::SS_ONSTACK != 0
}

/// Make a thread (as `pthread_self` has it) look whether it is cancelled. `poke`
/// interrupts its system call. False: it does not sleep, or has looked. It may be
/// just before its sleep, so the caller comes again.
fn disturb(thread: u64, first: bool, poke: impl Fn()) -> bool {
    let mut wait = false;
    for (_, p) in of(thread).filter(|(_, p)| p.sleeps.load(Ordering::SeqCst)) {
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

/// In a forked child, when all else is in order: of the threads there is this one only,
/// and what the others held is let go. (They went on while the memory was copied: what
/// is seen of a hold may be its place without its reference.)
pub fn become_child() {
    if process::was_alone() {
        return;
    }
    let me = me();
    for (owner, p) in SLEEPS.all().flat_map(Group::pairs) {
        let whose = owner.load(Ordering::Relaxed);
        if whose == me || whose == 0 {
            continue;
        }
        let held = p.held();
        p.take_beside().into_iter().for_each(peers::not_beside);
        owner.store(0, Ordering::Relaxed);
        if whose == BEING_TAKEN {
            continue;
        }
        for i in held.iter().map_while(|h| h.checked_sub(1)) {
            let Some(d) = crate::table::DESCS.get(i) else { continue };
            let mut numbers = 0;
            crate::table::each_fd(d, |_| numbers += 1);
            if d.refs() > numbers {
                drop(Hold::abandoned(i));
            }
        }
    }
}

/// How often a thread is poked that is about to sleep, or slow to wake, and the
/// longest pause in between, nanoseconds.
const POKES: u32 = 2000;

const PAUSE_NS: u64 = 1_000_000;

/// `pthread_cancel` has succeeded for another thread: an operation of ours that it sleeps in ends.
pub fn cancelled(thread: libc::pthread_t, tid: u32) {
    if cancel::note(thread, tid).is_some() {
        wake_cancelled(thread, tid);
    }
}

/// A request for the thread is noted: an operation of ours that it sleeps in ends.
pub fn wake_cancelled(thread: libc::pthread_t, tid: u32) {
    let mut pause = 10_000;
    for turn in 0..POKES {
        if !disturb(thread, turn == 0, || cancel::poke(tid)) {
            break;
        }
        sys::nanosleep(pause);
        pause = (pause * 2).min(PAUSE_NS);
    }
}
