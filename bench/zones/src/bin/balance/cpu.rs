//! CPU hogs, a CPU-bound job, CPU affinity and priority of threads, and CPU use.

use anyhow::{ensure, Context, Result};
use fsocket_testkit::process::{set_affinity, set_realtime};
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Number of CPUs that this process may use.
pub fn count() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The disturbed CPUs: the upper half.
fn upper() -> std::ops::Range<usize> {
    count() / 2..count()
}

fn gettid() -> i32 {
    // SAFETY: the call takes no pointers.
    unsafe { libc::gettid() }
}

/// Binds the calling thread to the CPU.
pub fn here(cpu: usize) -> std::io::Result<()> {
    set_affinity(gettid(), &[cpu])
}

/// Binds the calling thread to the CPU, with real-time priority.
pub fn urgent_here(cpu: usize) -> std::io::Result<()> {
    here(cpu)?;
    set_realtime(gettid())
}

/// Gives real-time priority to the kernel threads that take steered packets, because they stand for interrupts.
pub fn urgent_cpumaps() -> Result<()> {
    let mut found = 0;
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<i32>().ok()) else { continue };
        let comm = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        if comm.starts_with("cpumap/") {
            set_realtime(pid).with_context(|| comm.trim().to_owned())?;
            found += 1;
        }
    }
    ensure!(found > 0, "no cpumap thread: nothing is steered");
    Ok(())
}

/// A piece of work that takes a few microseconds.
fn piece(seed: u64) -> u64 {
    (0..2000u64).fold(seed, |x, i| black_box(x.rotate_left(7).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ i))
}

/// Threads that only compute, `each` of them on each CPU of the upper half.
pub struct Hogs {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Hogs {
    pub fn start(each: usize) -> Hogs {
        let stop = Arc::new(AtomicBool::new(false));
        let spawn = |cpu: usize| {
            let stop = stop.clone();
            std::thread::spawn(move || {
                set_affinity(gettid(), &[cpu]).expect("affinity");
                let mut x = cpu as u64;
                while !stop.load(Ordering::Relaxed) {
                    x = piece(x);
                }
            })
        };
        let threads = upper().flat_map(|cpu| std::iter::repeat_n(cpu, each)).map(spawn).collect();
        Hogs { stop, threads }
    }

    pub fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        for t in self.threads {
            let _ = t.join();
        }
    }
}

/// Runs the CPU-bound job, and returns its duration. The job has `each` threads on each CPU of the upper half, and
/// each thread has `work` pieces of work. An error after `limit`.
pub fn job(each: usize, work: u64, limit: Duration) -> Result<Duration> {
    let started = Instant::now();
    let spawn = |cpu: usize| {
        std::thread::spawn(move || {
            set_affinity(gettid(), &[cpu]).expect("affinity");
            let mut x = cpu as u64;
            for n in 0..work {
                x = piece(x);
                if n % 1024 == 0 && started.elapsed() > limit {
                    return false;
                }
            }
            true
        })
    };
    let threads: Vec<_> = upper().flat_map(|cpu| std::iter::repeat_n(cpu, each)).map(spawn).collect();
    let done = threads.into_iter().all(|t| t.join().unwrap_or(false));
    ensure!(done, "the job did not end within {limit:?}");
    Ok(started.elapsed())
}

/// The number of pieces of work that take about 3 s without a server, and their measured duration.
pub fn calibrate(each: usize) -> Result<(u64, Duration)> {
    let trial = job(each, 20_000, Duration::from_secs(60))?;
    let work = (20_000.0 * 3.0 / trial.as_secs_f64()) as u64;
    let mut took = Vec::new();
    for _ in 0..3 {
        took.push(job(each, work, Duration::from_secs(60))?);
    }
    took.sort_unstable();
    Ok((work, took[1]))
}

/// A reading of CPU time: for each CPU, the clock ticks that it was idle, and all clock ticks.
pub struct Used(Vec<(u64, u64)>);

impl Used {
    pub fn now() -> Used {
        let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
        let cpus = text.lines().filter(|l| l.starts_with("cpu") && !l.starts_with("cpu "));
        Used(
            cpus.map(|l| {
                let v: Vec<u64> = l.split_whitespace().skip(1).take(8).filter_map(|w| w.parse().ok()).collect();
                (v.get(3).unwrap_or(&0) + v.get(4).unwrap_or(&0), v.iter().sum())
            })
            .collect(),
        )
    }

    /// Percent of each CPU's time since this reading that was not idle.
    pub fn since(&self) -> Vec<f64> {
        let share = |((idle, all), (idle_then, all_then)): (&(u64, u64), &(u64, u64))| {
            let all = all.saturating_sub(*all_then).max(1) as f64;
            100.0 - idle.saturating_sub(*idle_then) as f64 * 100.0 / all
        };
        Used::now().0.iter().zip(&self.0).map(share).collect()
    }
}
