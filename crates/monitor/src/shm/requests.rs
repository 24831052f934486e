//! Requests about listeners, workers and channels. Everything in a message is untrusted.
//!
//! Long: one handler for each message about shared memory.

use crate::address::{destination, is_loopback};
use crate::ancillary::Sender;
use crate::answer::{reply, Answer, Misbehaved};
use crate::arenas::{printable, Arena, ArenaMem};
use crate::clients::{Client, Outgoing};
use crate::context::Context;
use crate::descriptor;
use crate::foreign::{closer, ForeignFd};
use crate::policy::programs::Program;
use crate::policy::Granted;
use crate::shm::channels::{Channel, ChannelMem};
use crate::shm::listeners::Shown;
use crate::shm::state::Shm;
use crate::{limits, shares, ChannelId, ConnId, ListenerId, NOBODY};
use fsocket_abi::channel::CHANNEL_SIZE;
use fsocket_proto::{kind, worker, Addr, Msg, CHANNELS_OF_LISTENER};
use fsocket_sync::atomic::Ordering;
use rustix::io::Errno;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;
use std::time::{Duration, Instant};

impl Shm {
    pub fn hello(&mut self, ctx: &mut Context, id: ConnId, msg: &Msg) -> Result<Answer, Misbehaved> {
        let registry = self.registry.fd();
        let Some(client) = ctx.clients.get_mut(id) else { return Err(Misbehaved("gone")) };
        if client.greeted || msg.id == 0 || (client.nonce != 0 && client.nonce != msg.id) {
            return Err(Misbehaved("HELLO out of place"));
        }
        if msg.arg1 != u64::from(fsocket_abi::VERSION) {
            return Ok(Ok(crate::shm::reattach::other_version(ctx, id, msg)));
        }
        client.greeted = true;
        let is_known = client.nonce != 0 && !client.is_successor;
        client.name = printable(&msg.addr.ip);
        client.has_closings = false;
        client.nonce = msg.id;
        client.class = msg.arg2;
        // Of one that was announced and says hello before we see whom messages are from: as its parent's.
        client.kernel = match (&ctx.policy.sender, client.pid) {
            (Some(sender), _) => sender.rights(),
            (None, 0) => client.kernel,
            (None, pid) => Sender { pid, ..Sender::default() }.rights(),
        };
        if client.pid == 0 {
            // (A process in a PID namespace of its own says another number.)
            let seen = ctx.policy.sender.as_ref().map(|s| s.pid).filter(|pid| *pid != 0);
            client.pid = seen.unwrap_or(msg.arg0 as u32);
        }
        let uid = client.uid;
        ctx.clients.named(id, msg.id);
        tracing::debug!(process = %ctx.clients.name(id), uid, "hello");
        ctx.look_if_off(id, msg.addr.port == 1);
        // (Without credentials it is nobody for now.)
        let party = ctx.note_party(id, false);
        if !is_known {
            ctx.choose_program(id, &party.unwrap_or_default());
        }
        let arg1 = ctx.program(id).map_or(0, Program::bits);
        Ok(Ok((Msg { id, arg0: fsocket_proto::REATTACH, arg1, ..reply(msg) }, Some(registry))))
    }

    pub fn adopt(
        &mut self,
        ctx: &mut Context,
        parent: ConnId,
        msg: &Msg,
        fd: Option<ForeignFd>,
    ) -> Result<(), Misbehaved> {
        let fd = fd.ok_or(Misbehaved("ADOPT without a socket"))?;
        let Some(p) = ctx.clients.get(parent) else { return Ok(()) };
        let nonce_taken =
            ctx.clients.family_members(p.family).iter().any(|m| ctx.clients.get(*m).is_some_and(|c| c.nonce == msg.id));
        if msg.id == 0 || nonce_taken || !descriptor::is_control_socket(fd.as_fd()) {
            return Err(Misbehaved("ADOPT of something else"));
        }
        // The credentials of the pair are the parent's; the child may have
        // become somebody with fewer rights, never with more.
        crate::wire::ask_for_senders(fd.as_fd());
        let mut child = Client::new(fd, p.uid, 0, p.family);
        child.nonce = msg.id;
        (child.class, child.kernel) = (p.class, p.kernel);
        (child.off, child.program) = (p.off, p.program);
        child.is_successor = msg.arg0 == 1;
        child.successor_of = child.is_successor.then_some(parent);
        if !child.is_successor {
            child.holds = p.holds.clone();
        }
        let (holds, is_successor) = (child.holds.clone(), child.is_successor);
        if !self.has_share(ctx, child.uid, shares::CLIENT) {
            // Its connections are then seen as closed when its parent goes.
            tracing::warn!(uid = child.uid, "too many processes; child not adopted");
            return Ok(());
        }
        let Ok(child) = ctx.clients.add(child) else { return Ok(()) };
        for listener in holds {
            if let Some(l) = self.listeners.get_mut(listener) {
                l.holders.insert(child);
            }
        }
        ctx.arenas.inherit(parent, child);
        // (What a successor gets of them it asks for.)
        for ch in self.channels.iter_mut().filter(|ch| !is_successor && ch.known_to.contains(&parent)) {
            ch.known_to.insert(child);
        }
        self.tell_watched(ctx, child);
        tracing::debug!(parent = %ctx.clients.name(parent), "a child is announced");
        Ok(())
    }

