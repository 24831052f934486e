//! What clients ask for. Everything in a message is untrusted.

use crate::address::{destination, is_loopback};
use crate::arenas::{Arena, ArenaMem};
use crate::channels::{Channel, ChannelMem};
use crate::clients::{Client, Outgoing};
use crate::descriptor::{self, Attached};
use crate::ports::BLOCK;
use crate::{limits, ChannelId, ConnId, ListenerId, Monitor};
use fsocket_abi::channel::{CHANNEL_SIZE, CLIENT, SERVER};
use fsocket_proto::{kind, Msg};
use rustix::fd::AsFd;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::cell::RefCell;
use std::collections::{BTreeSet, VecDeque};
use std::rc::Rc;

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
            kind::PORTS => self.ports(id, &msg),
            kind::GETBELL => self.get_bell(id, &msg),
            kind::UNPUBLISH => self.unpublish(id, &msg),
            kind::OPTIONS => self.mark_options(id, &msg),
            kind::SWITCH => self.switch(id, &msg, fd),
            kind::CLAIM => self.claim(id, &msg),
            kind::UPGRADE => self.upgrade(id, &msg, fd),
            kind::OFFER => self.offer_upgrade(id, &msg, fd),
            kind::TAKE => self.take(id, &msg, fd),
            kind::TAKEN => {
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
            kind::CLONE => self.clone_listener(&msg, fd),
            kind::BALANCE => self.balance(id, &msg),
            kind::SHUT => self.shut_group(id, &msg),
            kind::WAITING => self.waiting(id, &msg),
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
            kind::ESTATE => self.estate(id, &msg),
            kind::PART => self.part(id, &msg),
            kind::SETTLED => self.settled(id, &msg),
            kind::ADOPT => return self.adopt(id, &msg, fd),
            kind::ARENA => return self.arena(id, fd),
            kind::UNLISTEN => {
                self.unlisten(id, msg.id, msg.arg0 != 0);
                if msg.seq == 0 {
                    return Ok(());
                }
                Ok((reply(&msg), None))
            }
            kind::BELL => return self.bell(id, &msg, fd),
            kind::RING => {
                self.ring(id, &msg);
                return Ok(());
            }
            kind::UNBELL => {
                self.clients.remove_bell(id, msg.id);
                return Ok(());
            }
            _ => return Err(Misbehaved("unknown kind of message")),
        };
        let (msg, fd) = answer.unwrap_or_else(|errno| (Msg { result: errno.raw_os_error(), ..reply(&msg) }, None));
        self.clients.send(id, Outgoing { msg, fd, unasked: false }, &self.arenas);
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
        client.nonce = msg.id;
        if client.pid == 0 {
            client.pid = msg.arg0 as u32;
        }
        tracing::debug!(process = id, pid = client.pid, uid = client.uid, "hello");
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
        let mut child = Client::new(fd.keep(), p.uid, 0, p.family);
        child.nonce = msg.id;
        child.is_heir = msg.arg0 == 1;
        child.heir_of = child.is_heir.then_some(parent);
        if !child.is_heir {
            child.holds = p.holds.clone();
        }
        let holds = child.holds.clone();
        if !self.may_connect(child.uid) {
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
            fd: Rc::new(fd.keep()),
        });
        Ok(())
    }

    fn listen(&mut self, id: ConnId, msg: &Msg, fd: Option<Attached>) -> Answer {
        let info = descriptor::listening(fd.ok_or(Errno::BADF)?.as_fd())?;
        let uid = self.clients.get(id).ok_or(Errno::BADF)?.uid;
        let listener = match self.listeners.by_cookie(info.cookie) {
            Some(known) => known,
            None => {
                if self.registry.is_full() || (uid != 0 && self.listeners.owned_by(uid) >= limits::LISTENERS_PER_UID) {
                    return Err(Errno::MFILE);
                }
                // Whoever closed a socket on this address without telling must
                // not keep getting its connections.
                self.drop_stale(info.netns, &info.addr);
                let new = self.listeners.add(info, uid);
                self.registry.add(new, info.netns, &info.addr);
                self.refresh_steering();
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
        let worked = works(id) && self.clients.get(id).is_some_and(|c| c.is_heir)
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
        self.registry.remove(msg.id);
        self.listeners.hide(msg.id);
        for channel in self.listeners.get(msg.id).iter().flat_map(|l| &l.channels) {
            if let Some(ch) = self.channels.get(*channel) {
                ch.mem.set_listener_closed();
            }
        }
        // A client that queued before it could see that is in the queue by now.
        crate::membarrier::heavy_fence();
        Ok((reply(msg), None))
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
        let client = self.clients.get_mut(id).ok_or(Errno::BADF)?;
        let listener = self.listeners.get_mut(msg.id).ok_or(Errno::NOENT)?;
        if !client.holds.contains(&msg.id) {
            return Err(Errno::NOENT);
        }
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
        let msg =
            Msg { id: u64::from(channel), arg0: ch.listener, arg1: CHANNEL_SIZE as u64, ..Msg::new(kind::CHANNEL_SRV) };
        let fd = Some(ch.mem.fd());
        self.clients.send(worker, Outgoing { msg, fd, unasked: true }, &self.arenas);
    }

    fn connect(&mut self, id: ConnId, msg: &Msg, fd: Option<Attached>) -> Answer {
        let netns = descriptor::netns_cookie(fd.ok_or(Errno::BADF)?.as_fd())?;
        let ip = destination(msg.addr.ip);
        // Also for a listener bound to exactly this address: with IP_FREEBIND
        // anybody can bind somebody else's.
        let ours = is_loopback(&ip) || (netns == self.netns && self.locals.contains(&ip));
        if !ours {
            return Err(Errno::NOENT);
        }
        loop {
            let listener = self.listeners.find(netns, ip, msg.addr.port).ok_or(Errno::NOENT)?;
            let own = |ch: &&Channel| ch.client == id && ch.listener == listener;
            let newest = self.channels.iter().filter(own).map(|ch| ch.id).max();
            let found = |channel: ChannelId| Msg {
                id: u64::from(channel),
                arg0: listener,
                arg1: CHANNEL_SIZE as u64,
                ..reply(msg)
            };
            match newest {
                Some(channel) if u64::from(channel) != msg.arg0 => {
                    return Ok((Msg { arg2: 1, ..found(channel) }, None))
                }
                _ if self.still_listens(listener) => {
                    let (channel, fd) = self.make_channel(id, listener)?;
                    let mut answer = found(channel);
                    answer.addr.port = self.lease_ports(id, channel).unwrap_or(0);
                    return Ok((answer, Some(fd)));
                }
                // Its socket was closed in secret: see who is next.
                _ => self.end_listener(listener),
            }
        }
    }

    fn make_channel(&mut self, id: ConnId, listener: ListenerId) -> Result<(ChannelId, Rc<OwnedFd>), Errno> {
        let client = self.clients.get(id).ok_or(Errno::BADF)?;
        let count = |f: &dyn Fn(&Channel) -> bool| self.channels.iter().filter(|ch| f(ch)).count();
        if count(&|ch| ch.client == id) >= limits::CHANNELS_PER_PROCESS
            || (client.uid != 0
                && count(&|ch| ch.client_uid == client.uid && !ch.client_gone) >= limits::CHANNELS_PER_UID)
        {
            return Err(Errno::MFILE);
        }
        let (client_pid, client_uid, client_family) = (client.pid, client.uid, client.family);
        let l = self.listeners.get_mut(listener).ok_or(Errno::NOENT)?;
        let addr = l.info.addr;
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
            mem: Rc::new(mem),
            addr,
            switched: RefCell::default(),
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

    fn ports(&mut self, id: ConnId, msg: &Msg) -> Answer {
        // For a channel that is not its own client's it is kept until the process ends.
        let own = |channel: &ChannelId| self.channels.get(*channel).is_some_and(|ch| ch.client == id);
        let channel = ChannelId::try_from(msg.id).ok().filter(own).unwrap_or(0);
        let first = self.lease_ports(id, channel)?;
        Ok((Msg { arg0: u64::from(first), arg1: u64::from(BLOCK), ..reply(msg) }, None))
    }

    fn lease_ports(&mut self, id: ConnId, channel: ChannelId) -> Result<u16, Errno> {
        let client = self.clients.get(id).ok_or(Errno::BADF)?;
        let of_uid: usize = self.clients.iter().filter(|(_, c)| c.uid == client.uid).map(|(_, c)| c.leases.len()).sum();
        if client.leases.len() >= limits::LEASES_PER_PROCESS || (client.uid != 0 && of_uid >= limits::LEASES_PER_UID) {
            return Err(Errno::AGAIN);
        }
        let listened: BTreeSet<u16> = self.listeners.iter().map(|l| l.info.addr.port).collect();
        let first = self.ports.lease(|p| listened.contains(&p)).ok_or(Errno::AGAIN)?;
        if let Some(client) = self.clients.get_mut(id) {
            client.leases.push((channel, first));
        }
        Ok(first)
    }

    fn bell(&mut self, id: ConnId, msg: &Msg, fd: Option<Attached>) -> Result<(), Misbehaved> {
        let fd = fd.ok_or(Misbehaved("BELL without a descriptor"))?;
        let Some(client) = self.clients.get(id) else { return Ok(()) };
        if msg.id == 0 || client.bells.len() >= limits::BELLS_PER_PROCESS || !descriptor::is_eventfd(fd.as_fd()) {
            return Err(Misbehaved("not a bell"));
        }
        self.clients.add_bell(id, msg.id, fd.keep());
        let (now, wait) = self.early_rings.drain(..).partition(|(_, r)| r.id == msg.id);
        self.early_rings = wait;
        let now: VecDeque<(ConnId, Msg)> = now;
        for (requester, ring) in now {
            self.ring(requester, &ring);
        }
        Ok(())
    }

    /// A bell on the other side of a channel that `id` is a party of.
    fn other_bell(&self, id: ConnId, msg: &Msg) -> Result<&OwnedFd, Errno> {
        let family = self.clients.get(id).ok_or(Errno::BADF)?.family;
        let channel = ChannelId::try_from(msg.arg0).map_err(|_| Errno::NOENT)?;
        let ch = self.channels.get(channel).ok_or(Errno::NOENT)?;
        // The other side's bells only. A family that talks to itself is on
        // both. (Its own it may have rung, but not fetch: RING.)
        let own = msg.kind == kind::RING;
        let other_side = |owner| {
            (own && owner == family)
                || (ch.is_party(CLIENT, family) && ch.is_party(SERVER, owner))
                || (ch.is_party(SERVER, family) && ch.is_party(CLIENT, owner))
        };
        self.clients.bell(msg.id, other_side).ok_or(Errno::NOENT)
    }

    fn get_bell(&mut self, id: ConnId, msg: &Msg) -> Answer {
        let fd = rustix::io::fcntl_dupfd_cloexec(self.other_bell(id, msg)?, 0)?;
        Ok((Msg { id: msg.id, ..reply(msg) }, Some(Rc::new(fd))))
    }

    fn ring(&mut self, id: ConnId, msg: &Msg) {
        if let Ok(bell) = self.other_bell(id, msg) {
            crate::wake::ring_bell(bell.as_fd());
        } else if !self.clients.knows_bell(msg.id) {
            if self.early_rings.len() >= limits::EARLY_RINGS {
                self.early_rings.pop_front();
            }
            self.early_rings.push_back((id, *msg));
        }
    }

    fn send_report(&mut self, id: ConnId, msg: &Msg) -> Answer {
        let viewer = self.clients.get(id).ok_or(Errno::BADF)?.uid;
        let report = self.report(viewer);
        if msg.arg1 == 1 {
            let private = self.config.private;
            self.reset_zones(&|uid| viewer == 0 || private || viewer == uid);
        }
        answer_json(msg, &report)
    }

    fn steer_request(&mut self, id: ConnId, msg: &Msg, fd: Option<Attached>) -> Answer {
        let client = self.clients.get(id).ok_or(Errno::BADF)?;
        if client.uid != 0 {
            return Err(Errno::PERM);
        }
        let socket = rustix::io::fcntl_dupfd_cloexec(&client.fd, 0)?;
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
        let request = serde_json::from_slice(&text).map_err(|_| Errno::INVAL)?;
        answer_json(msg, &self.steer(request, socket.as_fd()))
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
