//! A kernel connection with somebody on this host, which may go over to shared memory; see `migrate::upgrade`.

use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicU8};
use fsocket_sync::handover::{Calls, Entry};

/// State of kind Kernel.
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

    /// Nothing is decided, no call has been made, and the call with number `first` tries.
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

    /// A call begins; `None`: wait a moment, it is being decided where the connection goes.
    pub fn enter(&self) -> Entry {
        self.using.enter()
    }
    pub fn leave(&self) {
        self.using.leave();
    }
    /// Keeps calls out, unless one is under way. True: [`KernelConn::decided`] follows.
    pub fn decide(&self) -> bool {
        self.using.decide()
    }
    /// `never`: nor will it be tried again.
    pub fn decided(&self, never: bool) {
        self.using.decided(never);
    }
    /// It stays the kernel's. False: that is just being decided.
    pub fn forbid(&self) -> bool {
        self.unconnected.store(false, Relaxed);
        self.using.forbid()
    }
    /// The socket is not connected yet. It may go over once it is connected, unless [`KernelConn::forbid`] comes first.
    pub fn await_connect(&self) {
        self.begin(0);
        self.using.forbid();
        self.unconnected.store(true, Relaxed);
    }
    pub fn awaits_connect(&self) -> bool {
        self.unconnected.load(Relaxed)
    }
    /// It stays the kernel's for good.
    pub fn stays(&self) -> bool {
        self.using.never()
    }
    /// The connection stays in the kernel in every process of the fork group.
    pub fn stays_everywhere(&self) -> bool {
        self.stays() && self.passed_as() == 0 && !self.awaits_connect()
    }
    /// No decision has been made, and no call is under way.
    pub fn forget_decision(&self) {
        self.using.reset();
    }

    /// Calls so far, each by its weight.
    pub fn calls(&self) -> u32 {
        self.calls.load(Relaxed)
    }
    /// Returns the sum with `weight`.
    pub fn count_call(&self, weight: u32) -> u32 {
        self.calls.fetch_add(weight, Relaxed) + weight
    }

    /// Tries to go over.
    pub fn tries(&self) -> u32 {
        self.tries.load(Relaxed)
    }
    /// Returns how many there were before.
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
    /// Not before this call.
    pub fn put_off_to(&self, call: u32) {
        self.next_try.fetch_max(call, Relaxed);
    }

    /// Its other end may be in another network namespace.
    pub fn is_across(&self) -> bool {
        self.across.load(Relaxed)
    }
    pub fn set_across(&self, across: bool) {
        self.across.store(across, Relaxed);
    }

    /// A call receives, or sends. True: the one before did the other thing.
    pub fn turns(&self, receives: bool) -> bool {
        let turns = self.heard.load(Relaxed) != receives;
        if turns {
            self.heard.store(receives, Relaxed);
        }
        turns
    }

    /// Its last try; see `upgrade::worth`.
    pub fn tried(&self) -> u8 {
        self.tried.load(Relaxed)
    }
    pub fn set_tried(&self, what: u8) {
        self.tried.store(what, Relaxed);
    }

    /// So many of the receives to come may wait in a way in which the connection can go over.
    pub fn allow_waits(&self, n: u32) {
        self.waits.store(n, Relaxed);
    }
    /// May one more? (Threads that ask at once may get one too many.)
    pub fn may_wait(&self) -> bool {
        let left = self.waits.load(Relaxed);
        left != 0 && {
            self.waits.store(left - 1, Relaxed);
            true
        }
    }

    /// This process has it by a fork, and has not told the monitor yet.
    pub fn comes_by_fork(&self) {
        self.by_fork.store(true, Relaxed);
    }
    /// Is it to be told now?
    pub fn arrives(&self) -> bool {
        self.by_fork.load(Relaxed) && self.by_fork.swap(false, Relaxed)
    }

    /// Its number (SO_COOKIE) if it has come from, or gone to, another process, and the monitor counts who has it; 0: no.
    pub fn passed_as(&self) -> u64 {
        self.passed_as.load(Relaxed)
    }
    pub fn set_passed_as(&self, cookie: u64) {
        self.passed_as.store(cookie, Relaxed);
    }
}
