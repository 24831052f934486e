//! The memory that the scheduler shares with the processes of a program. It
//! carries orders and answers, so that no descriptor of the programs under
//! test is taken by the tester.

use crate::program::{ACTORS, ARGS};
use anyhow::{Context, Result};
use fsocket_sys as sys;
use std::sync::atomic::{AtomicI32, AtomicI64, AtomicU32, Ordering::*};

/// Bytes of one transfer at most; the buffer has room for a guard behind.
pub const TRANSFER: usize = 64 * 1024;
pub const GUARD: usize = 64;
const DATA: usize = TRANSFER + 4096;
/// Results beside the return value.
pub const AUX: usize = 80;

/// [`Slot::state`].
pub mod state {
    /// Nobody there.
    pub const FREE: u32 = 0;
    /// Waits for an order.
    pub const IDLE: u32 = 1;
    /// An order is there.
    pub const GO: u32 = 2;
    /// In the call.
    pub const BUSY: u32 = 3;
    /// The answer is there.
    pub const DONE: u32 = 4;
    /// The actor waits until the kernel is through with the call, or with those before.
    pub const SETTLING: u32 = 5;
}

/// Orders to a fork server: start an actor; collect the dead.
pub const SPAWN: u32 = 1000;
pub const REAP: u32 = 1001;

/// One actor, or one fork server. Everything is published by `state`.
#[repr(C)]
pub struct Slot {
    pub state: AtomicU32,
    pub pid: AtomicI32,
    pub tid: AtomicI32,
    pub call: AtomicU32,
    /// Number of the step; it decides the bytes that are sent.
    pub step: AtomicU32,
    pub n_args: AtomicU32,
    pub args: [AtomicI64; ARGS],
    pub ret: AtomicI64,
    pub errno: AtomicI32,
    pub n_aux: AtomicU32,
    pub aux: [AtomicI64; AUX],
    /// Bytes of `data` that belong to the answer.
    pub len: AtomicU32,
    /// Handled USR1, USR2, PIPE.
    pub signals: [AtomicU32; 3],
    data: std::cell::UnsafeCell<[u8; DATA]>,
}

#[repr(C)]
pub struct Shared {
    /// Counts answers: the scheduler sleeps on it.
    pub answers: AtomicU32,
    /// Number of the run, which is a part of names.
    pub run: AtomicU32,
    slots: [Slot; ACTORS + 2],
}

// SAFETY: all but `data` is atomic; `data` belongs to the actor while its state
// is GO or BUSY, else to the scheduler.
unsafe impl Sync for Shared {}

/// Makes the memory; returns it with its descriptor.
pub fn create() -> Result<(&'static Shared, i32)> {
    let fd = sys::memfd_create(c"differential", libc::MFD_CLOEXEC).map_err(os)?;
    sys::ftruncate(fd, std::mem::size_of::<Shared>()).map_err(os)?;
    Ok((map(fd)?, fd))
}

/// Maps it by a path such as `/proc/1/fd/3`; leaves no descriptor behind.
pub fn open(path: &str) -> Result<&'static Shared> {
    use std::os::fd::AsRawFd;
    let file = std::fs::File::options().read(true).write(true).open(path).context("shared memory")?;
    map(file.as_raw_fd())
}

fn map(fd: i32) -> Result<&'static Shared> {
    let size = std::mem::size_of::<Shared>();
    let at = sys::mmap(size, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, fd, 0).map_err(os)?;
    // SAFETY: a mapping of that size which is never undone; zero is valid.
    Ok(unsafe { &*(at as *const Shared) })
}

fn os(e: sys::Errno) -> std::io::Error {
    std::io::Error::from_raw_os_error(e.raw())
}

impl Shared {
    pub fn slot(&self, i: usize) -> &Slot {
        &self.slots[i]
    }
    /// Fork server of stock (0) or of preloaded (1) processes.
    pub fn server(&self, flavour: usize) -> &Slot {
        &self.slots[ACTORS + flavour]
    }
    /// An answer is in `slot`.
    pub fn answered(&self, slot: &Slot) {
        slot.state.store(state::DONE, Release);
        self.answers.fetch_add(1, Release);
        sys::futex_wake(&self.answers, 1);
    }
}

impl Slot {
    /// Hand over an order.
    pub fn order(&self, call: u32, step: u32, args: &[i64]) {
        self.call.store(call, Relaxed);
        self.step.store(step, Relaxed);
        self.n_args.store(args.len() as u32, Relaxed);
        for (to, v) in self.args.iter().zip(args) {
            to.store(*v, Relaxed);
        }
        self.state.store(state::GO, Release);
        sys::futex_wake(&self.state, 1);
    }
    /// Wait for an order; false: none came for `ns` nanoseconds.
    pub fn next_order(&self, ns: u64) -> bool {
        let end = sys::now_ns() + ns;
        loop {
            let s = self.state.load(Acquire);
            if s == state::GO {
                self.state.store(state::BUSY, Release);
                return true;
            }
            let now = sys::now_ns();
            if now >= end {
                return false;
            }
            let _ = sys::futex_wait(&self.state, s, Some(end - now));
        }
    }
    pub fn arg(&self, i: usize) -> i64 {
        self.args[i].load(Relaxed)
    }
    pub fn put_aux(&self, v: i64) {
        let n = self.n_aux.load(Relaxed);
        if let Some(a) = self.aux.get(n as usize) {
            a.store(v, Relaxed);
            self.n_aux.store(n + 1, Relaxed);
        }
    }
    /// The buffer.
    ///
    /// # Safety
    /// Only for whom the state says it belongs to, and one reference at a time.
    #[allow(clippy::mut_from_ref)] // the state is the lock
    pub unsafe fn data(&self) -> &mut [u8; DATA] {
        // SAFETY: the state says that it is this process's, and there is one reference at a time.
        unsafe { &mut *self.data.get() }
    }
    pub fn forget(&self) {
        self.state.store(state::FREE, Relaxed);
        self.pid.store(0, Relaxed);
        self.tid.store(0, Relaxed);
        for s in &self.signals {
            s.store(0, Relaxed);
        }
    }
}
