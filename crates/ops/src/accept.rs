//! `accept`: takes a connection from the SYN queues, else from the kernel.

mod kernel;
mod parts;

use crate::claim::claim;
use crate::establish::{establish, End};
use crate::kept;
use crate::signals::Held;
use crate::table::{Desc, Kind};
use crate::wait::{self, Call, Deadline, Mask, Restart, Sleep, Sleeper, Source};
use crate::zone::{self, accept::Peer};
use crate::{ctl, listen::Listener, name, opts, path, pool, short_lived, stats, table, waker, Cause, Outcome};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::{Counter, Reason};
use fsocket_abi::channel::SERVER;
use fsocket_proto::Addr;
use fsocket_sync::block::{block, Wait};
use fsocket_sync::segments::Missing;
use fsocket_sys::{self as sys, Errno, Result};
use parts::Parts;

/// While the SYN queues have connections, the kernel's queue is tried once in this many calls.
const KERNEL_EVERY: u32 = 8;

/// The kernel has accepted a connection of a listener without SYN queues, and no zone was
/// involved.
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
    let r = accept_for(fd, d, Peer { addr, len, flags });
    if let (Outcome::Done(Ok(n)), Some(l)) = (&r, crate::listen::of(d)) {
        short_lived::accepted(l, *n);
    }
    r
}

fn accept_for(fd: i32, d: &'static Desc, peer: Peer) -> Outcome<Result<i32>> {
    if peer.flags & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) != 0 {
        return Outcome::Kernel(Cause::Invalid);
    }
    crate::listen::look_at_fork_group(fd, d);
    if !d.listening().accepts() {
        d.listening().mark_accepting();
    }
    let Some(l) = crate::listen::of(d) else {
        // SAFETY: `peer` is as accept4(2) wants it.
        return unsafe { zone::accept::accept(fd, d, peer) };
    };
    l.join();
    ctl::poll();
    zone::follow_options(fd, d);
    if l.is_untaken() {
        if let Some(r) = kernel::first(fd, d, l, peer) {
            return Outcome::Done(r);
        }
    }
    Outcome::Done(match at_once(fd, d, l, peer) {
        Some(r) => r,
        None => without_any(fd, d, l, peer),
    })
}

/// Takes a connection that waits in some queue now. The kernel's queue gets its turn while the
/// SYN queues are not empty.
fn at_once(fd: i32, d: &'static Desc, l: &Listener, peer: Peer) -> Option<Result<i32>> {
    let own = || zone::of(d).and_then(|z| z.take_own(fd, peer));
    if l.since_kernel.fetch_add(1, Ordering::Relaxed) >= KERNEL_EVERY {
        l.since_kernel.store(0, Ordering::Relaxed);
        if let Some(r) = own() {
            return Some(r);
        }
        match kernel::try_accept(fd, d, l, peer) {
            Err(Errno::EAGAIN) => {}
            r => return Some(r),
        }
    }
    if let Some(r) = from_queue(d, l, peer) {
        return Some(r);
    }
    own().inspect(|_| l.since_kernel.store(0, Ordering::Relaxed))
}

/// The SYN queues and the own zone are empty: takes a connection from the kernel, or waits.
fn without_any(fd: i32, d: &'static Desc, l: &Listener, peer: Peer) -> Result<i32> {
    let nonblock = sys::fcntl(fd, libc::F_GETFL, 0).unwrap_or(0) & libc::O_NONBLOCK != 0;
    if let Some(z) = zone::of(d) {
        z.come(fd, nonblock);
    }
    let zoned = zone::of(d).filter(|z| z.is_active());
    if !nonblock && (zoned.is_some() || l.chans().next().is_some() || !ctl::dead() || ctl::may_come()) {
        return wait(fd, d, l, peer);
    }
    l.since_kernel.store(0, Ordering::Relaxed);
    if let Some(z) = zoned {
        return z.take_other(fd, nonblock, peer);
    }
    if !nonblock {
        return kernel::block(fd, d, peer).unwrap_or_else(|| wait(fd, d, l, peer));
    }
    match (kernel::from_kernel(fd, peer), zone::of(d)) {
        (Err(Errno::EAGAIN), Some(z)) => z.take_waiting(fd, false, peer).unwrap_or(Err(Errno::EAGAIN)),
        (r, _) => r,
    }
}

