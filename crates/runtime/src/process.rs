//! This process: its identity (unique in the fork group), switches, and the library's descriptors.

use crate::bits::Bits;
use crate::pieces::{Pieces, Zero};
use crate::{registry, stats};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicU8, Ordering};
use fsocket_sys as sys;

// All data that the start of a program and a fork write lie together in one page (section
// `.data.fsocket_start`), and so does their code (`.text.fsocket_start`). Each page that a process
// touches costs it some microseconds. See crates/preload/layout.ld.

/// Random number of this process; 0: the library is not initialized.
#[link_section = ".data.fsocket_start"]
static NONCE: AtomicU64 = AtomicU64::new(0);
/// Upper bits of every thread identity; they differ between parent and child.
#[link_section = ".data.fsocket_start"]
static TAG: AtomicU64 = AtomicU64::new(0);
/// This process makes no new connections over shared memory.
#[link_section = ".data.fsocket_start"]
static DISABLED: AtomicBool = AtomicBool::new(true);
/// Number of CPUs of the machine; 0: not asked yet.
static CPUS: AtomicU32 = AtomicU32::new(0);
/// Lowest number for the library's own descriptors.
#[link_section = ".data.fsocket_start"]
static HIGH_FD: AtomicI32 = AtomicI32::new(900);

/// glibc's `__libc_single_threaded`; see [`begin`].
#[link_section = ".data.fsocket_start"]
static SINGLE_THREADED: AtomicPtr<AtomicU8> = AtomicPtr::new(core::ptr::null_mut());

/// Own descriptors get numbers above those that programs usually have, but not so high that the
/// kernel must enlarge the descriptor table much.
fn choose_high_fd() {
    let lim = sys::limit(libc::RLIMIT_NOFILE).min(1 << 30) as i32;
    HIGH_FD.store(if lim > 1000 { 900 } else { (lim - 48).max(lim / 2) }, Ordering::Relaxed);
}

/// Moves a descriptor of the library above the program's numbers, with close-on-exec. If there is
/// no room, it keeps its number.
pub fn high_fd(fd: i32) -> i32 {
    let dup = || sys::fcntl(fd, libc::F_DUPFD_CLOEXEC, HIGH_FD.load(Ordering::Relaxed) as usize);
    let high = dup().or_else(|_| {
        // The program may have lowered its limit since.
        choose_high_fd();
        dup()
    });
    let kept = match high {
        Ok(h) => {
            close_own(fd); // (The library may have owned this number, too.)
            h
        }
        Err(_) => fd,
    };
    set_own(kept, true);
    kept
}

/// Copies `fd` for the library above the program's numbers. None: there is no room.
pub fn high_copy(fd: i32) -> Option<i32> {
    let copy = sys::fcntl(fd, libc::F_DUPFD_CLOEXEC, HIGH_FD.load(Ordering::Relaxed) as usize).ok()?;
    set_own(copy, true);
    Some(copy)
}

/// Moves a descriptor above the program's numbers if there is plenty of room. For descriptors that
/// only save time and that exist for each peer: they must leave room for others. None: `fd` was
/// not moved.
pub fn spare_fd(fd: i32) -> Option<i32> {
    let copy = high_copy(fd)?;
    let limit = sys::limit(libc::RLIMIT_NOFILE);
    let above = limit.saturating_sub(high() as u64);
    if copy as u64 >= limit - above / 4 {
        close_own(copy);
        return None;
    }
    close_own(fd);
    Some(copy)
}

/// The lowest number for descriptors of the library.
pub fn high() -> i32 {
    HIGH_FD.load(Ordering::Relaxed)
}

/// Closes a descriptor of the library.
pub fn close_own(fd: i32) {
    set_own(fd, false);
    let _ = sys::close(fd);
}

/// Tables by descriptor number have this many entries.
pub const MAX_FD: usize = 1 << 20;

/// Own descriptors with low numbers, which are most. In the page that a fork writes anyway.
#[link_section = ".data.fsocket_start"]
static OWN_LOW: Bits<LOW_WORDS> = Bits::new();
const LOW_WORDS: usize = 20;
const LOW: u32 = LOW_WORDS as u32 * 64;
/// Own descriptors with higher numbers, [`OF_PAGE`] of them in each page. If there is no memory
/// for a page, its descriptors are not recorded.
static OWN_HIGH: Pieces<Bits<512>, 1, { MAX_FD / OF_PAGE as usize }> = Pieces::new();
const OF_PAGE: u32 = 512 * 64;
// SAFETY: zero bytes are an empty set.
unsafe impl Zero for Bits<512> {}

fn set_own(fd: i32, on: bool) {
    match (fd as u32) < LOW {
        true => OWN_LOW.set(fd, on),
        false => {
            let page = (fd as u32 / OF_PAGE) as usize;
            let bits = if on { OWN_HIGH.make(page) } else { OWN_HIGH.get(page) };
            if let Some(bits) = bits {
                bits.set((fd as u32 % OF_PAGE) as i32, on);
            }
        }
    }
}

