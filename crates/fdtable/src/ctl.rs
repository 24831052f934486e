//! The control socket to the monitor.

use crate::lock::{Guard, Lock};
use crate::upcalls::upcalls;
use crate::{arena, process, registry, rights, stats};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use fsocket_abi::arena::Counter;
use fsocket_proto::registry::Registry;
use fsocket_proto::{kind, Msg, MSG_SIZE};
use fsocket_sys::{self as sys, Errno, Result};
use zerocopy::{FromBytes, IntoBytes};

#[link_section = ".data.fsocket_start"]
static FD: AtomicI32 = AtomicI32::new(-1);
static LOCK: Lock<u32> = Lock::new(0);
#[link_section = ".data.fsocket_start"]
static DEAD: AtomicBool = AtomicBool::new(false);
/// See [`defer`].
static DEFERRED: AtomicBool = AtomicBool::new(false);
static UNWATCHED: AtomicU64 = AtomicU64::new(0);
#[link_section = ".data.fsocket_start"]
static PENDING_SEEN: AtomicU32 = AtomicU32::new(0);
/// Where the monitor was found; a length and the path.
#[link_section = ".data.fsocket_start"]
static PATH: Lock<(usize, [u8; PATH_MAX])> = Lock::new((0, [0; PATH_MAX]));
/// A forked child that was not announced to the monitor has no socket until it
/// needs one.
#[link_section = ".data.fsocket_start"]
static LATER: AtomicBool = AtomicBool::new(false);
/// When to look for the monitor again, and how long it was not there before.
#[link_section = ".data.fsocket_start"]
static LATER_AT: AtomicU64 = AtomicU64::new(0);
const LATER_PAUSE: u64 = 1_000_000_000;
/// The same while none has come after the one that has died.
const DIED_PAUSE: u64 = 100_000_000;
/// The socket is one of a monitor that has not said anything yet, while none is known.
static MEETING: AtomicBool = AtomicBool::new(false);
/// How long it is waited for that at a time, nanoseconds.
const MEETING_FOR: u64 = 5_000_000;
/// The monitor has another version.
static MISMATCH: AtomicBool = AtomicBool::new(false);
/// Channels of which it does not know both sides; see [`halves`].
static HALVES: AtomicU32 = AtomicU32::new(0);
/// How long a thread waits for another one that looks for it, nanoseconds.
const LOOKING_FOR: u64 = 100_000_000;

/// Bytes of a Unix socket's path.
const PATH_MAX: usize = 108;

/// How long an answer may take before the monitor counts as silent.
const PATIENCE: u64 = 1_000_000_000;
/// When it was found silent, nanoseconds; 0: it is not. A silent monitor still counts this process
/// as alive and names it to its peers, so that their wake-ups go on through it; but nothing is
/// asked, no sleep relies on it, and no message waits for room.
#[link_section = ".data.fsocket_start"]
static SILENT: AtomicU64 = AtomicU64::new(0);
/// How long an answer may take that the program can do without: the kernel does it then. Also one look
/// for an answer.
const SHORT_PATIENCE: u64 = 250_000_000;
/// Until when nothing of that kind is asked, nanoseconds, after an answer that took longer.
static SLOW_UNTIL: AtomicU64 = AtomicU64::new(0);
const SLOW_PAUSE: u64 = 1_000_000_000;
/// How long nothing is asked of a silent one.
const SILENCE: u64 = 10_000_000_000;
/// The longest pause before a message is sent again that the kernel had no room for; all pauses
/// together are twice that.
const ROOM_PAUSE: u64 = 32_000_000;

/// Connect and say hello, without waiting for the answer.
pub fn open(path: Option<&[u8]>) -> bool {
    let path = path.unwrap_or(fsocket_proto::paths::SYSTEM_SOCKET.as_bytes());
    let Ok(fd) = connect(path) else { return false };
    remember(path);
    adopt_fd(process::high_fd(fd))
}

/// Where the monitor is, although it was reached on another way.
pub fn remember(path: &[u8]) {
    if let Some(mut p) = PATH.lock().ok().filter(|_| path.len() <= PATH_MAX) {
        p.0 = path.len();
        p.1[..path.len()].copy_from_slice(path);
    }
}

