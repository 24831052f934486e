//! This process: identity, switches, its arena.

use crate::bits::Bits;
use crate::{ctl, stats};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicU8, Ordering};
use fsocket_abi::arena::{
    self, sock_state, Header, Sock, Zone, ARENA_SIZE, SOCKS, SOCK_OFF, STATS_OFF, ZONES, ZONE_OFF,
};
use fsocket_sys as sys;

/// Data that the start of a program and the fork of a shell use lie together (section
/// `.data.fsocket_start`), and so does their code (`.text.fsocket_start`): each page that a process
/// touches costs it some microseconds. The alignment keeps the data within one page.
#[repr(align(1024))]
struct AtStart<T>(T);

/// Nonce of this process; 0: the library is not initialized.
#[link_section = ".data.fsocket_start"]
static NONCE: AtStart<AtomicU64> = AtStart(AtomicU64::new(0));
/// Upper bits of every thread identity, different in parent and child.
#[link_section = ".data.fsocket_start"]
static TAG: AtomicU64 = AtomicU64::new(0);
/// Shared memory is off for good in this process.
#[link_section = ".data.fsocket_start"]
static DISABLED: AtomicBool = AtomicBool::new(true);
/// CPUs of the machine; 0: not asked yet.
static CPUS: AtomicU32 = AtomicU32::new(0);
#[link_section = ".data.fsocket_start"]
static ARENA: AtomicPtr<u8> = AtomicPtr::new(core::ptr::null_mut());
/// All arenas that are mapped here: this process's and those it has inherited.
static MAPPED: [AtomicPtr<u8>; MAPPED_MAX] = [const { AtomicPtr::new(core::ptr::null_mut()) }; MAPPED_MAX];
const MAPPED_MAX: usize = 128;
#[link_section = ".data.fsocket_start"]
static ARENA_FAILED: AtomicBool = AtomicBool::new(false);
static ARENA_LOCK: crate::lock::Lock<Free> = crate::lock::Lock::new(Free { list: [0; FREE], n: 0, scan: 0 });
/// Lowest number for our own descriptors.
#[link_section = ".data.fsocket_start"]
static HIGH_FD: AtomicI32 = AtomicI32::new(900);

/// See [`Config::single_threaded`].
#[link_section = ".data.fsocket_start"]
static SINGLE_THREADED: AtomicPtr<AtomicU8> = AtomicPtr::new(core::ptr::null_mut());

const FREE: usize = 256;
struct Free {
    list: [u32; FREE],
    n: usize,
    scan: u32,
}

/// Who we are told to be by the environment.
pub struct Config<'a> {
    pub socket: Option<&'a [u8]>,
    /// No shared memory.
    pub disabled: bool,
    /// No zones.
    pub no_zones: bool,
    /// No stealing.
    pub no_balance: bool,
    pub pin: crate::zone::Pin,
    /// Calls on a kernel connection before it may go over; 0: never.
    pub upgrade: Option<u32>,
    pub rseq_offset: Option<isize>,
    /// glibc's `__libc_single_threaded`, of 2.32 and later: not 0 while no second thread was ever made.
    pub single_threaded: Option<&'static AtomicU8>,
    /// What the program before this one has left (FASTSOCKET_SUCCESSOR).
    pub successor: Option<&'a [u8]>,
}

/// Called once by the constructor, single-threaded as far as anyone can tell.
#[link_section = ".text.fsocket_start"]
pub fn init(c: &Config) {
    let successor = c.successor.and_then(crate::inherit::successor);
    set_nonce(successor.map_or_else(|| sys::getrandom_u64() | 1, |(_, nonce)| nonce));
    sys::cpu::init(c.rseq_offset);
    if let Some(word) = c.single_threaded {
        SINGLE_THREADED.store(core::ptr::from_ref(word).cast_mut(), Ordering::Relaxed);
    }
    choose_high_fd();
    crate::upgrade::init(c.upgrade);
    crate::zone::init(!c.no_zones, c.pin);
    crate::zone::balance::init(!c.no_zones && !c.no_balance);
    let shm = !c.disabled && sys::membarrier(sys::MEMBARRIER_REGISTER_GLOBAL_EXPEDITED).is_ok();
    if !shm && c.no_zones {
        if let Some((fd, _)) = successor {
            let _ = sys::close(fd);
        }
        return;
    }
    let open = match successor {
        Some((fd, _)) => {
            ctl::remember(c.socket.unwrap_or(fsocket_proto::paths::SYSTEM_SOCKET.as_bytes()));
            ctl::adopt_fd(high_fd(fd))
        }
        None => ctl::open(c.socket),
    };
    if open && shm {
        DISABLED.store(false, Ordering::Release);
        crate::inherit::take_over(successor.is_some());
    } else if !c.no_zones {
        crate::inherit::take_zones();
    }
}

