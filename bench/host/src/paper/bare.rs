//! Rows of the bare machine: the costs of operations without sockets.

use super::experiment::{Claim, Experiment, Measure, STOCK};
use crate::child::pin_self;
use crate::scenario::Unit;
use crate::step::{Step, Values};
use crate::worker::futex::futex;
use anyhow::{anyhow, Result};
use rustix::mm::{mmap, MapFlags, ProtFlags};
use std::hint::black_box;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

/// SocksDirect, table 2: its rows that need neither a card nor another kernel.
pub fn operations() -> Vec<Experiment> {
    let row = |name: &'static str, us: f64, run: fn(&Step) -> Result<f64>| {
        let claim = Claim::Value { system: us * 1e3, source: "table 2" };
        Experiment::new(name, move |step| Ok(Values::from([("ns", run(step)?)])))
            .ways(STOCK)
            .not_counted()
            .measures([Measure::lower("ns", "", Unit::Nanoseconds).claims(claim)])
    };
    vec![
        row("cache line to another core", 0.03, cache_line),
        row("system call", 0.2, |step| on(step.client_cpu(), system_call)),
        row("copy of 4 KiB", 0.4, |step| on(step.client_cpu(), || copy(4 << 10))),
        row("copy of 128 KiB", 13.0, |step| on(step.client_cpu(), || copy(128 << 10))),
        row("cooperative switch of threads", 0.52, switch),
        row("wake-up of another core", 2.8, wake_up),
        row("pipe, round trip", 8.0, pipe),
        row("spinlock, no contention", 0.10, |step| on(step.client_cpu(), spinlock)),
        row("poll of 32 empty queues", 0.04, |step| on(step.client_cpu(), poll_queues)),
        row("allocation of a buffer", 0.13, |step| on(step.client_cpu(), allocate)),
        row("mapping of 4 KiB", 0.78, |step| on(step.client_cpu(), || map(4 << 10))?),
        row("mapping of 128 KiB", 1.2, |step| on(step.client_cpu(), || map(128 << 10))?),
    ]
}

/// Mean time of a call in nanoseconds, over `n` calls.
fn each(n: u64, mut call: impl FnMut()) -> f64 {
    (0..n / 10).for_each(|_| call());
    let started = Instant::now();
    (0..n).for_each(|_| call());
    started.elapsed().as_secs_f64() * 1e9 / n as f64
}

/// Runs `work` on one CPU.
fn on<T: Send>(cpu: usize, work: impl FnOnce() -> T + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let pinned = scope.spawn(|| pin_self(cpu).map(|()| work()));
        Ok(pinned.join().map_err(|_| anyhow!("a thread panicked"))??)
    })
}

/// Runs both closures at once, each on its CPU, and returns the result of the first.
fn both(cpus: [usize; 2], one: impl FnOnce() -> f64 + Send, other: impl FnOnce() + Send) -> Result<f64> {
    std::thread::scope(|scope| {
        let other = scope.spawn(|| on(cpus[1], other));
        let done = on(cpus[0], one);
        other.join().map_err(|_| anyhow!("a thread panicked"))??;
        done
    })
}

fn system_call() -> f64 {
    each(200_000, || {
        // SAFETY: the call takes no pointers.
        black_box(unsafe { libc::syscall(libc::SYS_getppid) });
    })
}

fn copy(size: usize) -> f64 {
    let (from, mut to) = (vec![1u8; size], vec![0u8; size]);
    each(if size > 64 << 10 { 5_000 } else { 100_000 }, || {
        to.copy_from_slice(black_box(&from));
        black_box(&mut to);
    })
}

/// Half a round trip of a word between two CPUs, in nanoseconds.
fn cache_line(step: &Step) -> Result<f64> {
    #[repr(align(128))]
    struct Line(AtomicU64);
    const TURNS: u64 = 200_000;
    let lines = [Line(AtomicU64::new(0)), Line(AtomicU64::new(0))];
    let wait = |line: &Line, n: u64| {
        while line.0.load(Ordering::Acquire) != n {
            std::hint::spin_loop();
        }
    };
    let ask = || {
        let mut n = 0;
        each(TURNS, || {
            n += 1;
            lines[0].0.store(n, Ordering::Release);
            wait(&lines[1], n);
        })
    };
    let answer = || {
        for n in 1..=TURNS + TURNS / 10 {
            wait(&lines[0], n);
            lines[1].0.store(n, Ordering::Release);
        }
    };
    Ok(both([step.client_cpu(), step.server_cpu()], ask, answer)? / 2.0)
}