/// Is that where our monitor is? None: the system's.
pub fn same_path(path: Option<&[u8]>) -> bool {
    let path = path.unwrap_or(fsocket_proto::paths::SYSTEM_SOCKET.as_bytes());
    PATH.lock().is_ok_and(|p| p.1[..p.0.min(PATH_MAX)] == *path)
}

/// Before something that needs the monitor: a child that was forked when there
/// was nothing to announce (a server that goes into the background before it
/// listens), or whose parent's has died, finds it now.
pub fn wanted() {
    if LATER.load(Ordering::Relaxed) || LOOKING.load(Ordering::Relaxed) != 0 {
        look_for_it();
    }
}

/// Has this child not met the monitor yet, which nobody says has died?
/// (What a thread that is looking has found is there before it says that it looks no more.)
pub fn unmet() -> bool {
    !DEAD.load(Ordering::Relaxed) && fd() < 0 && (LATER.load(Ordering::Acquire) || LOOKING.load(Ordering::Acquire) != 0)
}

/// Is there none now, and it is looked for?
pub fn may_come() -> bool {
    dead() && LATER.load(Ordering::Relaxed)
}

/// Thread that is looking for it; 0: none.
#[link_section = ".data.fsocket_start"]
static LOOKING: AtomicU64 = AtomicU64::new(0);

#[cold]
fn look_for_it() {
    let now = sys::now_ns();
    if now < LATER_AT.load(Ordering::Relaxed) && LOOKING.load(Ordering::Relaxed) == 0 {
        return;
    }
    let me = process::thread();
    if LOOKING.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_err() {
        // Another thread will know in a moment; what is left to the kernel now (a listener) may stay
        // there. Not for one that this very thread was looking for, before the signal.
        // (Acquire: pairs with the release below.)
        while ![0, me].contains(&LOOKING.load(Ordering::Acquire)) {
            if sys::now_ns().saturating_sub(now) > LOOKING_FOR {
                return;
            }
            sys::nanosleep(20_000);
        }
        return;
    }
    if now >= LATER_AT.load(Ordering::Relaxed) && LATER.swap(false, Ordering::AcqRel) {
        find_it(now);
    }
    // Release: what was found, for those that wait.
    LOOKING.store(0, Ordering::Release);
}

fn find_it(now: u64) {
    let died = DEAD.load(Ordering::Relaxed);
    let found = match died {
        true => meet(),
        false => dial().is_ok_and(|fd| adopt_fd(process::high_fd(fd))),
    };
    if !found {
        LATER_AT.store(now + if died { DIED_PAUSE } else { LATER_PAUSE }, Ordering::Relaxed);
        LATER.store(true, Ordering::Release);
    }
}

/// Connects to where the monitor is.
fn dial() -> Result<i32> {
    let (len, path) = PATH.lock().map(|p| *p).map_err(|_| Errno::EAGAIN)?;
    connect(&path[..len.min(PATH_MAX)])
}

/// Looks for a monitor after the one that has died. False: there is none yet.
fn meet() -> bool {
    let met = greet_another();
    if met && !dead() {
        (upcalls().monitor_found)();
    }
    met
}

