//! Requests about listeners, workers and channels. Everything in a message is untrusted.
//!
//! Long: one handler for each message about shared memory.

use crate::address::{destination, is_loopback};
use crate::ancillary::Sender;
use crate::answer::{Answer, Misbehaved};
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
use fsocket_proto::values::Work;
use fsocket_proto::{answer, notice, request, CHANNELS_OF_LISTENER};
use fsocket_sync::atomic::Ordering;
use rustix::io::Errno;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

impl Shm {
    /// [`request::Hello`].
    pub fn hello(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        msg: request::Hello,
    ) -> Result<Answer<answer::Hello>, Misbehaved> {
        let registry = self.registry.fd();
        let Some(client) = ctx.clients.get_mut(id) else { return Err(Misbehaved("gone")) };
        if client.greeted || msg.nonce == 0 || (client.nonce != 0 && client.nonce != msg.nonce) {
            return Err(Misbehaved("HELLO out of place"));
        }
        if msg.version != u64::from(fsocket_abi::VERSION) {
            return Ok(Err(crate::shm::reattach::other_version(ctx, id, msg.version)));
        }
        client.greeted = true;
        let is_known = client.nonce != 0 && !client.is_successor;
        client.name = printable(&msg.name);
        client.has_closings = false;
        client.nonce = msg.nonce;
        client.class = msg.rights;
        // A child that its parent has announced may say HELLO before messages show their senders.
        // It then gets its parent's rights.
        client.kernel = match (&ctx.policy.sender, client.pid) {
            (Some(sender), _) => sender.rights(),
            (None, 0) => client.kernel,
            (None, pid) => Sender { pid, ..Sender::default() }.rights(),
        };
        if client.pid == 0 {
            // (The process may be in another PID namespace and send its number there.)
            let seen = ctx.policy.sender.as_ref().map(|s| s.pid).filter(|pid| *pid != 0);
            client.pid = seen.unwrap_or(msg.pid);
        }
        let uid = client.uid;
        ctx.clients.named(id, msg.nonce);
        tracing::debug!(process = %ctx.clients.name(id), uid, "hello");
        ctx.look_if_off(id, msg.off);
        // (Without credentials, the process is treated as unknown for now.)
        let party = ctx.note_party(id, false);
        if !is_known {
            ctx.choose_program(id, &party.unwrap_or_default());
        }
        let program = ctx.program(id).map_or(0, Program::bits);
        Ok(Ok((answer::Hello { process: id, understands: fsocket_proto::REATTACH, program }, Some(registry))))
    }

