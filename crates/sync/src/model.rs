//! Loom: it runs every interleaving and every value a load may return. Here
//! is what the models of all crates share.
//!
//! # The asymmetric fence
//!
//! Here both halves are sequentially consistent fences. What `membarrier` gives
//! is a full barrier at *some* place in the instruction stream of each running
//! thread, during the call. For a light side "store X; light; load Y" against a
//! heavy side "store Y; heavy; load X" there are three places: before the
//! store of X, then the load of Y comes after the heavy side's store and sees
//! it; between the two, which is the fence of the model; after the load, then
//! the store of X is visible before the heavy side goes on. The first two
//! outcomes and the third are just the ones that two sequentially consistent
//! fences allow, so what holds here holds with `membarrier` as well.
//!
//! It is not faithful in the other direction: the model's light fence orders
//! two *light* sides against each other, and the real one, which only stops the
//! compiler, does not. A protocol that leans on two light fences passes here
//! and fails on a machine. So each use names the heavy fence that it pairs
//! with, and the models below put no property on publishers among themselves.
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
mod aloof;
#[cfg(test)]
mod doorbell;
#[cfg(test)]
mod handover;
#[cfg(test)]
mod nap;
#[cfg(test)]
mod steal;
#[cfg(test)]
mod token;

use crate::atomic::{AtomicU32, Ordering};
use loom::sync::{Condvar, Mutex};

/// Run `f` in every way there is, with at most `preemptions` if given.
pub fn every_way(preemptions: impl Into<Option<usize>>, f: impl Fn() + Sync + Send + 'static) {
    let mut b = loom::model::Builder::new();
    b.preemption_bound = preemptions.into();
    b.max_branches = 20_000;
    b.check(f);
}

/// The heavy half of the fence.
pub fn membarrier() {
    crate::atomic::fence(Ordering::SeqCst);
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
