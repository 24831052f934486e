//! How much memory the program may still have, and whether it locks what it has.
//!
//! Shared memory takes address space, private tables, and pages that `mlockall` would keep. Where a limit leaves little,
//! a call of the program must not fail for that: the process uses the kernel then.

use core::sync::atomic::{AtomicI32, Ordering};
use fsocket_sys as sys;

/// Bytes that a limit must leave, or the library does without shared memory.
const ENOUGH: u64 = 64 << 20;

/// Process that has locked all memory that it will have (`mlockall` with MCL_FUTURE). A fork inherits no locks.
#[link_section = ".data.fsocket_start"]
static LOCKS: AtomicI32 = AtomicI32::new(0);

/// Do RLIMIT_AS or RLIMIT_DATA leave the program so little that the library takes none of it?
pub fn is_narrow() -> bool {
    let [space, data] = [libc::RLIMIT_AS, libc::RLIMIT_DATA].map(sys::limit);
    if space == libc::RLIM64_INFINITY && data == libc::RLIM64_INFINITY {
        return false;
    }
    let used = used().unwrap_or((0, 0));
    space.saturating_sub(used.0) < ENOUGH || data.saturating_sub(used.1) < ENOUGH
}

/// Address space and data of this process, bytes.
fn used() -> Option<(u64, u64)> {
    let mut text = [0; 256];
    let text = core::str::from_utf8(sys::read_file(c"/proc/self/statm", &mut text).ok()?).ok()?;
    let page = sys::page_size() as u64;
    let word = |i: usize| Some(text.split_ascii_whitespace().nth(i)?.parse::<u64>().ok()? * page);
    Some((word(0)?, word(5)?))
}

/// The program locks all memory that it will have, or (false) does not any more.
pub fn note_locks(on: bool) {
    let by = if on { sys::getpid() } else { 0 };
    if LOCKS.load(Ordering::Relaxed) != by {
        LOCKS.store(by, Ordering::Relaxed);
    }
}

/// Is each new mapping locked?
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