    /// [`request::Adopt`].
    pub fn adopt(
        &mut self,
        ctx: &mut Context,
        parent: ConnId,
        msg: request::Adopt,
        fd: Option<ForeignFd>,
    ) -> Result<(), Misbehaved> {
        let fd = fd.ok_or(Misbehaved("ADOPT without a socket"))?;
        let Some(p) = ctx.clients.get(parent) else { return Ok(()) };
        let nonce_taken = ctx
            .clients
            .family_members(p.family)
            .iter()
            .any(|m| ctx.clients.get(*m).is_some_and(|c| c.nonce == msg.nonce));
        if msg.nonce == 0 || nonce_taken || !descriptor::is_control_socket(fd.as_fd()) {
            return Err(Misbehaved("ADOPT of something else"));
        }
        // The kernel shows the parent's credentials for the socket pair. The child may have
        // dropped rights since then, but cannot have gained any.
        crate::wire::ask_for_senders(fd.as_fd());
        let mut child = Client::new(fd, p.uid, 0, p.family);
        child.nonce = msg.nonce;
        (child.class, child.kernel) = (p.class, p.kernel);
        (child.off, child.program) = (p.off, p.program);
        child.is_successor = msg.successor;
        child.successor_of = child.is_successor.then_some(parent);
        if !child.is_successor {
            child.holds = p.holds.clone();
        }
        let (holds, is_successor) = (child.holds.clone(), child.is_successor);
        if !self.has_share(ctx, child.uid, shares::CLIENT) {
            // The monitor does not know the child. When its parent ends, its connections will look
            // closed.
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
        // (A successor asks for the channels that it needs.)
        for ch in self.channels.iter_mut().filter(|ch| !is_successor && ch.known_to.contains(&parent)) {
            ch.known_to.insert(child);
        }
        self.tell_watched(ctx, child);
        tracing::debug!(parent = %ctx.clients.name(parent), "a child is announced");
        Ok(())
    }

    /// [`request::Arena`].
    pub fn arena(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        msg: request::Arena,
        fd: Option<ForeignFd>,
    ) -> Result<(), Misbehaved> {
        let fd = fd.ok_or(Misbehaved("ARENA without a descriptor"))?;
        let inherited = msg.inherited;
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
            // The monitor is short of memory or descriptors. The process goes on, but the monitor
            // does not watch its arena.
            Err(Errno::NOMEM | Errno::MFILE | Errno::NFILE) => return Ok(()),
            Err(_) => return Err(Misbehaved("not an arena")),
        };
        let Some(client) = ctx.clients.get_mut(id) else { return Ok(()) };
        if !inherited {
            client.arena = Some(mem.clone());
            client.reserved = None;
            if std::mem::take(&mut client.missed_pending) {
                mem.tell_pending(true, false);
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

    /// [`request::Listen`].
    pub fn listen(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        msg: request::Listen,
        fd: Option<ForeignFd>,
    ) -> Answer<answer::Listen> {
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
                // A process may have closed a socket at this address without telling the monitor.
                // It must not get connections of the new socket.
                self.drop_stale(ctx, info.netns, &info.addr);
                ctx.broker.listener(fd.as_fd());
                let new = self.listeners.add(info, uid);
                if msg.held_elsewhere {
                    // A process without the library may accept there. So the kernel serves the
                    // listener until a process with the library works for it.
                    self.listeners.hide_until_served(new);
                } else {
                    self.registry.add(new, info.netns, &info.addr);
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
            l.held_elsewhere |= msg.held_elsewhere;
        }
        if let Some(c) = ctx.clients.get_mut(id) {
            c.holds.insert(listener);
            c.unclaimed.remove(&listener);
        }
        let works = |c: ConnId| ctx.clients.get(c).is_some_and(|c| c.works.contains(&listener));
        let worked = works(id) && ctx.clients.get(id).is_some_and(|c| c.is_successor)
            || self.predecessors(ctx, id).into_iter().any(works);
        Ok((answer::Listen { listener, worked }, None))
    }

    /// [`request::Options`].
    pub fn mark_options(&self, ctx: &Context, id: ConnId, msg: request::Options) -> Answer<answer::Options> {
        if !ctx.clients.get(id).is_some_and(|c| c.holds.contains(&msg.listener)) {
            return Err(Errno::NOENT);
        }
        let of = self.listeners.get(msg.listener).into_iter().flat_map(|l| &l.channels);
        let mark = |ch: &Channel| match msg.mark {
            0 => ch.mem.queued_all() as usize,
            mark => ch.mem.mark_waiting(mark),
        };
        let marked: usize = of.filter_map(|ch| self.channels.get(*ch)).map(mark).sum();
        Ok((answer::Options { marked: marked as u32 }, None))
    }

    /// [`request::Worker`].
    pub fn worker(&mut self, ctx: &mut Context, id: ConnId, msg: request::Worker) -> Answer<answer::Worker> {
        ctx.note_party(id, true)?;
        let l = self.listeners.get(msg.listener).ok_or(Errno::NOENT)?;
        ctx.may_work(id, l, &self.channels)?;
        if !ctx.clients.get(id).ok_or(Errno::BADF)?.holds.contains(&msg.listener) {
            return Err(Errno::NOENT);
        }
        if !self.may_serve(ctx, id, msg.listener) {
            return Err(Errno::OPNOTSUPP);
        }
        let client = ctx.clients.get_mut(id).ok_or(Errno::BADF)?;
        let listener = self.listeners.get_mut(msg.listener).ok_or(Errno::NOENT)?;
        client.works.insert(msg.listener);
        let family = client.family;
        listener.families.insert(family);
        let was_shared = listener.is_shared;
        let number = listener.join(id, msg.number.map(|n| n as usize));
        let mask = listener.worker_mask();
        let hidden_until = listener.shown;
        let is_looked_after = listener.is_shared && !was_shared;
        for channel in listener.channels.clone() {
            if is_looked_after {
                self.dispatch.arrives(channel, &ctx.config.balance);
            }
            // Workers get the channel before clients see the bit in the mask. So no client queues
            // a connection for a worker that lacks the channel.
            self.offer(ctx, channel, id, id);
            if let Some(ch) = self.channels.get(channel) {
                ch.mem.set_workers(mask);
            }
        }
        let is_served = match hidden_until {
            Shown::WhenServed => true,
            Shown::WhenAccepted => msg.work == Work::Accepts,
            Shown::Yes | Shown::Never => false,
        };
        if is_served && !self.is_moving(msg.listener) {
            self.show_listener(msg.listener);
        }
        let hidden = self.listeners.get(msg.listener).is_some_and(|l| l.shown == Shown::WhenAccepted);
        let number = number.ok_or(Errno::AGAIN)? as u32;
        Ok((answer::Worker { listener: msg.listener, number, untaken: hidden }, None))
    }

    /// Sends a channel to a worker of its listener. `by`: the process that has caused this.
    fn offer(&mut self, ctx: &mut Context, channel: ChannelId, worker: ConnId, by: ConnId) {
        let Some(family) = ctx.clients.get(worker).map(|c| c.family) else { return };
        let Some(ch) = self.channels.get_mut(channel) else { return };
        ch.server_families.insert(family);
        ch.known_to.insert(worker);
        let told = notice::ChannelSrv { channel, listener: ch.listener, size: CHANNEL_SIZE as u64 };
        let out = Outgoing::with(told, ch.mem.fd());
        match by == worker {
            true => ctx.clients.send(worker, out),
            false => _ = ctx.clients.send_for(by, worker, out),
        }
    }

    /// [`request::Connect`].
    pub fn connect(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        msg: request::Connect,
        fd: Option<ForeignFd>,
    ) -> Answer<answer::Connect> {
        let fd = fd.ok_or(Errno::BADF)?;
        let ip = destination(msg.to.ip);
        let end = descriptor::client_end(fd.as_fd(), &ip, msg.to.port)?;
        let netns = end.netns;
        // The address must be local, even if a listener is bound to it: with IP_FREEBIND any
        // process can bind an address of another host.
        let ours = is_loopback(&ip) || (netns == ctx.netns && ctx.locals.contains(&ip));
        if !ours {
            return Err(Errno::NOENT);
        }
        // The count is read before the listener is looked up. So if the listener changes after
        // this, the client sees another count.
        let closings = self.closings.count_for(ctx, id, msg.to.port);
        loop {
            let listener = self.listeners.find(netns, ip, msg.to.port).ok_or(Errno::NOENT)?;
            if !self.leads_to(ctx, listener, ip, fd.as_fd()) {
                if !self.still_listens(ctx, listener, Some(fd.as_fd())) {
                    // The listener's socket was closed without a message. Look for the next
                    // listener.
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
            let granted = ctx.judge(id, l, (ip, msg.to.port), &end, (fd.as_fd(), msg.identity))?;
            let (answer, fd) = self.channel_to(ctx, id, listener, msg.full)?;
            return Ok((answer::Connect { proved: granted == Granted::Proved, closings, ..answer }, fd));
        }
    }

    /// The channel of this process to a listener. A new one is made if there is none yet, or if it
    /// is `full`.
    pub fn channel_to(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        listener: ListenerId,
        full: Option<ChannelId>,
    ) -> Answer<answer::Connect> {
        // (A client may show a socket after its listener has ended.)
        let is_open =
            |ch: &Channel| ch.is_whole() && !ch.listener_gone && ch.mem.listener_closed().load(Ordering::Relaxed) == 0;
        let own = |ch: &&Channel| ch.client == id && is_open(ch);
        let all = self.listeners.get(listener).into_iter().flat_map(|l| &l.channels);
        let newest = all.filter_map(|ch| self.channels.get(*ch)).filter(own).map(|ch| ch.id).max();
        let found = |channel, known, first_port| answer::Connect {
            channel,
            listener,
            size: CHANNEL_SIZE as u64,
            known,
            first_port,
            proved: false,
            closings: 0,
        };
        match newest {
            Some(channel) if Some(channel) != full => Ok((found(channel, true, 0), None)),
            _ => {
                let (channel, fd) = self.make_channel(ctx, id, listener)?;
                Ok((found(channel, false, self.lease_ports(ctx, id, channel).unwrap_or(0)), Some(fd)))
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
        // A worker that does not read its messages gets no more channels.
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

    /// Whether a user may have one more channel to this listener. A user may have as many as are
    /// left for all others.
    fn has_room(&self, ctx: &Context, listener: ListenerId, uid: u32) -> bool {
        let Some(l) = self.listeners.get(listener) else { return false };
        let of = l.channels.iter().filter_map(|ch| self.channels.get(*ch));
        let alone = uid == 0 || ctx.config.private;
        let own = of.filter(|ch| !alone && ch.client_uid == uid).count();
        shares::admits(own as u64, l.channels.len() as u64, 1, CHANNELS_OF_LISTENER as u64)
    }

    /// [`request::Arrives`].
    pub fn arrives_in(&mut self, ctx: &Context, id: ConnId, request::Arrives { channel }: request::Arrives) {
        if self.channels.get(channel).is_some_and(|ch| ch.client == id) {
            self.waiting.arrives(channel);
            self.dispatch.arrives(channel, &ctx.config.balance);
        }
    }

    /// Whether this user holds less memory than is left for all others. The numbers are a few
    /// moments old ([`crate::shm::resident`]).
    fn has_memory(&mut self, ctx: &Context, uid: u32) -> bool {
        let Shm { memory, channels, .. } = self;
        memory.look(|first| channels.from(first), |first| ctx.arenas.iter().skip(first));
        let own = if uid == 0 || ctx.config.private { 0 } else { memory.of(uid) };
        shares::admits(own, memory.all(), 0, ctx.config.memory)
    }

    /// Whether `more` descriptors are within this user's share. Root, and the user of a private
    /// monitor, may take everything that is left.
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