    pub fn arena(&mut self, ctx: &mut Context, id: ConnId, msg: &Msg, fd: Option<ForeignFd>) -> Result<(), Misbehaved> {
        let fd = fd.ok_or(Misbehaved("ARENA without a descriptor"))?;
        let inherited = msg.arg1 == 1;
        if crate::shm::reattach::arena_again(ctx, id, fd.as_fd(), inherited) {
            return Ok(());
        }
        if !inherited && ctx.arenas.of(id).is_some() {
            return Err(Misbehaved("second ARENA"));
        }
        let Some(uid) = ctx.clients.get(id).map(|c| c.uid) else { return Ok(()) };
        if inherited && !self.has_share(ctx, uid, shares::ARENA) {
            return Ok(());
        }
        let mem = match ArenaMem::open(fd) {
            Ok(mem) => Rc::new(mem),
            // Ours to be short of; the process goes on without being watched.
            Err(Errno::NOMEM | Errno::MFILE | Errno::NFILE) => return Ok(()),
            Err(_) => return Err(Misbehaved("not an arena")),
        };
        let Some(client) = ctx.clients.get_mut(id) else { return Ok(()) };
        if !inherited {
            client.arena = Some(mem.clone());
            client.reserved = None;
            if std::mem::take(&mut client.missed_pending) {
                mem.bump_pending();
            }
        }
        ctx.arenas.add(Arena {
            creator: if inherited { NOBODY } else { id },
            family: client.family,
            uid: client.uid,
            rights: client.rights(),
            users: BTreeSet::from([id]),
            lifeline: ctx.lifelines.as_ref().and_then(|l| l.hold(mem.fd.as_fd())),
            mem,
        });
        self.ports_in_use(ctx, id);
        Ok(())
    }

    pub fn listen(&mut self, ctx: &mut Context, id: ConnId, msg: &Msg, fd: Option<ForeignFd>) -> Answer {
        let fd = fd.ok_or(Errno::BADF)?;
        let info = descriptor::listening(fd.as_fd())?;
        let reuse = descriptor::reuse(fd.as_fd())?;
        let _ = ctx.note_party(id, true);
        let uid = ctx.clients.get(id).ok_or(Errno::BADF)?.uid;
        let listener = match self.listeners.by_cookie(info.cookie) {
            Some(known) => known,
            None => {
                if self.registry.is_full()
                    || (uid != 0 && self.listeners.owned_by(uid) >= limits::LISTENERS_PER_UID)
                    || !self.has_share(ctx, uid, shares::LISTENER)
                {
                    return Err(Errno::MFILE);
                }
                // A process may have closed a socket on this address without telling: it must
                // not get the new one's connections.
                self.drop_stale(ctx, info.netns, &info.addr);
                ctx.broker.listener(fd.as_fd());
                let new = self.listeners.add(info, uid);
                if msg.arg0 == 0 {
                    self.registry.add(new, info.netns, &info.addr);
                } else {
                    // A process without the library may accept there: the kernel serves it until one with the library looks.
                    self.listeners.hide_until_served(new);
                }
                self.listeners_changed = true;
                let process = ctx.clients.name(id);
                tracing::info!(%process, address = crate::address::show(&info.addr), "listens");
                new
            }
        };
        if let Some(l) = self.listeners.get_mut(listener) {
            l.reuse = reuse;
            l.holders.insert(id);
            l.held_elsewhere |= msg.arg0 != 0;
        }
        if let Some(c) = ctx.clients.get_mut(id) {
            c.holds.insert(listener);
            c.unclaimed.remove(&listener);
        }
        let works = |c: ConnId| ctx.clients.get(c).is_some_and(|c| c.works.contains(&listener));
        let worked = works(id) && ctx.clients.get(id).is_some_and(|c| c.is_successor)
            || self.predecessors(ctx, id).into_iter().any(works);
        Ok((Msg { id: listener, arg0: worked.into(), ..reply(msg) }, None))
    }

