//! Busy loops that load CPUs during a measurement.

use crate::child::pin_self;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;

/// Threads that spin until this value is dropped.
pub struct Hogs {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Hogs {
    /// Starts `n` threads on each of the CPUs.
    pub fn start(cpus: &[usize], n: u32) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let threads = cpus.iter().flat_map(|cpu| (0..n).map(|_| *cpu));
        let threads = threads.map(|cpu| {
            let over = over.clone();
            std::thread::spawn(move || {
                if let Err(e) = pin_self(cpu) {
                    eprintln!("fastsocket bench: a loop is not on CPU {cpu}: {e}");
                }
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            })
        });
        Hogs { threads: threads.collect(), over }
    }
}

impl Drop for Hogs {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