/// A switch from one thread to another one on the same CPU through `sched_yield`, in nanoseconds.
fn switch(step: &Step) -> Result<f64> {
    const TURNS: u64 = 50_000;
    let turn = AtomicU64::new(0);
    let run = |me: u64, turns: u64| {
        for n in 0..turns {
            while turn.load(Ordering::Acquire) != 2 * n + me {
                std::thread::yield_now();
            }
            turn.store(2 * n + me + 1, Ordering::Release);
        }
    };
    let started = Instant::now();
    let first = || {
        run(0, TURNS);
        started.elapsed().as_secs_f64() * 1e9 / (2 * TURNS) as f64
    };
    both([step.client_cpu(); 2], first, || run(1, TURNS))
}

/// Half a round trip of two threads that sleep on a futex, on two CPUs, in nanoseconds.
fn wake_up(step: &Step) -> Result<f64> {
    const TURNS: u64 = 5_000;
    let words = [AtomicU32::new(0), AtomicU32::new(0)];
    let wait = |word: &AtomicU32, n: u32| {
        while word.load(Ordering::Acquire) != n {
            futex(word, libc::FUTEX_WAIT, n - 1);
        }
    };
    let set = |word: &AtomicU32, n: u32| {
        word.store(n, Ordering::Release);
        futex(word, libc::FUTEX_WAKE, 1);
    };
    let ask = || {
        let mut n = 0;
        each(TURNS, || {
            n += 1;
            set(&words[0], n);
            wait(&words[1], n);
        })
    };
    let answer = || {
        for n in 1..=(TURNS + TURNS / 10) as u32 {
            wait(&words[0], n);
            set(&words[1], n);
        }
    };
    Ok(both([step.client_cpu(), step.server_cpu()], ask, answer)? / 2.0)
}

fn spinlock() -> f64 {
    let lock = AtomicU32::new(0);
    each(1_000_000, || {
        while lock.compare_exchange_weak(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {}
        lock.store(0, Ordering::Release);
    })
}

/// Looks at a word of each of 32 queues. Each word is on a cache line of its own.
fn poll_queues() -> f64 {
    let queues: Vec<[AtomicU64; 16]> = (0..32).map(|_| std::array::from_fn(|_| AtomicU64::new(0))).collect();
    each(200_000, || {
        black_box(queues.iter().filter(|q| q[0].load(Ordering::Acquire) != 0).count());
    })
}

fn allocate() -> f64 {
    each(500_000, || drop(black_box(Vec::<u8>::with_capacity(2048))))
}

/// Maps `size` bytes of shared memory over an existing mapping, with all pages populated.
fn map(size: usize) -> Result<f64> {
    let file = rustix::fs::memfd_create("fastsocket-bench", rustix::fs::MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&file, size as u64)?;
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe { mmap(std::ptr::null_mut(), size, prot, MapFlags::SHARED | MapFlags::POPULATE, &file, 0)? };
    let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::POPULATE;
    let ns = each(5_000, || {
        // SAFETY: only this function's own mapping is replaced, and nothing refers to it.
        let again = unsafe { mmap(at, size, prot, flags, &file, 0) };
        assert!(again.is_ok_and(|again| again == at));
    });
    // SAFETY: this function's own mapping.
    unsafe { rustix::mm::munmap(at, size)? };
    Ok(ns)
}

/// A round trip of 8 bytes through two pipes between two CPUs, in nanoseconds.
fn pipe(step: &Step) -> Result<f64> {
    const TURNS: u64 = 5_000;
    let (mut from_one, mut to_other) = std::io::pipe()?;
    let (mut from_other, mut to_one) = std::io::pipe()?;
    let ask = move || {
        let mut message = [0; 8];
        each(TURNS, || {
            let done = to_other.write_all(&message).and_then(|()| from_other.read_exact(&mut message));
            done.expect("both ends of the pipes are open");
        })
    };
    let answer = move || {
        let mut message = [0; 8];
        while from_one.read_exact(&mut message).is_ok() && to_one.write_all(&message).is_ok() {}
    };
    both([step.client_cpu(), step.server_cpu()], ask, answer)
}