/// Does this descriptor belong to the library, unknown to the program?
#[inline]
pub fn owns(fd: i32) -> bool {
    match (fd as u32) < LOW {
        true => OWN_LOW.has(fd),
        false => {
            let bits = OWN_HIGH.get((fd as u32 / OF_PAGE) as usize);
            bits.is_some_and(|bits| bits.has((fd as u32 % OF_PAGE) as i32))
        }
    }
}

/// The lowest own descriptor in `from..=to`.
pub fn next_own(from: u32, to: u32) -> Option<u32> {
    OWN_LOW.next(from, to).or_else(|| {
        (from / OF_PAGE..=to.min(MAX_FD as u32 - 1) / OF_PAGE).find_map(|page| {
            let first = page * OF_PAGE;
            let found = OWN_HIGH.get(page as usize)?.next(from.saturating_sub(first), to - first);
            found.map(|n| first + n)
        })
    })
}

/// The word that each hook loads first: [`CANCELS`], [`ASLEEP`], and [`LENT`] once for each loan.
#[link_section = ".data.fsocket_start"]
static UNUSUAL: AtomicU8 = AtomicU8::new(ASLEEP);
/// The program cancels threads.
pub const CANCELS: u8 = 1;
/// The library has not started, because the program has made no call that needs it.
pub const ASLEEP: u8 = 2;
/// This process has lent its memory to a child ([`crate::lent`]). Added once for each loan.
const LENT: u8 = 4;

/// Which of [`CANCELS`], [`ASLEEP`] and [`LENT`] are set.
#[inline(always)]
pub fn unusual() -> u8 {
    UNUSUAL.load(Ordering::Relaxed)
}

pub fn is_asleep() -> bool {
    unusual() & ASLEEP != 0
}

/// Counts a child that begins (`more`) or stops to use this process's memory.
pub fn lends(more: bool) {
    // In the same word as the other bits, so that no hook overlooks a loan.
    match more {
        true => UNUSUAL.fetch_add(LENT, Ordering::SeqCst),
        false => UNUSUAL.fetch_sub(LENT, Ordering::SeqCst),
    };
}

/// In a forked child: the loans belong to the parent.
pub fn lends_nothing() {
    UNUSUAL.fetch_and(LENT - 1, Ordering::SeqCst);
}

#[inline]
pub fn is_lent() -> bool {
    unusual() >= LENT
}

pub fn cancels() {
    UNUSUAL.fetch_or(CANCELS, Ordering::SeqCst);
}

/// Records that the library has started.
pub fn awake() {
    // Release: publishes the initialization that came before.
    UNUSUAL.fetch_and(!ASLEEP, Ordering::Release);
}

pub fn set_nonce(n: u64) {
    NONCE.store(n, Ordering::Relaxed);
    TAG.store((n >> 16) << 48, Ordering::Relaxed);
}

pub fn nonce() -> u64 {
    NONCE.load(Ordering::Relaxed)
}

/// Identity of the calling thread, different from all other threads of the fork group. Never 0 or
/// 1.
#[inline(always)]
pub fn thread() -> u64 {
    sys::cpu::thread_id() ^ TAG.load(Ordering::Relaxed)
}

/// Had the parent only one thread at the fork?
#[link_section = ".data.fsocket_start"]
static WAS_ALONE: AtomicBool = AtomicBool::new(false);

/// Called before a fork, for [`was_alone`].
pub fn note_alone(alone: bool) {
    WAS_ALONE.store(alone, Ordering::Relaxed);
}

/// In a forked child: true if no other thread of the parent can have been inside an operation.
pub fn was_alone() -> bool {
    WAS_ALONE.load(Ordering::Relaxed)
}

/// Has this process never had a second thread? (False: unknown, or it has had one.)
pub fn is_single_threaded() -> bool {
    let word = SINGLE_THREADED.load(Ordering::Relaxed);
    // SAFETY: null, or a variable of libc, which is never unloaded.
    unsafe { word.as_ref() }.is_some_and(|w| w.load(Ordering::Relaxed) != 0)
}

#[inline(always)]
pub fn enabled() -> bool {
    !DISABLED.load(Ordering::Relaxed)
}

/// From now on, new connections and listeners use the kernel.
pub fn disable() {
    DISABLED.store(true, Ordering::Release);
}

/// Ends [`disable`]: connections and listeners may use shared memory again.
pub fn enable() {
    DISABLED.store(false, Ordering::Release);
}

/// An operator has asked this process to use the kernel for now.
#[link_section = ".data.fsocket_start"]
static OFF: AtomicBool = AtomicBool::new(false);

pub fn is_off() -> bool {
    OFF.load(Ordering::Relaxed)
}

pub fn set_off(off: bool) {
    OFF.store(off, Ordering::Relaxed);
}

/// The settings for this program in the monitor's configuration ([`fsocket_proto::program`]).
#[link_section = ".data.fsocket_start"]
static PROGRAM: AtomicU64 = AtomicU64::new(0);

