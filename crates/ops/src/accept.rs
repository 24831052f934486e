//! `accept`: from the SYN queues, else from the kernel.

mod kernel;
mod parts;

use crate::claim::claim;
use crate::establish::{establish, End};
use crate::kept;
use crate::signals::Held;
use crate::table::{Desc, Kind};
use crate::wait::{self, Deadline, Sleeper};
use crate::zone::{self, accept::Peer};
use crate::{ctl, listen::Listener, name, opts, path, pool, short_lived, stats, table, waker, Cause, Outcome};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::{Counter, Reason};
use fsocket_abi::channel::SERVER;
use fsocket_proto::Addr;
use fsocket_sync::segments::Missing;
use fsocket_sys::{self as sys, Errno, Result};
use parts::Parts;

/// While our queues have connections, the kernel's is looked at this often.
const KERNEL_EVERY: u32 = 8;

/// The kernel has accepted a connection of a listener that has no SYN queues, and none of whose zones was asked.
#[cold]
pub fn from_kernel_alone() {
    kernel::count();
}

/// # Safety
/// `addr` and `len` as accept4(2) wants them.
pub unsafe fn accept(
    fd: i32,
    d: &'static Desc,
    addr: *mut libc::sockaddr,
    len: *mut u32,
    flags: i32,
) -> Outcome<Result<i32>> {
    // SAFETY: `addr` and `len` are null or the program's, as accept4(2) wants them; only copies and the kernel reach
    // them.
    let r = unsafe { accept_any(fd, d, addr, len, flags) };
    if let (Outcome::Done(Ok(n)), Some(l)) = (&r, crate::listen::of(d)) {
        short_lived::accepted(l, *n);
    }
    r
}

/// # Safety
/// As [`accept`].
unsafe fn accept_any(
    fd: i32,
    d: &'static Desc,
    addr: *mut libc::sockaddr,
    len: *mut u32,
    flags: i32,
) -> Outcome<Result<i32>> {
    if flags & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) != 0 {
        return Outcome::Kernel(Cause::Invalid);
    }
    crate::listen::look_at_fork_group(fd, d);
    if !d.listening().accepts() {
        d.listening().mark_accepting();
    }
    let Some(l) = crate::listen::of(d) else {
        // SAFETY: `addr` and `len` are null or the program's, as accept4(2) wants them; only copies and the kernel
        // reach them.
        return unsafe { zone::accept::accept(fd, d, Peer { addr, len, flags }) };
    };
    l.join();
    ctl::poll();
    zone::follow_options(fd, d);
    if l.is_untaken() {
        // SAFETY: `addr` and `len` are null or the program's, as accept4(2) wants them; only copies and the kernel
        // reach them.
        if let Some(r) = unsafe { kernel::first(fd, d, l, Peer { addr, len, flags }) } {
            return Outcome::Done(r);
        }
    }
    if l.since_kernel.fetch_add(1, Ordering::Relaxed) >= KERNEL_EVERY {
        l.since_kernel.store(0, Ordering::Relaxed);
        if let Some(r) = zone::of(d).and_then(|z| z.take_own(fd, Peer { addr, len, flags })) {
            return Outcome::Done(r);
        }
        if kernel::is_ready(fd) {
            // SAFETY: `addr` and `len` are null or the program's, as accept4(2) wants them; only copies and the
            // kernel reach them.
            return Outcome::Done(unsafe { kernel::from_kernel(fd, addr, len, flags) });
        }
    }
    // SAFETY: `addr` and `len` are null or the program's, as accept4(2) wants them; only copies and the kernel reach
    // them.
    if let Some(r) = unsafe { from_queue(d, l, addr, len, flags) } {
        return Outcome::Done(r);
    }
    if let Some(r) = zone::of(d).and_then(|z| z.take_own(fd, Peer { addr, len, flags })) {
        l.since_kernel.store(0, Ordering::Relaxed);
        return Outcome::Done(r);
    }
    let nonblock = sys::fcntl(fd, libc::F_GETFL, 0).unwrap_or(0) & libc::O_NONBLOCK != 0;
    if let Some(z) = zone::of(d) {
        z.come(fd, nonblock);
    }
    let zoned = zone::of(d).filter(|z| z.is_active());
    if nonblock || zoned.is_none() && l.chans().next().is_none() && ctl::dead() && !ctl::may_come() {
        l.since_kernel.store(0, Ordering::Relaxed);
        return Outcome::Done(match zoned {
            Some(z) => z.take_other(fd, nonblock, Peer { addr, len, flags }),
            // SAFETY: `addr` and `len` are null or the program's, as accept4(2) wants them; only copies and the
            // kernel reach them.
            None => match (unsafe { kernel::from_kernel(fd, addr, len, flags) }, zone::of(d)) {
                (Err(Errno::EAGAIN), Some(z)) => {
                    z.take_waiting(fd, false, Peer { addr, len, flags }).unwrap_or(Err(Errno::EAGAIN))
                }
                (r, _) => r,
            },
        });
    }
    // SAFETY: `addr` and `len` are null or the program's, as accept4(2) wants them; only copies and the kernel reach
    // them.
    Outcome::Done(unsafe { wait(fd, d, l, addr, len, flags) })
}

