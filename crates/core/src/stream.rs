//! Bytes: send, receive, wait.

use crate::asleep::{self, On};
use crate::path::{self, Path};
use crate::table::Desc;
use crate::{bell, chan, ready, stats, token};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::{flag, Counter, Half};
use fsocket_abi::channel::{status, Dir, POS_START};
use fsocket_ring::{self as ring, Hostile};
use fsocket_sync::doorbell::FUTEX_BIT;
use fsocket_sys::{self as sys, cpu, Errno, Result};

/// After so many waits without a send in between, a receiver collects for
/// `BATCH_NS` before it looks. Measured with 8-byte messages on two CPUs: see
/// docs/performance.md.
const ONE_WAY: u32 = 16;
const BATCH_NS: u64 = 4000;

/// With both sides on one CPU a long message is handed over in pieces of this
/// many bytes, so that they are still in cache when the receiver copies them.
const SHARED_CPU: usize = 256 * 1024;

/// Segment of the loopback device, bytes: MSG_MORE holds back less than that.
const MSS: usize = 32 * 1024;

const TX_BAD: u32 = flag::SHUT_WR | flag::POISONED | flag::RST_REPORTED | flag::SENT_AFTER_CLOSE | flag::MOVED;
/// The peer's state in which a send is not the ring's alone.
const NOT_NOW: u32 = status::RST | status::CLOSED | status::DEAF | status::MOVING;
/// Flags that change nothing for us.
const SEND_PLAIN: i32 =
    libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT | libc::MSG_MORE | libc::MSG_DONTROUTE | libc::MSG_CONFIRM;

/// Publish where we run, if that has changed.
#[inline(always)]
fn publish_cpu(h: &Half, to: &fsocket_sync::atomic::AtomicU32) {
    if h.cpu.load(Ordering::Relaxed) != cpu::mark() {
        publish(h, to);
    }
}

#[cold]
#[inline(never)]
fn publish(h: &Half, to: &fsocket_sync::atomic::AtomicU32) {
    h.cpu.store(cpu::mark(), Ordering::Relaxed);
    to.store(cpu::current(), Ordering::Relaxed);
}

#[inline(always)]
fn notify(d: &'static Desc, want: &fsocket_sync::doorbell::Want) {
    let mask = want.take();
    if mask != 0 {
        wake(d, want, mask);
    }
}

#[cold]
fn wake(d: &'static Desc, want: &fsocket_sync::doorbell::Want, mask: u64) {
    let i = d.chan.load(Ordering::Relaxed);
    if let Some(c) = chan::CHANS.get(i.wrapping_sub(1)) {
        bell::wake(c, d.slot_index.load(Ordering::Relaxed) as usize, want, mask);
    }
    path::after_send(d);
}

/// Wake whoever waits for our data, and whoever waits for space at the peer.
pub fn notify_all(d: &'static Desc) {
    notify(d, &d.tx().1.want_data);
    notify(d, &d.rx().1.want_space);
}

/// A hostile peer: its connection is reset, nothing else happens.
#[cold]
pub fn poison(d: &'static Desc) {
    if d.sock().flags.fetch_or(flag::POISONED, Ordering::AcqRel) & flag::POISONED == 0 {
        stats::count(Counter::HostilePeer);
        d.tx().1.prod.status.fetch_or(status::RST | status::CLOSED, Ordering::Release);
        notify_all(d);
    }
}

/// Do these flags leave a send as it is?
#[inline(always)]
pub fn plain_send(flags: i32) -> bool {
    flags & !SEND_PLAIN == 0
}

/// # Safety
/// `buf` is readable for `len` bytes.
#[inline(always)]
pub unsafe fn send(d: &'static Desc, buf: *const u8, len: usize, flags: i32) -> Result<usize> {
    // SAFETY: the caller's.
    if plain_send(flags) && unsafe { send_fast(d, buf, len) } {
        return Ok(len);
    }
    // SAFETY: the caller's.
    unsafe { send_slow(d, buf, len, flags) }
}

