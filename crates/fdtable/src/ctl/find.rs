//! How a process finds the monitor: at its start, in a forked child, and after a monitor has
//! died.

use super::state::{
    dead, fd, given, in_time, never, patience, waited, DEAD, DIED_PAUSE, FD, FOUND_AT, FULL, LATER, LATER_AT, LOCK,
    LOOKING, NEVER, SHORT_PATIENCE, SILENT, SLOW_UNTIL,
};
use super::wire::{close_opt, receive, send_on, unasked};
use crate::lock::Lock;
use crate::upcalls::upcalls;
use crate::{process, rights, stats};
use core::sync::atomic::{AtomicBool, Ordering};
use fsocket_proto::{answer, paths, request};
use fsocket_runtime::uid_map;
use fsocket_sys::{self as sys, Errno, Result};

/// The path of the monitor's socket: length and bytes.
#[link_section = ".data.fsocket_start"]
pub(super) static PATH: Lock<(usize, [u8; PATH_MAX])> = Lock::new((0, [0; PATH_MAX]));
/// The pause between two attempts of a forked child to find the monitor, nanoseconds.
const LATER_PAUSE: u64 = 1_000_000_000;
/// The same for a process that found no monitor when it started.
const FIRST_PAUSE: u64 = 250_000_000;
/// No monitor is known, but the socket is connected to one that has not sent anything yet.
static MEETING: AtomicBool = AtomicBool::new(false);
/// A monitor was found at the path that only monitors of this library's ABI version use.
#[link_section = ".data.fsocket_start"]
static OF_OWN_ABI: AtomicBool = AtomicBool::new(false);
/// How long one attempt waits for the first message of such a monitor, nanoseconds.
const MEETING_FOR: u64 = 5_000_000;
/// How long a thread waits while another thread looks for the monitor, in nanoseconds.
const LOOKING_FOR: u64 = 100_000_000;

/// Maximum length of a Unix socket's path.
const PATH_MAX: usize = 108;

/// Connects to the monitor and sends the first message, without waiting for the answer.
pub fn open(path: Option<&[u8]>) -> bool {
    let path = path.unwrap_or(paths::SYSTEM_SOCKET.as_bytes());
    match connect(path, patience()) {
        Ok(fd) => {
            remember(path);
            adopt_fd(process::high_fd(fd))
        }
        Err(Errno::ENOENT | Errno::ECONNREFUSED | Errno::EAGAIN) => await_first(path),
        Err(_) => false,
    }
}

/// No monitor exists yet, or none accepts a connection in time. The process then behaves as if
/// its monitor had died: the control socket has no peer, and the process looks for a monitor as
/// it would look for a successor.
#[cold]
fn await_first(path: &[u8]) -> bool {
    let Ok(fd) = sys::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) else { return false };
    remember(path);
    FD.store(process::high_fd(fd), Ordering::Release);
    NEVER.store(true, Ordering::Relaxed);
    DEAD.store(true, Ordering::Relaxed);
    LATER_AT.store(sys::now_ns().saturating_add(FIRST_PAUSE), Ordering::Relaxed);
    LATER.store(true, Ordering::Release);
    true
}

/// Stores the monitor's path, for a process that has reached the monitor in another way.
pub fn remember(path: &[u8]) {
    if let Some(mut p) = PATH.lock().ok().filter(|_| path.len() <= PATH_MAX) {
        p.0 = path.len();
        p.1[..path.len()].copy_from_slice(path);
    }
}

/// Is `path` the path of this process's monitor? None: the system's monitor.
pub fn same_path(path: Option<&[u8]>) -> bool {
    let path = path.unwrap_or(paths::SYSTEM_SOCKET.as_bytes());
    PATH.lock().is_ok_and(|p| p.1[..p.0.min(PATH_MAX)] == *path)
}

/// Called before an action that needs the monitor. A child may have been forked when there was
/// nothing to announce (a server that becomes a daemon before it listens), or its parent's
/// monitor may have died. Such a child looks for the monitor now.
pub fn wanted() {
    if LATER.load(Ordering::Relaxed) || LOOKING.load(Ordering::Relaxed) != 0 {
        look_for_it();
    }
}

