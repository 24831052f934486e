//! Bells: what a thread sleeps on when it waits for more than one thing.

use crate::chan::{self, Chan};
use crate::{ctl, process, stats};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use fsocket_abi::arena::Counter;
use fsocket_abi::channel::{SUMMARY_SYN, WAITERS};
use fsocket_sync::atomic::{fence, AtomicU32};
use fsocket_sync::doorbell::{Want, FUTEX_BIT};
use fsocket_sys as sys;

/// Bells per process.
pub const MAX: usize = 255;

/// An eventfd that the monitor knows; peers fetch it when they must ring it.
pub struct Bell {
    fd: AtomicI32,
    key: AtomicU64,
    used: AtomicBool,
    /// In the hands of one sleeping thread, not of an epoll instance.
    transient: AtomicBool,
}

static BELLS: [Bell; MAX] = [const {
    Bell {
        fd: AtomicI32::new(-1),
        key: AtomicU64::new(0),
        used: AtomicBool::new(false),
        transient: AtomicBool::new(false),
    }
}; MAX];

impl Bell {
    pub fn index(&self) -> usize {
        (self as *const Bell as usize - BELLS.as_ptr() as usize) / core::mem::size_of::<Bell>()
    }
    pub fn fd(&self) -> i32 {
        self.fd.load(Ordering::Relaxed)
    }
    pub fn key(&self) -> u64 {
        self.key.load(Ordering::Relaxed)
    }
    /// Put it back; its eventfd is kept for the next user.
    pub fn release(&self) {
        if self.transient.swap(false, Ordering::SeqCst) {
            SLEEPERS.fetch_sub(1, Ordering::SeqCst);
        }
        self.used.store(false, Ordering::Release);
    }
    /// The user is gone for good: leave all channels too.
    pub fn retire(&self) {
        for c in chan::all() {
            c.release_waiter(self);
        }
        self.release();
    }
    /// Say on every channel where this bell has a waiter whether it sleeps.
    pub fn set_sleeping(&self, on: bool) {
        for c in chan::all() {
            if let Some(w) = c.waiter_of(self) {
                w.sleeping.store(on as u32, Ordering::Relaxed);
            }
        }
    }
    /// This use is one sleep of one thread.
    pub fn for_one_sleep(&self) {
        self.transient.store(true, Ordering::SeqCst);
        SLEEPERS.fetch_add(1, Ordering::SeqCst);
    }
    pub fn ring_self(&self) {
        let _ = sys::eventfd_ring(self.fd());
    }
}

static SLEEPERS: AtomicU32 = AtomicU32::new(0);

/// Wake threads of ours in `poll`, `select` and `accept`: they must look again.
pub fn ring_sleepers() {
    if SLEEPERS.load(Ordering::SeqCst) != 0 {
        for b in BELLS.iter().take(made()) {
            if b.transient.load(Ordering::SeqCst) {
                b.ring_self();
            }
        }
    }
}

/// A bell for one user.
pub fn get() -> Option<&'static Bell> {
    let b = BELLS.iter().find(|b| {
        !b.used.load(Ordering::Relaxed)
            && b.used.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    })?;
    if b.fd() < 0 && !make(b) {
        b.release();
        return None;
    }
    Some(b)
}

fn make(b: &Bell) -> bool {
    // A forked child may watch its sockets before it listens or connects.
    if ctl::unmet() {
        ctl::wanted();
    }
    let Ok(fd) = sys::eventfd().map(process::high_fd) else { return false };
    let key = sys::getrandom_u64() | 1;
    let mut m = fsocket_proto::Msg::new(fsocket_proto::kind::BELL);
    m.id = key;
    if !ctl::tell(m, Some(fd)) {
        process::close_own(fd);
        return false;
    }
    b.key.store(key, Ordering::Relaxed);
    b.fd.store(fd, Ordering::Release);
    true
}

/// The bell with this index.
/// A wait for something that no peer can be asked to ring for: it looks itself. Seldomer the longer
/// nothing happens, so that many idle threads cost little, and what comes late comes late by
/// a share of the time that nobody cared.
#[derive(Default)]
pub struct Unarmed {
    since: Option<u64>,
}

impl Unarmed {
    const LEAST_NS: u64 = 2_000_000;
    const MOST_NS: u64 = 100_000_000;
    const SHARE: u64 = 8;

    /// How long the next sleep may be, nanoseconds.
    pub fn piece(&mut self) -> u64 {
        stats::count(Counter::SleepsCut);
        let now = sys::now_ns();
        let since = *self.since.get_or_insert(now);
        Self::of(now.saturating_sub(since))
    }

    fn of(waited: u64) -> u64 {
        (waited / Self::SHARE).clamp(Self::LEAST_NS, Self::MOST_NS)
    }
}

pub fn at(i: usize) -> Option<&'static Bell> {
    BELLS.get(i)
}

/// Bells are made in order of their index.
fn made() -> usize {
    BELLS.iter().position(|b| b.fd() < 0 && !b.used.load(Ordering::Relaxed)).unwrap_or(MAX)
}

