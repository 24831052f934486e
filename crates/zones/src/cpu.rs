//! The zone of a worker: the CPU to which the worker is pinned, or a CPU that the library
//! assigns.

use super::page::Page;
use core::sync::atomic::{AtomicU32, Ordering};
use fsocket_sys as sys;

/// Are unpinned workers pinned to the CPU of their zone?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pin {
    /// Unpinned worker processes are pinned to their zone's CPU, as long as each has a CPU of its
    /// own.
    Auto,
    /// Zones are assigned, but no worker is moved.
    Never,
    /// Only pinned workers get a zone.
    Require,
}

#[link_section = ".data.fsocket_start"]
static PIN: AtomicU32 = AtomicU32::new(Pin::Never as u32);

impl Pin {
    /// Reads the value of the environment variable.
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
    /// The CPUs on which a thread of this process may run.
    fn of(tid: i32) -> Option<Cpus> {
        let mut set = Cpus([0; 64]);
        // SAFETY: the set has room for 4096 CPUs, and the kernel writes at most its size.
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

/// May the library pin an unpinned worker to its assigned CPU?
pub fn assigned(is_process: bool) -> bool {
    pin() == Pin::Auto && is_process
}

/// Pins the calling thread. False: the thread may not run on that CPU.
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
    /// Entry in the page; None: the page is full.
    pub entry: Option<u32>,
}

/// Enters a thread in the page. None: only pinned workers get a zone, and the thread is not
/// pinned.
///
/// The rule is that of the original kernel module (`enable_listen_spawn`): A worker that the
/// application has pinned has its zone on that CPU. Other workers get the CPU with the fewest
/// workers, and are pinned there with [`Pin::Auto`].
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
    // Threads are not pinned: a program may hand a connection from one thread to another, and the
    // library cannot know how many threads will come.
    if pin() == Pin::Auto && !pinned && !is_thread && others == 0 {
        // If the process has lost this CPU meanwhile, the worker is not moved.
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
