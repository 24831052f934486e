//! Ends: of a process, of a listener, of a channel.
//!
//! The monitor closes the connections of a dead process as the kernel would close its sockets.

use crate::arenas::ArenaMem;
use crate::clients::Client;
use crate::context::Context;
use crate::membarrier::heavy_fence;
use crate::shm::ending::{Ending, Step};
use crate::shm::listeners::Shown;
use crate::shm::state::Shm;
use crate::shm::wake::{close_side, closing_bits, free_waiters, has_unread, wake_side, wake_stealers};
use crate::{ChannelId, ConnId, FamilyId, ListenerId};
use fsocket_abi::arena::Counter;
use fsocket_abi::channel::{status, CLIENT, KEY_WAKER, SERVER, SLOTS};
use fsocket_abi::sock::{Place, Sock};
use fsocket_proto::notice;
use fsocket_sync::atomic::Ordering;
use fsocket_sync::token;
use std::collections::BTreeSet;
use std::rc::Rc;

impl Shm {
    /// Closes some sockets in the name of a process that has ended. False: there are no more.
    pub fn leave_some_sockets(&mut self, ctx: &mut Context, ending: &mut Ending) -> bool {
        const SOCKETS: usize = 64;
        let Some(step) = ending.steps.pop_front() else {
            if !std::mem::replace(&mut ending.has_left, true) {
                let orphans = ctx.arenas.leave(ending.id);
                // (This comes first, so that a report before the next step has all counts.)
                orphans.iter().for_each(|a| ctx.ended.fold(&a.mem, a.uid));
                ending.steps.extend(orphans.into_iter().map(|a| Step::Close(Rc::new(a))));
            }
            return !ending.steps.is_empty();
        };
        let Some(run) = step.mem().run(ending.at) else {
            ending.at = 0;
            stepped(ctx, ending, step);
            return true;
        };
        let end = run.end.min(run.start + SOCKETS);
        for sock in (run.start..end).map(|i| step.mem().sock(i)).filter(|s| ArenaMem::is_open(s)) {
            match &step {
                Step::Leave(mem) => self.leave_sock(ctx, sock, mem, ending.client.nonce, ending.client.family),
                // The socket is open, but no process holds it: its process died while closing it,
                // or while filling it in. In the second case it still names the slot of its
                // previous life, which another connection may have now.
                Step::Close(_) if !sock.is_held() => drop(ending.loose.insert(sock.place())),
                Step::Compare(_) => drop(ending.loose.remove(&sock.place())),
                Step::Loose(_) if !ending.loose.contains(&sock.place()) => {}
                Step::Close(arena) | Step::Loose(arena) => self.close_sock(ctx, sock, &arena.mem, arena.family),
            }
        }
        ending.at = end;
        ending.steps.push_front(step);
        true
    }

    /// All its sockets are closed, so it neither wakes others nor is woken. Leaves some channels; false: there
    /// are no more.
    pub fn leave_some_channels(&mut self, ctx: &mut Context, ending: &mut Ending) -> bool {
        const CHANNELS: usize = 16;
        let (id, client) = (ending.id, &ending.client);
        let some: Vec<ChannelId> = self.channels.from(ending.channel).take(CHANNELS).map(|ch| ch.id).collect();
        for ch in some.iter().filter_map(|ch| self.channels.get(*ch)) {
            for side in [CLIENT, SERVER].into_iter().filter(|side| ch.is_party(*side, client.family)) {
                let own = |key: u64| key & !KEY_WAKER == client.nonce & !KEY_WAKER;
                free_waiters(ch, side, |key| own(key) && ctx.clients.by_key(key, |f| f == client.family).is_none());
            }
        }
        for channel in &some {
            let Some(ch) = self.channels.get_mut(*channel) else { continue };
            ch.known_to.remove(&id);
            for sleeper in ch.pipes.leave(id) {
                if let Some(c) = ctx.clients.get_mut(sleeper) {
                    c.pipes_unready -= 1;
                }
            }
        }
        let Some(last) = some.last() else { return false };
        ending.channel = last.saturating_add(1);
        true
    }

    /// No offer reaches the process any more.
    pub fn leave_offers(&mut self, ctx: &mut Context, id: ConnId, client: &Client) {
        self.fold_after(ctx, id, client.uid);
        self.offers.leave(id);
        self.pairs.leave(id);
        self.unix.leave(id);
        self.remote.leave(id);
        self.passed.leave(client.uid, id, false);
        if !ctx.clients.iter().any(|(_, c)| c.uid == client.uid) {
            self.passed.forget(client.uid);
        }
    }