/// Between arming and the last look before a sleep on a bell: what a peer publishes is
/// seen, or it sees that we sleep. Costs an interrupt on every busy CPU, unless
/// nobody shares memory with us.
pub fn before_sleep() {
    // The bell before the look for channels; `ring_all` does the reverse.
    fence(Ordering::SeqCst);
    if !chan::none() {
        sys::heavy_fence();
    }
}

/// Wake every thread of this process that sleeps on a bell: something it must
/// arm for has appeared.
pub fn ring_all() {
    fence(Ordering::SeqCst);
    for b in BELLS.iter().take(made()) {
        if b.used.load(Ordering::Relaxed) {
            b.ring_self();
        }
    }
}

/// In a forked child: eventfds are shared with the parent, so ours they are not.
pub fn become_child() {
    for b in BELLS.iter().take(made()) {
        let fd = b.fd.swap(-1, Ordering::AcqRel);
        if fd >= 0 {
            process::close_own(fd);
        }
        b.key.store(0, Ordering::Relaxed);
        b.used.store(false, Ordering::Relaxed);
        b.transient.store(false, Ordering::Relaxed);
    }
    SLEEPERS.store(0, Ordering::Relaxed);
    for c in chan::all() {
        c.forget_bells();
    }
}

/// Tell the other side that something changed on `slot`: `mask` came from
/// [`Want::take`].
#[cold]
#[inline(never)]
pub fn wake(c: &Chan, slot: usize, want: &Want, mask: u64) {
    wake_side(c, 1 - c.my_side(), slot, want, mask);
}

/// Tell one side, also the caller's own.
pub fn wake_side(c: &Chan, side: usize, slot: usize, want: &Want, mask: u64) {
    stats::count(Counter::Wakes);
    if mask & FUTEX_BIT != 0 {
        wake_futex(&want.seq);
    }
    // Before the marks, whose release publishes it.
    want.told.store(sys::cpu::ticks(), Ordering::Relaxed);
    each(c, side, mask & !FUTEX_BIT, |w| {
        w.ready[slot / 64 % 16].fetch_or(1 << (slot % 64), Ordering::Relaxed);
        w.summary.fetch_or(1 << (slot / 64 % 16), Ordering::Release);
    });
}

/// Tell waiters that a SYN queue has something.
#[cold]
pub fn wake_syn(c: &Chan, mask: u64) {
    stats::count(Counter::Wakes);
    // As in `wake_side`; for all queues of the channel.
    c.queue(0).want.told.store(sys::cpu::ticks(), Ordering::Relaxed);
    each(c, 1 - c.my_side(), mask & !FUTEX_BIT, |w| {
        w.summary.fetch_or(SUMMARY_SYN, Ordering::Release);
    });
}

fn wake_futex(seq: &AtomicU32) {
    seq.fetch_add(1, Ordering::Release);
    sys::futex_wake(seq, i32::MAX);
}

fn each(c: &Chan, side: usize, mut mask: u64, mark: impl Fn(&fsocket_abi::channel::Waiter)) {
    while mask != 0 {
        let i = mask.trailing_zeros() as usize;
        mask &= mask - 1;
        if i >= WAITERS {
            continue;
        }
        let w = c.waiter(side, i);
        mark(w);
        // The mark before the look at `sleeping`; the sleeper does the reverse
        // with a heavy fence between.
        fence(Ordering::SeqCst);
        if w.sleeping.load(Ordering::Relaxed) != 0 && w.sleeping.swap(0, Ordering::AcqRel) != 0 {
            let key = w.bell.load(Ordering::Acquire);
            let rung = key != 0 && if side == c.my_side() { ring_relative(c, key) } else { c.ring_peer(i, key) };
            if !rung {
                // Nobody can ring it now; sleeps are bounded when the monitor
                // is dead, and the mark stays.
                w.sleeping.store(1, Ordering::Relaxed);
            }
        }
    }
}

/// Ring a bell on our own side: this process's, or that of one related by fork.
fn ring_relative(c: &Chan, key: u64) -> bool {
    if let Some(b) = BELLS.iter().take(made()).find(|b| b.key() == key) {
        b.ring_self();
        return true;
    }
    let mut m = fsocket_proto::Msg::new(fsocket_proto::kind::RING);
    m.id = key;
    m.arg0 = c.id.load(Ordering::Relaxed) as u64;
    ctl::tell(m, None)
}

/// A bell's eventfd got another number. (An epoll instance that watches it
/// keeps watching the eventfd itself.)
pub fn moved(old: i32, new: i32) -> bool {
    BELLS.iter().any(|b| b.fd.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_cannot_be_rung_looks_ever_more_seldom() {
        let (mut at, mut looks) = (0, 0);
        while at < 10_000_000_000 {
            at += Unarmed::of(at);
            looks += 1;
        }
        assert!((100..200).contains(&looks), "{looks} times in ten seconds");
        assert_eq!((Unarmed::of(0), Unarmed::of(80_000_000)), (2_000_000, 10_000_000));
    }
}