/// Own descriptors lie above what programs usually hold, but not so high that
/// the kernel must grow the descriptor table much.
fn choose_high_fd() {
    let mut r = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `r` is ours.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut r) };
    let lim = r.rlim_cur.min(1 << 30) as i32;
    HIGH_FD.store(if lim > 1000 { 900 } else { (lim - 48).max(lim / 2) }, Ordering::Relaxed);
}

/// Move a descriptor of ours out of the application's way; it is close-on-exec.
/// Where there is no room up there it stays where it is.
pub fn high_fd(fd: i32) -> i32 {
    let dup = || sys::fcntl(fd, libc::F_DUPFD_CLOEXEC, HIGH_FD.load(Ordering::Relaxed) as usize);
    let high = dup().or_else(|_| {
        // The application may have lowered its limit since.
        choose_high_fd();
        dup()
    });
    let kept = match high {
        Ok(h) => {
            let _ = sys::close(fd);
            h
        }
        Err(_) => fd,
    };
    OWN.set(kept, true);
    kept
}

/// Where descriptors of ours begin.
pub fn high() -> i32 {
    HIGH_FD.load(Ordering::Relaxed)
}

/// Close a descriptor of ours.
pub fn close_own(fd: i32) {
    OWN.set(fd, false);
    let _ = sys::close(fd);
}

/// The library's own descriptors.
static OWN: Bits<{ crate::table::MAX_FD / 64 }> = Bits::new();

/// Is it a descriptor that the library needs and the application never saw?
#[inline]
pub fn owns(fd: i32) -> bool {
    OWN.has(fd)
}

/// The lowest own descriptor in `from..=to`.
pub fn next_own(from: u32, to: u32) -> Option<u32> {
    OWN.next(from, to)
}

fn set_nonce(n: u64) {
    NONCE.0.store(n, Ordering::Relaxed);
    TAG.store((n >> 16) << 48, Ordering::Relaxed);
}

pub fn nonce() -> u64 {
    NONCE.0.load(Ordering::Relaxed)
}

/// Identity of the calling thread, different from every thread of every
/// process of the fork group. Never 0 or 1.
#[inline(always)]
pub fn thread() -> u64 {
    sys::cpu::thread_id() ^ TAG.load(Ordering::Relaxed)
}

/// Has this process never had a second thread? (False: nobody knows.)
pub fn is_single_threaded() -> bool {
    let word = SINGLE_THREADED.load(Ordering::Relaxed);
    // SAFETY: null, or a variable of libc's that is never unloaded.
    unsafe { word.as_ref() }.is_some_and(|w| w.load(Ordering::Relaxed) != 0)
}

#[inline(always)]
pub fn enabled() -> bool {
    !DISABLED.load(Ordering::Relaxed)
}

/// New connections and listeners use the kernel from now on.
pub fn disable() {
    DISABLED.store(true, Ordering::Release);
}

/// They may use shared memory again, after [`disable`].
pub fn enable() {
    DISABLED.store(false, Ordering::Release);
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
    // The monitor has counted them; sysconf would open a file.
    let n = match ctl::mapped_registry() {
        Some(r) if r.cpus > 0 => r.cpus.min(65536) as u32,
        // SAFETY: plain sysconf.
        _ => unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }.clamp(1, 65536) as u32,
    };
    CPUS.store(n, Ordering::Relaxed);
    n
}

