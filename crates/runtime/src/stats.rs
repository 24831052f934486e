//! Counters: in the arena once there is one, in a private page before.

use core::sync::atomic::{AtomicPtr, Ordering};
use fsocket_abi::arena::{Counter, Stats};

// Zero bytes are valid counters.
static PRIVATE: Page = Page(core::cell::UnsafeCell::new([0; 64 + 64 + 8]));
#[repr(C, align(64))]
struct Page(core::cell::UnsafeCell<[u64; 64 + 64 + 8]>);
// SAFETY: reached only as `Stats`, whose fields are atomics.
unsafe impl Sync for Page {}

static NOW: AtomicPtr<Stats> = AtomicPtr::new(core::ptr::null_mut());

#[inline(always)]
fn stats() -> &'static Stats {
    let p = NOW.load(Ordering::Relaxed);
    let p = if p.is_null() { PRIVATE.0.get() as *mut Stats } else { p };
    // SAFETY: either the static page or the arena's, both mapped for ever.
    unsafe { &*p }
}

#[inline(always)]
pub fn count(c: Counter) {
    add(c, 1)
}

#[inline(always)]
pub fn add(c: Counter, n: u64) {
    stats().counter[c as usize].fetch_add(n, Ordering::Relaxed);
}

/// Use the arena's page from now on and take along what was counted so far.
///
/// # Safety
/// `to` stays mapped for the life of the process.
pub unsafe fn attach(to: *const Stats) {
    let old = stats();
    // SAFETY: the caller's.
    let new = unsafe { &*to };
    for (a, b) in old.counter.iter().zip(&new.counter) {
        b.fetch_add(a.swap(0, Ordering::Relaxed), Ordering::Relaxed);
    }
    let mut name = [0u8; 16];
    // SAFETY: PR_GET_NAME fills 16 bytes.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    for (a, b) in new.comm.iter().zip(name) {
        a.store(b, Ordering::Relaxed);
    }
    NOW.store(to as *mut Stats, Ordering::Release);
}

/// In a forked child: the parent's page is not ours.
pub fn detach() {
    NOW.store(core::ptr::null_mut(), Ordering::Release);
    // (Not written: a page less to copy.)
    for c in stats().counter.iter().filter(|c| c.load(Ordering::Relaxed) != 0) {
        c.store(0, Ordering::Relaxed);
    }
}
