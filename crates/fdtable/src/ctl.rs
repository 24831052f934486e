//! The control socket to the monitor: requests, messages that nobody asked for, fork, and changed
//! credentials.

use crate::lock::Guard;
use crate::upcalls::upcalls;
use crate::{arena, process, registry};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use fsocket_abi::arena::HELD;
use fsocket_proto::registry::Registry;
use fsocket_proto::{request as msg, Asks, Msg, Payload};
use fsocket_sys::{self as sys, Errno, Result};

mod find;
mod state;
mod wire;

pub use find::{adopt_fd, open, remember, same_path, wanted};
pub use state::init;
pub use state::{
    alive, any_half, dead, detach, died, fd, halves, is_slow, is_unwatched, is_watched, may_come, mismatch, never,
    progress, unmet, unwatched, why_none,
};
pub use wire::{show, tell};

use find::PATH;
use state::{
    in_time, is_late, long_patience, patience, waited, DEAD, FD, FOUND_AT, LATER, LOCK, LOOKING, PATIENCE, SILENCE,
    SILENT, SLOW_UNTIL,
};
use wire::{close_opt, passes, ready_before, receive, send, unasked};

/// The arena's count of the monitor's messages up to which this process has read them.
#[link_section = ".data.fsocket_start"]
static PENDING_SEEN: AtomicU32 = AtomicU32::new(0);
/// Work was put off, see [`defer`].
static DEFERRED: AtomicBool = AtomicBool::new(false);

/// Called before a sleep that does not watch the control socket: checks whether the monitor has
/// died. Asks the kernel a few times a second at most.
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

/// Makes a request and waits for the answer. The second value is the descriptor that came with
/// the answer.
#[inline]
pub fn request<R: Asks>(request: R, attach: Option<i32>) -> Result<(R::Answer, Option<i32>)> {
    let (answer, got) = exchange(request.into(), attach)?;
    // (A monitor whose answer has another type is treated as if there were none.)
    answer.read().map(|answer| (answer, got)).map_err(|_| {
        close_opt(got);
        Errno::EIO
    })
}