/// # Safety
/// As [`accept`].
unsafe fn from_queue(
    d: &'static Desc,
    l: &Listener,
    addr: *mut libc::sockaddr,
    len: *mut u32,
    flags: i32,
) -> Option<Result<i32>> {
    if !l.has_syn(true) {
        return None;
    }
    // The descriptor first: without one the connection stays in the queue, as
    // it does in the kernel.
    let parts = match Parts::get(d.family(), flags) {
        Ok(p) => p,
        Err(e) => return Some(Err(e)),
    };
    for _ in 0..64 {
        let next = l.take_busy().or_else(|| l.take(false)).or_else(|| l.take(true));
        let Some((c, slot)) = next else { break };
        let Some((dst, port)) = claim(l, c, slot) else { continue };
        match c.rings(slot) {
            Ok(rings) => {
                let to = Addr { ip: dst, family: d.family() as u16, ..l.addr() };
                let end = End::usual(c, (slot, rings), SERVER, &to, port);
                // SAFETY: `addr` and `len` are null or the program's, as accept4(2) wants them; only copies and the
                // kernel reach them.
                return Some(unsafe { take(d, l, &end, addr, len, flags, &parts) });
            }
            Err(Missing::Closed) => {} // nobody uses the channel here any more
            Err(Missing::Failed) => {
                path::cannot_map(d, l, c, slot, dst, port);
                break;
            }
        }
    }
    parts.give_back();
    None
}

/// One connection out of a queue, which has been claimed.
///
/// # Safety
/// As [`accept`].
unsafe fn take(
    listener: &Desc,
    l: &Listener,
    e: &End,
    addr: *mut libc::sockaddr,
    len: *mut u32,
    flags: i32,
    parts: &Parts,
) -> Result<i32> {
    let bound = l.addr();
    let family = e.family;
    let &Parts { fd, desc: d, sock } = parts;
    d.set_family(family as u32);
    d.unconnected().set_nonblock(flags & libc::SOCK_NONBLOCK != 0);
    let options = opts::before::at(e.chan.slot(e.slot).dir[SERVER].prod.options.swap(0, Ordering::Relaxed), listener);
    d.options().set_values(options.opt);
    // An address of its own makes a socket IPv6-only, unless it is a mapped one.
    let only6 = bound.v6only != 0 || !(name::is_any(&bound.ip) || name::is_v4(&bound.ip));
    d.options().set_value(crate::options::V6ONLY, (family == libc::AF_INET6 as u16 && only6).into());
    if kept::any(listener) {
        if let Some(from) = table::fd_of(listener) {
            kept::inherit(listener, from, d, fd);
        }
    }
    d.options().set_receive_timeout(options.rcvtimeo);
    d.options().set_send_timeout(options.sndtimeo);
    establish(d, sock, e);
    if !table::install(fd, d) {
        crate::close::last_reference(d);
        let _ = sys::close(fd);
        return Err(Errno::EMFILE);
    }
    stats::count(Counter::AcceptShm);
    if fd <= table::STDIO {
        path::materialize_one(d, Reason::Option);
    }
    if !addr.is_null() {
        // SAFETY: `addr` and `len` are null or the program's, as accept4(2) wants them; only copies and the kernel
        // reach them.
        if let Err(wrong) = unsafe { name::give(&e.src, e.client_port, family, addr, len) } {
            // As in the kernel the connection is lost.
            let _ = crate::close::close(fd).or_kernel(|r| r, || sys::close(fd));
            return Err(wrong);
        }
    }
    Ok(fd)
}

