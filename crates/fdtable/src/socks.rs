//! Makes this process's arena and announces it on first use, and allocates its sockets.

use crate::arena::{header, note, ARENA, FAILED, FREE, KEPT, LOCK, MAPPED};
use crate::{ctl, process, space, stats};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::{Header, Stats, ARENA_SIZE, MAGIC, SOCKS, SOCK_OFF, STATS_OFF};
use fsocket_abi::sock::Sock;
use fsocket_proto::request;
use fsocket_sys::{self as sys, Errno};

/// The pause before a failed arena is tried again, in nanoseconds.
const PAUSE: u64 = 200_000_000;

/// Could no arena be made for lack of memory or descriptors, while a later try may succeed?
pub fn fails_for_now() -> bool {
    ![0, u64::MAX].contains(&FAILED.load(Ordering::Relaxed)) && ARENA.load(Ordering::Acquire).is_null()
}

/// Returns the arena. On first use it is made and announced to the monitor.
pub fn arena() -> Option<*mut u8> {
    let p = ARENA.load(Ordering::Acquire);
    if !p.is_null() {
        return Some(p);
    }
    let again = FAILED.load(Ordering::Relaxed);
    if again != 0 && sys::now_ns() < again {
        return None;
    }
    let _l = LOCK.lock().ok()?;
    let p = ARENA.load(Ordering::Acquire);
    if !p.is_null() {
        return Some(p);
    }
    let made = make_arena();
    match made {
        Ok(p) => ARENA.store(p, Ordering::Release),
        Err(again) => FAILED.store(again, Ordering::Relaxed),
    }
    made.ok()
}

/// Makes the arena. The error is the time of the next try.
fn make_arena() -> Result<*mut u8, u64> {
    let later = || sys::now_ns() + PAUSE;
    let fd = sys::memfd_create(c"fastsocket-arena", libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
    let fd = fd.map_err(|_| later())?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    let map = || {
        sys::ftruncate(fd, ARENA_SIZE)?;
        sys::fcntl(fd, libc::F_ADD_SEALS, seals as usize)?;
        sys::mmap(ARENA_SIZE, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_NORESERVE, fd, 0)
    };
    let p = match map() {
        Ok(p) => p,
        Err(e) => {
            let _ = sys::close(fd);
            // (The program's limit of file sizes, RLIMIT_FSIZE, is too small, so it never gets an
            // arena.)
            return Err(if e == Errno::new(libc::EFBIG) { u64::MAX } else { later() });
        }
    };
    if !note(p, |kept| kept.keep(process::high(), || process::high_copy(fd))) {
        let _ = sys::close(fd);
        // SAFETY: the memory was just mapped, and nothing knows it.
        let _ = unsafe { sys::munmap(p, ARENA_SIZE) };
        return Err(later());
    }
    // SAFETY: the mapping is new, filled with zeros, and ARENA_SIZE bytes long.
    unsafe {
        let h = p as *mut Header;
        (*h).magic = MAGIC;
        (*h).version = fsocket_abi::VERSION;
        (*h).pid.store(sys::getpid() as u32, Ordering::Relaxed);
        stats::attach(p.add(STATS_OFF) as *const Stats);
    }
    let sent = announce(fd);
    let _ = sys::close(fd);
    // (If a monitor comes later, this process shows the arena to it.)
    (sent || ctl::may_come()).then_some(p).ok_or(u64::MAX)
}

/// Forgets all arenas; the next one will be new. The addresses stay reserved, so a thread that
/// still has a pointer finds empty memory.
pub fn forget() {
    // (If a signal handler has interrupted the holder of the lock, the holder finds no arena
    // afterwards.)
    let lock = LOCK.lock();
    ARENA.store(core::ptr::null_mut(), Ordering::Release);
    FAILED.store(0, Ordering::Relaxed);
    if let Ok(mut f) = lock {
        f.n = 0;
        f.scan = 0;
    }
    stats::detach();
    for (m, kept) in MAPPED.iter().zip(&KEPT) {
        let base = m.swap(core::ptr::null_mut(), Ordering::AcqRel);
        if !base.is_null() {
            // SAFETY: the arena has left the list of mapped ones, so no new pointer is handed
            // out; a thread with an old pointer finds empty memory.
            unsafe { space::retire_other(base, ARENA_SIZE) };
        }
        if let Some(fd) = kept.take() {
            process::close_own(fd);
        }
    }
}

fn sock_at(base: *mut u8, i: u32) -> &'static Sock {
    // SAFETY: `base` is an arena, which stays mapped, and the index is below SOCKS.
    unsafe { &*(base.add(SOCK_OFF) as *const Sock).add(i as usize % SOCKS) }
}

/// Allocates a socket of the arena, in state OPEN. Its fields still have the values of its last
/// user.
pub fn alloc_sock() -> Option<&'static Sock> {
    let base = arena()?;
    let h = header()?;
    let mut f = LOCK.lock().ok()?;
    if f.of != base as usize {
        (f.of, f.n, f.scan) = (base as usize, 0, 0);
    }
    let claim = |i: u32| {
        let s = sock_at(base, i);
        s.claim().then_some(s)
    };
    while f.n > 0 {
        f.n -= 1;
        if let Some(s) = claim(f.list[f.n]) {
            return Some(s);
        }
    }
    // (The fork group's other processes write this word, too, so it is limited to the arena's
    // size.)
    let hw = h.high_water.load(Ordering::Relaxed).min(SOCKS as u32);
    // A socket whose last holder was another process is found free only by a look at the arena.
    // Each call looks at a few sockets, so the number of such sockets stays small.
    for _ in 0..if hw as usize >= SOCKS { hw } else { hw.min(4) } {
        let i = f.scan % hw;
        f.scan = f.scan.wrapping_add(1);
        if let Some(s) = claim(i) {
            return Some(s);
        }
    }
    if hw as usize >= SOCKS {
        return None;
    }
    h.high_water.store(hw + 1, Ordering::Release);
    claim(hw)
}

/// Frees a socket. The caller was its last holder.
pub fn free_sock(s: &Sock) {
    s.free();
    let base = ARENA.load(Ordering::Acquire) as usize;
    let first = base + SOCK_OFF;
    let at = s as *const Sock as usize;
    if base == 0 || at < first || at >= base + ARENA_SIZE {
        return; // lives in the arena of a parent
    }
    if let Ok(mut f) = LOCK.lock() {
        if f.of == base && f.n < FREE {
            let n = f.n;
            f.list[n] = ((at - first) / core::mem::size_of::<Sock>()) as u32;
            f.n += 1;
        }
    }
}

/// Removes this process from the holders of a socket. True: no process holds the socket any more.
pub fn let_go(s: &Sock) -> bool {
    s.remove_holder(process::nonce());
    !s.is_held()
}

fn announce(memfd: i32) -> bool {
    ctl::tell(request::Arena { size: ARENA_SIZE as u64, inherited: false }, Some(memfd))
}