/// Number of this process; 0: not asked yet.
#[link_section = ".data.fsocket_start"]
static PID: AtomicU32 = AtomicU32::new(0);
/// Its process namespace; 0: not asked yet, UNKNOWN: cannot be had.
#[link_section = ".data.fsocket_start"]
static PID_NAMESPACE: AtomicU32 = AtomicU32::new(0);
const UNKNOWN: u32 = u32::MAX;

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

/// Names the namespace in which process numbers mean something; 0: not known.
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

/// In a forked child that has inherited nothing of ours: a new identity.
pub fn become_another(nonce: u64) {
    set_nonce(nonce);
    PID.store(0, Ordering::Relaxed);
    PID_NAMESPACE.store(0, Ordering::Relaxed);
    stats::detach();
}

/// In a forked child: new identity, no arena of its own yet.
pub fn become_child(nonce: u64) {
    become_another(nonce);
    ARENA.store(core::ptr::null_mut(), Ordering::Release);
    ARENA_FAILED.store(false, Ordering::Relaxed);
    ARENA_LOCK.reset_after_fork();
    if let Ok(mut f) = ARENA_LOCK.lock() {
        f.n = 0;
        f.scan = 0;
    }
}

/// Has this process made an arena, or tried to?
pub fn has_arena() -> bool {
    !ARENA.load(Ordering::Acquire).is_null() || ARENA_FAILED.load(Ordering::Relaxed)
}

/// The arena this process made for itself, if it has one.
pub fn arena_header() -> Option<&'static Header> {
    let p = ARENA.load(Ordering::Acquire);
    // SAFETY: a non-null ARENA is a mapping of ARENA_SIZE that is never unmapped.
    (!p.is_null()).then(|| unsafe { &*(p as *const Header) })
}

/// The counters of a zone, if there is an arena.
pub fn arena_zone(cpu: u32) -> Option<&'static Zone> {
    let p = ARENA.load(Ordering::Acquire);
    // SAFETY: as in `arena_header`; the index stays below ZONES.
    (!p.is_null()).then(|| unsafe { &*(p.add(ZONE_OFF) as *const Zone).add(cpu as usize % ZONES) })
}

/// The arena, made and announced to the monitor on first use.
pub fn arena() -> Option<*mut u8> {
    let p = ARENA.load(Ordering::Acquire);
    if !p.is_null() {
        return Some(p);
    }
    if ARENA_FAILED.load(Ordering::Relaxed) {
        return None;
    }
    let _l = ARENA_LOCK.lock().ok()?;
    let p = ARENA.load(Ordering::Acquire);
    if !p.is_null() {
        return Some(p);
    }
    let made = make_arena();
    match made {
        Some(p) => ARENA.store(p, Ordering::Release),
        None => ARENA_FAILED.store(true, Ordering::Relaxed),
    }
    made
}

fn make_arena() -> Option<*mut u8> {
    let fd = sys::memfd_create(c"fastsocket-arena", libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING).ok()?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    let map = || {
        sys::ftruncate(fd, ARENA_SIZE)?;
        sys::fcntl(fd, libc::F_ADD_SEALS, seals as usize)?;
        sys::mmap(ARENA_SIZE, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_NORESERVE, fd, 0)
    };
    let Ok(p) = map() else {
        let _ = sys::close(fd);
        return None;
    };
    if !note_arena(p) {
        let _ = sys::close(fd);
        // SAFETY: just mapped, nobody knows it.
        let _ = unsafe { sys::munmap(p, ARENA_SIZE) };
        return None;
    }
    // SAFETY: the mapping is new, zero-filled, and ARENA_SIZE long.
    unsafe {
        let h = p as *mut Header;
        (*h).magic = arena::MAGIC;
        (*h).version = fsocket_abi::VERSION;
        (*h).pid.store(sys::getpid() as u32, Ordering::Relaxed);
        stats::attach(p.add(STATS_OFF) as *const arena::Stats);
    }
    let sent = ctl::send_arena(fd);
    let _ = sys::close(fd);
    sent.then_some(p)
}

/// An arena has been mapped. False: there are too many.
pub fn note_arena(base: *mut u8) -> bool {
    let null = core::ptr::null_mut();
    MAPPED.iter().any(|m| m.compare_exchange(null, base, Ordering::AcqRel, Ordering::Relaxed).is_ok())
}