fn from_queue(d: &'static Desc, l: &Listener, peer: Peer) -> Option<Result<i32>> {
    if !l.has_syn(true) {
        return None;
    }
    // The descriptor is allocated first: if that fails, the connection stays in the queue, as in
    // the kernel.
    let parts = match Parts::get(d.family(), peer.flags) {
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
                return Some(take(d, l, &End::usual(c, (slot, rings), SERVER, &to, port), peer, &parts));
            }
            Err(Missing::Closed) => {} // no thread of this process uses the channel any more
            Err(Missing::Failed) => {
                path::cannot_map(d, l, c, slot, dst, port);
                break;
            }
        }
    }
    parts.give_back();
    None
}

/// Accepts one connection that was claimed from a queue.
fn take(listener: &Desc, l: &Listener, e: &End, peer: Peer, parts: &Parts) -> Result<i32> {
    let bound = l.addr();
    let family = e.family;
    let &Parts { fd, desc: d, sock } = parts;
    d.set_family(family as u32);
    d.unconnected().set_nonblock(peer.flags & libc::SOCK_NONBLOCK != 0);
    let options = opts::before::at(e.chan.slot(e.slot).dir[SERVER].prod.options.swap(0, Ordering::Relaxed), listener);
    d.options().set_values(options.opt);
    // A socket bound to a specific address is IPv6-only, unless that is a v4-mapped address.
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
    if table::is_stdio(fd) {
        path::materialize_one(d, Reason::Option);
    }
    if !peer.addr.is_null() {
        // SAFETY: `peer` is as accept4(2) wants it; only copies that return EFAULT reach the program's memory.
        if let Err(wrong) = unsafe { name::give(&e.src, e.client_port, family, peer.addr, peer.len) } {
            // As in the kernel, the connection is lost if the program's buffer is bad.
            let _ = crate::close::close(fd).or_kernel(|r| r, || sys::close(fd));
            return Err(wrong);
        }
    }
    Ok(fd)
}

/// A blocking accept: sleeps on the kernel's queue, the waker and the monitor.
fn wait(fd: i32, d: &'static Desc, l: &Listener, peer: Peer) -> Result<i32> {
    match wait_any(fd, d, l, peer) {
        Waited::Ours(Ok(n)) => Ok(n),
        // A client may have rung only this thread, for a connection in a SYN queue, so another
        // thread is woken.
        Waited::Ours(r) | Waited::Other(r) => {
            l.pass_on();
            r
        }
    }
}

/// How a wait ended.
enum Waited {
    /// A SYN queue had something.
    Ours(Result<i32>),
    Other(Result<i32>),
}

fn wait_any(fd: i32, d: &'static Desc, l: &Listener, peer: Peer) -> Waited {
    let deadline = Deadline::of_option(d.options().receive_timeout());
    // Signals are held during the spin: a signal that is handled then would not end the sleep
    // that follows, while in the kernel it would end the call. (Other calls spin too briefly to
    // pay for holding signals.)
    let mut held = None;
    let mut unarmed = waker::Unarmed::default();
    loop {
        ctl::poll();
        zone::follow_options(fd, d);
        if let Some(r) = from_queue(d, l, peer) {
            return Waited::Ours(r);
        }
        if held.is_none() {
            held = Some(Held::all());
            if !table::lookup(fd).is_some_and(|now| core::ptr::eq(now, d)) {
                drop(held);
                return Waited::Other(restart_on_fd(fd, peer));
            }
        }
        let signals = held.get_or_insert_with(Held::all).before();
        if d.spin_rx().spin(0, || l.has_syn(true)) {
            continue;
        }
        if let Some(z) = zone::of(d).filter(|z| z.is_non_worker() && !kernel::is_ready(fd)) {
            if let Some(r) = z.take_waiting(fd, true, peer) {
                return Waited::Other(r);
            }
        }
        let zoned = zone::of(d).filter(|z| z.is_active());
        let local = zoned.and_then(|z| z.own_fd()).unwrap_or(-1);
        let peers = zoned.map_or(-1, |z| z.peers_fd());
        let (global, limit) = zone::of(d).map_or((fd, None), |z| z.to_sleep_on(fd));
        let mut p = [global, local, peers, -1, -1].map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
        // SAFETY: `signals` outlives the sleep, and is as long as the kernel's set.
        let mask = unsafe { Mask::of(&signals) };
        let n = block(&mut InQueues { d, l, p: &mut p, deadline, limit, unarmed: &mut unarmed, mask, sleeper: None });
        if zoned.is_none() && n.is_ok() && p[0].revents != 0 {
            held = None;
        }
        match after_sleep((fd, d, l), zoned, &p, n, peer) {
            Err(Errno::EAGAIN) => {}
            r => return Waited::Other(r),
        }
        if deadline.is_over() && !l.has_syn(true) {
            return Waited::Other(Err(Errno::EAGAIN));
        }
    }
}