#[cold]
fn look_for_it() {
    let now = sys::now_ns();
    if now < LATER_AT.load(Ordering::Relaxed) && LOOKING.load(Ordering::Relaxed) == 0 {
        return;
    }
    let me = process::thread();
    if LOOKING.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_err() {
        // Another thread will know soon. If it takes too long, the caller leaves its object (a
        // listener) to the kernel. A signal handler does not wait if it has interrupted the very
        // thread that looks. (Acquire: pairs with the release below.)
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
    // Release: makes the result visible to waiting threads.
    LOOKING.store(0, Ordering::Release);
}

fn find_it(now: u64) {
    let died = DEAD.load(Ordering::Relaxed);
    let found = match died {
        true => meet(),
        false => dial(patience()).is_ok_and(|fd| adopt_fd(process::high_fd(fd))),
    };
    if !found {
        let pause = match (died, never()) {
            (true, false) => DIED_PAUSE,
            (true, true) => FIRST_PAUSE,
            (false, _) => LATER_PAUSE,
        };
        LATER_AT.store(now + pause, Ordering::Relaxed);
        LATER.store(true, Ordering::Release);
    }
}

/// Connects to the monitor's path, within `within` nanoseconds.
fn dial(within: u64) -> Result<i32> {
    let (len, path) = PATH.lock().map(|p| *p).map_err(|_| Errno::EAGAIN)?;
    connect(&path[..len.min(PATH_MAX)], within)
}

/// Looks for the successor of a dead monitor. False: there is none yet.
fn meet() -> bool {
    let met = greet_another();
    if met && !dead() {
        (upcalls().monitor_found)();
    }
    met
}

/// Greets another monitor. When the monitor has answered, this process announces what it shares.
/// Only then does the monitor become this process's monitor.
fn greet_another() -> bool {
    let Ok(_l) = LOCK.lock() else { return false };
    if !MEETING.swap(false, Ordering::AcqRel) {
        let Ok(fd) = dial(MEETING_FOR).map(process::high_fd) else { return false };
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
        Ok((m, got)) if m.is::<answer::Hello>() => (m, got),
        Ok((_, got)) => {
            close_opt(got);
            return hang_up();
        }
        // A service manager may have made the socket before the monitor runs.
        Err(Errno::EAGAIN | Errno::EINTR) => {
            MEETING.store(true, Ordering::Release);
            return false;
        }
        Err(_) => return hang_up(),
    };
    unasked(&hello, registry);
    if hello.refusal().is_some() {
        return true;
    }
    let understands = hello.read::<answer::Hello>().map_or(0, |hello| hello.understands);
    in_time();
    for word in [&SILENT, &SLOW_UNTIL] {
        word.store(0, Ordering::Relaxed);
    }
    FOUND_AT.store(sys::now_ns(), Ordering::Relaxed);
    if understands < fsocket_proto::REATTACH || !(upcalls().announce)() {
        // This monitor does not know what the process has shared under the first one.
        process::disable();
    }
    NEVER.store(false, Ordering::Relaxed);
    DEAD.store(false, Ordering::Release);
    true
}

/// Closes the socket of a monitor that this process may not use.
fn hang_up() -> bool {
    let fd = FD.swap(-1, Ordering::AcqRel);
    if fd >= 0 {
        process::close_own(fd);
    }
    false
}

/// Uses `fd` as the control socket and greets the monitor.
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
    limit_waits(fd, libc::SO_RCVTIMEO, SHORT_PATIENCE);
    let hello = request::Hello {
        nonce: process::nonce(),
        pid: sys::getpid() as u32,
        version: fsocket_abi::VERSION.into(),
        rights: rights::class(),
        name: stats::name(),
        off: process::is_off(),
    };
    send_on(fd, &hello.into(), None, sys::now_ns() + given()).is_ok()
}

/// Limits waits on the socket to `ns` nanoseconds. `option`: SO_RCVTIMEO or SO_SNDTIMEO.
#[link_section = ".text.fsocket_start"]
fn limit_waits(fd: i32, option: i32, ns: u64) {
    // (0 would mean no limit.)
    let t = libc::timeval { tv_sec: 0, tv_usec: (ns / 1000).clamp(1, 999_999) as i64 };
    // SAFETY: a timeval is plain bytes.
    let bytes = unsafe { core::slice::from_raw_parts(&t as *const _ as *const u8, core::mem::size_of_val(&t)) };
    let _ = sys::setsockopt(fd, libc::SOL_SOCKET, option, bytes);
}