/// The common case of [`send`]: it needs neither the kernel nor a look at the
/// peer. False: nothing was done.
///
/// # Safety
/// As [`send`].
#[inline(always)]
pub unsafe fn send_fast(d: &'static Desc, buf: *const u8, len: usize) -> bool {
    let s = d.sock();
    let (r, tx, h) = d.tx();
    let (_, rx, _) = d.rx();
    // Who switches the path leaves no room to `send_small`, while he has the
    // token: these may be looked at before.
    if s.flags.load(Ordering::Relaxed) & TX_BAD != 0 || rx.prod.status.load(Ordering::Relaxed) & NOT_NOW != 0 {
        return false;
    }
    let Ok(t) = token::enter(h) else { return false };
    // SAFETY: the caller's; the token is ours.
    let sent = d.is_conn() && unsafe { ring::send_small(r, tx, h, buf, len) };
    drop(t);
    if sent {
        notify(d, &tx.want_data);
        publish_cpu(h, &tx.prod.cpu);
    }
    sent
}

/// What [`send_tiny`] has done.
pub enum Tiny {
    /// All of it.
    Sent,
    /// The bytes are on their way; [`sent_tiny`] does the rest.
    Tell,
    /// Nothing.
    No,
}

/// [`send_fast`] for a few bytes by the only thread that has ever sent: the case in which
/// a call costs as much as the work. Nothing in it calls a function, so that it needs no
/// stack (see docs/performance.md).
///
/// # Safety
/// As [`send`].
#[inline(always)]
pub unsafe fn send_tiny(d: &'static Desc, buf: *const u8, len: usize) -> Tiny {
    let s = d.sock();
    // As in `send_fast`.
    if !ring::TINY.contains(&len)
        || s.flags.load(Ordering::Relaxed) & TX_BAD != 0
        || d.rx_dir().prod.status.load(Ordering::Relaxed) & NOT_NOW != 0
    {
        return Tiny::No;
    }
    let h = &s.tx;
    let Some(t) = token::enter_owned(h) else { return Tiny::No };
    if !d.is_conn() || !ring::fits_tiny(h, len) {
        return Tiny::No;
    }
    // SAFETY: the caller's; the token is ours.
    unsafe { ring::send_tiny(d.tx_ring(), h, buf, len) };
    drop(t);
    let tx = d.tx_dir();
    fsocket_sync::light_fence();
    if tx.want_data.armed() != 0 || h.cpu.load(Ordering::Relaxed) != cpu::mark() {
        return Tiny::Tell;
    }
    Tiny::Sent
}

/// After [`Tiny::Tell`].
pub fn sent_tiny(d: &'static Desc) {
    let (_, tx, h) = d.tx();
    notify(d, &tx.want_data);
    publish_cpu(h, &tx.prod.cpu);
}

/// # Safety
/// As [`send`].
#[cold]
#[inline(never)]
pub unsafe fn send_slow(d: &'static Desc, buf: *const u8, len: usize, flags: i32) -> Result<usize> {
    // Of nothing there is no urgent byte.
    let urgent = flags & libc::MSG_OOB != 0 && len > 0;
    if urgent {
        if path::of(d) == Path::Shm && !only_deaf(d) {
            if let Some(r) = refused(d, len, 0, flags) {
                return r;
            }
        }
        // The kernel has urgent data, the ring has not.
        stats::count(Counter::FbOption);
        path::materialize_one(d);
    }
    if flags & libc::MSG_ZEROCOPY != 0 && len > 0 && path::of(d) == Path::Shm {
        crate::opts::extra::zerocopy(d);
    }
    let s = d.sock();
    let (r, tx, h) = d.tx();
    let block = s.flags.load(Ordering::Relaxed) & flag::NONBLOCK == 0 && flags & libc::MSG_DONTWAIT == 0;
    let (mut deadline, mut hold) = (None, None);
    let (mut done, mut shown) = (0, 0);
    // Who only writes and then waits by a system call of its own is seen here.
    if h.pos.load(Ordering::Relaxed) == POS_START && d.items.load(Ordering::Relaxed) == 0 && d.is_conn() {
        hold.get_or_insert_with(|| Hold::on(d));
        crate::foreign::noticed();
    }
    loop {
        if left_rings(d) {
            hold.get_or_insert_with(|| Hold::on(d));
        }
        if let Some(fd) = path_taken(d) {
            // SAFETY: the rest of the caller's buffer.
            return match fd.and_then(|fd| unsafe { sys::send(fd, buf.add(done), len - done, flags) }) {
                Ok(n) => Ok(done + n),
                Err(_) if done > 0 => Ok(done),
                Err(e) => Err(e),
            };
        }
        if urgent {
            return Err(Errno::EOPNOTSUPP);
        }
        if let Some(r) = refused(d, len, done, flags) {
            return r;
        }
        if done == len {
            return Ok(done);
        }
        let step = match token::enter(h) {
            Err(token::Busy) => return if done > 0 { Ok(done) } else { Err(Errno::EAGAIN) },
            Ok(_) if !d.is_conn() => match path::went_to(d) {
                Some(_) => continue,
                None => return Err(Errno::EBADF),
            },
            Ok(_) if path::of(d) != Path::Shm => continue,
            Ok(_t) => {
                populate(d, h, len - done);
                // SAFETY: the rest of the caller's buffer; the token is held.
                unsafe { ring::send(r, tx, h, buf.add(done), len - done) }
            }
        };
        match step {
            Err(Hostile) => poison(d),
            Ok(0) => {
                s.tx_blocked.fetch_add(1, Ordering::Relaxed);
                if !block {
                    // Whoever waits for EPOLLOUT must look at the ring again.
                    crate::epoll::changed(d);
                    return if done > 0 { Ok(done) } else { Err(Errno::EAGAIN) };
                }
                hold.get_or_insert_with(|| Hold::on(d));
                if done > 0 {
                    interruptible(&mut deadline, s.sndtimeo.load(Ordering::Relaxed));
                }
                if let Err(e) = wait_space(d, &mut deadline) {
                    return if done > 0 { Ok(done) } else { Err(e) };
                }
            }
            Ok(n) => {
                done += n;
                notify(d, &tx.want_data);
                publish_cpu(h, &tx.prod.cpu);
                if done == len {
                    return Ok(done);
                }
                if done - shown >= SHARED_CPU && ready::peer_cpu(d) == cpu::current() {
                    // The peer needs this CPU to take what lies in its cache.
                    shown = done;
                    crate::spin::give_way();
                }
            }
        }
    }
}

