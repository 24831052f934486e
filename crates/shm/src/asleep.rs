//! Records of threads that sleep in the library: what they sleep on, and what they hold meanwhile.
//!
//! Two events need these records. `pthread_cancel` must find the sleeping thread
//! ([`crate::cancel`]). A signal handler may leave by `siglongjmp` (as programs do for time
//! limits around `read` and `connect`). Then no frame of the library runs again. The thread
//! releases what the abandoned sleep held when it next enters the library.

use crate::cancel::me;
use crate::conn::Hold;
use crate::pieces::{Pieces, Zero};
use crate::upcalls::watcher;
use crate::{cancel, peers, process, waker};
use core::sync::atomic::{fence, AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use fsocket_sync::atomic::AtomicU32 as Word;
use fsocket_sync::block::{self, Asleep};
use fsocket_sys::{self as sys, Errno, Result};

/// Places are in groups. A thread only uses the places of one group.
const GROUPS: usize = 256;
const GROUP: usize = 8;
/// The most descriptions that one operation holds.
pub const HOLDS: usize = 16;

/// Value of a place's owner while a thread takes the place.
const BEING_TAKEN: u64 = 1;

/// The record of a sleep.
pub struct Place {
    /// The address of the sleep's stack frame, and the word written there. If a jump leaves the
    /// frame, later frames overwrite the word.
    frame: AtomicUsize,
    mark: AtomicU64,
    /// Address of the futex, if it sleeps on one.
    word: AtomicUsize,
    /// False: the operation does not sleep, it only holds descriptions.
    asleep: Asleep,
    /// Indices + 1 of the descriptions held; the first 0 ends the list.
    hold: [AtomicU32; HOLDS],
    /// Indices + 1 of the waker and of the epoll instance.
    waker: AtomicU32,
    ep: AtomicU32,
    /// The thread waits in the epoll instance itself, as if the library had no sockets there.
    plain: AtomicBool,
    inside: AtomicBool,
    /// The descriptor + 1 of [`crate::peers::beside`]; 0: none.
    beside: AtomicI32,
}

/// The owner of each place, as `pthread_self` returns it (0: free). The owners share one cache
/// line, which is read as a whole. They lie beside their places, so that a thread of a forked
/// child copies only one page when it sleeps.
#[repr(C, align(64))]
struct Group {
    owners: [AtomicU64; GROUP],
    places: [Place; GROUP],
}

/// A page has four groups.
static SLEEPS: Pieces<Group, 4, { GROUPS / 4 }> = Pieces::new();
// SAFETY: all fields are atomics of integers, for which zero bytes are a valid value.
unsafe impl Zero for Group {}

impl Group {
    fn pairs(&'static self) -> impl Iterator<Item = (&'static AtomicU64, &'static Place)> {
        self.owners.iter().zip(&self.places)
    }
}

/// The objects of a sleep.
#[derive(Default)]
pub struct On<'a> {
    pub word: Option<&'a Word>,
    pub waker: Option<&'a waker::Waker>,
    /// Index of the epoll instance.
    pub ep: Option<u32>,
    /// The thread waits in the epoll instance itself, as if the library had no sockets there.
    pub plain: bool,
    /// The thread waits in the application's instance, inside the wrapper.
    pub inside: bool,
    /// See [`crate::peers::beside`]; released after the sleep.
    pub beside: Option<i32>,
}

/// The places of a thread's group, with their owners.
fn near(thread: u64) -> impl Iterator<Item = (&'static AtomicU64, &'static Place)> {
    SLEEPS.get(group(thread)).into_iter().flat_map(Group::pairs)
}

