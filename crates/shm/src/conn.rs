//! A connection of ours, below sending and receiving: waking its sides, ending it, keeping it.

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

/// Publish where we run, if that has changed.
#[inline(always)]
pub fn publish_cpu(h: &Half, to: &fsocket_sync::atomic::AtomicU32) {
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

/// This side's stream ends so: [`status`] bits, for the peer, who is told with [`notify_all`].
pub fn end(d: &Desc, how: u32) {
    let tx = d.tx_dir();
    // Also if nobody wants to be told: an end has no record that could say when.
    tx.want_data.notified_at.store(cpu::ticks(), Ordering::Relaxed);
    // Release: all data before; pairs with the acquire in `ready::state`.
    tx.prod.status.fetch_or(how, Ordering::Release);
}

/// A hostile peer: its connection is reset. A few of them, and all that it has with us are.
#[cold]
pub fn poison(d: &'static Desc) {
    if reset(d) {
        if let Some(c) = chan::of(d) {
            c.violated();
        }
    }
}

/// Ends a connection whatever the peer writes from now on. False: it was before.
#[cold]
pub fn reset(d: &'static Desc) -> bool {
    let first = d.sock().flags.poison();
    if first {
        end(d, status::RST | status::CLOSED);
        notify_all(d);
    }
    first
}

/// Does the peer say what no side says? One that closes or reads no more has said first how its stream
/// ends. (What is read once here may be right the next time: then it is that.)
pub fn is_nonsense(d: &Desc) -> bool {
    use status::{CLOSED, FIN, FOR_NOW, MIGRATED, MIGRATING, RST, SHUT_BOTH};
    let st = d.rx_dir().prod.status.load(Ordering::Acquire);
    // (A Unix socket's peer that only receives no more says so without an end.)
    let ends = if d.is_unix() { CLOSED } else { CLOSED | SHUT_BOTH };
    st & !(FIN | RST | CLOSED | SHUT_BOTH | MIGRATING | MIGRATED | FOR_NOW) != 0
        || st & ends != 0 && st & (FIN | RST | MIGRATED) == 0
}

/// SO_RCVLOWAT, bytes: a receive that may wait waits for that much.
pub fn low_water(d: &Desc) -> usize {
    match d.is_conn() && d.sock().flags.get().has(FlagSet::LOWAT) {
        true => values::lowat(d),
        false => 1,
    }
}

/// Is there something in the ring to receive?
pub fn ring_has(d: &Desc) -> bool {
    let (r, rx, h) = d.rx();
    d.is_conn() && !d.sock().flags.get().is_drained() && ring::readable(r, rx, h)
}

/// Keeps a connection while a thread sleeps in an operation on it: another
/// thread may close the descriptor meanwhile, and as in the kernel the operation
/// goes on, and the connection ends when it is over.
pub struct Hold(u32);

impl Hold {
    pub fn on(d: &Desc) -> Hold {
        d.add_ref();
        Hold(d.index())
    }
    /// Unless its last reference is gone already.
    pub fn unless_gone(d: &Desc) -> Option<Hold> {
        d.add_ref_if_used().then(|| Hold(d.index()))
    }
    /// What an operation that will never end has left behind.
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
/// again. Threads that sleep in `poll` or `select` on it are armed in the two words, so nobody else is woken:
/// a server with a thread for each connection has hundreds of sleepers.
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

/// Wakes the other side, for which `mask` came from [`Want::take`].
pub fn wake(d: &'static Desc, want: &Want, mask: u64) {
    if let Some(c) = chan::of(d) {
        chan::wake(c, d.conn().slot_index(), want, mask);
    }
}

/// Wakes whoever waits for our data, and whoever waits for space at the peer. The path stays what it
/// is: see `stream::notify_all`.
pub fn notify_all(d: &'static Desc) {
    for want in [&d.tx().1.want_data, &d.rx().1.want_space] {
        let mask = want.take();
        if mask != 0 {
            wake(d, want, mask);
        }
    }
}
