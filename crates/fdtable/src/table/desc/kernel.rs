//! A kernel connection with a process on this host, which may move to shared memory; see `migrate::upgrade`.

use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicU8};
use fsocket_sync::handover::{Calls, Entry};

/// State of descriptions of kind Kernel.
pub struct KernelConn {
    using: Calls,
    calls: AtomicU32,
    tries: AtomicU32,
    next_try: AtomicU32,
    passed_as: AtomicU64,
    across: AtomicBool,
    heard: AtomicBool,
    tried: AtomicU8,
    waits: AtomicU32,
    by_fork: AtomicBool,
    unconnected: AtomicBool,
}

impl KernelConn {
    pub(super) fn reset(&self) {
        self.passed_as.store(0, Relaxed);
        self.tried.store(0, Relaxed);
        self.unconnected.store(false, Relaxed);
    }

    /// Nothing is decided and no call was counted; the call with number `first` tries to move.
    pub fn restart(&self, first: u32) {
        self.using.reset();
        self.calls.store(0, Relaxed);
        self.tries.store(0, Relaxed);
        self.waits.store(0, Relaxed);
        self.next_try.store(first, Relaxed);
    }
    pub(super) fn begin(&self, first: u32) {
        self.restart(first);
        for flag in [&self.across, &self.heard, &self.by_fork, &self.unconnected] {
            flag.store(false, Relaxed);
        }
    }

    /// A call begins. `None`: another thread is just deciding about the path, so the caller waits
    /// a moment.
    pub fn enter(&self) -> Entry {
        self.using.enter()
    }
    pub fn leave(&self) {
        self.using.leave();
    }
    /// Keeps new calls out, unless a call is running. True: the caller must call
    /// [`KernelConn::decided`] afterwards.
    pub fn decide(&self) -> bool {
        self.using.decide()
    }
    /// The decision is over, and calls may begin. `never`: there will be no further try.
    pub fn decided(&self, never: bool) {
        self.using.decided(never);
    }
    /// The connection stays in the kernel. False: another thread is just deciding about the path.
    pub fn forbid(&self) -> bool {
        self.unconnected.store(false, Relaxed);
        self.using.forbid()
    }
    /// The socket is not connected yet. It may move once it is connected, unless [`KernelConn::forbid`] comes first.
    pub fn await_connect(&self) {
        self.begin(0);
        self.using.forbid();
        self.unconnected.store(true, Relaxed);
    }
    pub fn awaits_connect(&self) -> bool {
        self.unconnected.load(Relaxed)
    }
    /// Does the connection stay on the kernel for good?
    pub fn stays(&self) -> bool {
        self.using.never()
    }
    /// Does the connection stay in the kernel in every process of the fork group?
    pub fn stays_everywhere(&self) -> bool {
        self.stays() && self.passed_as() == 0 && !self.awaits_connect()
    }
    /// Resets the decision and the running calls.
    pub fn forget_decision(&self) {
        self.using.reset();
    }

    /// The sum of the weights of all calls so far.
    pub fn calls(&self) -> u32 {
        self.calls.load(Relaxed)
    }
    /// Adds `weight`. Returns the new sum.
    pub fn count_call(&self, weight: u32) -> u32 {
        self.calls.fetch_add(weight, Relaxed) + weight
    }

    /// Number of tries to move.
    pub fn tries(&self) -> u32 {
        self.tries.load(Relaxed)
    }
    /// Adds `n` tries. Returns the number before.
    pub fn count_tries(&self, n: u32) -> u32 {
        self.tries.fetch_add(n, Relaxed)
    }
    pub fn forget_tries(&self) {
        self.tries.store(0, Relaxed);
    }

    /// The number of the call that tries next.
    pub fn next_try(&self) -> u32 {
        self.next_try.load(Relaxed)
    }
    pub fn set_next_try(&self, call: u32) {
        self.next_try.store(call, Relaxed);
    }
    /// The next try does not come before the call with this number.
    pub fn put_off_to(&self, call: u32) {
        self.next_try.fetch_max(call, Relaxed);
    }

    /// May the connection's other end be in another network namespace?
    pub fn is_across(&self) -> bool {
        self.across.load(Relaxed)
    }
    pub fn set_across(&self, across: bool) {
        self.across.store(across, Relaxed);
    }

    /// Notes whether a call receives or sends. True: the previous call did the opposite.
    pub fn turns(&self, receives: bool) -> bool {
        let turns = self.heard.load(Relaxed) != receives;
        if turns {
            self.heard.store(receives, Relaxed);
        }
        turns
    }

    /// The state in which the connection last tried to move; see `upgrade::worth`.
    pub fn tried(&self) -> u8 {
        self.tried.load(Relaxed)
    }
    pub fn set_tried(&self, what: u8) {
        self.tried.store(what, Relaxed);
    }

    /// The next `n` receives may wait in a way that lets the connection move meanwhile.
    pub fn allow_waits(&self, n: u32) {
        self.waits.store(n, Relaxed);
    }
    /// May one more receive wait in that way? (If several threads ask at the same time, one wait
    /// too many may be allowed.)
    pub fn may_wait(&self) -> bool {
        let left = self.waits.load(Relaxed);
        left != 0 && {
            self.waits.store(left - 1, Relaxed);
            true
        }
    }

    /// This process has inherited the connection by a fork, and has not told the monitor yet.
    pub fn comes_by_fork(&self) {
        self.by_fork.store(true, Relaxed);
    }
    /// Must this process tell the monitor now that it has the connection? (True once.)
    pub fn arrives(&self) -> bool {
        self.by_fork.load(Relaxed) && self.by_fork.swap(false, Relaxed)
    }

    /// The socket's cookie (SO_COOKIE), if the socket was passed between processes and the
    /// monitor counts its holders. 0: it was not.
    pub fn passed_as(&self) -> u64 {
        self.passed_as.load(Relaxed)
    }
    pub fn set_passed_as(&self, cookie: u64) {
        self.passed_as.store(cookie, Relaxed);
    }
}
