//! Ends: of a process, of a listener, of a channel.
//!
//! What a process leaves behind when it dies is closed as the kernel would
//! close its sockets.

use crate::arenas::{Arena, ArenaMem, Totals};
use crate::channels::Channel;
use crate::clients::Outgoing;
use crate::wake::{
    close_all, close_side, closing_bits, end_listening, free_waiters, has_unread, wake_side, wake_stealers,
};
use crate::{limits, ChannelId, ConnId, FamilyId, ListenerId, Monitor};
use fsocket_abi::arena::{flag, sock_state, Counter, Sock};
use fsocket_abi::channel::{status, CLIENT, KEY_WAKER, SERVER, SLOTS};
use fsocket_proto::{kind, Msg};
use fsocket_sync::atomic::{AtomicU64, Ordering};
use fsocket_sync::token::in_critical_section;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::{Duration, Instant};

impl Monitor {
    /// A process is gone (or is treated as if): everything it held goes.
    pub fn end_process(&mut self, id: ConnId) {
        let Some(client) = self.clients.remove(id) else { return };
        self.policy.leave(id);
        if client.is_process() {
            tracing::debug!(process = id, pid = client.pid, "end");
        }
        for mem in self.arenas.used_by(id) {
            self.leave_socks(&mem, client.nonce, client.family);
        }
        for arena in self.arenas.leave(id) {
            self.end_arena(&arena);
        }
        self.fold_after(id, client.uid);
        for ch in self.channels.iter() {
            for side in [CLIENT, SERVER] {
                if ch.is_party(side, client.family) {
                    let own = |key: u64| key & !KEY_WAKER == client.nonce & !KEY_WAKER;
                    free_waiters(ch, side, |key| {
                        own(key) && self.clients.by_key(key, |f| f == client.family).is_none()
                    });
                }
            }
        }
        for ch in self.channels.iter_mut() {
            ch.known_to.remove(&id);
            for sleeper in ch.pipes.leave(id) {
                if let Some(c) = self.clients.get_mut(sleeper) {
                    c.pipes_unready -= 1;
                }
            }
        }
        self.offers.leave(id);
        self.leave_zones(id);
        let number = |l: &ListenerId| Some((*l, self.listeners.get(*l)?.number_of(id)?));
        let numbers: Vec<_> = client.works.iter().filter_map(number).collect();
        for listener in client.works {
            self.stop_working(id, listener);
        }
        self.take_places(id, &numbers);
        for listener in client.holds {
            self.drop_holder(id, listener);
        }
        for ch in self.channels.iter_mut().filter(|ch| ch.client == id) {
            ch.client_ended = true;
        }
        // What the client has left in a queue is still to be accepted, under its port.
        let mut leases = client.leases;
        leases.retain(|(channel, first)| match self.channels.get_mut(*channel) {
            Some(ch) => {
                ch.leases.push(*first);
                false
            }
            None => true,
        });
        self.return_ports(client.family, leases.into_iter().map(|(_, first)| first).collect());
        self.sweep();
    }