/// Once it has answered, it is told first what this process shares; then it is this process's monitor.
fn greet_another() -> bool {
    let Ok(_l) = LOCK.lock() else { return false };
    if !MEETING.swap(false, Ordering::AcqRel) {
        let Ok(fd) = dial().map(process::high_fd) else { return false };
        let old = FD.swap(fd, Ordering::AcqRel);
        if old >= 0 {
            process::close_own(old);
        }
        if !greet(fd) {
            return hang_up();
        }
    }
    let mut p = libc::pollfd { fd: fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd.
    let _ = unsafe { sys::ppoll(&mut p, 1, Some(MEETING_FOR), core::ptr::null()) };
    let (hello, registry) = match receive(libc::MSG_DONTWAIT) {
        Ok((m, got)) if m.kind == kind::HELLO => (m, got),
        Ok((_, got)) => {
            close_opt(got);
            return hang_up();
        }
        // A service manager may have made the socket for one that is still to come.
        Err(Errno::EAGAIN | Errno::EINTR) => {
            MEETING.store(true, Ordering::Release);
            return false;
        }
        Err(_) => return hang_up(),
    };
    unasked(&hello, registry);
    if hello.result != 0 {
        return true;
    }
    for word in [&SILENT, &SLOW_UNTIL] {
        word.store(0, Ordering::Relaxed);
    }
    if hello.arg0 < fsocket_proto::REATTACH || !(upcalls().announce)() {
        // It knows nothing of what was shared over the first one.
        process::disable();
    }
    DEAD.store(false, Ordering::Release);
    true
}

/// The socket of a monitor that was not to be met.
fn hang_up() -> bool {
    let fd = FD.swap(-1, Ordering::AcqRel);
    if fd >= 0 {
        process::close_own(fd);
    }
    false
}

/// One message before another monitor is this process's.
pub fn show(m: &Msg, attach: i32) -> bool {
    send(m, Some(attach), sys::now_ns() + PATIENCE).is_ok()
}

/// Has the monitor another version, so that there is nothing to talk about?
pub fn mismatch() -> bool {
    MISMATCH.load(Ordering::Relaxed)
}

/// Why there is no monitor.
pub fn why_none() -> Counter {
    match (MISMATCH.load(Ordering::Relaxed), DEAD.load(Ordering::Relaxed)) {
        (true, _) => Counter::FbVersion,
        (_, true) => Counter::FbMonitorGone,
        _ => Counter::FbNoMonitor,
    }
}

/// Use `fd` as the control socket and greet the monitor on it.
#[link_section = ".text.fsocket_start"]
pub fn adopt_fd(fd: i32) -> bool {
    if !greet(fd) {
        process::close_own(fd);
        return false;
    }
    FD.store(fd, Ordering::Release);
    SILENT.store(0, Ordering::Relaxed);
    DEAD.store(false, Ordering::Relaxed);
    true
}

#[link_section = ".text.fsocket_start"]
fn greet(fd: i32) -> bool {
    let t = libc::timeval { tv_sec: 0, tv_usec: (SHORT_PATIENCE / 1000) as i64 };
    // SAFETY: a timeval is plain bytes.
    let bytes = unsafe { core::slice::from_raw_parts(&t as *const _ as *const u8, core::mem::size_of_val(&t)) };
    let _ = sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVTIMEO, bytes);
    let mut m = Msg::new(kind::HELLO);
    m.id = process::nonce();
    m.arg0 = sys::getpid() as u64;
    m.arg1 = fsocket_abi::VERSION as u64;
    m.arg2 = rights::class();
    m.addr.ip = stats::name();
    sys::send_with_fd(fd, m.as_bytes(), None, libc::MSG_DONTWAIT).is_ok()
}

#[link_section = ".text.fsocket_start"]
fn connect(path: &[u8]) -> Result<i32> {
    let mut addr = [0u8; core::mem::size_of::<libc::sockaddr_un>()];
    if path.is_empty() || path.len() + 3 > addr.len() {
        return Err(Errno::EINVAL);
    }
    addr[..2].copy_from_slice(&(libc::AF_UNIX as u16).to_ne_bytes());
    addr[2..2 + path.len()].copy_from_slice(path);
    let fd = sys::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0)?;
    let r = sys::connect(fd, &addr[..path.len() + 3]).and_then(|()| {
        // Only root's or our own monitor may tell us what to map.
        let mut cred = [0u8; 12];
        sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, &mut cred)?;
        let uid = u32::from_ne_bytes([cred[4], cred[5], cred[6], cred[7]]);
        if uid == 0 || uid == sys::getuid() {
            Ok(())
        } else {
            Err(Errno::EPERM)
        }
    });
    if let Err(e) = r {
        let _ = sys::close(fd);
        return Err(e);
    }
    Ok(fd)
}

pub fn fd() -> i32 {
    FD.load(Ordering::Relaxed)
}

/// The monitor is gone (or never was): no new connections over shared memory,
/// and nobody else notices when a peer dies.
pub fn dead() -> bool {
    DEAD.load(Ordering::Relaxed) || fd() < 0
}

