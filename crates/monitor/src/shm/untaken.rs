//! Connections that no process has accepted go into the kernel's queue of their listener, where every process that has
//! the socket finds them, with the library or without.
//!
//! That needs neither side: the monitor takes a connection out of its SYN queue as a worker does, connects a socket of
//! the client's to the listener, and does at the server's end what a process does that moves a connection to the
//! kernel. The client follows when it next looks, as always.

use crate::clients::Outgoing;
use crate::context::Context;
use crate::shm::channels::Channel;
use crate::shm::listeners::Shown;
use crate::shm::state::Shm;
use crate::shm::switch::at_other_end;
use crate::shm::switched::{Named, Release};
use crate::shm::wake::{close_side, wake_side};
use crate::{ChannelId, ListenerId};
use fsocket_abi::arena::Counter;
use fsocket_abi::channel::{slot_state, status, CLIENT, POS_START, SERVER, SYN_CAP};
use fsocket_proto::notice;
use fsocket_proto::switch::act;
use fsocket_ring::syn;
use fsocket_sync::atomic::{fence, Ordering};
use fsocket_sync::doorbell::FUTEX_BIT;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::time::{Duration, Instant};

/// Connections of one listener that are moved in one turn of the loop.
const TURN: usize = 32;
/// Between two looks at what has begun: the kernel's queue may be full.
const PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

impl Shm {
    /// Moves what has waited for too long, and goes on with what has begun.
    pub fn move_untaken_if_due(&mut self, ctx: &mut Context) {
        for listener in self.waiting.look_if_due(&self.channels, &self.dispatch) {
            self.leave_to_kernel(ctx, listener);
        }
        let Some((_, pause)) = self.moving.next.take_if(|(at, _)| *at <= Instant::now()) else { return };
        for named in std::mem::take(&mut self.moving.begun) {
            self.go_on(ctx, named, None);
        }
        for listener in self.moving.listeners.clone() {
            self.empty_queues(ctx, listener, None);
        }
        self.moving.next = self.moving.next.map(|_| (pause * 2).min(LONGEST_PAUSE)).map(|p| (Instant::now() + p, p));
    }

    /// Nobody takes connections from the queues of a listener: new ones are the kernel's until somebody does.
    fn leave_to_kernel(&mut self, ctx: &mut Context, listener: ListenerId) {
        let Some(l) = self.listeners.get_mut(listener) else { return };
        if l.info.netns != ctx.netns {
            return; // (No process has shown a socket of that namespace.)
        }
        if !std::mem::replace(&mut l.had_untaken, true) {
            let address = crate::address::show(&l.info.addr);
            tracing::warn!(address, "connections waited for a second, and no process with the library took them: they go into the kernel's queue");
        }
        let workers: Vec<_> = l.accepting().collect();
        self.hide_listener(listener, Shown::WhenAccepted);
        for worker in workers {
            ctx.clients.send(worker, Outgoing::of(notice::Untaken { listener }));
        }
        self.move_waiting(ctx, listener, None);
    }

    /// Whatever waits in the queues of a listener that is hidden goes into the kernel's queue, now if it can. `place`:
    /// a TCP socket of its network namespace.
    /// False: none was shown, and it is not the monitor's.
    pub fn move_waiting(&mut self, ctx: &mut Context, listener: ListenerId, place: Option<BorrowedFd<'_>>) -> bool {
        let Some(l) = self.listeners.get(listener) else { return false };
        if place.is_none() && l.info.netns != ctx.netns {
            return false;
        }
        self.moving.listeners.insert(listener);
        self.empty_queues(ctx, listener, place);
        true
    }

    /// Is something on its way into the kernel's queue of this listener?
    pub fn is_moving(&self, listener: ListenerId) -> bool {
        let of = |named: &Named| self.channels.get(named.channel).is_some_and(|ch| ch.listener == listener);
        self.moving.listeners.contains(&listener) || self.moving.begun.iter().any(of)
    }

    fn empty_queues(&mut self, ctx: &mut Context, listener: ListenerId, place: Option<BorrowedFd<'_>>) {
        let channels = self.listeners.get(listener).map(|l| l.channels.clone()).unwrap_or_default();
        for turn in 0..=TURN {
            // In order: behind one for which the kernel's queue has no room wait all.
            if turn == TURN || self.begins_somewhere(listener) {
                return self.goes_on(PAUSE);
            }
            let Some(named) = channels.iter().find_map(|channel| self.take_one(ctx, *channel)) else { break };
            self.go_on(ctx, named, place);
        }
        self.moving.listeners.remove(&listener);
    }

    fn begins_somewhere(&self, listener: ListenerId) -> bool {
        self.moving.begun.iter().any(|n| self.channels.get(n.channel).is_some_and(|ch| ch.listener == listener))
    }

    fn goes_on(&mut self, pause: Duration) {
        self.moving.next.get_or_insert_with(|| (Instant::now() + pause, pause));
    }

