//! Threads of this test contend for a lock, which must show under its name.

use fsocket_bpf::locks::Locks;
use fsocket_bpf::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Contends with other threads for the lock of this process's address space.
fn fight(stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        // SAFETY: this makes a new mapping and unmaps it at once.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
            let at = libc::mmap(std::ptr::null_mut(), 1 << 16, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            libc::munmap(at, 1 << 16);
        }
    }
}

#[test]
fn a_fight_for_the_address_space_is_seen() {
    let measuring = match Locks::start() {
        Ok(measuring) => measuring,
        Err(Error::Missing(reason)) => return println!("SKIPPED: locks: {reason}"),
        Err(e) => panic!("{e}"),
    };
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| fight(&stop));
        }
        thread::sleep(Duration::from_millis(500));
        stop.store(true, Ordering::Relaxed);
    });
    let all = measuring.contention().unwrap();
    let shown: Vec<String> = all.iter().take(20).map(|c| format!("{c:?}")).collect();
    let mmap = all.iter().filter(|c| c.class == "rwsem" && c.lock == "mmap_lock").map(|c| (c.times, c.ns));
    let (times, ns) = mmap.fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
    assert!(times >= 10 && ns >= 10_000, "mmap_lock: {times} times, {ns} ns\n{}", shown.join("\n"));
    assert!(all.iter().all(|c| c.longest <= c.ns && c.times > 0));
    println!("{}", shown.join("\n"));
}
