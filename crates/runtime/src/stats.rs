//! Counters of this process. If the process has an arena, the counters are there, where the
//! monitor reads them. Before that they are in a private page, and the process sends their values
//! to the monitor.

use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use fsocket_abi::arena::{Counter, Reason, Stats, COUNTERS};
use fsocket_proto::values::Counted;
use fsocket_proto::{request, Msg};
use fsocket_sys as sys;
use zerocopy::IntoBytes;

// Zero bytes are valid counters.
static PRIVATE: Page = Page(core::cell::UnsafeCell::new([0; size_of::<Stats>() / 8]));
#[repr(C, align(64))]
struct Page(core::cell::UnsafeCell<[u64; size_of::<Stats>() / 8]>);
// SAFETY: the page is used only as `Stats`, whose fields are atomics.
unsafe impl Sync for Page {}

#[link_section = ".data.fsocket_start"]
static NOW: AtomicPtr<Stats> = AtomicPtr::new(core::ptr::null_mut());

#[inline(always)]
fn stats() -> &'static Stats {
    let p = NOW.load(Ordering::Relaxed);
    let p = if p.is_null() { PRIVATE.0.get() as *mut Stats } else { p };
    // SAFETY: the pointer is to the static page or to the arena's; both stay mapped for the life
    // of the process.
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

/// Counts a socket or call that could have used shared memory but uses the kernel.
pub fn fall_back(why: Reason) {
    stats().counter[why as usize].fetch_add(1, Ordering::Relaxed);
}

/// Moves the counts to the arena's page, and counts there from now on.
///
/// # Safety
/// `to` stays mapped for the life of the process.
pub unsafe fn attach(to: *const Stats) {
    let old = stats();
    // SAFETY: the page is in an arena, which stays mapped for the life of the process.
    let new = unsafe { &*to };
    for (a, b) in old.counter.iter().zip(&new.counter) {
        b.fetch_add(a.swap(0, Ordering::Relaxed), Ordering::Relaxed);
    }
    for (a, b) in new.comm.iter().zip(name()) {
        a.store(b, Ordering::Relaxed);
    }
    NOW.store(to as *mut Stats, Ordering::Release);
}

/// The name of the program, padded with NULs.
pub fn name() -> [u8; 16] {
    let mut name = [0u8; 16];
    let args = [libc::PR_GET_NAME as usize, name.as_mut_ptr() as usize, 0, 0, 0, 0];
    // SAFETY: PR_GET_NAME writes 16 bytes, for which `name` has room.
    let _ = unsafe { fsocket_sys::raw(libc::SYS_prctl, args) };
    name
}

/// For each counter: the sum that was sent to the monitor.
static TOLD: [AtomicU64; COUNTERS.len()] = [const { AtomicU64::new(0) }; COUNTERS.len()];
/// Has this process sent counts to the monitor?
#[link_section = ".data.fsocket_start"]
static HAS_TOLD: AtomicBool = AtomicBool::new(false);
/// Number of kernel connections of this process.
#[link_section = ".data.fsocket_start"]
static OF_KERNEL: AtomicU64 = AtomicU64::new(0);

/// A process makes an arena when it has this many kernel connections.
const MANY: u64 = 8;

/// Counts a kernel connection by `c`. A process with few kernel connections and no others makes no
/// arena, which would cost a memory file, a mapping, and slower forks. Instead it sends its counts
/// with each connection, and at its end. With more connections it makes an arena. `monitor`: the
/// control socket. `arena`: makes an arena; false: it cannot.
#[inline]
pub fn kernel_connection(c: Counter, monitor: Option<i32>, arena: impl FnOnce() -> bool) {
    count(c);
    if let Some(monitor) = monitor.filter(|_| is_private()) {
        if OF_KERNEL.fetch_add(1, Ordering::Relaxed) + 1 < MANY || !arena() {
            tell(monitor);
        }
    }
}

/// All that the process has counted under this index.
pub fn total(counter: usize) -> u64 {
    stats().counter[counter].load(Ordering::Relaxed) + TOLD[counter].load(Ordering::Relaxed)
}

/// Sends the last counts, because the program ends.
pub fn at_exit(monitor: Option<i32>) {
    if let Some(monitor) = monitor.filter(|_| is_private()) {
        tell(monitor);
    }
}

fn is_private() -> bool {
    NOW.load(Ordering::Relaxed).is_null()
}

/// Sends the monitor the counts since the last message.
#[cold]
fn tell(monitor: i32) {
    let counters = &stats().counter;
    let mut used = counters.iter().enumerate().filter(|(_, c)| c.load(Ordering::Relaxed) != 0);
    loop {
        let mut pairs = [(0, 0); 4];
        let next = pairs.iter_mut().zip(&mut used).map(|(pair, (i, c))| *pair = (i, c.swap(0, Ordering::Relaxed)));
        let n = next.count();
        if n == 0 {
            return;
        }
        let mut counts = [None; 4];
        for (count, (counter, n)) in counts.iter_mut().zip(&pairs[..n]) {
            *count = Some(Counted { counter: *counter, n: *n });
        }
        let m = Msg::from(request::Counts { counts });
        // Non-blocking. Counts that cannot be sent now are added to the next message.
        if sys::send_with_fd(monitor, m.as_bytes(), None, libc::MSG_DONTWAIT).is_err() {
            for (counter, value) in &pairs[..n] {
                counters[*counter].fetch_add(*value, Ordering::Relaxed);
            }
            return;
        }
        HAS_TOLD.store(true, Ordering::Relaxed);
        for (counter, value) in &pairs[..n] {
            TOLD[*counter].fetch_add(*value, Ordering::Relaxed);
        }
    }
}

/// In a forked child: the arena's page belongs to the parent.
pub fn detach() {
    let had_arena = !NOW.swap(core::ptr::null_mut(), Ordering::AcqRel).is_null();
    OF_KERNEL.store(0, Ordering::Relaxed);
    if had_arena && !HAS_TOLD.load(Ordering::Relaxed) {
        return; // The private page is empty since the arena was made. Not reading it avoids a page fault.
    }
    // Zero counters are not written, which avoids a copy of their page.
    let told = if HAS_TOLD.load(Ordering::Relaxed) { &TOLD[..] } else { &[] };
    for c in stats().counter.iter().chain(told).filter(|c| c.load(Ordering::Relaxed) != 0) {
        c.store(0, Ordering::Relaxed);
    }
}