/// Make the pages exist that a long message will touch, in one call instead of
/// one fault each; and find out about a lack of memory here, not by a signal.
fn populate(d: &Desc, h: &Half, len: usize) {
    const CHUNK: u64 = 128 * 1024;
    const MADV_POPULATE_WRITE: i32 = 23;
    let at = ring::offset(h);
    if len < 8192 && at < 16384 {
        return;
    }
    crate::idle::grown(d);
    let Some(c) = chan::CHANS.get(d.chan.load(Ordering::Relaxed).wrapping_sub(1)) else { return };
    let base = c.ring(d.slot_index.load(Ordering::Relaxed) as usize, d.side.load(Ordering::Relaxed) as usize);
    let have = h.populated.load(Ordering::Relaxed);
    if at + CHUNK / 2 < have || have >= fsocket_abi::channel::RING_CAP as u64 {
        return;
    }
    let from = have & !4095;
    let n = CHUNK.max(at + CHUNK / 2 - from).min(fsocket_abi::channel::RING_CAP as u64 - from) & !4095;
    // SAFETY: inside our ring; populating changes no content.
    if unsafe { sys::madvise(base.add(from as usize), n as usize, MADV_POPULATE_WRITE) }.is_ok() {
        h.populated.store(from + n, Ordering::Relaxed);
    }
}

/// SO_RCVLOWAT, bytes: a receive that may wait waits for that much.
pub fn low_water(d: &Desc) -> usize {
    match d.is_conn() && d.sock().flags.load(Ordering::Relaxed) & flag::LOWAT != 0 {
        true => crate::opts::lowat(d),
        false => 1,
    }
}

/// Is the path no longer the rings alone?
#[inline]
pub fn left_rings(d: &Desc) -> bool {
    !d.is_conn() || path::of(d) != Path::Shm
}

/// Is there something in the ring to receive?
fn ring_has(d: &Desc) -> bool {
    let (r, rx, h) = d.rx();
    d.is_conn() && ring::readable(r, rx, h)
}

/// Where the rest of an operation is to be done, if no longer in the rings.
/// The caller keeps `d` meanwhile ([`Hold`]).
fn path_taken(d: &'static Desc) -> Option<Result<i32>> {
    if !d.is_conn() {
        return path::went_to(d).map(Ok);
    }
    match path::of(d) {
        Path::Shm => None,
        _ if d.sock().flags.load(Ordering::Relaxed) & flag::POISONED != 0 => None,
        _ => match path::follow(d) {
            // Reset half-way: what remains is ours to report.
            Err(Errno::ECONNRESET) => None,
            r => Some(r),
        },
    }
}

