//! Bytes: send, receive, wait.

mod recv;
mod send;
mod turn;
mod wait;

pub use recv::{before_urgent, found_nothing, recv, recv_fast, recv_on_credit, recv_slow, rest};
pub use send::{
    blocks, plain_send, rather, refused, send, send_fast, send_part, send_slow, send_small, send_tiny, sent_tiny, Tiny,
};
pub use wait::{fd_detached, wake_late};

use crate::asleep::{self, Mark};
use crate::path::{self, Path};
use crate::table::Desc;
use crate::{chan, waker};
use core::cell::Cell;
use core::sync::atomic::Ordering;
use fsocket_abi::arena::{flag, Half};
use fsocket_abi::channel::status;
use fsocket_ring as ring;
use fsocket_sys::{cpu, Errno, Result};

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
        waker::wake(c, d.slot_index.load(Ordering::Relaxed) as usize, want, mask);
    }
    path::after_send(d);
}

/// This side's stream ends so: [`status`] bits, for the peer, who is told with [`notify_all`].
pub fn end(d: &Desc, how: u32) {
    let tx = d.tx_dir();
    // Also if nobody wants to be told: an end has no record that could say when.
    tx.want_data.notified_at.store(cpu::ticks(), Ordering::Relaxed);
    // Release: all data before; pairs with the acquire in `ready::state`.
    tx.prod.status.fetch_or(how, Ordering::Release);
}

/// Wake whoever waits for our data, and whoever waits for space at the peer.
pub fn notify_all(d: &'static Desc) {
    notify(d, &d.tx().1.want_data);
    notify(d, &d.rx().1.want_space);
}

/// A hostile peer: its connection is reset. A few of them, and all that it has with us are.
#[cold]
pub fn poison(d: &'static Desc) {
    if reset(d) {
        if let Some(c) = chan::CHANS.get(d.chan.load(Ordering::Relaxed).wrapping_sub(1)) {
            c.violated();
        }
    }
}

/// Ends a connection whatever the peer writes from now on. False: it was before.
#[cold]
pub fn reset(d: &'static Desc) -> bool {
    let first = d.sock().flags.fetch_or(flag::POISONED, Ordering::AcqRel) & flag::POISONED == 0;
    if first {
        end(d, status::RST | status::CLOSED);
        notify_all(d);
    }
    first
}

/// Does the peer say what no side says? One that closes or reads no more has said first how its stream
/// ends. (What is read once here may be right the next time: then it is that.)
pub fn is_nonsense(d: &Desc) -> bool {
    use status::{CLOSED, FIN, MIGRATED, MIGRATING, RST, SHUT_BOTH};
    let st = d.rx_dir().prod.status.load(Ordering::Acquire);
    st & !(FIN | RST | CLOSED | SHUT_BOTH | MIGRATING | MIGRATED) != 0
        || st & (CLOSED | SHUT_BOTH) != 0 && st & (FIN | RST | MIGRATED) == 0
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
pub fn ring_has(d: &Desc) -> bool {
    let (r, rx, h) = d.rx();
    d.is_conn() && d.sock().flags.load(Ordering::Relaxed) & flag::DRAINED == 0 && ring::readable(r, rx, h)
}

/// Where the rest of an operation is to be done, if no longer in the rings.
/// The caller keeps `d` meanwhile ([`Hold`]). EAGAIN: the peer is about to say where, and the call,
/// with these `flags`, does not wait.
fn path_taken(d: &'static Desc, flags: i32) -> Option<Result<i32>> {
    if !d.is_conn() {
        return path::went_to(d).map(Ok);
    }
    match path::of(d) {
        Path::Shm => None,
        _ if d.sock().flags.load(Ordering::Relaxed) & flag::POISONED != 0 => None,
        _ if path::is_moving(d)
            && (flags & libc::MSG_DONTWAIT != 0 || d.sock().flags.load(Ordering::Relaxed) & flag::NONBLOCK != 0) =>
        {
            Some(Err(Errno::EAGAIN))
        }
        _ => match path::follow(d) {
            // Reset half-way: what remains is ours to report.
            Err(Errno::ECONNRESET) => None,
            r => Some(r),
        },
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

/// A call of several operations on one connection, of which each may sleep: the connection stays until
/// the last is done.
pub fn throughout<R>(d: &Desc, call: impl FnOnce(&Midway) -> R) -> R {
    let mark = Mark::new();
    let _hold = Hold::on(d);
    let held = asleep::holds(core::iter::once(d.index()), &mark);
    let r = call(&Midway { d, begun: Cell::new(false) });
    if let Some(held) = held {
        asleep::let_go(held);
    }
    r
}

/// Whether a call of several operations has done one of them.
pub struct Midway<'a> {
    d: &'a Desc,
    begun: Cell<bool>,
}

impl Midway<'_> {
    /// From now on it does not begin anew, whatever its number becomes.
    pub fn begun(&self) {
        if !self.begun.replace(true) {
            self.d.midway.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Midway<'_> {
    fn drop(&mut self) {
        if self.begun.get() {
            self.d.midway.fetch_sub(1, Ordering::Relaxed);
        }
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