fn group(thread: u64) -> usize {
    ((thread >> 12).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as usize % GROUPS
}

/// The places that a thread owns.
fn of(thread: u64) -> impl Iterator<Item = (&'static AtomicU64, &'static Place)> {
    near(thread).filter(move |(owner, _)| owner.load(Ordering::SeqCst) == thread)
}

/// Sleeps by calling `f`: a system call that a signal interrupts, or a futex wait. EINTR: a signal
/// came, or the thread is cancelled.
// Not inlined, because `lives` compares addresses: this frame must be below the caller's frame.
#[inline(never)]
pub fn sleep<R>(on: &On, f: impl FnMut() -> Result<R>) -> Result<R> {
    let mark = Mark::new();
    let place = enter(on, &mark);
    let r = block::sleep(place.map(|(_, p)| &p.asleep), Errno::EINTR, cancel::hit, f);
    if on.beside.is_some() {
        // The place has the current number of the descriptor, which the library may have moved
        // during the sleep.
        let fd = place.map_or(on.beside, |(_, p)| p.take_beside());
        fd.into_iter().for_each(peers::not_beside);
    }
    if let Some((owner, _)) = place {
        owner.store(0, Ordering::Release);
    }
    r
}

/// The library has moved a descriptor from `old` to `new`. True: a sleep uses this descriptor.
pub fn renumbered(old: i32, new: i32) -> bool {
    let swap = |p: &Place| p.beside.compare_exchange(old + 1, new + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    SLEEPS.all().flat_map(|g| &g.places).any(swap)
}

/// Number of threads that sleep in the epoll instance with this index.
#[cold]
pub fn threads_in(ep: u32) -> u32 {
    let places = SLEEPS.all().flat_map(Group::pairs);
    let sleeps = |p: &Place| p.asleep.is() && p.ep.load(Ordering::Relaxed) == ep + 1;
    places.filter(|(owner, p)| owner.load(Ordering::SeqCst) > BEING_TAKEN && sleeps(p)).count() as u32
}

/// A word in the frame of an operation. It shows whether the frame still exists.
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

/// Records that the operation with the frame of `mark` has a [`Hold`] on the descriptions with
/// these indices, until [`let_go`].
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
    // A value that no other frame has there by chance.
    let word = p.mark.load(Ordering::Relaxed).wrapping_add(2) | 0x5EE9_0000_0000_0001;
    mark.store(word, Ordering::Relaxed);
    p.mark.store(word, Ordering::Relaxed);
    p.frame.store(frame, Ordering::Relaxed);
    p.word.store(on.word.map_or(0, |w| w as *const Word as usize), Ordering::Relaxed);
    for h in p.hold.iter().take_while(|h| h.load(Ordering::Relaxed) != 0) {
        h.store(0, Ordering::Relaxed);
    }
    p.asleep.reset();
    p.waker.store(index(on.waker.map(|b| b.index() as u32)), Ordering::Relaxed);
    p.ep.store(index(on.ep), Ordering::Relaxed);
    p.plain.store(on.plain, Ordering::Relaxed);
    p.inside.store(on.inside, Ordering::Relaxed);
    p.beside.store(on.beside.map_or(0, |fd| fd + 1), Ordering::Relaxed);
    owner.store(me, Ordering::Release);
    Some((owner, p))
}

/// Releases what the abandoned sleeps of this thread hold.
#[inline(never)]
pub fn reap() {
    let here = 0u64;
    reap_of(me(), core::hint::black_box(&here) as *const u64 as usize);
}

#[inline]
fn reap_of(me: u64, here: usize) {
    for (owner, p) in of(me) {
        // On another stack (as a signal handler may have), the comparison of addresses proves
        // nothing.
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

/// Does the sleep's frame still exist, so that the caller is a signal handler on top of it?
fn lives(p: &Place, here: usize) -> bool {
    let frame = p.frame.load(Ordering::Relaxed);
    // SAFETY: `frame > here` is checked first, so the address is further up on this thread's
    // stack, which is mapped.
    let mark = || unsafe { (frame as *const u64).read_volatile() };
    frame > here && mark() == p.mark.load(Ordering::Relaxed)
}

/// In a signal handler: has the signal interrupted a sleep?
pub fn is_interrupted() -> bool {
    let here = 0u64;
    // On another stack, addresses cannot be compared: 0 is below every frame.
    let here = if on_another_stack() { 0 } else { core::hint::black_box(&here) as *const u64 as usize };
    of(me()).any(|(_, p)| p.asleep.is() && lives(p, here))
}

/// Does this code run on an alternate signal stack?
fn on_another_stack() -> bool {
    let mut s = libc::stack_t { ss_sp: core::ptr::null_mut(), ss_flags: 0, ss_size: 0 };
    let args = [0, &raw mut s as usize, 0, 0, 0, 0];
    // SAFETY: the call only reads the state; `s` is a local variable.
    unsafe { sys::raw(libc::SYS_sigaltstack, args) }.is_ok() && s.ss_flags & libc::SS_ONSTACK != 0
}

/// Makes a sleeping thread check whether it is cancelled. `poke` interrupts its system call.
/// False: the thread does not sleep, or has checked. While true, the caller must repeat the call,
/// because the thread may not have entered its system call yet.
fn disturb(thread: u64, first: bool, poke: impl Fn()) -> bool {
    let mut wait = false;
    // After the store of the request, before the search for places of the thread.
    fence(Ordering::SeqCst);
    for (_, p) in of(thread) {
        wait |= p.asleep.disturb(first, || match p.word.load(Ordering::Relaxed) {
            0 => poke(),
            // The sleeper may have left, and its word may be unmapped. So the address is only
            // passed on.
            word => sys::futex_wake_at(word),
        });
    }
    wait
}

/// Called in a forked child, after all other steps. Only the calling thread is left, so everything
/// that other threads held is released. (Those threads went on while the memory was copied. So a
/// place may list a description without having its reference yet.)
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

/// Limits for a cancelled thread that has not entered its sleep yet, or wakes slowly: the number
/// of pokes, and the longest pause between them in nanoseconds.
const POKES: u32 = 2000;

const PAUSE_NS: u64 = 1_000_000;

/// Called after `pthread_cancel` has succeeded for another thread: ends the library's operation in
/// which that thread sleeps.
pub fn cancelled(thread: libc::pthread_t, tid: u32) {
    if cancel::note(thread, tid).is_some() {
        wake_cancelled(thread, tid);
    }
}

/// Called after a request for the thread was noted: ends the library's operation in which that
/// thread sleeps.
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