/// What a send of `len` bytes, of which `done` are gone, returns because nothing
/// more can be sent; None: it can. A vectored send asks once for all its parts.
pub fn refused(d: &'static Desc, len: usize, done: usize, flags: i32) -> Option<Result<usize>> {
    if done > 0 && broken(d) {
        return Some(Ok(done)); // and why is the next call's
    }
    Some(match send_error(d, len, flags)? {
        // No more than a send buffer holds: what is longer meets the reset.
        Refused::Swallow => Ok(len.min(crate::opts::send_buffer(d))),
        _ if done > 0 => Ok(done),
        Refused::Pipe => {
            if flags & libc::MSG_NOSIGNAL == 0 {
                let _ = sys::tgkill(sys::getpid(), sys::gettid(), libc::SIGPIPE);
            }
            Err(Errno::EPIPE)
        }
        Refused::Error(e) => Err(e),
    })
}

/// Would the peer, which is there and has shut down both directions, answer a send? To an urgent
/// one it does so in the kernel, and shows that it was urgent.
fn only_deaf(d: &Desc) -> bool {
    const SENT: u32 = flag::SHUT_WR | flag::SENT_AFTER_CLOSE | flag::POISONED;
    let theirs = d.rx().1.prod.status.load(Ordering::Acquire);
    theirs & (status::DEAF | status::CLOSED | status::RST) == status::DEAF
        && d.sock().flags.load(Ordering::Relaxed) & SENT == 0
        && d.sock().err.load(Ordering::Relaxed) == 0
}

/// Has this side shut down, or is there an error?
fn broken(d: &Desc) -> bool {
    let s = d.sock();
    s.err.load(Ordering::Relaxed) != 0 || s.flags.load(Ordering::Relaxed) & flag::SHUT_WR != 0 || ready::state(d).reset
}

enum Refused {
    /// The first send after the peer's close: the kernel takes the bytes, the
    /// peer answers with a reset.
    Swallow,
    Pipe,
    Error(Errno),
}

/// Why `len` bytes cannot be sent, if so; updates what is reported only once.
fn send_error(d: &'static Desc, len: usize, flags: i32) -> Option<Refused> {
    let s = d.sock();
    let f = s.flags.load(Ordering::Relaxed);
    match s.err.swap(0, Ordering::AcqRel) {
        0 => {}
        libc::EPIPE => return Some(Refused::Pipe),
        e => return Some(Refused::Error(Errno::new(e))),
    }
    let st = ready::state(d);
    if st.reset && s.flags.fetch_or(flag::RST_REPORTED, Ordering::AcqRel) & flag::RST_REPORTED == 0 {
        return Some(match ready::reset_error(st) {
            libc::EPIPE => Refused::Pipe,
            e => Refused::Error(Errno::new(e)),
        });
    }
    if f & flag::SHUT_WR != 0 || st.reset {
        return Some(Refused::Pipe);
    }
    if st.closed {
        let held = flags & libc::MSG_MORE != 0 && len < MSS;
        if f & flag::SENT_AFTER_CLOSE == 0 && (len == 0 || held) {
            // No segment, no answer.
            return if held { Some(Refused::Swallow) } else { None };
        }
        if s.flags.fetch_or(flag::SENT_AFTER_CLOSE, Ordering::AcqRel) & flag::SENT_AFTER_CLOSE == 0 {
            // The reset that answers it finds us with the peer's FIN received.
            s.err.store(libc::EPIPE, Ordering::Release);
            // A peer that has closed does not care; one that only shut down
            // both directions has answered, and is reset itself.
            d.tx().1.prod.status.fetch_or(status::RST, Ordering::Release);
            notify(d, &d.tx().1.want_data);
            // Relatives that wait on it see the hang-up, too.
            path::wake_own(d);
            return Some(Refused::Swallow);
        }
        return Some(Refused::Pipe);
    }
    None
}

/// # Safety
/// `buf` is writable for `len` bytes.
#[inline(always)]
pub unsafe fn recv(d: &'static Desc, buf: *mut u8, len: usize, flags: i32) -> Result<usize> {
    // SAFETY: the caller's.
    match unsafe { recv_fast(d, buf, len, flags) } {
        // SAFETY: the caller's.
        0 => unsafe { recv_slow(d, buf, len, flags) },
        // SAFETY: the caller's.
        n if n < len && left_rings(d) => Ok(n + unsafe { rest(d, buf.wrapping_add(n), len - n, flags) }),
        n => Ok(n),
    }
}