    /// Its listeners and channels end, unless other processes have them.
    pub fn leave_listeners(&mut self, ctx: &mut Context, id: ConnId, client: &mut Client) {
        let number = |l: &ListenerId| Some((*l, self.listeners.get(*l)?.number_of(id)?));
        let numbers: Vec<_> = client.works.iter().filter_map(number).collect();
        for listener in std::mem::take(&mut client.works) {
            self.stop_working(ctx, id, listener);
        }
        self.take_places(ctx, id, &numbers);
        for ch in self.channels.iter_mut().filter(|ch| ch.client == id) {
            ch.client_ended = true;
        }
        // Connections that the client has left in a queue can still be accepted, under its port.
        let mut free = Vec::new();
        for (channel, first) in std::mem::take(&mut client.leases).into_all() {
            match self.channels.get_mut(channel) {
                Some(ch) => ch.leases.push(first),
                None => free.push(first),
            }
        }
        self.return_ports(ctx, client.family, free);
    }

    /// One of its listeners ends, unless other processes have it. False: there is none.
    pub fn leave_a_listener(&mut self, ctx: &mut Context, ending: &mut Ending) -> bool {
        let Some(listener) = ending.client.holds.pop_first() else { return false };
        self.drop_holder(ctx, ending.id, listener);
        true
    }

    /// Takes a process out of a socket, which is closed if no other process holds it.
    fn leave_sock(&self, ctx: &Context, sock: &Sock, mem: &ArenaMem, nonce: u64, family: FamilyId) {
        if nonce == 0 {
            return;
        }
        let held = sock.remove_holder(nonce);
        if held && !sock.is_held() {
            self.close_sock(ctx, sock, mem, family);
        } else if held && died_inside(sock, nonce) {
            self.break_token(ctx, sock, nonce, mem, family);
        } else if held {
            self.wake_peer(ctx, sock, family);
        }
    }

    /// A process of a fork group died. It may have changed a connection without waking the peer.
    fn wake_peer(&self, ctx: &Context, sock: &Sock, family: FamilyId) {
        let Place { channel, slot, side } = sock.place();
        let channel = self.channels.get(channel);
        if let Some(ch) = channel.filter(|ch| side < 2 && slot < SLOTS && ch.is_party(side, family)) {
            wake_side(ch, slot, 1 - side, &ctx.clients);
        }
    }

    /// A process died in the middle of an operation on a socket that other processes of the fork
    /// group use, too. Its progress is unknown, so the connection is reset; and no process waits
    /// for a dead one.
    fn break_token(&self, ctx: &Context, sock: &Sock, nonce: u64, mem: &ArenaMem, family: FamilyId) {
        let Place { channel, slot, side } = sock.place();
        let channel = self.channels.get(channel);
        sock.flags.poison();
        if let Some(ch) = channel.filter(|ch| side < 2 && slot < SLOTS && ch.is_party(side, family)) {
            close_side(ch, slot, side, status::RST, &ctx.clients);
            wake_side(ch, slot, side, &ctx.clients);
            mem.count(Counter::ResetShm, 1);
        }
        for half in [&sock.tx, &sock.rx] {
            token::expel(half, |thread| is_of(nonce, thread));
        }
    }

    /// Closes one socket in the name of its family.
    fn close_sock(&self, ctx: &Context, sock: &Sock, mem: &ArenaMem, family: FamilyId) {
        let Place { channel, slot, side } = sock.place();
        let channel = self.channels.get(channel);
        // The family itself writes its arena, so it may close only its own connections.
        if let Some(ch) = channel.filter(|ch| side < 2 && slot < SLOTS && ch.is_party(side, family)) {
            let (pos, base, left) = sock.rx.from_outside();
            let unread = has_unread(&ch.mem, slot, side, pos, base, left);
            let bits = match self.remote.carries(family) {
                true => status::RST | status::CLOSED,
                false => closing_bits(ch, slot, side, sock, unread),
            };
            close_side(ch, slot, side, bits, &ctx.clients);
            mem.count(Counter::CloseShm, 1);
            mem.count(Counter::ResetShm, u64::from(bits & status::RST != 0));
        }
        mem.count(Counter::TxBytes, sock.tx.take_bytes());
        mem.count(Counter::RxBytes, sock.rx.take_bytes());
        sock.free();
    }

    /// The creator of an arena has ended, but the arena lives on: its counters are no longer shown
    /// under the creator's name.
    fn fold_after(&mut self, ctx: &mut Context, id: ConnId, uid: u32) {
        if let Some(mem) = ctx.arenas.of(id).map(|a| a.mem.clone()) {
            ctx.ended.fold(&mem, uid);
        }
    }