/// Connects, within `within` nanoseconds. Error EAGAIN: the monitor's queue was full all that
/// time.
#[link_section = ".text.fsocket_start"]
fn connect_within(fd: i32, addr: &[u8], within: u64) -> Result<()> {
    let began = sys::now_ns();
    loop {
        let left = within.saturating_sub(sys::now_ns() - began);
        // This also limits a `connect` that waits because the monitor's queue is full.
        limit_waits(fd, libc::SO_SNDTIMEO, left);
        let r = sys::connect(fd, addr);
        if r == Err(Errno::EINTR) && left != 0 {
            continue;
        }
        FULL.store(r == Err(Errno::EAGAIN), Ordering::Relaxed);
        waited(began);
        return r;
    }
}

/// Connects to the monitor of this library's ABI version at `path`. If there is none, this
/// function tries `path` itself, where a monitor of another ABI may listen (it refuses HELLO), or
/// a socket that somebody has put there. A process that has met a monitor of its ABI does not try
/// this, because the refusal would switch the library off. It waits for the next monitor instead.
/// Errors: those of [`connect_to`].
#[link_section = ".text.fsocket_start"]
fn connect(path: &[u8], within: u64) -> Result<i32> {
    let (began, mut room) = (sys::now_ns(), [0; PATH_MAX]);
    if let Some(own) = paths::versioned(path, fsocket_abi::VERSION, &mut room) {
        match connect_to(own, within) {
            Err(Errno::ENOENT | Errno::ECONNREFUSED) if !OF_OWN_ABI.load(Ordering::Relaxed) => {}
            done => {
                OF_OWN_ABI.fetch_or(done.is_ok(), Ordering::Relaxed);
                return done;
            }
        }
    }
    connect_to(path, within.saturating_sub(sys::now_ns() - began))
}

/// Connects to a monitor's socket. Errors: those of [`connect_within`]; EPERM: the monitor runs
/// neither as root nor as this user.
#[link_section = ".text.fsocket_start"]
fn connect_to(path: &[u8], within: u64) -> Result<i32> {
    let mut addr = [0u8; core::mem::size_of::<libc::sockaddr_un>()];
    if path.is_empty() || path.len() + 3 > addr.len() {
        return Err(Errno::EINVAL);
    }
    addr[..2].copy_from_slice(&(libc::AF_UNIX as u16).to_ne_bytes());
    addr[2..2 + path.len()].copy_from_slice(path);
    let fd = sys::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0)?;
    let r = connect_within(fd, &addr[..path.len() + 3], within).and_then(|()| {
        // Only a monitor of root or of this user may decide what this process maps.
        let mut cred = [0u8; 12];
        sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, &mut cred)?;
        let uid = u32::from_ne_bytes([cred[4], cred[5], cred[6], cred[7]]);
        if uid == 0 || uid == sys::getuid() || uid == uid_map::OVERFLOW && was_mounted(path) {
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

/// For a user namespace that has no number for the monitor's user (root of the host). Was the
/// directory of the monitor's socket mounted into this container? If no process in this namespace
/// could have put a socket there, the mount proves that the monitor is the host's.
#[cold]
fn was_mounted(path: &[u8]) -> bool {
    let mut directory = [0u8; PATH_MAX];
    let end = path.iter().rposition(|c| *c == b'/').unwrap_or(0);
    let Some(name) = directory.get_mut(..end).filter(|d| !d.is_empty()) else { return false };
    name.copy_from_slice(&path[..end]);
    let Ok(directory) = core::ffi::CStr::from_bytes_until_nul(&directory) else { return false };
    let is_closed = |(owner, mode): (u32, u32)| [0, uid_map::OVERFLOW].contains(&owner) && mode & 0o022 == 0;
    uid_map::overflow_is_nobody() && sys::owner_and_mode(directory).is_ok_and(is_closed)
}