/// Blocking accept: sleep on the kernel's queue, the waker and the monitor.
///
/// # Safety
/// As [`accept`].
unsafe fn wait(
    fd: i32,
    d: &'static Desc,
    l: &Listener,
    addr: *mut libc::sockaddr,
    len: *mut u32,
    flags: i32,
) -> Result<i32> {
    // SAFETY: `addr` and `len` are null or the program's, as accept4(2) wants them; only copies and the kernel reach
    // them.
    match unsafe { wait_any(fd, d, l, addr, len, flags) } {
        Waited::Ours(Ok(n)) => Ok(n),
        // A client may have rung this thread, and no other, for a connection of ours.
        Waited::Ours(r) | Waited::Other(r) => {
            l.pass_on();
            r
        }
    }
}

/// How a wait ended.
enum Waited {
    /// By what a SYN queue had.
    Ours(Result<i32>),
    Other(Result<i32>),
}

/// # Safety
/// As [`accept`].
unsafe fn wait_any(
    fd: i32,
    d: &'static Desc,
    l: &Listener,
    addr: *mut libc::sockaddr,
    len: *mut u32,
    flags: i32,
) -> Waited {
    let timeo = d.options().receive_timeout();
    let deadline = Deadline::of_option(timeo);
    // A signal that is handled while we spin would not end the sleep behind it, as it does in the
    // kernel: it waits until then. (Others spin too shortly to pay for that.)
    let mut held = None;
    let mut unarmed = waker::Unarmed::default();
    loop {
        ctl::poll();
        zone::follow_options(fd, d);
        // SAFETY: `addr` and `len` are null or the program's, as accept4(2) wants them; only copies and the kernel
        // reach them.
        if let Some(r) = unsafe { from_queue(d, l, addr, len, flags) } {
            return Waited::Ours(r);
        }
        if held.is_none() {
            held = Some(Held::all());
            if !table::lookup(fd).is_some_and(|now| core::ptr::eq(now, d)) {
                drop(held);
                // SAFETY: `addr` and `len` are null or the program's, as accept4(2) wants them; only copies and the
                // kernel reach them.
                return Waited::Other(unsafe { restart_on_fd(fd, addr, len, flags) });
            }
        }
        let signals = held.get_or_insert_with(Held::all).before();
        if d.spin_rx().spin(0, || l.has_syn(true)) {
            continue;
        }
        if let Some(z) = zone::of(d).filter(|z| z.is_non_worker() && !kernel::is_ready(fd)) {
            if let Some(r) = z.take_waiting(fd, true, Peer { addr, len, flags }) {
                return Waited::Other(r);
            }
        }
        let zoned = zone::of(d).filter(|z| z.is_active());
        let local = zoned.and_then(|z| z.own_fd()).unwrap_or(-1);
        let peers = zoned.map_or(-1, |z| z.peers_fd());
        let mut p = [fd, local, peers, -1, -1].map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
        let n = sleep(d, l, &mut p, deadline, &mut unarmed, signals);
        if let Some(z) = zoned.filter(|_| n != Err(Errno::EINTR)) {
            z.peers_spoke(p[2].revents != 0);
            match z.take(fd, false, Peer { addr, len, flags }) {
                Err(Errno::EAGAIN) => {}
                r => return Waited::Other(r),
            }
        }
        match n {
            Err(Errno::EINTR) if wait::restarts(deadline.is_limited()) => continue,
            Err(e) => return Waited::Other(Err(e)),
            Ok(_) => {}
        }
        if zoned.is_none() && p[0].revents != 0 {
            // Somebody else may take it first: do not block in there.
            held = None;
            // SAFETY: `addr` and `len` are null or the program's, as accept4(2) wants them; only copies and the
            // kernel reach them.
            match unsafe { kernel::try_accept(fd, addr, len, flags) } {
                Err(Errno::EAGAIN) => {}
                r => return Waited::Other(r),
            }
        }
        if deadline.is_over() && !l.has_syn(true) {
            return Waited::Other(Err(Errno::EAGAIN));
        }
    }
}