    pub fn mark_options(&mut self, ctx: &mut Context, id: ConnId, msg: &Msg) -> Answer {
        if !ctx.clients.get(id).is_some_and(|c| c.holds.contains(&msg.id)) {
            return Err(Errno::NOENT);
        }
        let of = self.listeners.get(msg.id).into_iter().flat_map(|l| &l.channels);
        let mark = |ch: &Channel| match msg.arg0 as u32 {
            0 => ch.mem.queued_all() as usize,
            mark => ch.mem.mark_waiting(mark),
        };
        let marked: usize = of.filter_map(|ch| self.channels.get(*ch)).map(mark).sum();
        Ok((Msg { arg0: marked as u64, ..reply(msg) }, None))
    }

    pub fn worker(&mut self, ctx: &mut Context, id: ConnId, msg: &Msg) -> Answer {
        ctx.note_party(id, true)?;
        let l = self.listeners.get(msg.id).ok_or(Errno::NOENT)?;
        ctx.may_work(id, l, &self.channels)?;
        if !ctx.clients.get(id).ok_or(Errno::BADF)?.holds.contains(&msg.id) {
            return Err(Errno::NOENT);
        }
        if !self.may_serve(ctx, id, msg.id) {
            return Err(Errno::OPNOTSUPP);
        }
        let client = ctx.clients.get_mut(id).ok_or(Errno::BADF)?;
        let listener = self.listeners.get_mut(msg.id).ok_or(Errno::NOENT)?;
        client.works.insert(msg.id);
        let family = client.family;
        listener.families.insert(family);
        let was_shared = listener.is_shared;
        let number = listener.join(id, msg.arg0.checked_sub(1).map(|n| n as usize));
        let mask = listener.worker_mask();
        let hidden_until = listener.shown;
        let is_looked_after = listener.is_shared && !was_shared;
        for channel in listener.channels.clone() {
            if is_looked_after {
                self.dispatch.arrives(channel, &ctx.config.balance);
            }
            // First the channel, then the mask bit: nobody queues for a worker
            // that was not told.
            self.offer(ctx, channel, id, id);
            if let Some(ch) = self.channels.get(channel) {
                ch.mem.set_workers(mask);
            }
        }
        let is_served = match hidden_until {
            Shown::WhenServed => msg.arg1 != worker::LEAVES,
            Shown::WhenAccepted => msg.arg1 == worker::ACCEPTS,
            Shown::Yes | Shown::Never => false,
        };
        if is_served && !self.is_moving(msg.id) {
            self.show_listener(msg.id);
        }
        let hidden = self.listeners.get(msg.id).is_some_and(|l| l.shown == Shown::WhenAccepted);
        match number {
            Some(n) => Ok((Msg { id: msg.id, arg0: n as u64, arg1: hidden.into(), ..reply(msg) }, None)),
            None => Err(Errno::AGAIN),
        }
    }

    /// Sends a channel to a worker of its listener. `by`: the process that wants it to be sent.
    fn offer(&mut self, ctx: &mut Context, channel: ChannelId, worker: ConnId, by: ConnId) {
        let Some(family) = ctx.clients.get(worker).map(|c| c.family) else { return };
        let Some(ch) = self.channels.get_mut(channel) else { return };
        ch.server_families.insert(family);
        ch.known_to.insert(worker);
        let msg =
            Msg { id: u64::from(channel), arg0: ch.listener, arg1: CHANNEL_SIZE as u64, ..Msg::new(kind::CHANNEL_SRV) };
        let out = Outgoing { msg, fd: Some(ch.mem.fd()), unasked: true };
        match by == worker {
            true => ctx.clients.send(worker, out),
            false => _ = ctx.clients.send_for(by, worker, out),
        }
    }