/// What a receive that has taken the ring's last bytes finds behind them in the
/// kernel, where the path was switched: how many bytes more.
///
/// # Safety
/// As [`recv`].
#[cold]
pub unsafe fn rest(d: &'static Desc, buf: *mut u8, len: usize, flags: i32) -> usize {
    let _hold = Hold::on(d);
    if ring_has(d) {
        return 0;
    }
    match path_taken(d) {
        // A receive ends before urgent data; begun there it would go over them. And one that
        // has something to return leaves an error to the next.
        Some(Ok(fd)) if at_mark(fd) || in_kernel(fd) == 0 => 0,
        // SAFETY: the caller's.
        Some(Ok(fd)) => unsafe { sys::recv(fd, buf, len, flags | libc::MSG_DONTWAIT) }.unwrap_or(0),
        _ => 0,
    }
}

/// Does urgent data come next? A receive that has something ends there.
pub fn before_urgent(d: &Desc) -> bool {
    let fd = || path::went_to(d).or_else(|| path::kernel_part(d));
    left_rings(d) && !ring_has(d) && fd().is_some_and(at_mark)
}

fn at_mark(fd: i32) -> bool {
    const SIOCATMARK: usize = 0x8905;
    ioctl(fd, SIOCATMARK) != 0
}

/// Bytes that a kernel socket has to receive.
fn in_kernel(fd: i32) -> i32 {
    ioctl(fd, libc::FIONREAD as usize)
}

/// A receive that has something, and waits for more, goes on in the kernel: there it would wait
/// like one that has nothing, across urgent data and signals. False: that has come, or the time is
/// up.
fn something_behind(d: &Desc, fd: i32) -> bool {
    let mut p = libc::pollfd { fd, events: libc::POLLIN | libc::POLLPRI, revents: 0 };
    let limit = Some(d.sock().rcvtimeo.load(Ordering::Relaxed)).filter(|t| *t != 0);
    // SAFETY: one pollfd.
    let r = asleep::sleep(&On::default(), || unsafe { sys::ppoll(&mut p, 1, limit, core::ptr::null()) });
    r == Ok(1) && !at_mark(fd)
}

/// The int that an ioctl answers; 0 if it fails.
fn ioctl(fd: i32, what: usize) -> i32 {
    let mut answer = 0i32;
    // SAFETY: an int for the answer.
    match unsafe { sys::raw(libc::SYS_ioctl, [fd as usize, what, &raw mut answer as usize, 0, 0, 0]) } {
        Ok(_) => answer,
        Err(_) => 0,
    }
}

/// The same for a look ahead: the ring's bytes stay where they are.
///
/// # Safety
/// As [`recv`].
#[cold]
unsafe fn peek_rest(d: &'static Desc, buf: *mut u8, len: usize, flags: i32) -> usize {
    let _hold = Hold::on(d);
    match path_taken(d) {
        Some(Ok(fd)) if d.is_conn() && in_kernel(fd) > 0 => {
            // SAFETY: the caller's.
            unsafe { sys::recv(fd, buf, len, flags | libc::MSG_DONTWAIT) }.unwrap_or(0)
        }
        _ => 0,
    }
}

/// The common case of [`recv`]: something is there. 0: nothing was done.
///
/// # Safety
/// As [`recv`].
#[inline(always)]
pub unsafe fn recv_fast(d: &'static Desc, buf: *mut u8, len: usize, flags: i32) -> usize {
    if flags & !(libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) != 0 {
        return 0;
    }
    let (r, rx, h) = d.rx();
    let Ok(t) = token::enter(h) else { return 0 };
    const SLOW: u32 = flag::SHUT_RD | flag::POISONED | flag::MOVING | flag::LOWAT;
    if !d.is_conn() || d.sock().flags.load(Ordering::Relaxed) & SLOW != 0 {
        return 0;
    }
    // SAFETY: the caller's; the token is held. What is wrong with the peer is
    // found again, and dealt with, by the slow path.
    let got = unsafe { ring::recv(r, rx, h, buf, len, false) };
    drop(t);
    match got {
        Ok(n @ 1..) => {
            consumed(d, rx, h);
            n
        }
        _ => 0,
    }
}

/// Keeps a connection while a thread sleeps in an operation on it: another
/// thread may close the descriptor meanwhile, and as in the kernel the operation
/// goes on, and the connection ends when it is over.
pub struct Hold(u32);