/// Sleeps on our queues and on what is in `p`, with these signals held.
fn sleep(
    d: &Desc,
    l: &Listener,
    p: &mut [libc::pollfd],
    deadline: Deadline,
    unarmed: &mut waker::Unarmed,
    signals: u64,
) -> Result<usize> {
    // Without one (no descriptors, no memory) our queues are looked at from time to time: the
    // kernel's `accept` would not end for a connection there.
    let mut sleeper = Sleeper::in_accept(l.id.load(Ordering::Relaxed));
    if let Some(s) = &sleeper {
        s.arm(|b, batch| l.sleep_alone_on(b, batch));
    }
    let mut n = Ok(0);
    // (A client that has rung this thread meanwhile does not again.)
    let marked = sleeper.as_ref().is_some_and(|s| s.is(|b| l.is_marked(b)));
    if !marked && !l.has_syn(true) {
        stats::count(Counter::Sleeps);
        let t0 = sys::cpu::ticks();
        zone::balance::before_sleep();
        let mut left = zone::balance::cut(deadline.left());
        let piece = match sleeper.is_none() {
            true => Some(unarmed.piece()),
            // (It is looked for at the end of the sleep.)
            false => ctl::may_come().then(ctl::unwatched).flatten(),
        };
        if let Some(piece) = piece {
            left = Some(left.map_or(piece, |l| l.min(piece)));
        }
        // SAFETY: `signals` is as long as the kernel's set.
        n = unsafe { wait::sleep(p, sleeper.as_mut(), left, &raw const signals as *const _) };
        d.spin_rx().slept(t0, l.notified_since(t0));
    }
    if let Some(s) = sleeper {
        s.end(|b| l.disarm(b));
    }
    wait::heed(p);
    n
}

/// The number refers to something else by now, if to anything: this has not begun before. (A program
/// that puts another file in the listener's place sends the thread a signal next, which is held from here on.)
///
/// # Safety
/// As [`accept`].
#[cold]
unsafe fn restart_on_fd(fd: i32, addr: *mut libc::sockaddr, len: *mut u32, flags: i32) -> Result<i32> {
    let now = table::lookup(fd).filter(|d| matches!(d.kind(), Kind::Listener | Kind::KernelListener));
    // SAFETY: `addr` and `len` are null or the program's, as accept4(2) wants them; only copies and the kernel reach
    // them.
    match now.map(|d| unsafe { accept(fd, d, addr, len, flags) }) {
        Some(Outcome::Done(r)) => r,
        _ if pool::holds(fd) => Err(Errno::EBADF),
        // SAFETY: `addr` and `len` are null or the program's, as accept4(2) wants them; only copies and the kernel
        // reach them.
        _ => unsafe { kernel::from_kernel(fd, addr, len, flags) },
    }
}
