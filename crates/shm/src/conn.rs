//! A connection over shared memory, below sending and receiving: waking its sides, ending it,
//! keeping it.

use crate::table::{self, Desc};
use crate::upcalls::{upcalls, watcher};
use crate::values;
use crate::{arena, chan};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::news_of;
use fsocket_abi::channel::status;
use fsocket_abi::flags::FlagSet;
use fsocket_abi::half::Half;
use fsocket_ring as ring;
use fsocket_sync::doorbell::Want;
use fsocket_sys::{self as sys, cpu};

/// Publishes the CPU on which this side runs, if that has changed.
#[inline(always)]
pub fn publish_cpu(h: &Half, to: &fsocket_sync::atomic::AtomicU32) {
    if h.cpu() != cpu::mark() {
        publish(h, to);
    }
}

#[cold]
#[inline(never)]
fn publish(h: &Half, to: &fsocket_sync::atomic::AtomicU32) {
    h.set_cpu(cpu::mark());
    to.store(cpu::current(), Ordering::Relaxed);
}

/// Ends this side's stream with these [`status`] bits. [`notify_all`] then tells the peer.
pub fn end(d: &Desc, how: u32) {
    let tx = d.tx_dir();
    // The time is noted even if no waiter is armed, because an end has no record with a time.
    tx.want_data.notified_at.store(cpu::ticks(), Ordering::Relaxed);
    // Release: all earlier data; pairs with the acquire in `ready::state`.
    tx.prod.status.fetch_or(how, Ordering::Release);
}

/// A hostile peer: its connection is reset. After some violations all its connections are reset.
#[cold]
pub fn poison(d: &'static Desc) {
    if reset(d) {
        if let Some(c) = chan::of(d) {
            c.violated();
        }
    }
}

/// Ends a connection, whatever the peer writes from now on. False: the connection had already
/// ended.
#[cold]
pub fn reset(d: &'static Desc) -> bool {
    let first = d.sock().flags.poison();
    if first {
        end(d, status::RST | status::CLOSED);
        notify_all(d);
    }
    first
}

/// Does the peer say what no side says?
pub fn is_nonsense(d: &Desc) -> bool {
    d.peer_status().is_nonsense(d.is_unix())
}

/// SO_RCVLOWAT in bytes: a receive that may wait waits for that many.
pub fn low_water(d: &Desc) -> usize {
    match d.is_conn() && d.sock().flags.get().has(FlagSet::LOWAT) {
        true => values::lowat(d),
        false => 1,
    }
}

/// Does the ring have something to receive?
pub fn ring_has(d: &Desc) -> bool {
    let (r, rx, h) = d.rx();
    d.is_conn() && !d.sock().flags.get().is_drained() && ring::readable(r, rx, h)
}

/// Keeps a connection while a thread sleeps in an operation on it. Another thread may close the
/// descriptor meanwhile. As in the kernel, the operation goes on, and the connection ends after it.
pub struct Hold(u32);

impl Hold {
    pub fn on(d: &Desc) -> Hold {
        d.add_ref();
        Hold(d.index())
    }
    /// Fails if the last reference is already gone.
    pub fn unless_gone(d: &Desc) -> Option<Hold> {
        d.add_ref_if_used().then(|| Hold(d.index()))
    }
    /// The hold of an operation that will never end.
    pub fn abandoned(index: u32) -> Hold {
        Hold(index)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Some(d) = table::DESCS.get(self.0) {
            if d.drop_ref() {
                (upcalls().last_reference)(d);
                table::done_with(d);
            }
        }
    }
}

/// Threads and processes of the fork group of this process that sleep on the connection look
/// again. Threads in `poll` or `select` on it are armed in the two words, so no other thread wakes: a server
/// with a thread for each connection has hundreds of sleepers.
pub fn wake_own(d: &'static Desc) {
    let wants = [&d.rx().1.want_data, &d.tx().1.want_space];
    for w in wants {
        w.seq.fetch_add(1, Ordering::Release);
        sys::futex_wake(&w.seq, i32::MAX);
    }
    if let Some(c) = chan::of(d) {
        let slot = d.conn().slot_index();
        // The peer may have taken sleepers from the words.
        if let Some(news) = arena::header().map(|h| &h.news[news_of(c.id.load(Ordering::Relaxed), slot)]) {
            if news.tell() {
                sys::futex_wake(news.word(), i32::MAX);
            }
        }
        for w in wants {
            let mask = w.take();
            if mask != 0 {
                chan::wake_side(c, c.my_side(), slot, w, mask);
            }
        }
    }
    (watcher().changed)(d);
}

/// Wakes the other side; `mask` came from [`Want::take`].
pub fn wake(d: &'static Desc, want: &Want, mask: u64) {
    if let Some(c) = chan::of(d) {
        chan::wake(c, d.conn().slot_index(), want, mask);
    }
}

/// Wakes the waiters for this side's data, and those for space at the peer. The path does not
/// change: see `stream::notify_all`.
pub fn notify_all(d: &'static Desc) {
    for want in [&d.tx().1.want_data, &d.rx().1.want_space] {
        let mask = want.take();
        if mask != 0 {
            wake(d, want, mask);
        }
    }
}