    /// Takes a process out of the sockets of an arena; those that nobody holds
    /// any more are closed.
    fn leave_socks(&self, mem: &ArenaMem, nonce: u64, family: FamilyId) {
        if nonce == 0 {
            return;
        }
        for sock in mem.open_socks() {
            let out = |h: &AtomicU64| h.compare_exchange(nonce, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok();
            // All of them: a nonce may stand there twice.
            let held = sock.holders.iter().fold(false, |held, h| out(h) | held);
            let empty = sock.holders.iter().all(|h| h.load(Ordering::Acquire) == 0);
            if held && empty && sock.extra_holders.load(Ordering::Acquire) == 0 {
                self.close_sock(sock, mem, family);
            } else if held && died_inside(sock, nonce) {
                self.break_token(sock, nonce, mem, family);
            }
        }
    }

    /// A process died in the middle of an operation on a socket that processes of the fork group
    /// use, too. Nobody can say how far it came, so the connection is reset; and
    /// nobody waits for the dead.
    fn break_token(&self, sock: &Sock, nonce: u64, mem: &ArenaMem, family: FamilyId) {
        let side = sock.side.load(Ordering::Relaxed) as usize;
        let slot = sock.slot.load(Ordering::Relaxed) as usize;
        let channel = self.channels.get(sock.channel.load(Ordering::Relaxed));
        sock.flags.fetch_or(flag::POISONED, Ordering::AcqRel);
        if let Some(ch) = channel.filter(|ch| side < 2 && slot < SLOTS && ch.is_party(side, family)) {
            close_side(ch, slot, side, status::RST, &self.clients);
            wake_side(ch, slot, side, &self.clients);
            mem.count(Counter::ResetShm, 1);
        }
        for half in [&sock.tx, &sock.rx] {
            if is_of(nonce, half.owner.load(Ordering::Acquire)) {
                half.in_flight.store(half.pos.load(Ordering::Relaxed), Ordering::Release);
            }
            let holder = half.shared.load(Ordering::Acquire);
            if is_of(nonce, holder) {
                let _ = half.shared.compare_exchange(holder, 0, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
    }

    /// Closes one socket in the name of its family.
    fn close_sock(&self, sock: &Sock, mem: &ArenaMem, family: FamilyId) {
        let side = sock.side.load(Ordering::Relaxed) as usize;
        let slot = sock.slot.load(Ordering::Relaxed) as usize;
        let channel = self.channels.get(sock.channel.load(Ordering::Relaxed));
        // The family writes its arena itself: it may only close what is its
        // own to close.
        if let Some(ch) = channel.filter(|ch| side < 2 && slot < SLOTS && ch.is_party(side, family)) {
            let rx = |word: &AtomicU64| word.load(Ordering::Acquire);
            let unread = has_unread(&ch.mem, slot, side, rx(&sock.rx.pos), rx(&sock.rx.base), rx(&sock.rx.limit));
            let bits = closing_bits(ch, slot, side, sock, unread);
            close_side(ch, slot, side, bits, &self.clients);
            mem.count(Counter::CloseShm, 1);
            mem.count(Counter::ResetShm, u64::from(bits & status::RST != 0));
        }
        mem.count(Counter::TxBytes, sock.tx.bytes.swap(0, Ordering::Relaxed));
        mem.count(Counter::RxBytes, sock.rx.bytes.swap(0, Ordering::Relaxed));
        sock.state.store(sock_state::FREE, Ordering::Release);
    }

    /// Nobody has this arena any more: whatever is still open in it is closed,
    /// whoever is counted as its holder.
    fn end_arena(&mut self, arena: &Arena) {
        // Its process may have written anything into each of 65,536 sockets: once for all of them.
        let named: HashSet<[u32; 3]> = self.arenas.iter().flat_map(|a| a.mem.open_socks()).map(end_of).collect();
        for sock in arena.mem.open_socks() {
            let held = sock.holders.iter().any(|h| h.load(Ordering::Acquire) != 0)
                || sock.extra_holders.load(Ordering::Acquire) != 0;
            // Open but held by nobody: its process died while closing it, or
            // while filling it in. In the second case it still names the slot
            // of its previous life, which may be somebody else's now.
            if held || !named.contains(&end_of(sock)) {
                self.close_sock(sock, &arena.mem, arena.family);
            }
        }
        arena.mem.fold(totals_of(&mut self.totals, arena.uid));
        arena.mem.fold_zones(self.zones.totals(arena.uid));
    }

    /// The creator of an arena that lives on has ended: its counters are no
    /// longer shown under its name.
    fn fold_after(&mut self, id: ConnId, uid: u32) {
        if let Some(mem) = self.arenas.of(id).map(|a| a.mem.clone()) {
            mem.fold(totals_of(&mut self.totals, uid));
            mem.fold_zones(self.zones.totals(uid));
        }
    }

    fn stop_working(&mut self, id: ConnId, listener: ListenerId) {
        let Some(l) = self.listeners.get_mut(listener) else { return };
        let number = l.leave(id);
        let mask = l.worker_mask();
        for channel in &l.channels {
            let Some(ch) = self.channels.get(*channel) else { continue };
            ch.mem.set_workers(mask);
            // Its queue is left for the others to steal from.
            if number.is_some_and(|n| ch.mem.queued(1 + n) > 0) {
                wake_stealers(ch, &self.clients);
            }
        }
    }

    /// A process is done with a listener; with `all` nobody listens any more
    /// (shutdown, which concerns the socket that processes of the fork group share).
    pub fn unlisten(&mut self, id: ConnId, listener: ListenerId, all: bool) {
        let Some(client) = self.clients.get_mut(id) else { return };
        if !client.holds.remove(&listener) {
            return;
        }
        if client.works.remove(&listener) {
            self.stop_working(id, listener);
        }
        match all {
            true => self.end_listener(listener),
            false => self.drop_holder(id, listener),
        }
        self.sweep();
    }

    fn drop_holder(&mut self, id: ConnId, listener: ListenerId) {
        let Some(l) = self.listeners.get_mut(listener) else { return };
        l.holders.remove(&id);
        if l.holders.is_empty() {
            self.end_listener(listener);
        }
    }

    /// The end of a listener: connections that nobody accepted are reset, those
    /// that somebody has go on.
    pub fn end_listener(&mut self, listener: ListenerId) {
        let Some(l) = self.listeners.remove(listener) else { return };
        tracing::info!(listener, addr = crate::address::show(&l.info.addr), "listener ended");
        self.registry.remove(listener);
        self.forget_place(l.info.netns);
        self.steer_also(&crate::steer::Also::Refresh);
        for id in l.holders {
            if let Some(client) = self.clients.get_mut(id) {
                client.holds.remove(&listener);
                client.works.remove(&listener);
            }
        }
        for channel in l.channels {
            let Some(ch) = self.channels.get_mut(channel) else { continue };
            ch.listener_gone = true;
            let (client_family, families) = (ch.client_family, ch.server_families.clone());
            if let Some(ch) = self.channels.get(channel) {
                end_listening(ch, &self.clients);
            }
            self.tell_gone(channel, families.into_iter().chain([client_family]), false);
        }
    }

    pub(crate) fn tell_gone(&mut self, channel: ChannelId, families: impl IntoIterator<Item = FamilyId>, broken: bool) {
        let families: BTreeSet<FamilyId> = families.into_iter().collect();
        let known_to = self.channels.get(channel).map(|ch| ch.known_to.clone()).unwrap_or_default();
        for member in known_to {
            if self.clients.get(member).is_some_and(|c| families.contains(&c.family)) {
                let msg = Msg { id: u64::from(channel), arg0: broken.into(), ..Msg::new(kind::CHANNEL_GONE) };
                self.clients.send(member, Outgoing { msg, fd: None, unasked: true }, &self.arenas);
            }
        }
    }

    /// Channels: looks which have lost a side for good.
    pub fn sweep(&mut self) {
        let candidates: Vec<ChannelId> =
            self.channels.iter().filter(|ch| ch.client_ended || ch.listener_gone).map(|ch| ch.id).collect();
        let crowded = self.channels.iter().filter(|ch| ch.client_gone).count() > limits::LINGERING_CHANNELS;
        for id in candidates {
            self.sweep_one(id, crowded);
        }
    }

    fn sweep_one(&mut self, id: ChannelId, crowded: bool) {
        let Some(ch) = self.channels.get(id) else { return };
        if ch.client_ended && !ch.client_gone && !self.has_socks(id, CLIENT, ch.client_family) {
            close_all(ch, CLIENT, &self.clients);
            ch.mem.set_client_gone();
            if let Some(ch) = self.channels.get_mut(id) {
                ch.client_gone = true;
            }
        }
        let Some(ch) = self.channels.get(id) else { return };
        let family_lives = |family| self.clients.iter().any(|(_, c)| c.family == family);
        let servers_gone = ch.listener_gone && !ch.server_families.iter().any(|f| family_lives(*f));
        if servers_gone {
            close_all(ch, SERVER, &self.clients);
        }
        // A client that came, sent and went before anybody accepted is still
        // to be accepted, by workers who may yet have to be told; and a worker
        // may be about to. So a channel stays while anything in it is open,
        // unless too many do.
        // The same for one that went over to the kernel, whose peer has not come
        // for its end yet.
        let done = (ch.client_gone || ch.listener_gone)
            && !ch.switched.borrow().is_waiting()
            && ((servers_gone && !self.has_socks(id, CLIENT, ch.client_family))
                || ch.mem.slots_in_use() == 0
                || (crowded && ch.client_gone && ch.mem.queued_all() == 0));
        if ch.client_gone && !done {
            let wait = Duration::from_secs(1);
            self.look_again.get_or_insert((Instant::now() + wait, wait));
        }
        if done {
            if !ch.listener_gone {
                let families = ch.server_families.clone();
                self.tell_gone(id, families, false);
            }
            self.remove_channel(id);
        }
    }

    /// A channel that nothing comes through any more.
    pub(crate) fn remove_channel(&mut self, id: ChannelId) {
        let Some(ch) = self.channels.remove(id) else { return };
        self.registry.set_owner(ch.bound.into_keys(), 0);
        let mut leases = ch.leases;
        if let Some(client) = self.clients.get_mut(ch.client) {
            leases.extend(client.leases.extract_if(.., |(channel, _)| *channel == id).map(|(_, first)| first));
        }
        self.return_ports(ch.client_family, leases);
        for sleeper in ch.pipes.unready() {
            if let Some(c) = self.clients.get_mut(sleeper) {
                c.pipes_unready -= 1;
            }
        }
        if let Some(l) = self.listeners.get_mut(ch.listener) {
            l.channels.remove(&id);
            l.opened = l.opened.saturating_add(ch.mem.opened());
        }
        tracing::debug!(channel = id, "channel ended");
    }

    fn has_socks(&self, channel: ChannelId, side: usize, family: FamilyId) -> bool {
        self.arenas
            .in_family(family)
            .flat_map(|a| a.mem.open_socks())
            .any(|s| s.channel.load(Ordering::Relaxed) == channel && s.side.load(Ordering::Relaxed) as usize == side)
    }

    /// Ports of dead clients, of which nothing waits to be accepted: where there are no others. What
    /// they have left open at a server is under way with the port it was accepted with.
    pub(crate) fn reclaim_ports(&mut self) {
        let idle = |ch: &&mut Channel| ch.client_ended && !ch.leases.is_empty() && ch.mem.queued_all() == 0;
        let of = |ch: &mut Channel| (ch.client_family, std::mem::take(&mut ch.leases));
        let reclaimed: Vec<_> = self.channels.iter_mut().filter(idle).map(of).collect();
        for (family, leases) in reclaimed {
            self.return_ports(family, leases);
        }
    }

    /// Ports of a channel or a process that ended are free, unless it or another process of the fork group still has a
    /// connection from one of them; then they wait for the family to end.
    fn return_ports(&mut self, family: FamilyId, leases: Vec<u16>) {
        let in_use: BTreeSet<u16> = self
            .arenas
            .in_family(family)
            .flat_map(|a| a.mem.open_socks())
            .filter(|s| s.side.load(Ordering::Relaxed) as usize == CLIENT)
            .map(|s| s.local_port.load(Ordering::Relaxed))
            .collect();
        let kept = self.family_leases.remove(&family).unwrap_or_default();
        let alive = self.clients.iter().any(|(_, c)| c.family == family);
        for first in leases.into_iter().chain(kept) {
            // Nobody begins a connection from it any more.
            self.registry.set_owner(first..=first + (crate::ports::BLOCK - 1), 0);
            if alive && in_use.range(first..=first + (crate::ports::BLOCK - 1)).next().is_some() {
                self.family_leases.entry(family).or_default().push(first);
            } else {
                self.ports.give_back(first);
            }
        }
    }
}

/// Which end of a connection an open socket says it is.
fn end_of(sock: &Sock) -> [u32; 3] {
    [&sock.channel, &sock.slot, &sock.side].map(|w| w.load(Ordering::Relaxed))
}

/// Is this thread one of the process with that nonce? Its identity carries 16 bits
/// of it; 0 and 1 are nobody's.
fn is_of(nonce: u64, thread: u64) -> bool {
    thread > 1 && thread >> 48 == nonce >> 16 & 0xffff
}

fn died_inside(sock: &Sock, nonce: u64) -> bool {
    [&sock.tx, &sock.rx].iter().any(|half| {
        is_of(nonce, half.shared.load(Ordering::Acquire))
            || in_critical_section(*half) && is_of(nonce, half.owner.load(Ordering::Acquire))
    })
}

fn totals_of(totals: &mut HashMap<u32, Totals>, uid: u32) -> &mut Totals {
    totals.entry(uid).or_insert([0; fsocket_abi::arena::COUNTERS.len()])
}