impl Hold {
    pub fn on(d: &Desc) -> Hold {
        d.refs.fetch_add(1, Ordering::AcqRel);
        Hold(d.index())
    }
    /// Unless its last reference is gone already.
    pub fn unless_gone(d: &Desc) -> Option<Hold> {
        let add = |n: u32| (n != 0).then(|| n + 1);
        d.refs.fetch_update(Ordering::AcqRel, Ordering::Relaxed, add).ok().map(|_| Hold(d.index()))
    }
    /// What an operation that will never end has left behind.
    pub(crate) fn abandoned(index: u32) -> Hold {
        Hold(index)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Some(d) = crate::table::DESCS.get(self.0) {
            if d.refs.fetch_sub(1, Ordering::AcqRel) == 1 {
                crate::close::last_reference(d);
                crate::table::done_with(d);
            }
        }
    }
}

/// After a read: wake a sender that sleeps for space, once there is enough.
#[inline(always)]
fn consumed(d: &'static Desc, rx: &Dir, h: &Half) {
    fsocket_sync::light_fence();
    if rx.want_space.armed() != 0 && h.pos.load(Ordering::Relaxed) >= rx.prod.space_at.load(Ordering::Relaxed) {
        notify(d, &rx.want_space);
    }
    publish_cpu(h, &rx.cons.cpu);
}

/// # Safety
/// As [`recv`].
#[cold]
#[inline(never)]
pub unsafe fn recv_slow(d: &'static Desc, buf: *mut u8, len: usize, flags: i32) -> Result<usize> {
    if flags & libc::MSG_OOB != 0 {
        return match path_taken(d) {
            // SAFETY: the caller's.
            Some(fd) => fd.and_then(|fd| unsafe { sys::recv(fd, buf, len, flags) }),
            // Nobody has sent any, or the path would have been switched.
            None => Err(Errno::EINVAL),
        };
    }
    if flags & libc::MSG_ERRQUEUE != 0 {
        return Err(Errno::EAGAIN);
    }
    let s = d.sock();
    let (r, rx, h) = d.rx();
    let peek = flags & libc::MSG_PEEK != 0;
    let mut block = s.flags.load(Ordering::Relaxed) & flag::NONBLOCK == 0 && flags & libc::MSG_DONTWAIT == 0;
    // MSG_TRUNC on TCP: the bytes are discarded.
    let dst = if flags & libc::MSG_TRUNC != 0 { core::ptr::null_mut() } else { buf };
    // As many bytes end a sleep.
    let mut target = match block {
        true if flags & libc::MSG_WAITALL != 0 => len,
        true if s.flags.load(Ordering::Relaxed) & flag::LOWAT != 0 => crate::opts::lowat(d).min(len),
        _ => 1,
    };
    let (mut deadline, mut hold) = (None, None);
    let mut done = 0;
    loop {
        let mut looked = false;
        if !ring_has(d) || s.flags.load(Ordering::Relaxed) & flag::MOVING != 0 {
            looked = true;
            if left_rings(d) {
                hold.get_or_insert_with(|| Hold::on(d));
            }
            if let Some(fd) = path_taken(d) {
                if done > 0 && fd.is_ok_and(|fd| at_mark(fd) || block && !something_behind(d, fd)) {
                    return Ok(done);
                }
                // SAFETY: the rest of the caller's buffer.
                return match fd.and_then(|fd| unsafe { sys::recv(fd, buf.wrapping_add(done), len - done, flags) }) {
                    Ok(n) => Ok(done + n),
                    Err(_) if done > 0 => Ok(done),
                    Err(e) => Err(e),
                };
            }
        }
        if s.flags.load(Ordering::Relaxed) & flag::POISONED == 0 {
            let got = match token::enter(h) {
                Err(token::Busy) => return Err(Errno::EAGAIN),
                Ok(_) if !d.is_conn() => match path::went_to(d) {
                    Some(_) => continue,
                    None => return Err(Errno::EBADF),
                },
                Ok(_) if s.flags.load(Ordering::Relaxed) & flag::MOVING != 0 => continue,
                Ok(_t) => {
                    if len == 0 {
                        ring::available(r, rx, h, 1).map(|n| if n > 0 { usize::MAX } else { 0 })
                    } else {
                        let at = if dst.is_null() { dst } else { dst.wrapping_add(done) };
                        // A peek always starts over.
                        let (at, n) = if peek { (dst, len) } else { (at, len - done) };
                        // SAFETY: within the caller's buffer; the token is held.
                        unsafe { ring::recv(r, rx, h, at, n, peek) }
                    }
                }
            };
            match got {
                Err(Hostile) => {
                    poison(d);
                    continue;
                }
                Ok(usize::MAX) => return Ok(0),
                Ok(n) if peek && n > 0 && n < len && left_rings(d) => {
                    let at = if dst.is_null() { dst } else { dst.wrapping_add(n) };
                    // SAFETY: the rest of the caller's buffer.
                    return Ok(n + unsafe { peek_rest(d, at, len - n, flags) });
                }
                Ok(n) if peek && n > 0 && n >= target => return Ok(n),
                Ok(n) if peek => {
                    done = n;
                }
                Ok(0) => {}
                Ok(n) => {
                    done += n;
                    consumed(d, rx, h);
                    if done < len && done >= target && left_rings(d) {
                        let at = if dst.is_null() { dst } else { dst.wrapping_add(done) };
                        // SAFETY: the rest of the caller's buffer.
                        return Ok(done + unsafe { rest(d, at, len - done, flags) });
                    }
                    if done >= target {
                        return Ok(done);
                    }
                    continue;
                }
            }
        }
        if ended(d) {
            if !looked && left_rings(d) {
                // The path was switched while we waited for the token: the rest, which was in the
                // ring a moment ago, is in the kernel.
                continue;
            }
            let poisoned = s.flags.load(Ordering::Relaxed) & flag::POISONED != 0;
            if ring::readable(r, rx, h) && !poisoned && !(peek && done > 0) {
                continue; // data came before the end that we have just seen
            }
            return if done > 0 { Ok(done) } else { end_of_stream(d) };
        }
        if done == 0 && d.items.load(Ordering::Relaxed) == 0 {
            hold.get_or_insert_with(|| Hold::on(d));
            if crate::foreign::noticed() {
                continue;
            }
        }
        if !block {
            return if done > 0 { Ok(done) } else { Err(Errno::EAGAIN) };
        }
        hold.get_or_insert_with(|| Hold::on(d));
        if done > 0 || len == 0 {
            interruptible(&mut deadline, s.rcvtimeo.load(Ordering::Relaxed));
        }
        if len == 0 {
            let _ = wait_any(d, &mut deadline);
            return Ok(0); // whatever has ended the wait
        }
        let r = if peek && done > 0 { wait_more(d, done, &mut deadline) } else { wait_data(d, &mut deadline) };
        if let Err(e) = r {
            if (done == 0 || !peek) && block && low_water(d) > 1 && ring_has(d) {
                // Less than was waited for is better than nothing, and all that is there better
                // than what was there before.
                (block, target) = (false, 1);
                continue;
            }
            return if done > 0 { Ok(done) } else { Err(e) };
        }
    }
}