/// The control socket, if the monitor lives.
pub fn alive() -> Option<i32> {
    (!dead()).then(fd)
}

/// Before a sleep in which the control socket is not looked at: has the monitor
/// died? Asks the kernel a few times a second at most.
pub fn notice() {
    const EVERY_US: u64 = 100_000;
    #[link_section = ".data.fsocket_start"]
    static LAST: AtomicU64 = AtomicU64::new(0);
    let now = sys::cpu::ticks();
    if dead() || now.wrapping_sub(LAST.load(Ordering::Relaxed)) < EVERY_US * sys::cpu::ticks_per_us() {
        return;
    }
    LAST.store(now, Ordering::Relaxed);
    let mut p = libc::pollfd { fd: fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd.
    if matches!(unsafe { sys::ppoll(&mut p, 1, Some(0), core::ptr::null()) }, Ok(1)) {
        readable();
    }
}

/// Some channels more or less of which the monitor does not know both sides. (It wraps around below zero.)
pub fn halves(more: i32) {
    HALVES.fetch_add(more as u32, Ordering::AcqRel);
}

/// Are there channels of which the monitor does not know both sides?
#[inline]
pub fn any_half() -> bool {
    HALVES.load(Ordering::Relaxed) != 0
}

/// While nobody watches over our peers, sleeps are cut into pieces: short ones
/// at first, doubling while nothing happens. None: the monitor lives.
pub fn unwatched() -> Option<u64> {
    const MIN: u64 = 1_000_000;
    const MAX: u64 = 500_000_000;
    if !dead() && SILENT.load(Ordering::Relaxed) == 0 && !any_half() {
        return None;
    }
    let ns = UNWATCHED.load(Ordering::Relaxed).clamp(MIN, MAX);
    UNWATCHED.store((ns * 2).min(MAX), Ordering::Relaxed);
    Some(ns)
}

/// Something happened: look closely again for a while.
pub fn progress() {
    if dead() || SILENT.load(Ordering::Relaxed) != 0 || any_half() {
        UNWATCHED.store(0, Ordering::Relaxed);
    }
}

/// As if the monitor had died: nothing is asked, and nothing read.
pub fn detach() {
    died();
    // (Also what that has just set.)
    LATER.store(false, Ordering::Release);
}

/// It is certain that the monitor has died.
pub fn died() {
    if !DEAD.swap(true, Ordering::AcqRel) {
        UNWATCHED.store(0, Ordering::Relaxed);
        if (upcalls().monitor_died)() && !mismatch() {
            LATER_AT.store(sys::now_ns().saturating_add(DIED_PAUSE / 4), Ordering::Relaxed);
            LATER.store(true, Ordering::Release);
        }
    }
}

/// Sends one packet to the monitor. An error that says nothing about the monitor (a signal, no
/// memory for the packet, too many descriptors under way) is no end of it: this process would
/// stop to wake its peers, while the monitor still names it to them. Such a packet is sent again.
fn send(m: &Msg, attach: Option<i32>, limit: u64) -> Result<()> {
    let mut pause = 1_000_000;
    loop {
        match sys::send_with_fd(fd(), m.as_bytes(), attach, libc::MSG_DONTWAIT) {
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) if SILENT.load(Ordering::Relaxed) == 0 && ready_before(libc::POLLOUT, limit) => {}
            Err(Errno::EAGAIN) => return Err(Errno::EAGAIN),
            Err(e) if passes(e) && pause <= ROOM_PAUSE => {
                sys::nanosleep(pause);
                pause *= 2;
            }
            Err(e) => {
                if !passes(e) {
                    died();
                }
                return Err(e);
            }
        }
    }
}

/// Does this error of a packet concern the kernel's memory, and not the other side?
fn passes(e: Errno) -> bool {
    matches!(e, Errno::ENOMEM | Errno::ENOBUFS | Errno::ETOOMANYREFS)
}

/// A request with an answer. The second value is a descriptor that came along.
pub fn request(m: Msg, attach: Option<i32>) -> Result<(Msg, Option<i32>)> {
    request_within(m, attach, has_another_way(m.kind))
}