    fn stop_working(&mut self, ctx: &mut Context, id: ConnId, listener: ListenerId) {
        let Some(l) = self.listeners.get_mut(listener) else { return };
        let number = l.leave(id);
        let mask = l.worker_mask();
        for channel in &l.channels {
            let Some(ch) = self.channels.get(*channel) else { continue };
            ch.mem.set_workers(mask);
            // The other workers steal from its queue.
            if number.is_some_and(|n| ch.mem.queued(1 + n) > 0) {
                ch.mem.note_left_behind();
                wake_stealers(ch, &ctx.clients);
            }
        }
        if l.held_elsewhere && l.accepting().next().is_none() {
            self.hide_listener(listener, Shown::WhenServed);
        }
    }

    /// A process is done with a listener. With `all` no process listens any more (shutdown, which
    /// concerns the socket that the fork group shares).
    pub fn unlisten(&mut self, ctx: &mut Context, id: ConnId, listener: ListenerId, all: bool) {
        let Some(client) = ctx.clients.get_mut(id) else { return };
        if !client.holds.remove(&listener) {
            return;
        }
        if client.works.remove(&listener) {
            self.stop_working(ctx, id, listener);
        }
        match all {
            true => self.end_listener(ctx, listener),
            false => self.drop_holder(ctx, id, listener),
        }
        self.sweep(ctx);
    }

    fn drop_holder(&mut self, ctx: &mut Context, id: ConnId, listener: ListenerId) {
        let Some(l) = self.listeners.get_mut(listener) else { return };
        l.holders.remove(&id);
        if l.holders.is_empty() {
            self.end_listener(ctx, listener);
        }
    }

    /// The end of a listener: waiting connections are reset, accepted ones go on.
    pub fn end_listener(&mut self, ctx: &mut Context, listener: ListenerId) {
        let Some(l) = self.listeners.remove(listener) else { return };
        tracing::info!(listener, addr = crate::address::show(&l.info.addr), "listener ended");
        self.registry.remove(listener);
        if !self.listeners.iter().any(|other| other.info.netns == l.info.netns) {
            self.closings.forget(l.info.netns);
        }
        self.listeners_changed = true;
        for id in l.holders {
            if let Some(client) = ctx.clients.get_mut(id) {
                client.holds.remove(&listener);
                client.works.remove(&listener);
            }
        }
        for channel in &l.channels {
            let Some(ch) = self.channels.get_mut(*channel) else { continue };
            (ch.listener_gone, ch.is_ending) = (true, true);
            ch.mem.listener_closed().store(1, Ordering::SeqCst);
        }
        if !l.channels.is_empty() {
            // A client that publishes a SYN and then finds `listener_closed` unset has published before this fence.
            heavy_fence();
            self.end_channels(ctx, l.uid, l.channels.into_iter());
        }
    }

    pub fn tell_gone(
        &mut self,
        ctx: &mut Context,
        channel: ChannelId,
        families: impl IntoIterator<Item = FamilyId>,
        broken: bool,
    ) {
        let families: BTreeSet<FamilyId> = families.into_iter().collect();
        let known_to = self.channels.get(channel).map(|ch| ch.known_to.clone()).unwrap_or_default();
        for member in known_to {
            if ctx.clients.get(member).is_some_and(|c| families.contains(&c.family)) {
                ctx.clients.notify(member, notice::ChannelGone { channel, broken });
            }
        }
    }
}

/// All sockets of a step are done.
fn stepped(ctx: &mut Context, ending: &mut Ending, step: Step) {
    let Step::Close(arena) = step else { return };
    ctx.ended.fold(&arena.mem, arena.uid);
    if !ending.loose.is_empty() {
        // Processes that share an end have the same user.
        let others = ctx.arenas.iter().filter(|a| a.uid == arena.uid).map(|a| Step::Compare(a.mem.clone()));
        let next: Vec<_> = others.chain([Step::Loose(arena.clone())]).collect();
        next.into_iter().rev().for_each(|step| ending.steps.push_front(step));
    }
}

/// Does this thread belong to the process with that nonce? Its identity carries 16 bits of the
/// nonce; 0 and 1 belong to nobody.
fn is_of(nonce: u64, thread: u64) -> bool {
    thread > 1 && thread >> 48 == nonce >> 16 & 0xffff
}

fn died_inside(sock: &Sock, nonce: u64) -> bool {
    [&sock.tx, &sock.rx].into_iter().any(|half| token::died_inside(half, |thread| is_of(nonce, thread)))
}