    pub fn connect(&mut self, ctx: &mut Context, id: ConnId, msg: &Msg, fd: Option<ForeignFd>) -> Answer {
        let fd = fd.ok_or(Errno::BADF)?;
        let ip = destination(msg.addr.ip);
        let end = descriptor::client_end(fd.as_fd(), &ip, msg.addr.port)?;
        let netns = end.netns;
        // Also for a listener bound to exactly this address: with IP_FREEBIND
        // anybody can bind somebody else's.
        let ours = is_loopback(&ip) || (netns == ctx.netns && ctx.locals.contains(&ip));
        if !ours {
            return Err(Errno::NOENT);
        }
        // Before the look at the listener, so that what happens meanwhile is a change.
        let closings = self.closings.count_for(ctx, id, msg.addr.port);
        loop {
            let listener = self.listeners.find(netns, ip, msg.addr.port).ok_or(Errno::NOENT)?;
            if !self.leads_to(ctx, listener, ip, fd.as_fd()) {
                if !self.still_listens(ctx, listener, Some(fd.as_fd())) {
                    // Its socket was closed in secret: see who is next.
                    self.end_listener(ctx, listener);
                    continue;
                }
                if !self.is_reached(ctx, listener, ip, fd.as_fd()) {
                    return Err(Errno::NOENT);
                }
            }
            if self.distrust.refuses(listener, ctx.clients.get(id).ok_or(Errno::BADF)?.uid, id) {
                return Err(Errno::ACCESS);
            }
            let l = self.listeners.get(listener).ok_or(Errno::NOENT)?;
            let granted = ctx.judge(id, l, (ip, msg.addr.port), &end, (fd.as_fd(), msg.arg1))?;
            return self.channel_to(ctx, id, listener, msg, closings).map(|(mut answer, fd)| {
                answer.addr.family = (granted == Granted::Proved).into();
                (answer, fd)
            });
        }
    }

    /// The process's channel to a listener, unless that is the one which the message calls full.
    pub fn channel_to(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        listener: ListenerId,
        msg: &Msg,
        closings: u32,
    ) -> Answer {
        // (A socket may be shown again after its listener has ended.)
        let is_open =
            |ch: &Channel| ch.is_whole() && !ch.listener_gone && ch.mem.listener_closed().load(Ordering::Relaxed) == 0;
        let own = |ch: &&Channel| ch.client == id && is_open(ch);
        let all = self.listeners.get(listener).into_iter().flat_map(|l| &l.channels);
        let newest = all.filter_map(|ch| self.channels.get(*ch)).filter(own).map(|ch| ch.id).max();
        let found = |channel: ChannelId| Msg {
            id: u64::from(channel),
            arg0: listener,
            arg1: CHANNEL_SIZE as u64,
            addr: Addr { v6only: closings, ..Addr::default() },
            ..reply(msg)
        };
        match newest {
            Some(channel) if u64::from(channel) != msg.arg0 => Ok((Msg { arg2: 1, ..found(channel) }, None)),
            _ => {
                let (channel, fd) = self.make_channel(ctx, id, listener)?;
                let mut answer = found(channel);
                answer.addr.port = self.lease_ports(ctx, id, channel).unwrap_or(0);
                Ok((answer, Some(fd)))
            }
        }
    }