/// The same for what another monitor must hear, also if it is slow just after its start.
pub fn insist(m: Msg, attach: Option<i32>) -> Result<(Msg, Option<i32>)> {
    request_within(m, attach, false)
}

fn request_within(mut m: Msg, attach: Option<i32>, short: bool) -> Result<(Msg, Option<i32>)> {
    if dead() {
        return Err(Errno::EIO);
    }
    let mut seq = LOCK.lock().map_err(|_| Errno::EAGAIN)?;
    let now = sys::now_ns();
    let silent = SILENT.load(Ordering::Relaxed);
    if silent != 0 && now.saturating_sub(silent) < SILENCE {
        return Err(Errno::EIO);
    }
    if short && now < SLOW_UNTIL.load(Ordering::Relaxed) {
        return Err(Errno::EIO);
    }
    let limit = now + if short { SHORT_PATIENCE } else { PATIENCE };
    *seq = seq.wrapping_add(1);
    m.seq = *seq | 1 << 31;
    if let Err(e) = send(&m, attach, limit) {
        if e == Errno::EAGAIN {
            is_late(short);
        }
        return Err(Errno::EIO);
    }
    loop {
        match receive(0) {
            Ok((a, got)) if a.seq == m.seq && a.kind == m.kind => {
                if a.result != 0 {
                    close_opt(got);
                    return Err(Errno::new(a.result));
                }
                return Ok((a, got));
            }
            Ok((a, got)) => unasked(&a, got),
            // (A look may end early, and is restarted by each signal.)
            Err(Errno::EINTR | Errno::EAGAIN) if sys::now_ns() < limit => {}
            Err(Errno::EINTR | Errno::EAGAIN) => {
                is_late(short);
                // It will be the monitor's listener for a moment, and this process would not serve it. If
                // not even that can be said, and nothing else ends by it, this process has gone for it.
                if m.kind == kind::LISTEN && !tell(Msg::new(kind::UNLISTEN), attach) && (upcalls().shares_nothing)() {
                    leave();
                }
                return Err(Errno::EIO);
            }
            Err(e) if passes(e) => return Err(e),
            Err(e) => {
                died();
                return Err(e);
            }
        }
    }
}

/// The monitor takes too long. (An answer that comes later is undone or used in [`unasked`].)
#[cold]
fn is_late(short: bool) {
    let now = sys::now_ns();
    match short {
        true => SLOW_UNTIL.store(now + SLOW_PAUSE, Ordering::Relaxed),
        false => SILENT.store(now, Ordering::Relaxed),
    }
}

/// Can the program do what is asked for as if there were no monitor?
fn has_another_way(what: u32) -> bool {
    use kind::{
        BALANCE, CLONE, CONNECT, GROUP, IN_USE, LISTEN, LOCAL, OFFER, OPTIONS, PORTS, UPGRADE, WAITING, WORKER,
    };
    matches!(
        what,
        CONNECT
            | IN_USE
            | LISTEN
            | WORKER
            | PORTS
            | CLONE
            | GROUP
            | LOCAL
            | BALANCE
            | WAITING
            | OFFER
            | UPGRADE
            | OPTIONS
    )
}

/// Waits until the control socket is ready for that, at most up to `limit`. False: it is not.
fn ready_before(events: i16, limit: u64) -> bool {
    let mut p = libc::pollfd { fd: fd(), events, revents: 0 };
    loop {
        let left = limit.saturating_sub(sys::now_ns());
        // SAFETY: one pollfd.
        match unsafe { sys::ppoll(&mut p, 1, Some(left), core::ptr::null()) } {
            Ok(0) => return false,
            Err(Errno::EINTR) => {}
            // (An error is for the call that comes next.)
            _ => return true,
        }
    }
}

/// For the monitor this process ends. Its listeners are the kernel's from now on.
fn leave() {
    died();
    let fd = FD.swap(-1, Ordering::AcqRel);
    if fd >= 0 {
        process::close_own(fd);
    }
}

