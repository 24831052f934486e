//! Loom runs every interleaving of a model, with every value that a load may return. This module
//! has what the models of all crates share.
//!
//! # The asymmetric fence
//!
//! `membarrier` gives a full barrier at *some* place in the instruction stream of each running
//! thread, during the call. A light side does "store X; light; load Y", and a heavy side "store Y;
//! heavy; load X". If the barrier falls before the light side's load of Y, that load sees the
//! heavy side's store. If it falls after that load, the store of X is visible before the heavy
//! side goes on. So at least one of the two loads sees the store of the other side.
//!
//! A thread that has called [`is_light`] is modelled exactly: its light fence, and a heavy fence
//! for each such thread, take and release one mutex of that thread. The later of the two sees the
//! earlier one. A light fence orders nothing else: neither against another light one nor against a
//! sleeper that runs no heavy fence.
//!
//! For other threads both halves are sequentially consistent fences. Such a model is stronger than
//! `membarrier` in one respect: it also orders two light sides. A protocol that relied on that
//! would pass here and fail on a machine. So each light fence in the code names the heavy fence
//! that it pairs with, and those models require no order between light sides.
//!
//! # Bounds
//!
//! Most models are bounded to three or four preemptions for two threads (a switch away from a
//! thread that could go on). Bugs of this kind need one or two. Three threads that spin for a token
//! are bounded to one, because with two loom does not finish.
//!
//! Loom runs each thread in program order: a load never returns a value that is stored later. So
//! loom cannot show that a load which only guards an overwrite must be an acquire (for example the
//! sender's load of the receiver's position).

#[cfg(test)]
mod arrivals;
#[cfg(test)]
mod block;
#[cfg(test)]
mod doorbell;
#[cfg(test)]
mod handover;
#[cfg(test)]
mod idle;
#[cfg(test)]
mod inside;
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

/// At most this many threads of a model may be light.
const LIGHT: usize = 3;
loom::lazy_static! {
    static ref BARRIERS: [Mutex<()>; LIGHT] = core::array::from_fn(|_| Mutex::new(()));
}
loom::thread_local! {
    static ME: Cell<Option<usize>> = Cell::new(None);
}
std::thread_local! {
    /// The step that a model leaves out. The model must then fail. (Loom runs all threads of a
    /// model on one thread.)
    static LEFT_OUT: Cell<Option<Step>> = const { Cell::new(None) };
    /// The number of light threads in the running model.
    static LIGHTS: Cell<usize> = const { Cell::new(0) };
}

/// The calling thread of the model is the `n`-th light one of [`with_light`].
pub fn is_light(n: usize) {
    ME.with(|me| me.set(Some(n)));
}

/// `f` runs models in which this many threads call [`is_light`].
pub fn with_light(threads: usize, f: impl FnOnce()) {
    assert!(threads <= LIGHT);
    let _reset = Reset;
    LIGHTS.with(|n| n.set(threads));
    f();
}

/// This also runs after a panic, because the next test may run on this thread.
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

/// Runs `f` in every possible order, with at most `preemptions` if given.
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

/// `futex(2)`: the comparison and the sleep are one step, as seen by a wake-up.
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
