//! The memory that the scheduler shares with the processes of a program. It carries orders and
//! answers, so the tester takes no descriptor of the programs under test.

use crate::program::{ACTORS, ARGS};
use anyhow::{Context, Result};
use fsocket_sys as sys;
use std::sync::atomic::{AtomicI32, AtomicI64, AtomicU32, Ordering::*};

/// Upper limit of the bytes of one transfer. The buffer has room for a guard behind them.
pub const TRANSFER: usize = 64 * 1024;
pub const GUARD: usize = 64;
const DATA: usize = TRANSFER + 4096;
/// Upper limit of the results besides the return value.
pub const AUX: usize = 80;

/// The values of [`Slot::state`].
pub mod state {
    /// No actor uses the slot.
    pub const FREE: u32 = 0;
    /// The actor waits for an order.
    pub const IDLE: u32 = 1;
    /// An order is there.
    pub const GO: u32 = 2;
    /// The actor makes the call.
    pub const BUSY: u32 = 3;
    /// The answer is there.
    pub const DONE: u32 = 4;
    /// The actor waits until the kernel has completed the effects of the call, or of earlier calls.
    pub const SETTLING: u32 = 5;
}

/// Orders to a fork server: start an actor; collect ended children.
pub const SPAWN: u32 = 1000;
pub const REAP: u32 = 1001;

/// The slot of one actor or one fork server. `state` publishes all other fields.
#[repr(C)]
pub struct Slot {
    pub state: AtomicU32,
    pub pid: AtomicI32,
    pub tid: AtomicI32,
    pub call: AtomicU32,
    /// Number of the step, which decides the bytes that are sent.
    pub step: AtomicU32,
    pub n_args: AtomicU32,
    pub args: [AtomicI64; ARGS],
    pub ret: AtomicI64,
    pub errno: AtomicI32,
    pub n_aux: AtomicU32,
    pub aux: [AtomicI64; AUX],
    /// Bytes of `data` that belong to the answer.
    pub len: AtomicU32,
    /// Numbers of handled signals: USR1, USR2, PIPE.
    pub signals: [AtomicU32; 3],
    data: std::cell::UnsafeCell<[u8; DATA]>,
}

#[repr(C)]
pub struct Shared {
    /// Counts answers. The scheduler sleeps on this word.
    pub answers: AtomicU32,
    /// Number of the run, which is part of socket names.
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

/// Maps the memory by a path such as `/proc/1/fd/3`, and leaves no descriptor behind.
pub fn open(path: &str) -> Result<&'static Shared> {
    use std::os::fd::AsRawFd;
    let file = std::fs::File::options().read(true).write(true).open(path).context("shared memory")?;
    map(file.as_raw_fd())
}

fn map(fd: i32) -> Result<&'static Shared> {
    let size = std::mem::size_of::<Shared>();
    let at = sys::mmap(size, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, fd, 0).map_err(os)?;
    // SAFETY: the mapping has that size and is never undone, and all-zero bytes are valid.
    Ok(unsafe { &*(at as *const Shared) })
}

fn os(e: sys::Errno) -> std::io::Error {
    std::io::Error::from_raw_os_error(e.raw())
}

impl Shared {
    pub fn slot(&self, i: usize) -> &Slot {
        &self.slots[i]
    }
    /// The slot of the fork server for stock (0) or preloaded (1) processes.
    pub fn server(&self, flavour: usize) -> &Slot {
        &self.slots[ACTORS + flavour]
    }
    /// Publishes the answer in `slot`.
    pub fn answered(&self, slot: &Slot) {
        slot.state.store(state::DONE, Release);
        self.answers.fetch_add(1, Release);
        sys::futex_wake(&self.answers, 1);
    }
}

impl Slot {
    /// Hands over an order.
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
    /// Waits for an order. Returns false if none came for `ns` nanoseconds.
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
    /// The data buffer.
    ///
    /// # Safety
    /// Only the owner according to the state may call this, with one reference at a time.
    #[allow(clippy::mut_from_ref)] // the state is the lock
    pub unsafe fn data(&self) -> &mut [u8; DATA] {
        // SAFETY: the state names one owner of the buffer, which has only this reference.
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