/// A message without an answer.
pub fn tell(m: Msg, attach: Option<i32>) -> bool {
    // SEQPACKET sends are atomic: no lock, so this also works where the lock
    // is held further up the stack.
    if unmet() {
        return false; // Nothing has died: the first that is found is the one.
    }
    if dead() {
        died();
        return false;
    }
    let sent = send(&m, attach, sys::now_ns() + PATIENCE);
    if sent == Err(Errno::EAGAIN) && SILENT.load(Ordering::Relaxed) == 0 {
        is_late(false);
    }
    sent.is_ok()
}

/// Handle what the monitor sent unasked. Cheap when there is nothing: the
/// monitor counts its messages in our arena.
pub fn poll() {
    poll_by(|| LOCK.lock().ok());
}

/// As [`poll`], where nothing of it is needed now: not while another thread waits for the monitor.
pub fn poll_in_passing() {
    poll_by(|| LOCK.try_lock());
}

#[inline]
fn poll_by(lock: impl FnOnce() -> Option<Guard<'static, u32>>) {
    if LATER.load(Ordering::Relaxed) && DEAD.load(Ordering::Relaxed) {
        wanted();
    }
    let Some(h) = arena::header() else { return };
    let now = h.pending.load(Ordering::Acquire);
    if now != PENDING_SEEN.load(Ordering::Relaxed) {
        drain(now, lock);
    }
    settle();
}

#[cold]
fn drain(pending: u32, lock: impl FnOnce() -> Option<Guard<'static, u32>>) {
    if dead() {
        return;
    }
    let Some(_l) = lock() else { return };
    PENDING_SEEN.store(pending, Ordering::Relaxed);
    loop {
        match receive(libc::MSG_DONTWAIT) {
            Ok((m, got)) => unasked(&m, got),
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => return,
            // What was not read is still there, and makes the socket readable.
            Err(e) if passes(e) => return,
            Err(_) => return died(),
        }
    }
}

/// The control socket is readable although `pending` says nothing: the monitor
/// closed it, or the message came before the count.
pub fn readable() {
    drain(PENDING_SEEN.load(Ordering::Relaxed), || LOCK.lock().ok());
    settle();
}

/// Something is left to do that may not be done where it was found: it follows at the next call that looks
/// at the monitor's messages.
pub fn defer() {
    DEFERRED.store(true, Ordering::Release);
}

#[inline]
fn settle() {
    if DEFERRED.load(Ordering::Relaxed) && DEFERRED.swap(false, Ordering::AcqRel) {
        (upcalls().settle)();
    }
}

fn receive(flags: i32) -> Result<(Msg, Option<i32>)> {
    let mut buf = [0u8; MSG_SIZE];
    let (n, got) = sys::recv_with_fd(fd(), &mut buf, flags)?;
    match Msg::read_from_bytes(&buf) {
        Ok(m) if n == MSG_SIZE && m.version == fsocket_proto::VERSION => {
            if SILENT.load(Ordering::Relaxed) != 0 {
                SILENT.store(0, Ordering::Relaxed);
            }
            Ok((m, got))
        }
        _ => {
            close_opt(got);
            Err(Errno::EPROTO)
        }
    }
}

fn unasked(m: &Msg, got: Option<i32>) {
    match m.kind {
        kind::HELLO if m.result == 0 => {
            forget(registry::forget_closings(), fsocket_proto::CLOSINGS_SIZE);
            if let Some(fd) = got {
                forget(registry::map(fd), fsocket_proto::registry::SIZE);
            }
        }
        kind::CLOSINGS => {
            if let Some(fd) = got {
                registry::map_closings(fd);
            }
        }
        kind::HELLO => {
            // Another version: there is nothing to talk about.
            MISMATCH.store(true, Ordering::Relaxed);
            LATER.store(false, Ordering::Release);
            process::disable();
            died();
        }
        // The answer came too late, and the listener has been left to the kernel.
        kind::LISTEN if m.result == 0 => {
            tell(Msg { id: m.id, ..Msg::new(kind::UNLISTEN) }, None);
        }
        // So has the zone's socket.
        kind::LOCAL if m.result == 0 => {
            tell(Msg { id: m.id, arg0: m.arg0, ..Msg::new(kind::LEFT) }, None);
        }
        _ if (upcalls().message)(m, got) => return,
        _ => {}
    }
    close_opt(got);
}