    /// Takes a connection out of a queue, as a worker.
    fn take_one(&mut self, ctx: &mut Context, channel: ChannelId) -> Option<Named> {
        let ch = self.channels.get(channel)?;
        for q in ch.mem.touched_queues() {
            while let Some(slot) = first(ch, q) {
                // One that its client moves to the kernel has ends there already: a worker must come for it.
                if ch.mem.slot(slot).switching.load(Ordering::Acquire) != 0 {
                    break;
                }
                match syn::pop(ch.mem.queue(q)) {
                    Ok(Some(slot)) => {
                        if let Some(named) = claim(ctx, ch, slot) {
                            return Some(named);
                        }
                    }
                    Ok(None) => break,
                    Err(_) => {
                        self.end_broken(ctx, channel, None);
                        return None;
                    }
                }
            }
        }
        None
    }

    /// Connects the client's socket. Where the kernel's queue is full this is tried again, as its client would.
    fn go_on(&mut self, ctx: &mut Context, named: Named, place: Option<BorrowedFd<'_>>) {
        let Some(ch) = self.channels.get(named.channel) else { return };
        let dialled = self.dial(ctx, (ch, ch.client_uid), &named, &mut ch.switched.borrow_mut(), place);
        match dialled {
            Ok(()) => {
                finish(ctx, ch, &named);
                let sum = |mem: &crate::arenas::ArenaMem| mem.count(Counter::FbUntaken, 1);
                match ctx.arenas.of(ch.client) {
                    Some(arena) => sum(&arena.mem),
                    None => ctx.ended.count(ch.client_uid, Counter::FbUntaken),
                }
            }
            // (Its user may have too much on its way just now.)
            Err(Errno::INPROGRESS | Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::AGAIN) => {
                self.moving.begun.push(named);
                self.goes_on(PAUSE);
            }
            Err(error) => {
                tracing::debug!(channel = named.channel, %error, "a connection that nobody took is refused");
                close_side(ch, named.slot, SERVER, status::RST | status::CLOSED, &ctx.clients);
            }
        }
    }
}

/// The slot of the connection that waits longest in a queue.
fn first(ch: &Channel, q: usize) -> Option<usize> {
    if ch.mem.queued(q) == 0 {
        return None;
    }
    let queue = ch.mem.queue(q);
    let entry = queue.entry[queue.head.load(Ordering::Acquire) as usize % SYN_CAP].load(Ordering::Relaxed) as usize;
    // (What is nonsense is found by `pop`.)
    Some(entry.saturating_sub(1) % fsocket_abi::channel::SLOTS)
}

/// As `claim` of the library: of worker, client and monitor the first to change the state has it. None: it was not this one.
fn claim(ctx: &Context, ch: &Channel, slot: usize) -> Option<Named> {
    let s = ch.mem.slot(slot);
    s.state.compare_exchange(slot_state::SYN, slot_state::ESTABLISHED, Ordering::AcqRel, Ordering::Relaxed).ok()?;
    let generation = s.generation.load(Ordering::Relaxed);
    if s.switching.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire).is_err() {
        close_side(ch, slot, SERVER, status::RST | status::CLOSED, &ctx.clients);
        return None;
    }
    Some(Named { channel: ch.id, slot, side: SERVER, generation })
}

/// What the library's `start`, `move_out` and `leave` do, by a server that has read nothing.
fn finish(ctx: &Context, ch: &Channel, named: &Named) {
    let control = ch.mem.slot(named.slot);
    let own = &control.dir[SERVER].prod.status;
    own.fetch_or(status::MIGRATING, Ordering::Release);
    // Release: a client that sees the want word armed sees MIGRATING.
    fence(Ordering::Release);
    control.dir[CLIENT].want_data.hint(FUTEX_BIT);
    crate::membarrier::heavy_fence();
    let theirs = control.dir[CLIENT].prod.status.load(Ordering::Acquire);
    let gone = theirs & status::CLOSED != 0 && theirs & status::MIGRATED == 0;
    let reset = theirs & status::RST != 0;
    let mut what = act::POUR;
    if theirs & status::FIN != 0 && (reset || !gone) {
        what |= act::FIN;
    }
    if gone && reset {
        what |= act::RESET;
    }
    control.migrated[CLIENT].base.store(POS_START, Ordering::Relaxed);
    control.migrated[CLIENT].limit.store(0, Ordering::Release);
    at_other_end(ch, named, what);
    if gone {
        ch.switched.borrow_mut().release(named.slot, CLIENT, named.generation, Release::Copied);
    }
    // Release: all of the above. CLOSED: no process has this side any more.
    own.fetch_or(status::MIGRATED | status::CLOSED, Ordering::Release);
    wake_side(ch, named.slot, CLIENT, &ctx.clients);
    tracing::debug!(channel = ch.id, slot = named.slot, "a connection that nobody took goes into the kernel's queue");
}
