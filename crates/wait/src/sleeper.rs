//! The waker of a thread that sleeps on several things.

use fsocket_shm::waker::{self, Waker};
use fsocket_sync::doorbell::Batch;

/// A waker for one sleep.
pub struct Sleeper {
    pub(crate) waker: &'static Waker,
    pub(crate) rang: bool,
}

impl Sleeper {
    pub fn new() -> Option<Self> {
        let waker = waker::get()?;
        waker.for_one_sleep();
        Some(Sleeper { waker, rang: false })
    }

    /// For an `accept` that sleeps on this listener only.
    pub fn in_accept(listener: u64) -> Option<Self> {
        let waker = waker::get()?;
        waker.for_listener(listener);
        Some(Sleeper { waker, rang: false })
    }

    /// Calls `arm`, which asks peers to ring and says in each channel that the waker sleeps
    /// (`Chan::sleep_on`). What a peer publishes from then on rings the waker. The caller must
    /// look again afterwards, because what was published before does not ring.
    pub fn arm<R>(&self, arm: impl FnOnce(&'static Waker, &mut Batch<'static>) -> R) -> R {
        let mut batch = waker::arming();
        let r = arm(self.waker, &mut batch);
        batch.fence();
        r
    }

    /// Is `f` true for this waker?
    pub fn is(&self, f: impl FnOnce(&'static Waker) -> bool) -> bool {
        f(self.waker)
    }

    /// Ends the sleep: calls `disarm`, and gives the waker back.
    pub fn end(self, disarm: impl FnOnce(&'static Waker)) {
        disarm(self.waker);
        // A late ring, which comes after this, ends a later sleep without a reason; that does no
        // harm.
        if self.rang {
            self.waker.clear();
        }
        self.waker.release();
    }
}
