//! Counters: in the arena once there is one, in a private page before, of which the monitor is told.

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
// SAFETY: reached only as `Stats`, whose fields are atomics.
unsafe impl Sync for Page {}

#[link_section = ".data.fsocket_start"]
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

/// Something that could have been ours is the kernel's.
pub fn fall_back(why: Reason) {
    stats().counter[why as usize].fetch_add(1, Ordering::Relaxed);
}

/// Use the arena's page from now on and take along what was counted so far.
///
/// # Safety
/// `to` stays mapped for the life of the process.
pub unsafe fn attach(to: *const Stats) {
    let old = stats();
    // SAFETY: the counters lie in an arena that stays mapped for the life of the process.
    let new = unsafe { &*to };
    for (a, b) in old.counter.iter().zip(&new.counter) {
        b.fetch_add(a.swap(0, Ordering::Relaxed), Ordering::Relaxed);
    }
    for (a, b) in new.comm.iter().zip(name()) {
        a.store(b, Ordering::Relaxed);
    }
    NOW.store(to as *mut Stats, Ordering::Release);
}

/// Name of the program, NUL padded.
pub fn name() -> [u8; 16] {
    let mut name = [0u8; 16];
    let args = [libc::PR_GET_NAME as usize, name.as_mut_ptr() as usize, 0, 0, 0, 0];
    // SAFETY: PR_GET_NAME fills 16 bytes.
    let _ = unsafe { fsocket_sys::raw(libc::SYS_prctl, args) };
    name
}

/// What the monitor was told, by counter.
static TOLD: [AtomicU64; COUNTERS.len()] = [const { AtomicU64::new(0) }; COUNTERS.len()];
/// Was it ever told of any?
#[link_section = ".data.fsocket_start"]
static HAS_TOLD: AtomicBool = AtomicBool::new(false);
/// Connections of this process that are the kernel's.
#[link_section = ".data.fsocket_start"]
static OF_KERNEL: AtomicU64 = AtomicU64::new(0);

/// A process with so many has an arena.
const MANY: u64 = 8;

/// A connection is the kernel's: counted by `c`. A process with few of them, and of no other kind, makes no arena, which would
/// be a memory file, a mapping, and forks that cost more: it says at each what it has counted, and at its end. One with many
/// counts where the monitor looks. `monitor`: the control socket. `arena`: makes one; false: there is none.
#[inline]
pub fn kernel_connection(c: Counter, monitor: Option<i32>, arena: impl FnOnce() -> bool) {
    count(c);
    if let Some(monitor) = monitor.filter(|_| is_private()) {
        if OF_KERNEL.fetch_add(1, Ordering::Relaxed) + 1 < MANY || !arena() {
            tell(monitor);
        }
    }
}

/// All that this process has counted, by index of the counter.
pub fn total(counter: usize) -> u64 {
    stats().counter[counter].load(Ordering::Relaxed) + TOLD[counter].load(Ordering::Relaxed)
}

/// The program ends.
pub fn at_exit(monitor: Option<i32>) {
    if let Some(monitor) = monitor.filter(|_| is_private()) {
        tell(monitor);
    }
}

fn is_private() -> bool {
    NOW.load(Ordering::Relaxed).is_null()
}

/// Tells the monitor what was counted since it was told last.
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
        // Nobody waits for that: what is not sent now is sent with the next.
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

/// In a forked child: the parent's page is not ours.
pub fn detach() {
    let had_arena = !NOW.swap(core::ptr::null_mut(), Ordering::AcqRel).is_null();
    OF_KERNEL.store(0, Ordering::Relaxed);
    if had_arena && !HAS_TOLD.load(Ordering::Relaxed) {
        return; // (What was private before is in the arena since; not even read: a page less to map.)
    }
    // (Not written: a page less to copy.)
    let told = if HAS_TOLD.load(Ordering::Relaxed) { &TOLD[..] } else { &[] };
    for c in stats().counter.iter().chain(told).filter(|c| c.load(Ordering::Relaxed) != 0) {
        c.store(0, Ordering::Relaxed);
    }
}