/// Memory of a monitor that has died. Who still has a pointer finds it empty.
fn forget(memory: *mut u8, size: usize) {
    if !memory.is_null() {
        // SAFETY: mapped by the registry with that size, and never unmapped; whoever reads it finds zeros.
        unsafe { crate::space::blank(memory, size) };
    }
}

fn close_opt(fd: Option<i32>) {
    if let Some(fd) = fd {
        let _ = sys::close(fd);
    }
}

/// The registry; waits for the monitor's first answer if need be.
pub fn registry() -> Option<&'static Registry> {
    if let Some(r) = registry::mapped() {
        return Some(r);
    }
    if dead() {
        return None;
    }
    let now = sys::now_ns();
    if now < SLOW_UNTIL.load(Ordering::Relaxed) {
        return None;
    }
    let l = LOCK.lock().ok()?;
    while registry::mapped().is_none() && !dead() {
        if !ready_before(libc::POLLIN, now + SHORT_PATIENCE) {
            is_late(true);
            break;
        }
        match receive(libc::MSG_DONTWAIT) {
            Ok((m, got)) => unasked(&m, got),
            Err(Errno::EINTR | Errno::EAGAIN) => {}
            Err(_) => {
                died();
                break;
            }
        }
    }
    drop(l);
    registry::mapped()
}

pub fn lock_for_fork() -> bool {
    LOCK.lock().map(core::mem::forget).is_ok()
}
pub fn unlock_after_fork() {
    LOCK.reset_after_fork();
}

/// In a forked child: the inherited socket is the parent's.
#[link_section = ".text.fsocket_start"]
pub fn become_child(own: Option<i32>) {
    let old = FD.swap(-1, Ordering::AcqRel);
    if old >= 0 {
        process::close_own(old);
    }
    PENDING_SEEN.store(0, Ordering::Relaxed);
    SILENT.store(0, Ordering::Relaxed);
    LOOKING.store(0, Ordering::Relaxed);
    PATH.reset_after_fork();
    LATER.store(own.is_none() && (LATER.load(Ordering::Relaxed) || old >= 0), Ordering::Release);
    if let Some(fd) = own {
        adopt_fd(fd);
    }
}

/// This process has other credentials than before. The monitor gets a socket made with those, over
/// the one that shows whose process this was; from here on they talk over the new one, and what the
/// process held but its listeners has ended. False: there is no monitor, or it refuses.
pub fn renew() -> bool {
    if dead() {
        return false;
    }
    let Ok(_l) = LOCK.lock() else {
        died();
        return false;
    };
    let made = sys::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC);
    let Ok([own, theirs]) = made else {
        died();
        return false;
    };
    // What follows before the monitor has read this says already who this process is.
    let _ = sys::setsockopt(theirs, libc::SOL_SOCKET, libc::SO_PASSCRED, &1i32.to_ne_bytes());
    let sent = tell(Msg::new(kind::RENEW), Some(theirs));
    let _ = sys::close(theirs);
    let own = process::high_fd(own);
    let old = fd();
    PENDING_SEEN.store(0, Ordering::Relaxed);
    let renewed = sent && adopt_fd(own);
    if !renewed {
        FD.store(-1, Ordering::Release);
        died();
    }
    // With what it has not been asked for yet: that is about what this process had.
    process::close_own(old);
    renewed
}

/// The descriptor of the control socket, if `fd` is it, is `new` from now on.
pub fn renumbered(old: i32, new: i32) -> bool {
    FD.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok()
}

/// Announces a process to the monitor: a child, or (`successor`) the program that replaces this one.
/// Returns its control socket.
pub fn announce(nonce: u64, successor: bool) -> Option<i32> {
    let [child, monitor] = sys::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC).ok()?;
    // What the child sends before the monitor has read this says already who the child is.
    let _ = sys::setsockopt(monitor, libc::SOL_SOCKET, libc::SO_PASSCRED, &1i32.to_ne_bytes());
    let sent = tell(Msg { id: nonce, arg0: successor.into(), ..Msg::new(kind::ADOPT) }, Some(monitor));
    let _ = sys::close(monitor);
    if !sent {
        let _ = sys::close(child);
        return None;
    }
    Some(process::high_fd(child))
}