/// No arena is mapped here any more, and the next one is a new one. The addresses stay ours:
/// a thread that still has a pointer finds empty memory.
pub fn forget_arenas() {
    // (In a signal handler on top of the lock: whoever has it finds nothing, either.)
    let lock = ARENA_LOCK.lock();
    ARENA.store(core::ptr::null_mut(), Ordering::Release);
    ARENA_FAILED.store(false, Ordering::Relaxed);
    if let Ok(mut f) = lock {
        f.n = 0;
        f.scan = 0;
    }
    stats::detach();
    for m in &MAPPED {
        let base = m.swap(core::ptr::null_mut(), Ordering::AcqRel);
        if !base.is_null() {
            crate::space::blank(base, ARENA_SIZE);
        }
    }
}

fn sock_at(base: *mut u8, i: u32) -> &'static Sock {
    debug_assert!((i as usize) < SOCKS);
    // SAFETY: callers pass i < SOCKS; the arena stays mapped.
    unsafe { &*(base.add(SOCK_OFF) as *const Sock).add(i as usize) }
}

/// A free socket of the arena, in state OPEN, otherwise as its last user left it.
pub fn alloc_sock() -> Option<&'static Sock> {
    let base = arena()?;
    let h = arena_header()?;
    let mut f = ARENA_LOCK.lock().ok()?;
    let claim = |i: u32| {
        let s = sock_at(base, i);
        s.state
            .compare_exchange(sock_state::FREE, sock_state::OPEN, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
            .then_some(s)
    };
    while f.n > 0 {
        f.n -= 1;
        if let Some(s) = claim(f.list[f.n]) {
            return Some(s);
        }
    }
    // Processes of the fork group write there, too: no more than there is.
    let hw = h.high_water.load(Ordering::Relaxed).min(SOCKS as u32);
    // Sockets whose last holder was another process of the fork group come back
    // only through a look at the arena; a few per call keep it bounded.
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

/// Give a socket back; the caller was its last holder.
pub fn free_sock(s: &Sock) {
    s.state.store(sock_state::FREE, Ordering::Release);
    let base = ARENA.load(Ordering::Acquire) as usize;
    let first = base + SOCK_OFF;
    let at = s as *const Sock as usize;
    if base == 0 || at < first || at >= base + ARENA_SIZE {
        return; // lives in the arena of a parent
    }
    if let Ok(mut f) = ARENA_LOCK.lock() {
        if f.n < FREE {
            let n = f.n;
            f.list[n] = ((at - first) / core::mem::size_of::<Sock>()) as u32;
            f.n += 1;
        }
    }
}

/// This process no longer holds a socket. True: nobody does.
pub fn let_go(s: &Sock) -> bool {
    let me = nonce();
    for h in &s.holders {
        if h.load(Ordering::Acquire) == me {
            h.store(0, Ordering::SeqCst);
        }
    }
    // SeqCst: of two processes that let go at once, at least one sees that
    // nobody is left.
    s.extra_holders.load(Ordering::SeqCst) == 0 && s.holders.iter().all(|h| h.load(Ordering::SeqCst) == 0)
}

pub fn lock_for_fork() -> bool {
    ARENA_LOCK.lock().map(core::mem::forget).is_ok()
}
pub fn unlock_after_fork() {
    ARENA_LOCK.reset_after_fork();
}

/// The application wants number `fd` for itself (dup2) and we use it: move.
pub fn make_way(fd: i32) {
    let to = (fd + 1).max(HIGH_FD.load(Ordering::Relaxed));
    if let Ok(new) = sys::fcntl(fd, libc::F_DUPFD_CLOEXEC, to as usize) {
        OWN.set(fd, false);
        if ctl::renumbered(fd, new)
            || crate::waker::renumbered(fd, new)
            || crate::chan::renumbered(fd, new)
            || crate::zone::renumbered(fd, new)
            || crate::epoll::renumbered(fd, new)
            || crate::peers::renumbered(fd, new)
            || crate::asleep::renumbered(fd, new)
        {
            OWN.set(new, true);
        } else {
            let _ = sys::close(new);
        }
    }
}