/// Will no more data come, for whatever reason?
fn ended(d: &Desc) -> bool {
    let s = d.sock();
    let f = s.flags.load(Ordering::Relaxed);
    ready::state(d).eof || s.err.load(Ordering::Relaxed) != 0 || f & (flag::SHUT_RD | flag::POISONED) != 0
}

/// Nothing is left to read: an error once, then the end. After a FIN there is
/// only the end, whatever error is pending.
fn end_of_stream(d: &Desc) -> Result<usize> {
    let st = ready::state(d);
    if st.fin {
        return Ok(0);
    }
    match ready::take_error(d) {
        0 => Ok(0),
        e => Err(Errno::new(e)),
    }
}

/// MSG_PEEK with MSG_WAITALL: more than what was there.
fn wait_more(d: &'static Desc, have: usize, deadline: &mut Option<u64>) -> Result<()> {
    let (r, rx, h) = d.rx();
    let more = || {
        token::enter(h).map_or(true, |_t| ring::available(r, rx, h, have + 1).map_or(true, |n| n > have)) || ended(d)
    };
    let timeo = d.sock().rcvtimeo.load(Ordering::Relaxed);
    sleep(d, &rx.want_data, deadline, timeo, &d.spin_rx, 0, more)
}

/// For what a receive of no bytes waits: also a shutdown of its own side.
fn wait_any(d: &'static Desc, deadline: &mut Option<u64>) -> Result<()> {
    let (_, rx, _) = d.rx();
    let s = d.sock();
    let before = s.edges.load(Ordering::Relaxed);
    let ready = || !d.is_conn() || ready::can_recv(d) || s.edges.load(Ordering::Relaxed) != before;
    sleep(d, &rx.want_data, deadline, s.rcvtimeo.load(Ordering::Relaxed), &d.spin_rx, 0, ready)
}

/// Is this a one-way stream: many waits for data, and nothing sent between?
fn streaming(d: &Desc) -> bool {
    let sent = d.sock().tx.bytes.load(Ordering::Relaxed);
    if d.sent_before.swap(sent, Ordering::Relaxed) != sent {
        d.one_way.store(0, Ordering::Relaxed);
        return false;
    }
    d.one_way.fetch_add(1, Ordering::Relaxed) >= ONE_WAY
}

