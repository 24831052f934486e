//! A connection that no process has accepted goes into the kernel's queue of its listener. Every process that has the
//! socket finds it there, with the library or without.
//!
//! Neither side has to help. The monitor takes a connection out of its SYN queue as a worker does, and connects a
//! socket of the client to the listener. At the server's end it does what a process does that moves a connection to
//! the kernel. The client follows when it next looks, as always.

use crate::clients::Outgoing;
use crate::context::Context;
use crate::shm::channels::Channel;
use crate::shm::ends::{at_other_end, leave_end};
use crate::shm::listeners::Shown;
use crate::shm::state::Shm;
use crate::shm::switched::{Named, Release};
use crate::shm::wake::{close_side, wake_side};
use crate::{ChannelId, ListenerId};
use fsocket_abi::arena::Counter;
use fsocket_abi::channel::{slot_state, status, CLIENT, POS_START, SERVER, SYN_CAP};
use fsocket_abi::path_switch::{self, Fenced, Remains};
use fsocket_proto::notice;
use fsocket_proto::switch::act;
use fsocket_ring::syn;
use fsocket_sync::atomic::Ordering;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::time::{Duration, Instant};

/// One turn of the loop moves at most this many connections of a listener.
const TURN: usize = 32;
/// Pause between two looks at moves that have begun, because the kernel's queue may be full.
const PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

impl Shm {
    /// Moves connections that have waited for too long, and continues moves that have begun.
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

    /// No process takes connections from the queues of a listener, so new ones use the kernel until one does.
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

    /// All connections in the queues of a hidden listener go into the kernel's queue, now if possible. `place`: a TCP
    /// socket of its network namespace. False: no socket was shown, and the namespace is not the monitor's.
    pub fn move_waiting(&mut self, ctx: &mut Context, listener: ListenerId, place: Option<BorrowedFd<'_>>) -> bool {
        let Some(l) = self.listeners.get(listener) else { return false };
        if place.is_none() && l.info.netns != ctx.netns {
            return false;
        }
        self.moving.listeners.insert(listener);
        self.empty_queues(ctx, listener, place);
        true
    }

    /// Is a connection in flight into the kernel's queue of this listener?
    pub fn is_moving(&self, listener: ListenerId) -> bool {
        let of = |named: &Named| self.channels.get(named.channel).is_some_and(|ch| ch.listener == listener);
        self.moving.listeners.contains(&listener) || self.moving.begun.iter().any(of)
    }

    fn empty_queues(&mut self, ctx: &mut Context, listener: ListenerId, place: Option<BorrowedFd<'_>>) {
        let channels = self.listeners.get(listener).map(|l| l.channels.clone()).unwrap_or_default();
        for turn in 0..=TURN {
            // The order is kept: if the kernel's queue has no room for one, all later ones wait.
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

    /// Takes a connection out of a queue, as a worker does.
    fn take_one(&mut self, ctx: &mut Context, channel: ChannelId) -> Option<Named> {
        let ch = self.channels.get(channel)?;
        for q in ch.mem.touched_queues() {
            while let Some(slot) = first(ch, q) {
                // If the client moves the connection to the kernel, it has ends there already, and a worker
                // must come for it.
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

    /// Connects the client's socket. If the kernel's queue is full, the monitor tries again, as the client
    /// itself would.
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
            // (The user may have too much in flight just now.)
            Err(Errno::INPROGRESS | Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::AGAIN) => {
                self.moving.begun.push(named);
                self.goes_on(PAUSE);
            }
            Err(error) => {
                tracing::debug!(channel = named.channel, %error, "a connection that was not accepted is refused");
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
    // (`pop` finds nonsense.)
    Some(entry.saturating_sub(1) % fsocket_abi::channel::SLOTS)
}

/// As `claim` of the library: the first of worker, client and monitor to change the state has the connection. None:
/// another one was first.
fn claim(ctx: &Context, ch: &Channel, slot: usize) -> Option<Named> {
    let s = ch.mem.slot(slot);
    s.state.compare_exchange(slot_state::SYN, slot_state::ESTABLISHED, Ordering::AcqRel, Ordering::Relaxed).ok()?;
    let generation = s.generation.load(Ordering::Relaxed);
    if !path_switch::claim(&s.switching, false) {
        close_side(ch, slot, SERVER, status::RST | status::CLOSED, &ctx.clients);
        return None;
    }
    Some(Named { channel: ch.id, slot, side: SERVER, generation })
}

/// The steps of a mover ([`path_switch`]), by a server that has read nothing.
fn finish(ctx: &Context, ch: &Channel, named: &Named) {
    let control = ch.mem.slot(named.slot);
    let announced = path_switch::announce(&control.dir[SERVER], &control.dir[CLIENT]);
    let moving = announced.look(&Fenced::after(crate::membarrier::heavy_fence));
    let remains = Remains::of(moving.peer(), false);
    let mut what = act::POUR;
    if remains.fin {
        what |= act::FIN;
    }
    if remains.reset {
        what |= act::RESET;
    }
    moving.leave_at(&control.migrated[CLIENT], POS_START, 0);
    at_other_end(ch, named, what);
    if remains.gone {
        ch.switched.borrow_mut().release(named.slot, CLIENT, named.generation, Release::Copied);
    }
    let finished = moving.finish(false);
    let (before, now) = finished.look_back(&Fenced::after(crate::membarrier::heavy_fence));
    let fin = if now.has(status::FIN) && !before.has(status::FIN) { act::FIN } else { 0 };
    at_other_end(ch, named, act::POUR | fin);
    if now.is_gone() {
        let how = if now.has(status::RST) { Release::Reset } else { Release::Copied };
        leave_end(ch, &Named { side: CLIENT, ..*named }, how);
    }
    path_switch::leave(&control.dir[SERVER].prod, true);
    wake_side(ch, named.slot, CLIENT, &ctx.clients);
    tracing::debug!(
        channel = ch.id,
        slot = named.slot,
        "a connection that was not accepted goes into the kernel's queue"
    );
}