/// Takes a connection from the kernel after a sleep on `p`. EAGAIN: there is none.
fn after_sleep(
    (fd, d, l): (i32, &Desc, &Listener),
    zoned: Option<&zone::Zoned>,
    p: &[libc::pollfd],
    slept: Result<usize>,
    peer: Peer,
) -> Result<i32> {
    if let Some(z) = zoned.filter(|_| slept != Err(Errno::EINTR)) {
        z.peers_spoke(p[2].revents != 0);
        match z.take(fd, false, peer) {
            Err(Errno::EAGAIN) => {}
            r => return r,
        }
    }
    slept?;
    match zoned {
        None if p[0].fd < 0 || p[0].revents != 0 => kernel::try_accept(fd, d, l, peer),
        _ => Err(Errno::EAGAIN),
    }
}

/// The sleep of an `accept`, on the SYN queues and on the descriptors in `p`.
struct InQueues<'a> {
    d: &'a Desc,
    l: &'a Listener,
    p: &'a mut [libc::pollfd],
    deadline: Deadline,
    /// A further limit of the sleep, in ns.
    limit: Option<u64>,
    unarmed: &'a mut waker::Unarmed,
    mask: Mask,
    sleeper: Option<Sleeper>,
}

impl Wait for InQueues<'_> {
    type Woken = Result<usize>;
    type End = Result<usize>;

    fn arm(&mut self) {
        // Without a sleeper (no descriptors or no memory) the SYN queues are looked at from time
        // to time: the kernel's `accept` would not return for a connection there.
        self.sleeper = Sleeper::in_accept(self.l.id.load(Ordering::Relaxed));
        if let Some(s) = &self.sleeper {
            s.arm(|b, batch| self.l.sleep_alone_on(b, batch));
        }
    }

    fn look(&mut self) -> Option<Result<usize>> {
        // (A client that has rung this thread already does not ring again, so its mark counts.)
        let marked = self.sleeper.as_ref().is_some_and(|s| s.is(|b| self.l.is_marked(b)));
        (marked || self.l.has_syn(true)).then_some(Ok(0))
    }

    fn sleep(&mut self) -> Result<usize> {
        let t0 = sys::cpu::ticks();
        zone::balance::before_sleep();
        let unarmed = if self.sleeper.is_none() { Some(&mut *self.unarmed) } else { None };
        let left = self.limit.into_iter().chain(self.deadline.left()).min();
        let how = Sleep::of(Call::Accept, left).unarmed(unarmed).restart(Restart::Socket);
        let r = wait::sleep(Source::Set { fds: self.p, sleeper: self.sleeper.as_mut(), mask: self.mask }, how);
        self.d.spin_rx().slept(t0, self.l.notified_since(t0));
        r
    }

    fn disarm(&mut self) {
        if let Some(s) = self.sleeper.take() {
            s.end(|b| self.l.disarm(b));
        }
    }

    fn on_wake(&mut self, woken: Result<usize>) -> Option<Result<usize>> {
        wait::heed(self.p);
        Some(woken)
    }
}

/// The descriptor refers to another file, or to none, before the call has begun: calls `accept`
/// for what it is now. (A program that puts another file in the listener's place then sends this
/// thread a signal, which is held from here on.)
#[cold]
fn restart_on_fd(fd: i32, peer: Peer) -> Result<i32> {
    let now = table::lookup(fd).filter(|d| matches!(d.kind(), Kind::Listener | Kind::KernelListener));
    // SAFETY: `peer` is as accept4(2) wants it.
    match now.map(|d| unsafe { accept(fd, d, peer.addr, peer.len, peer.flags) }) {
        Some(Outcome::Done(r)) => r,
        _ if pool::holds(fd) => Err(Errno::EBADF),
        _ => kernel::from_kernel(fd, peer),
    }
}