/// Block until there is something to receive (data, end or error).
pub fn wait_data(d: &'static Desc, deadline: &mut Option<u64>) -> Result<()> {
    let (_, rx, _) = d.rx();
    let peer = ready::peer_cpu(d);
    if streaming(d) && peer != cpu::current() {
        // Polling right behind a sender makes both fight for the cache line it
        // is filling. Let it get ahead.
        let end = cpu::ticks() + BATCH_NS * cpu::ticks_per_us() / 1000;
        while cpu::ticks() < end {
            core::hint::spin_loop();
        }
        if ready::can_recv(d) {
            return Ok(());
        }
    }
    let timeo = d.sock().rcvtimeo.load(Ordering::Relaxed);
    sleep(d, &rx.want_data, deadline, timeo, &d.spin_rx, peer, || !d.is_conn() || ready::can_recv(d))
}

/// Block until a send can make progress or fails.
pub fn wait_space(d: &'static Desc, deadline: &mut Option<u64>) -> Result<()> {
    let (_, tx, h) = d.tx();
    tx.prod.space_at.store(ring::space_target(tx, h), Ordering::Relaxed);
    let timeo = d.sock().sndtimeo.load(Ordering::Relaxed);
    sleep(d, &tx.want_space, deadline, timeo, &d.spin_tx, ready::peer_cpu(d), || !d.is_conn() || ready::can_send(d))
}

/// A call that has something to return does so after any signal, also one that
/// restarts calls. A futex wait with a limit is never restarted.
fn interruptible(deadline: &mut Option<u64>, timeo: u64) {
    if timeo == 0 {
        deadline.get_or_insert(u64::MAX / 2);
    }
}

/// Spin, then sleep on a futex, until `ready`, a signal, or the deadline (set
/// on first use from `timeo`, nanoseconds; 0: none).
#[allow(clippy::too_many_arguments)] // what to wait for, and for how long
fn sleep(
    d: &'static Desc,
    want: &fsocket_sync::doorbell::Want,
    deadline: &mut Option<u64>,
    timeo: u64,
    spin: &crate::spin::Memory,
    peer_cpu: u32,
    mut ready: impl FnMut() -> bool,
) -> Result<()> {
    // The callers hold `d`; that is written down as soon as this CPU may be given up.
    let mark = asleep::Mark::new();
    let mut held = None;
    let hit = spin.spin_noting(peer_cpu, &mut ready, || {
        held = held.take().or_else(|| asleep::holds(core::iter::once(d.index()), &mark));
    });
    let r = if hit { Ok(()) } else { sleep_on(d, want, deadline, timeo, spin, ready) };
    if let Some(h) = held {
        asleep::let_go(h);
    }
    r
}

/// The second half of [`sleep`].
fn sleep_on(
    d: &'static Desc,
    want: &fsocket_sync::doorbell::Want,
    deadline: &mut Option<u64>,
    timeo: u64,
    spin: &crate::spin::Memory,
    mut ready: impl FnMut() -> bool,
) -> Result<()> {
    if timeo != 0 && deadline.is_none() {
        *deadline = Some(sys::now_ns().saturating_add(timeo));
    }
    let t0 = cpu::ticks();
    loop {
        let seq = want.seq.load(Ordering::Acquire);
        want.arm(FUTEX_BIT);
        sys::heavy_fence();
        if ready() {
            break;
        }
        crate::ctl::poll();
        crate::ctl::notice();
        crate::peers::look(d);
        if ready() {
            break;
        }
        stats::count(Counter::Sleeps);
        crate::idle::before_sleep();
        let unwatched = crate::ctl::unwatched();
        let left = match *deadline {
            Some(t) => match t.saturating_sub(sys::now_ns()) {
                0 => return Err(Errno::EAGAIN),
                n => Some(unwatched.map_or(n, |u| u.min(n))),
            },
            None => unwatched,
        };
        let on = On { word: Some(&want.seq), ..On::default() };
        let r = asleep::sleep(&on, || sys::futex_wait(&want.seq, seq, left));
        if ready() {
            break;
        }
        match r {
            Err(Errno::EINTR) => return Err(Errno::EINTR),
            Err(Errno::ETIMEDOUT) if deadline.is_some_and(|t| sys::now_ns() >= t) => return Err(Errno::EAGAIN),
            _ => {}
        }
    }
    spin.slept(cpu::ticks() - t0);
    Ok(())
}
