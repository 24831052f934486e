//! Rows of the bare machine: what operations cost without sockets.

use super::experiment::{Claim, Experiment, Measure, STOCK};
use crate::child::pin_self;
use crate::scenario::Unit;
use crate::step::{Step, Values};
use anyhow::{anyhow, Result};
use std::hint::black_box;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};
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
        row("pipe, round trip", 8.0, pipe),
    ]
}

/// Nanoseconds of one of `n` calls.
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

/// Runs both at once, each on its CPU; the first one's result.
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
        // SAFETY: no pointers.
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

/// Half a round trip of a word between two CPUs.
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

/// From one thread to another one of the same CPU, by `sched_yield`.
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

/// 8 bytes through a pipe and back, between two CPUs.
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