fn exchange(m: Msg, attach: Option<i32>) -> Result<(Msg, Option<i32>)> {
    if dead() {
        return Err(Errno::EIO);
    }
    let mut seq = LOCK.lock().map_err(|_| Errno::EAGAIN)?;
    let now = sys::now_ns();
    // A new monitor must receive what its predecessor knew, even if the new one starts slowly.
    let short = has_another_way(&m) && now.saturating_sub(FOUND_AT.load(Ordering::Relaxed)) > PATIENCE;
    let silent = SILENT.load(Ordering::Relaxed);
    if silent != 0 && now.saturating_sub(silent) < SILENCE {
        return Err(Errno::EIO);
    }
    if short && now < SLOW_UNTIL.load(Ordering::Relaxed) {
        return Err(Errno::EIO);
    }
    let limit = now + if short { patience() } else { long_patience() };
    *seq = seq.wrapping_add(1);
    let m = m.numbered(*seq | 1 << 31);
    if let Err(e) = send(&m, attach, limit) {
        if e == Errno::EAGAIN {
            is_late(short);
        }
        return Err(Errno::EIO);
    }
    loop {
        match receive(0) {
            Ok((a, got)) if a.answers(&m) => {
                in_time();
                if let Some(errno) = a.refusal() {
                    close_opt(got);
                    return Err(Errno::new(errno));
                }
                return Ok((a, got));
            }
            Ok((a, got)) => unasked(&a, got),
            // (A wait may end early, and a signal would restart it, so the time limit is checked
            // here.)
            Err(Errno::EINTR | Errno::EAGAIN) if sys::now_ns() < limit => {}
            Err(Errno::EINTR | Errno::EAGAIN) => {
                is_late(short);
                // The monitor may have registered the listener although this process will not
                // serve it, so the process withdraws it. If that message cannot be sent either,
                // and the process shares nothing else, the process closes the control socket. The
                // monitor then removes the listener.
                let shown = msg::Unlisten { listener: 0, for_all: false };
                if m.is::<msg::Listen>() && !tell(shown, attach) && (upcalls().shares_nothing)() {
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

/// Can the program go on without an answer, as if there were no monitor?
fn has_another_way(m: &Msg) -> bool {
    const THOSE: [u32; 14] = [
        msg::Connect::KIND,
        msg::InUse::KIND,
        msg::Listen::KIND,
        msg::Worker::KIND,
        msg::Ports::KIND,
        msg::Clone::KIND,
        msg::Group::KIND,
        msg::Local::KIND,
        msg::Balance::KIND,
        msg::Waiting::KIND,
        msg::Meet::KIND,
        msg::Offer::KIND,
        msg::Upgrade::KIND,
        msg::Options::KIND,
    ];
    THOSE.contains(&m.kind())
}

/// Closes the control socket: for the monitor, this process has ended. Its listeners use the
/// kernel from now on.
fn leave() {
    died();
    let fd = FD.swap(-1, Ordering::AcqRel);
    if fd >= 0 {
        process::close_own(fd);
    }
}

/// All messages were read. Will the monitor send messages that it has held back? Waits a short
/// time for them, so that a call that does not block sees messages that were sent before it.
fn is_more_coming(limit: &mut Option<u64>) -> bool {
    const LIMIT: u64 = 250_000_000;
    // The monitor clears HELD after it has sent the last message.
    const PIECE: u64 = 500_000;
    if arena::header().is_none_or(|h| h.pending.load(Ordering::Acquire) & HELD == 0) {
        return false;
    }
    let now = sys::now_ns();
    let limit = *limit.get_or_insert(now + LIMIT);
    if now < limit {
        ready_before(fd(), libc::POLLIN, limit.min(now + PIECE));
    }
    now < limit
}

/// Handles messages of the monitor that this process has not asked for. This is cheap if there
/// are none, because the monitor counts its messages in the arena.
pub fn poll() {
    poll_by(|| LOCK.lock().ok());
}

/// As [`poll`], for a caller that needs no message now: does nothing while another thread waits
/// for the monitor.
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
    let mut limit = None;
    loop {
        match receive(libc::MSG_DONTWAIT) {
            Ok((m, got)) => unasked(&m, got),
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) if is_more_coming(&mut limit) => {}
            Err(Errno::EAGAIN) => return,
            // The message stays unread, and the socket stays readable.
            Err(e) if passes(e) => return,
            Err(_) => return died(),
        }
    }
}

/// The control socket is readable although the arena's count has not changed: the monitor has
/// closed the socket, or the message came before the count.
pub fn readable() {
    drain(PENDING_SEEN.load(Ordering::Relaxed), || LOCK.lock().ok());
    settle();
}

/// Notes work that must not be done at this place. The next call that looks for messages of the
/// monitor does it.
pub fn defer() {
    DEFERRED.store(true, Ordering::Release);
}

#[inline]
fn settle() {
    if DEFERRED.load(Ordering::Relaxed) && DEFERRED.swap(false, Ordering::AcqRel) {
        (upcalls().settle)();
    }
}

/// Returns the registry, and waits for the monitor's first answer if necessary.
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
    let limit = now + patience();
    while registry::mapped().is_none() && !dead() {
        if !ready_before(fd(), libc::POLLIN, limit) {
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
    if registry::mapped().is_some() {
        waited(now);
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

/// In a forked child: the inherited socket belongs to the parent, so the child closes it.
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

/// Called after this process has changed its credentials. It makes a new socket with them, and
/// sends it to the monitor over the old socket, which proves whose it is. From then on both use
/// the new socket. Everything that the process shared has ended, except its listeners. False:
/// there is no monitor, or it refuses.
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
    // With SO_PASSCRED, the next messages already carry the new credentials, even before the
    // monitor has read this one.
    let _ = sys::setsockopt(theirs, libc::SOL_SOCKET, libc::SO_PASSCRED, &1i32.to_ne_bytes());
    let sent = tell(msg::Renew {}, Some(theirs));
    let _ = sys::close(theirs);
    let own = process::high_fd(own);
    let old = fd();
    PENDING_SEEN.store(0, Ordering::Relaxed);
    let renewed = sent && adopt_fd(own);
    if !sent {
        process::close_own(own);
    }
    if !renewed {
        FD.store(-1, Ordering::Release);
        died();
    }
    // Unread messages are lost with the old socket: they concern what this process has given up.
    process::close_own(old);
    renewed
}

/// If `old` is the control socket, its descriptor is `new` from now on.
pub fn renumbered(old: i32, new: i32) -> bool {
    FD.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok()
}

/// Announces a process to the monitor: a child, or (`successor`) the program that replaces this one.
/// Returns its control socket.
pub fn announce(nonce: u64, successor: bool) -> Option<i32> {
    let [child, monitor] = sys::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC).ok()?;
    // With SO_PASSCRED, the child's messages already carry its identity, before the monitor has
    // read this one.
    let _ = sys::setsockopt(monitor, libc::SOL_SOCKET, libc::SO_PASSCRED, &1i32.to_ne_bytes());
    let sent = tell(msg::Adopt { nonce, successor }, Some(monitor));
    let _ = sys::close(monitor);
    if !sent {
        let _ = sys::close(child);
        return None;
    }
    Some(process::high_fd(child))
}