    fn make_channel(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        listener: ListenerId,
    ) -> Result<(ChannelId, Rc<ForeignFd>), Errno> {
        let client = ctx.clients.get(id).ok_or(Errno::BADF)?;
        let has = || self.channels.iter().filter(|ch| ch.client == id).count();
        if ctx.program(id).and_then(|p| p.channels).is_some_and(|most| has() >= most)
            || !self.has_room(ctx, listener, client.uid)
            || !self.has_share(ctx, client.uid, shares::CHANNEL)
        {
            return Err(Errno::MFILE);
        }
        if !self.has_memory(ctx, client.uid) {
            return Err(Errno::NOMEM);
        }
        let (client_pid, client_uid, client_family) = (client.pid, client.uid, client.family);
        let l = self.listeners.get_mut(listener).ok_or(Errno::NOENT)?;
        let (addr, netns, reuse, server_uid) = (l.info.addr, l.info.netns, l.reuse, l.uid);
        // A worker that does not read has channels enough.
        let workers: Vec<ConnId> = l.accepting().collect();
        if workers.iter().any(|worker| *worker != id && !ctx.clients.has_room(id, *worker, 1)) {
            return Err(Errno::MFILE);
        }
        let channel = self.channels.next_id(client.last_channel);
        let mem = ChannelMem::new(channel, client_uid)
            .map_err(|e| e.raw_os_error().map_or(Errno::NOMEM, Errno::from_raw_os_error))?;
        mem.set_workers(l.worker_mask());
        if ctx.config.balance.off {
            mem.set_turns();
        }
        let fd = mem.fd();
        l.channels.insert(channel);
        let is_shared = l.is_shared;
        self.registry.serves(addr.port);
        self.channels.add(Channel {
            id: channel,
            listener,
            client: id,
            client_pid,
            client_uid,
            client_family,
            server_families: BTreeSet::new(),
            known_to: BTreeSet::from([id]),
            mem: Rc::new(mem),
            addr,
            netns,
            reuse,
            server_uid,
            leases: Vec::new(),
            bound: BTreeMap::new(),
            switched: RefCell::default(),
            pipes: Default::default(),
            client_ended: false,
            client_gone: false,
            claimed_from: Cell::new(None),
            listener_gone: false,
            is_ending: false,
            is_from_before: false,
        });
        if let Some(client) = ctx.clients.get_mut(id) {
            client.last_channel = channel;
        }
        for worker in workers {
            self.offer(ctx, channel, worker, id);
        }
        tracing::debug!(channel, listener, process = %ctx.clients.name(id), "channel");
        self.waiting.arrives(channel);
        if is_shared {
            self.dispatch.arrives(channel, &ctx.config.balance);
        }
        Ok((channel, fd))
    }

    /// Whether a user may have one channel more of those that a listener can have: as many as are left for all others.
    fn has_room(&self, ctx: &Context, listener: ListenerId, uid: u32) -> bool {
        let Some(l) = self.listeners.get(listener) else { return false };
        let of = l.channels.iter().filter_map(|ch| self.channels.get(*ch));
        let alone = uid == 0 || ctx.config.private;
        let own = of.filter(|ch| !alone && ch.client_uid == uid).count();
        shares::admits(own as u64, l.channels.len() as u64, 1, CHANNELS_OF_LISTENER as u64)
    }

    /// [`fsocket_proto::kind::ARRIVES`].
    pub fn arrives_in(&mut self, ctx: &mut Context, id: ConnId, msg: &Msg) {
        let channel = ChannelId::try_from(msg.id).unwrap_or_default();
        if self.channels.get(channel).is_some_and(|ch| ch.client == id) {
            self.waiting.arrives(channel);
            self.dispatch.arrives(channel, &ctx.config.balance);
        }
    }

    /// Whether a user whose processes need another channel holds less memory than is left for all others. As it
    /// was a moment ago: many come at once, and it is read from each channel.
    fn has_memory(&mut self, ctx: &Context, uid: u32) -> bool {
        const MOMENT: Duration = Duration::from_millis(50);
        let held = self.memory.take().filter(|(at, _)| at.elapsed() < MOMENT).unwrap_or_else(|| {
            let channels = self.channels.iter().map(|ch| (ch.client_uid, ch.mem.resident()));
            let arenas = ctx.arenas.iter().map(|a| (a.uid, a.mem.resident()));
            let mut sum = HashMap::new();
            for (uid, bytes) in channels.chain(arenas) {
                *sum.entry(uid).or_default() += bytes;
            }
            (Instant::now(), sum)
        });
        let own = if uid == 0 || ctx.config.private { 0 } else { held.1.get(&uid).copied().unwrap_or_default() };
        let all = held.1.values().sum();
        self.memory = Some(held);
        shares::admits(own, all, 0, ctx.config.memory)
    }

    /// Whether so many `more` descriptors are within a user's share. Root, and the only user of a private
    /// monitor, get what is there.
    pub fn has_share(&self, ctx: &Context, uid: u32, more: u64) -> bool {
        let (mut own, mut all) = closer().held(uid);
        for (holder, n) in self.listeners.by_user() {
            all += n * shares::LISTENER;
            own += if holder == uid { n * shares::LISTENER } else { 0 };
        }
        let alone = uid == 0 || ctx.config.private;
        let own = if alone { 0 } else { own };
        shares::admits(own, all, more, ctx.descriptors)
    }
}
