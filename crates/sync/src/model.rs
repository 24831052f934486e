//! Loom: it runs every interleaving and every value a load may return. Here
//! is what the models of all crates share.
//!
//! # The asymmetric fence
//!
//! `membarrier` gives a full barrier at *some* place in the instruction stream of each running
//! thread, during the call. For a light side "store X; light; load Y" against a
//! heavy side "store Y; heavy; load X" there are three places: before the
//! store of X, then the load of Y comes after the heavy side's store and sees
//! it; between the two; after the load, then the store of X is visible before the heavy side goes
//! on. So either the load sees what the heavy side stored before, or the heavy side sees what was
//! stored before the light fence.
//!
//! A thread that has said [`is_light`] is modelled exactly so: its light fence, and a heavy fence
//! for each such thread, take and release one mutex of that thread's. Whichever is first is seen by
//! the other, and a light fence orders nothing else: neither against another light one nor against a
//! sleeper that runs no heavy fence.
//!
//! In other threads both halves are sequentially consistent fences. That allows what `membarrier`
//! allows, and is stronger between two light sides: a protocol that leans on two light fences passes
//! here and fails on a machine. So each use names the heavy fence that it pairs with, and those
//! models put no property on light sides among themselves.
//!
//! # Bounds
//!
//! Most models are bounded to a number of preemptions (a switch away from a
//! thread that could go on), three or four for two threads; bugs of this kind
//! need one or two. Three threads that spin for a token are bounded to one:
//! with two, loom does not come to an end.
//!
//! Loom runs each thread in program order: a load never returns what is stored
//! later. So it cannot tell that a load which only guards an overwrite must be
//! an acquire (the sender's look at the receiver's position).

#[cfg(test)]
mod arrivals;
#[cfg(test)]
mod doorbell;
#[cfg(test)]
mod handover;
#[cfg(test)]
mod idle;
#[cfg(test)]
mod news;
#[cfg(test)]
mod one;
#[cfg(test)]
mod segments;
#[cfg(test)]
mod steal;
#[cfg(test)]
mod token;
#[cfg(test)]
mod trim;
#[cfg(test)]
mod unsubscribed;

use crate::atomic::{fence, AtomicU32, Ordering};
use crate::step::Step;
use core::cell::Cell;
use loom::sync::{Condvar, Mutex};

/// Threads of a model that may be light, at most.
const LIGHT: usize = 3;
loom::lazy_static! {
    static ref BARRIERS: [Mutex<()>; LIGHT] = core::array::from_fn(|_| Mutex::new(()));
}
loom::thread_local! {
    static ME: Cell<Option<usize>> = Cell::new(None);
}
std::thread_local! {
    /// Of a model that must fail: what it leaves out. (Loom runs all threads of a model on one.)
    static LEFT_OUT: Cell<Option<Step>> = const { Cell::new(None) };
    /// Of the model that runs: how many of its threads are light.
    static LIGHTS: Cell<usize> = const { Cell::new(0) };
}

/// The calling thread of the model, one of [`with_light`]'s, is the `n`-th light one.
pub fn is_light(n: usize) {
    ME.with(|me| me.set(Some(n)));
}

/// `f` runs models in which so many threads say [`is_light`].
pub fn with_light(threads: usize, f: impl FnOnce()) {
    assert!(threads <= LIGHT);
    let _reset = Reset;
    LIGHTS.with(|n| n.set(threads));
    f();
}

/// Also after a panic: the next test may run on this thread.
struct Reset;
impl Drop for Reset {
    fn drop(&mut self) {
        LIGHTS.with(|n| n.set(0));
        LEFT_OUT.with(|s| s.set(None));
    }
}

/// See the module.
pub fn light_fence() {
    match ME.with(|me| me.get()) {
        Some(n) => drop(BARRIERS[n].lock().unwrap()),
        None => fence(Ordering::SeqCst),
    }
}

/// `f` runs models that leave out `step`.
pub fn without(step: Step, f: impl FnOnce()) {
    let _reset = Reset;
    LEFT_OUT.with(|s| s.set(Some(step)));
    f();
}

pub fn leaves_out(step: Step) -> bool {
    LEFT_OUT.with(|s| s.get()) == Some(step)
}

/// Run `f` in every way there is, with at most `preemptions` if given.
pub fn every_way(preemptions: impl Into<Option<usize>>, f: impl Fn() + Sync + Send + 'static) {
    let mut b = loom::model::Builder::new();
    b.preemption_bound = preemptions.into();
    b.max_branches = 20_000;
    b.check(f);
}

/// The heavy half of the fence.
pub fn membarrier() {
    fence(Ordering::SeqCst);
    for n in 0..LIGHTS.with(Cell::get) {
        drop(BARRIERS[n].lock().unwrap());
    }
    fence(Ordering::SeqCst);
}

/// `futex(2)`: the comparison and the sleep are one step against a wake-up.
#[derive(Default)]
pub struct Futex {
    bucket: Mutex<()>,
    woken: Condvar,
}
impl Futex {
    pub fn wait(&self, word: &AtomicU32, expected: u32) {
        let bucket = self.bucket.lock().unwrap();
        if word.load(Ordering::Relaxed) == expected {
            drop(self.woken.wait(bucket).unwrap());
        }
    }
    pub fn wake_all(&self) {
        let _bucket = self.bucket.lock().unwrap();
        self.woken.notify_all();
    }
}
