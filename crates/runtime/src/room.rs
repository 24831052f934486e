//! How much memory the program's limits still leave, and whether the program locks its memory (ADR
//! 68).
//!
//! Shared memory takes address space, private tables, and pages that `mlockall` would keep in
//! memory. No call of the program may fail because of that. So if a limit leaves little, the
//! process uses the kernel.

use core::sync::atomic::{AtomicI32, Ordering};
use fsocket_sys as sys;

/// If a limit leaves fewer bytes than this, the library does not use shared memory.
const ENOUGH: u64 = 64 << 20;

/// The process that has locked all its future memory (`mlockall` with MCL_FUTURE); 0: none. A
/// forked child inherits no locks.
#[link_section = ".data.fsocket_start"]
static LOCKS: AtomicI32 = AtomicI32::new(0);

/// Do RLIMIT_AS or RLIMIT_DATA leave so little that the library must not map memory?
pub fn is_narrow() -> bool {
    let [space, data] = [libc::RLIMIT_AS, libc::RLIMIT_DATA].map(sys::limit);
    if space == libc::RLIM64_INFINITY && data == libc::RLIM64_INFINITY {
        return false;
    }
    let used = used().unwrap_or((0, 0));
    space.saturating_sub(used.0) < ENOUGH || data.saturating_sub(used.1) < ENOUGH
}

/// Address space and data of this process, in bytes.
fn used() -> Option<(u64, u64)> {
    let mut text = [0; 256];
    let text = core::str::from_utf8(sys::read_file(c"/proc/self/statm", &mut text).ok()?).ok()?;
    let page = sys::page_size() as u64;
    let word = |i: usize| Some(text.split_ascii_whitespace().nth(i)?.parse::<u64>().ok()? * page);
    Some((word(0)?, word(5)?))
}

/// Records that the program locks all its future memory (`on`), or stops doing so.
pub fn note_locks(on: bool) {
    let by = if on { sys::getpid() } else { 0 };
    if LOCKS.load(Ordering::Relaxed) != by {
        LOCKS.store(by, Ordering::Relaxed);
    }
}

/// Does the kernel lock each new mapping of this process?
pub fn is_locked() -> bool {
    let by = LOCKS.load(Ordering::Relaxed);
    by != 0 && by == sys::getpid()
}

#[cfg(test)]
mod tests {
    #[test]
    fn no_limit_is_not_narrow() {
        assert!(super::used().is_some_and(|(space, data)| space > data && data > 0));
        assert!(!super::is_narrow() && !super::is_locked());
    }
}