pub fn set_program(bits: u64) {
    PROGRAM.store(bits, Ordering::Relaxed);
}

#[inline]
pub fn may_spin() -> bool {
    !is_told(fsocket_proto::program::NO_SPIN)
}

#[inline]
pub fn is_told(bit: u64) -> bool {
    PROGRAM.load(Ordering::Relaxed) & bit != 0
}

#[inline(always)]
pub fn cpus() -> u32 {
    match CPUS.load(Ordering::Relaxed) {
        0 => count_cpus(),
        n => n,
    }
}

#[cold]
fn count_cpus() -> u32 {
    // The monitor has already counted the CPUs.
    let n = match registry::mapped() {
        Some(r) if r.cpus > 0 => r.cpus.min(65536) as u32,
        _ => online_cpus().unwrap_or(1).clamp(1, 65536),
    };
    CPUS.store(n, Ordering::Relaxed);
    n
}

/// Counts the CPUs in the kernel's list, which has ranges such as `0-3,8-11`.
fn online_cpus() -> Option<u32> {
    let mut text = [0; 256];
    let text = sys::read_file(c"/sys/devices/system/cpu/online", &mut text).ok()?;
    let ranges = core::str::from_utf8(text).ok()?.trim().split(',');
    ranges
        .map(|range| {
            let (from, to) = range.split_once('-').unwrap_or((range, range));
            Some(to.parse::<u32>().ok()?.checked_sub(from.parse().ok()?)? + 1)
        })
        .sum()
}

/// Number of this process; 0: not asked yet.
#[link_section = ".data.fsocket_start"]
static PID: AtomicU32 = AtomicU32::new(0);
/// PID namespace; 0: not asked yet; UNKNOWN: the kernel did not answer.
#[link_section = ".data.fsocket_start"]
static PID_NAMESPACE: AtomicU32 = AtomicU32::new(0);
const UNKNOWN: u32 = u32::MAX;
/// Children of this process may be in another PID namespace.
#[link_section = ".data.fsocket_start"]
static CHILDREN_ELSEWHERE: AtomicBool = AtomicBool::new(false);

/// Records that the process, or its future children, have moved to other namespaces.
pub fn namespaces_changed() {
    CHILDREN_ELSEWHERE.store(true, Ordering::Relaxed);
}

/// May children of this process be in another PID namespace?
pub fn has_left_namespaces() -> bool {
    CHILDREN_ELSEWHERE.load(Ordering::Relaxed)
}

#[inline]
pub fn pid() -> u32 {
    match PID.load(Ordering::Relaxed) {
        0 => {
            let n = sys::getpid() as u32;
            PID.store(n, Ordering::Relaxed);
            n
        }
        n => n,
    }
}

/// The PID namespace in which process numbers of this process are valid; 0: unknown.
#[inline]
pub fn pid_namespace() -> u32 {
    match PID_NAMESPACE.load(Ordering::Relaxed) {
        0 => {
            let n = sys::inode(c"/proc/self/ns/pid").map_or(UNKNOWN, |i| i as u32);
            PID_NAMESPACE.store(n, Ordering::Relaxed);
            pid_namespace()
        }
        UNKNOWN => 0,
        n => n,
    }
}

/// In a forked child: takes a new identity.
#[link_section = ".text.fsocket_start"]
pub fn become_another(nonce: u64) {
    set_nonce(nonce);
    PID.store(0, Ordering::Relaxed);
    if CHILDREN_ELSEWHERE.load(Ordering::Relaxed) {
        PID_NAMESPACE.store(0, Ordering::Relaxed);
    }
    stats::detach();
}

/// Called once, at the start. `single_threaded`: `__libc_single_threaded` of glibc (2.32 and later),
/// which is not 0 until a second thread is made.
#[link_section = ".text.fsocket_start"]
pub fn begin(single_threaded: Option<&'static AtomicU8>) {
    if let Some(word) = single_threaded {
        SINGLE_THREADED.store(core::ptr::from_ref(word).cast_mut(), Ordering::Relaxed);
    }
    choose_high_fd();
}

/// Duplicates the library's descriptor `fd` to a high number, because the program wants the number
/// `fd` (dup2). Returns the new number. The caller must tell the descriptor's user.
pub fn duplicate_own(fd: i32) -> Option<i32> {
    let to = (fd + 1).max(HIGH_FD.load(Ordering::Relaxed));
    let new = sys::fcntl(fd, libc::F_DUPFD_CLOEXEC, to as usize).ok()?;
    set_own(fd, false);
    Some(new)
}

/// Notes that `fd` belongs to the library.
pub fn note_own(fd: i32) {
    set_own(fd, true);
}

#[link_section = ".data.fsocket_start"]
static BALANCES: AtomicBool = AtomicBool::new(false);

/// Called once, before `main`.
pub fn set_balance(on: bool) {
    BALANCES.store(on, Ordering::Release);
}

/// Is the library active in this program?
#[inline]
pub fn balances() -> bool {
    BALANCES.load(Ordering::Relaxed)
}
