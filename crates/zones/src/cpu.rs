//! The zone of a worker: the CPU that it is pinned to, else one that is assigned.

use super::page::Page;
use core::sync::atomic::{AtomicU32, Ordering};
use fsocket_sys as sys;

/// Whether unpinned workers are pinned to the CPU of their zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pin {
    /// A worker process that nobody has pinned, while there is a CPU for each.
    Auto,
    /// Zones are assigned, but nobody is moved.
    Never,
    /// Only workers that are pinned get a zone.
    Require,
}

#[link_section = ".data.fsocket_start"]
static PIN: AtomicU32 = AtomicU32::new(Pin::Never as u32);

impl Pin {
    /// As in the environment.
    pub fn parse(word: &[u8]) -> Pin {
        match word {
            b"auto" => Pin::Auto,
            b"require" => Pin::Require,
            _ => Pin::Never,
        }
    }
}

pub fn set_pin(p: Pin) {
    PIN.store(p as u32, Ordering::Relaxed);
}

fn pin() -> Pin {
    match PIN.load(Ordering::Relaxed) {
        0 => Pin::Auto,
        1 => Pin::Never,
        _ => Pin::Require,
    }
}

/// A set of CPUs.
struct Cpus([u64; 64]);

impl Cpus {
    /// Those that a thread of this process may run on.
    fn of(tid: i32) -> Option<Cpus> {
        let mut set = Cpus([0; 64]);
        // SAFETY: room for 4096 CPUs; the kernel writes no more than it is told.
        unsafe {
            sys::raw(
                libc::SYS_sched_getaffinity,
                [tid as usize, core::mem::size_of_val(&set.0), set.0.as_mut_ptr() as usize, 0, 0, 0],
            )
        }
        .ok()?;
        Some(set)
    }
    fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        (0..4096u32).filter(|c| self.0[*c as usize / 64] >> (c % 64) & 1 != 0)
    }
    fn count(&self) -> u32 {
        self.0.iter().map(|w| w.count_ones()).sum()
    }
}

/// The CPU to which a thread is pinned.
pub fn pinned(tid: i32) -> Option<u32> {
    let mine = Cpus::of(tid)?;
    (mine.count() == 1).then(|| mine.iter().next()).flatten()
}

/// May a worker that nobody has pinned be pinned to the CPU that it is assigned?
pub fn assigned(is_process: bool) -> bool {
    pin() == Pin::Auto && is_process
}

/// Pins the calling thread. False: it may not run there.
pub fn pin_to(cpu: u32) -> bool {
    let mut one = [0u64; 64];
    let Some(w) = one.get_mut(cpu as usize / 64) else { return false };
    *w = 1 << (cpu % 64);
    // SAFETY: room for 4096 CPUs, which the kernel only reads.
    let r = unsafe {
        sys::raw(libc::SYS_sched_setaffinity, [0, core::mem::size_of_val(&one), one.as_ptr() as usize, 0, 0, 0])
    };
    r.is_ok()
}

/// A worker's zone.
pub struct Choice {
    pub cpu: u32,
    /// In the page; None: it is full.
    pub entry: Option<u32>,
}

/// Enters a thread in the page. None: it is not pinned, and must be.
///
/// As the original's module decided (`enable_listen_spawn`): a worker that the
/// application has pinned has its zone there; others are given the CPU with the
/// fewest workers, and moved there if that is wished.
pub fn choose(page: &Page, tid: i32, is_thread: bool) -> Option<Choice> {
    let mine = Cpus::of(tid);
    let pinned = mine.as_ref().is_some_and(|m| m.count() == 1);
    if pin() == Pin::Require && !pinned {
        return None;
    }
    let mut others = 0;
    let (entry, cpu) = page.enter(|on| {
        let best = mine.as_ref().and_then(|m| m.iter().map(|c| (on(c), c)).min());
        let (there, cpu) = best.unwrap_or((0, 0));
        others = there;
        cpu
    });
    // Threads run as their program arranges them: it may hand a connection from
    // one to another, and we cannot see how many there will be.
    if pin() == Pin::Auto && !pinned && !is_thread && others == 0 {
        // A CPU that was taken away meanwhile: stay.
        pin_to(cpu);
    }
    Some(Choice { cpu, entry })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words() {
        assert_eq!(Pin::parse(b"auto"), Pin::Auto);
        assert_eq!(Pin::parse(b"require"), Pin::Require);
        assert_eq!(Pin::parse(b"anything"), Pin::Never);
        let mine = Cpus::of(0).unwrap();
        assert!(mine.count() >= 1 && mine.iter().count() as u32 == mine.count());
    }
}
