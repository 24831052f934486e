//! What clients ask for. Everything in a message is untrusted.

use crate::address::{destination, is_loopback};
use crate::arenas::{Arena, ArenaMem};
use crate::channels::{Channel, ChannelMem};
use crate::clients::{Client, Outgoing};
use crate::descriptor::{self, Attached};
use crate::ports::BLOCK;
use crate::report::Wanted;
use crate::steer::Also;
use crate::{limits, shares, ChannelId, ConnId, ListenerId, Monitor};
use fsocket_abi::channel::CHANNEL_SIZE;
use fsocket_proto::{kind, Addr, Msg};
use rustix::fd::AsFd;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Instant;

/// What an answer is made of.
pub type Answer = Result<(Msg, Option<Rc<OwnedFd>>), Errno>;

/// Ends the client that sent such a thing.
pub struct Misbehaved(pub &'static str);

impl Monitor {
    /// Handles one request.
    pub fn handle(&mut self, id: ConnId, msg: Msg, fd: Option<Attached>) -> Result<(), Misbehaved> {
        let Some(client) = self.clients.get(id) else { return Ok(()) };
        if !client.is_process() && !matches!(msg.kind, kind::HELLO | kind::REPORT | kind::STEER) {
            return Err(Misbehaved("no HELLO"));
        }
        let answer = match msg.kind {
            kind::HELLO => self.hello(id, &msg)?,
            kind::LISTEN => self.listen(id, &msg, fd),
            kind::WORKER => self.worker(id, &msg),
            kind::CONNECT => self.connect(id, &msg, fd),
            kind::PORTS => self.ports(id, &msg, fd),
            kind::UNPUBLISH => self.unpublish(id, &msg),
            kind::OPTIONS => self.mark_options(id, &msg),
            kind::SWITCH => self.switch(id, &msg, fd),
            kind::CLAIM => self.claim(id, &msg),
            kind::UPGRADE => self.upgrade(id, &msg, fd),
            kind::OFFER => self.offer_upgrade(id, &msg, fd),
            kind::TRANSFER => self.take(id, &msg, fd),
            kind::TRANSFERRED => {
                self.taken(&msg);
                return Ok(());
            }
            kind::RELEASE => {
                self.release(id, &msg);
                if msg.seq == 0 {
                    return Ok(());
                }
                Ok((reply(&msg), None))
            }
            kind::REPORT => self.send_report(id, &msg),
            kind::GROUP => self.group(id, &msg, fd),
            kind::LOCAL => self.local(id, &msg, fd),
            kind::CLONE => self.clone_listener(id, &msg, fd),
            kind::BALANCE => self.balance(id, &msg),
            kind::SHUT => self.shut_group(id, &msg),
            kind::WAITING => self.waiting(id, &msg),
            kind::BROKEN => {
                self.broken(id, &msg);
                return Ok(());
            }
            kind::ARRIVES => {
                self.arrives_in(id, &msg);
                return Ok(());
            }
            kind::PEER_CLOSED => {
                self.peer_closed(id, &msg);
                return Ok(());
            }
            kind::SHARE => {
                let _ = self.share(id, &msg, fd);
                return Ok(());
            }
            kind::LEFT => {
                self.left(id, &msg);
                if msg.seq == 0 {
                    return Ok(());
                }
                Ok((reply(&msg), None))
            }
            kind::STEER => self.steer_request(id, &msg, fd),
            kind::KEEP => return self.keep(id, &msg),
            kind::INHERITED_ARENA => self.inherited_arena(id, &msg),
            kind::CHANNEL_HANDLE => self.channel_handle(id, &msg),
            kind::SETTLED => self.settled(id, &msg),
            kind::ADOPT => return self.adopt(id, &msg, fd),
            kind::RENEW => return self.renew(id, fd),
            kind::ARENA => return self.arena(id, fd),
            kind::UNLISTEN => {
                let shown = fd.and_then(|fd| descriptor::listening(fd.as_fd()).ok());
                let listener = shown.map_or(Some(msg.id), |info| self.listeners.by_cookie(info.cookie));
                if let Some(listener) = listener {
                    self.unlisten(id, listener, msg.arg0 != 0);
                }
                if msg.seq == 0 {
                    return Ok(());
                }
                Ok((reply(&msg), None))
            }
            kind::RING => {
                self.ring(id, &msg);
                return Ok(());
            }
            kind::NEARER => {
                if self.listeners.has_port(msg.addr.port) {
                    self.registry.touch();
                }
                return Ok(());
            }
            kind::WAKER => {
                self.waker(id, &msg);
                return Ok(());
            }
            kind::WAKER_READY => {
                self.waker_ready(id, &msg);
                return Ok(());
            }
            _ => return Err(Misbehaved("unknown kind of message")),
        };
        let (msg, fd) = answer.unwrap_or_else(|errno| (Msg { result: errno.raw_os_error(), ..reply(&msg) }, None));
        self.clients.send(id, Outgoing { msg, fd, unasked: false }, &self.arenas);
        Ok(())
    }

    /// Nothing is done, for lack of a descriptor: the client does without.
    pub(crate) fn refuse_cut(&mut self, id: ConnId, msg: &Msg) -> Result<(), Misbehaved> {
        tracing::warn!(process = id, kind = msg.kind, "out of descriptors");
        match msg.kind {
            // Rights that it has given up it must not keep here.
            kind::RENEW => return Err(Misbehaved("out of descriptors for its new socket")),
            _ if msg.seq == 0 => {}
            _ => {
                let msg = Msg { result: Errno::MFILE.raw_os_error(), ..reply(msg) };
                self.clients.send(id, Outgoing { msg, fd: None, unasked: false }, &self.arenas);
            }
        }
        Ok(())
    }

    fn hello(&mut self, id: ConnId, msg: &Msg) -> Result<Answer, Misbehaved> {
        let registry = self.registry.fd();
        let Some(client) = self.clients.get_mut(id) else { return Err(Misbehaved("gone")) };
        if client.greeted || msg.id == 0 || (client.nonce != 0 && client.nonce != msg.id) {
            return Err(Misbehaved("HELLO out of place"));
        }
        if msg.arg1 != u64::from(fsocket_abi::VERSION) {
            return Ok(Err(Errno::PROTO));
        }
        client.greeted = true;
        client.has_closings = false;
        client.nonce = msg.id;
        client.class = msg.arg2;
        if client.pid == 0 {
            client.pid = msg.arg0 as u32;
        }
        tracing::debug!(process = id, pid = client.pid, uid = client.uid, "hello");
        self.clients.named(id, msg.id);
        // (Without credentials it is nobody for now.)
        let _ = self.note_party(id, false);
        Ok(Ok((Msg { id, ..reply(msg) }, Some(registry))))
    }

    fn adopt(&mut self, parent: ConnId, msg: &Msg, fd: Option<Attached>) -> Result<(), Misbehaved> {
        let fd = fd.ok_or(Misbehaved("ADOPT without a socket"))?;
        let Some(p) = self.clients.get(parent) else { return Ok(()) };
        let nonce_taken = self
            .clients
            .family_members(p.family)
            .iter()
            .any(|m| self.clients.get(*m).is_some_and(|c| c.nonce == msg.id));
        if msg.id == 0 || nonce_taken || !descriptor::is_control_socket(fd.as_fd()) {
            return Err(Misbehaved("ADOPT of something else"));
        }
        // The credentials of the pair are the parent's; the child may have
        // become somebody with fewer rights, never with more.
        crate::wire::ask_for_senders(fd.as_fd());
        let mut child = Client::new(fd.keep(), p.uid, 0, p.family);
        child.nonce = msg.id;
        child.class = p.class;
        child.is_successor = msg.arg0 == 1;
        child.successor_of = child.is_successor.then_some(parent);
        if !child.is_successor {
            child.holds = p.holds.clone();
        }
        let (holds, is_successor) = (child.holds.clone(), child.is_successor);
        if !self.has_share(child.uid, shares::CLIENT) {
            // Its connections are then seen as closed when its parent goes.
            tracing::warn!(uid = child.uid, "too many processes; child not adopted");
            return Ok(());
        }
        let Ok(child) = self.clients.add(child) else { return Ok(()) };
        for listener in holds {
            if let Some(l) = self.listeners.get_mut(listener) {
                l.holders.insert(child);
            }
        }
        self.arenas.inherit(parent, child);
        // (What a successor gets of them it asks for.)
        for ch in self.channels.iter_mut().filter(|ch| !is_successor && ch.known_to.contains(&parent)) {
            ch.known_to.insert(child);
        }
        tracing::debug!(process = child, parent, "adopted");
        Ok(())
    }

    fn arena(&mut self, id: ConnId, fd: Option<Attached>) -> Result<(), Misbehaved> {
        let fd = fd.ok_or(Misbehaved("ARENA without a descriptor"))?;
        if self.arenas.of(id).is_some() {
            return Err(Misbehaved("second ARENA"));
        }
        let mem = match ArenaMem::open(fd.as_fd()) {
            Ok(mem) => Rc::new(mem),
            // Ours to be short of; the process goes on without being watched.
            Err(Errno::NOMEM | Errno::MFILE | Errno::NFILE) => return Ok(()),
            Err(_) => return Err(Misbehaved("not an arena")),
        };
        let Some(client) = self.clients.get_mut(id) else { return Ok(()) };
        if std::mem::take(&mut client.missed_pending) {
            mem.bump_pending();
        }
        self.arenas.add(Arena {
            creator: id,
            family: client.family,
            uid: client.uid,
            users: BTreeSet::from([id]),
            mem,
            lifeline: self.lifelines.as_ref().and_then(|l| l.hold(fd.as_fd())),
            fd: Rc::new(fd.keep()),
        });
        Ok(())
    }

    fn listen(&mut self, id: ConnId, msg: &Msg, fd: Option<Attached>) -> Answer {
        let fd = fd.ok_or(Errno::BADF)?;
        let info = descriptor::listening(fd.as_fd())?;
        let _ = self.note_party(id, true);
        let uid = self.clients.get(id).ok_or(Errno::BADF)?.uid;
        let listener = match self.listeners.by_cookie(info.cookie) {
            Some(known) => known,
            None => {
                if self.registry.is_full()
                    || (uid != 0 && self.listeners.owned_by(uid) >= limits::LISTENERS_PER_UID)
                    || !self.has_share(uid, shares::LISTENER)
                {
                    return Err(Errno::MFILE);
                }
                // Whoever closed a socket on this address without telling must
                // not keep getting its connections.
                self.drop_stale(info.netns, &info.addr);
                self.broker.listener(fd.as_fd());
                let new = self.listeners.add(info, uid);
                self.registry.add(new, info.netns, &info.addr);
                self.steer_also(&Also::Refresh);
                tracing::info!(listener = new, addr = crate::address::show(&info.addr), process = id, "listen");
                new
            }
        };
        if let Some(l) = self.listeners.get_mut(listener) {
            l.holders.insert(id);
        }
        if let Some(c) = self.clients.get_mut(id) {
            c.holds.insert(listener);
            c.unclaimed.remove(&listener);
        }
        let works = |c: ConnId| self.clients.get(c).is_some_and(|c| c.works.contains(&listener));
        let worked = works(id) && self.clients.get(id).is_some_and(|c| c.is_successor)
            || self.predecessors(id).into_iter().any(works);
        Ok((Msg { id: listener, arg0: worked.into(), ..reply(msg) }, None))
    }

    fn unpublish(&mut self, id: ConnId, msg: &Msg) -> Answer {
        if !self.clients.get(id).is_some_and(|c| c.holds.contains(&msg.id)) {
            return Err(Errno::NOENT);
        }
        if msg.arg0 != 0 && self.listeners.get(msg.id).is_some_and(|l| l.holders.len() > 1) {
            return Err(Errno::BUSY);
        }
        self.hide_listener(msg.id);
        Ok((reply(msg), None))
    }

    /// New connections to a listener use the kernel.
    pub(crate) fn hide_listener(&mut self, listener: ListenerId) {
        self.registry.remove(listener);
        self.listeners.hide(listener);
        for channel in self.listeners.get(listener).iter().flat_map(|l| &l.channels) {
            if let Some(ch) = self.channels.get(*channel) {
                ch.mem.set_listener_closed();
            }
        }
        // A client that queued before it could see that is in the queue by now.
        crate::membarrier::heavy_fence();
    }

    fn mark_options(&mut self, id: ConnId, msg: &Msg) -> Answer {
        if !self.clients.get(id).is_some_and(|c| c.holds.contains(&msg.id)) {
            return Err(Errno::NOENT);
        }
        let of = self.listeners.get(msg.id).into_iter().flat_map(|l| &l.channels);
        let marked: usize =
            of.filter_map(|ch| self.channels.get(*ch)).map(|ch| ch.mem.mark_waiting(msg.arg0 as u32)).sum();
        Ok((Msg { arg0: marked as u64, ..reply(msg) }, None))
    }

    fn worker(&mut self, id: ConnId, msg: &Msg) -> Answer {
        self.note_party(id, true)?;
        self.may_work(id, msg.id)?;
        if !self.clients.get(id).ok_or(Errno::BADF)?.holds.contains(&msg.id) {
            return Err(Errno::NOENT);
        }
        if !self.may_serve(id, msg.id) {
            return Err(Errno::OPNOTSUPP);
        }
        let client = self.clients.get_mut(id).ok_or(Errno::BADF)?;
        let listener = self.listeners.get_mut(msg.id).ok_or(Errno::NOENT)?;
        client.works.insert(msg.id);
        let family = client.family;
        listener.families.insert(family);
        let number = listener.join(id);
        let mask = listener.worker_mask();
        for channel in listener.channels.clone() {
            // First the channel, then the mask bit: nobody queues for a worker
            // that was not told.
            self.offer(channel, id);
            if let Some(ch) = self.channels.get(channel) {
                ch.mem.set_workers(mask);
            }
        }
        match number {
            Some(n) => Ok((Msg { arg0: n as u64, ..reply(msg) }, None)),
            None => Err(Errno::AGAIN),
        }
    }

    /// Sends a channel to a worker of its listener.
    fn offer(&mut self, channel: ChannelId, worker: ConnId) {
        let Some(family) = self.clients.get(worker).map(|c| c.family) else { return };
        let Some(ch) = self.channels.get_mut(channel) else { return };
        ch.server_families.insert(family);
        ch.known_to.insert(worker);
        let msg =
            Msg { id: u64::from(channel), arg0: ch.listener, arg1: CHANNEL_SIZE as u64, ..Msg::new(kind::CHANNEL_SRV) };
        let fd = Some(ch.mem.fd());
        self.clients.send(worker, Outgoing { msg, fd, unasked: true }, &self.arenas);
    }

    fn connect(&mut self, id: ConnId, msg: &Msg, fd: Option<Attached>) -> Answer {
        let fd = fd.ok_or(Errno::BADF)?;
        let ip = destination(msg.addr.ip);
        let end = descriptor::client_end(fd.as_fd(), &ip, msg.addr.port)?;
        let netns = end.netns;
        // Also for a listener bound to exactly this address: with IP_FREEBIND
        // anybody can bind somebody else's.
        let ours = is_loopback(&ip) || (netns == self.netns && self.locals.contains(&ip));
        if !ours {
            return Err(Errno::NOENT);
        }
        // Before the look at the listener, so that what happens meanwhile is a change.
        let closings = self.closings_of(id, msg.addr.port);
        loop {
            let listener = self.listeners.find(netns, ip, msg.addr.port).ok_or(Errno::NOENT)?;
            if !self.still_listens(listener, Some(fd.as_fd())) {
                // Its socket was closed in secret: see who is next.
                self.end_listener(listener);
                continue;
            }
            if !self.is_reached(listener, ip, fd.as_fd()) {
                return Err(Errno::NOENT);
            }
            if self.distrust.refuses(listener, self.clients.get(id).ok_or(Errno::BADF)?.uid, id) {
                return Err(Errno::ACCESS);
            }
            self.judge(id, listener, (ip, msg.addr.port), &end, fd.as_fd())?;
            let own = |ch: &&Channel| ch.client == id && ch.listener == listener;
            let newest = self.channels.iter().filter(own).map(|ch| ch.id).max();
            let found = |channel: ChannelId| Msg {
                id: u64::from(channel),
                arg0: listener,
                arg1: CHANNEL_SIZE as u64,
                addr: Addr { v6only: closings, ..Addr::default() },
                ..reply(msg)
            };
            return match newest {
                Some(channel) if u64::from(channel) != msg.arg0 => Ok((Msg { arg2: 1, ..found(channel) }, None)),
                _ => {
                    let (channel, fd) = self.make_channel(id, listener)?;
                    let mut answer = found(channel);
                    answer.addr.port = self.lease_ports(id, channel).unwrap_or(0);
                    Ok((answer, Some(fd)))
                }
            };
        }
    }

    fn make_channel(&mut self, id: ConnId, listener: ListenerId) -> Result<(ChannelId, Rc<OwnedFd>), Errno> {
        let client = self.clients.get(id).ok_or(Errno::BADF)?;
        let count = |f: &dyn Fn(&Channel) -> bool| self.channels.iter().filter(|ch| f(ch)).count();
        if count(&|ch| ch.client == id) >= limits::CHANNELS_PER_PROCESS
            || (client.uid != 0
                && count(&|ch| ch.client_uid == client.uid && !ch.client_gone) >= limits::CHANNELS_PER_UID)
            || !self.has_share(client.uid, shares::CHANNEL)
        {
            return Err(Errno::MFILE);
        }
        let (client_pid, client_uid, client_family) = (client.pid, client.uid, client.family);
        let l = self.listeners.get_mut(listener).ok_or(Errno::NOENT)?;
        let (addr, netns, server_uid) = (l.info.addr, l.info.netns, l.uid);
        let channel = self.channels.next_id();
        let mem =
            ChannelMem::new(channel).map_err(|e| e.raw_os_error().map_or(Errno::NOMEM, Errno::from_raw_os_error))?;
        mem.set_workers(l.worker_mask());
        if self.config.balance.off {
            mem.set_turns();
        }
        let fd = mem.fd();
        l.channels.insert(channel);
        let workers: Vec<ConnId> = l.accepting().collect();
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
            server_uid,
            leases: Vec::new(),
            bound: BTreeMap::new(),
            switched: RefCell::default(),
            pipes: Default::default(),
            client_ended: false,
            client_gone: false,
            listener_gone: false,
        });
        for worker in workers {
            self.offer(channel, worker);
        }
        tracing::debug!(channel, listener, process = id, "channel");
        self.arrives(channel);
        Ok((channel, fd))
    }

    fn ports(&mut self, id: ConnId, msg: &Msg, fd: Option<Attached>) -> Answer {
        if let Some(fd) = fd {
            let port = self.bound_port(id, msg, &fd)?;
            return Ok((Msg { arg0: u64::from(port), arg1: 1, ..reply(msg) }, None));
        }
        // For a channel that is not its own client's it is kept until the process ends.
        let own = |channel: &ChannelId| self.channels.get(*channel).is_some_and(|ch| ch.client == id);
        let channel = ChannelId::try_from(msg.id).ok().filter(own).unwrap_or(0);
        let first = self.lease_ports(id, channel)?;
        Ok((Msg { arg0: u64::from(first), arg1: u64::from(BLOCK), ..reply(msg) }, None))
    }

    fn lease_ports(&mut self, id: ConnId, channel: ChannelId) -> Result<u16, Errno> {
        let first = self.free_ports(id).or_else(|_| {
            self.reclaim_ports();
            self.free_ports(id)
        })?;
        self.registry.set_owner(first..=first + (BLOCK - 1), channel);
        if let Some(client) = self.clients.get_mut(id) {
            client.leases.push((channel, first));
        }
        Ok(first)
    }

    fn free_ports(&mut self, id: ConnId) -> Result<u16, Errno> {
        let client = self.clients.get(id).ok_or(Errno::BADF)?;
        let of_uid: usize = self.clients.iter().filter(|(_, c)| c.uid == client.uid).map(|(_, c)| c.leases.len()).sum();
        let left: usize = self.channels.iter().filter(|ch| ch.client_uid == client.uid).map(|ch| ch.leases.len()).sum();
        if client.leases.len() >= limits::LEASES_PER_PROCESS
            || (client.uid != 0 && of_uid + left >= limits::LEASES_PER_UID)
        {
            return Err(Errno::AGAIN);
        }
        let listened: BTreeSet<u16> = self.listeners.iter().map(|l| l.info.addr.port).collect();
        let used = |p| listened.contains(&p) || self.registry.owner(p) != 0;
        self.ports.lease(used).ok_or(Errno::AGAIN)
    }

    /// The port that a client has bound its socket to is the channel's. The kernel lets one socket
    /// have it, so whoever shows one has the better right than whoever has shown one before.
    fn bound_port(&mut self, id: ConnId, msg: &Msg, fd: &Attached) -> Result<u16, Errno> {
        let (port, netns) = (descriptor::bound_port(fd.as_fd())?, descriptor::netns_cookie(fd.as_fd())?);
        let channel = ChannelId::try_from(msg.id).map_err(|_| Errno::NOENT)?;
        let ch = self.channels.get(channel).filter(|ch| ch.client == id).ok_or(Errno::NOENT)?;
        if ch.netns != netns || ch.bound.len() >= limits::BOUND_PER_CHANNEL {
            return Err(Errno::ADDRINUSE);
        }
        let owner = self.registry.owner(port);
        if owner != 0 && owner != channel {
            let other = self.channels.get_mut(owner).filter(|ch| ch.netns == netns);
            if other.is_none_or(|ch| ch.bound.remove(&port).is_none()) {
                return Err(Errno::ADDRINUSE);
            }
        }
        let ours = owner == channel && self.channels.get(channel).is_some_and(|ch| !ch.bound.contains_key(&port));
        if !ours {
            let cookie = rustix::net::sockopt::socket_cookie(fd.as_fd())?;
            self.broker.bound(fd.as_fd());
            if let Some(ch) = self.channels.get_mut(channel) {
                ch.bound.insert(port, cookie);
            }
            self.registry.set_owner(std::iter::once(port), channel);
        }
        Ok(port)
    }

    fn send_report(&mut self, id: ConnId, msg: &Msg) -> Answer {
        let viewer = self.clients.get(id).ok_or(Errno::BADF)?.uid;
        let reset = msg.arg1 == 1;
        let wanted = Wanted { viewer, is_brief: msg.arg2 == 1 };
        if let Some((length, fd)) = self.reports.get(wanted).filter(|_| !reset) {
            return Ok((Msg { arg0: length, ..reply(msg) }, Some(Rc::new(fd))));
        }
        let began = Instant::now();
        let report = self.report(wanted);
        if reset {
            let private = self.config.private;
            self.reset_zones(&|uid| viewer == 0 || private || viewer == uid);
        }
        let (answer, fd) = answer_json(msg, &report)?;
        if let Some(fd) = fd.as_ref() {
            self.reports.keep(wanted, answer.arg0, fd, began);
        }
        Ok((answer, fd))
    }

    fn steer_request(&mut self, id: ConnId, msg: &Msg, fd: Option<Attached>) -> Answer {
        let fd = fd.ok_or(Errno::BADF)?;
        // Sealed, so that reading it cannot block.
        let seals = rustix::fs::fcntl_get_seals(fd.as_fd())?;
        let length = msg.arg0 as usize;
        if !seals.contains(rustix::fs::SealFlags::SHRINK) || length > limits::STEER_REQUEST {
            return Err(Errno::INVAL);
        }
        let mut text = vec![0; length];
        if rustix::io::pread(fd.as_fd(), &mut text, 0)? != length {
            return Err(Errno::INVAL);
        }
        let client = self.clients.get(id).ok_or(Errno::BADF)?;
        let done = self.broker.steer(&text, client.fd.as_fd())?;
        self.steered(&done);
        answer_json(msg, &done.answer)
    }
}

/// An answer that is too long for a message: in a memfd.
fn answer_json(msg: &Msg, what: &impl serde::Serialize) -> Answer {
    let json = serde_json::to_vec(what).map_err(|_| Errno::NOMEM)?;
    let fd = crate::shm::memfd_of("fastsocket-answer", &json)
        .map_err(|e| e.raw_os_error().map_or(Errno::NOMEM, Errno::from_raw_os_error))?;
    Ok((Msg { arg0: json.len() as u64, ..reply(msg) }, Some(Rc::new(fd))))
}

/// The frame of an answer.
pub fn reply(msg: &Msg) -> Msg {
    Msg { seq: msg.seq, ..Msg::new(msg.kind) }
}
