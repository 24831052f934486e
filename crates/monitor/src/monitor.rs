//! The state of the monitor, and its event loop.

use crate::address;
use crate::arenas::{Arenas, Totals};
use crate::broker::Broker;
use crate::channels::Channels;
use crate::clients::{Client, Clients};
use crate::descriptor;
use crate::endpoint::{Config, Endpoint, StartError};
use crate::listeners::Listeners;
use crate::ports::{KernelPorts, Ports};
use crate::registry::Registry;
use crate::requests::Misbehaved;
use crate::sockdiag::SockDiag;
use crate::steer::Also;
use crate::turns::TURN;
use crate::watchdog::Watchdog;
use crate::wire::{self, Received};
use crate::zones::Zones;
use crate::{shares, ConnId, FamilyId};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::Timespec;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// What an event is about; processes have larger numbers.
const ENDPOINT: u64 = 1;
const ADDRESSES: u64 = 2;
const STOP: u64 = 3;
pub(crate) const POLICY: u64 = 4;
const FIRST_CLIENT: ConnId = 15;
/// Groups whose program rings; the group's number in the lower bits.
pub(crate) const FIRST_WAKER: u64 = 1 << 63;
/// A private monitor gives its first client this much longer.
const START_GRACE: Duration = Duration::from_secs(10);

pub struct Monitor {
    pub(crate) config: Config,
    endpoint: Endpoint,
    /// To what takes a privilege.
    pub(crate) broker: Rc<Broker>,
    pub(crate) epoll: Rc<OwnedFd>,
    addresses: Option<OwnedFd>,
    /// Given up for a moment when descriptors run out, to turn somebody away.
    spare: Option<OwnedFd>,
    pub(crate) started: Instant,
    own_uid: u32,
    /// That the broker knows.
    users: BTreeSet<u32>,
    /// For all users.
    descriptors: u64,
    /// Of this process, for which `locals` is valid.
    pub(crate) netns: u64,
    pub(crate) locals: BTreeSet<[u8; 16]>,
    pub(crate) clients: Clients,
    turns: crate::turns::Turns,
    pub(crate) arenas: Arenas,
    pub(crate) listeners: Listeners,
    pub(crate) channels: Channels,
    pub(crate) zones: Zones,
    pub(crate) offers: crate::upgrade::Offers,
    pub(crate) ports: Ports,
    pub(crate) registry: Registry,
    pub(crate) steers: crate::steer::front::Front,
    pub(crate) diag: Option<SockDiag>,
    pub(crate) closings: crate::closings::Closings,
    /// Reports that took long to make.
    pub(crate) reports: crate::report::Kept,
    /// Counters of processes that ended, by user.
    pub(crate) totals: HashMap<u32, Totals>,
    /// Port leases of ended processes whose fork group still use them.
    pub(crate) family_leases: HashMap<FamilyId, Vec<u16>>,
    last_family: FamilyId,
    /// Private: when to exit unless somebody comes.
    deadline: Option<Instant>,
    /// When to look again for channels that wait to be emptied, and how long
    /// the wait before that was.
    pub(crate) look_again: Option<(Instant, Duration)>,
    pub(crate) dispatch: crate::dispatch::Dispatch,
    pub(crate) distrust: crate::distrust::Distrust,
    /// Of the thread that serves.
    pub(crate) lifelines: Option<crate::lifeline::Lifelines>,
    pub(crate) policy: crate::policy::Policy,
}

impl Monitor {
    /// Everything that can fail; when it returns, clients can connect.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(config: Config) -> Result<Monitor, StartError> {
        let endpoint = Endpoint::publish(&config)?;
        let broker = Broker::here(endpoint.fd.as_fd(), config.keep.as_deref(), config.socket.parent());
        Monitor::on(config, endpoint, broker)
    }

    /// The same with what may be another process's.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn on(config: Config, endpoint: Endpoint, broker: Broker) -> Result<Monitor, StartError> {
        let fail = |what| move |e: std::io::Error| StartError::System { what, source: e };
        let descriptors = shares::total(raise_nofile().min(config.descriptors));
        crate::membarrier::register();
        let epoll =
            Rc::new(epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| fail("make an epoll instance")(e.into()))?);
        epoll::add(&*epoll, &endpoint.fd, EventData::new_u64(ENDPOINT), EventFlags::IN)
            .map_err(|e| fail("watch the socket")(e.into()))?;
        let netns = rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .and_then(|s| descriptor::netns_cookie(s.as_fd()))
            .map_err(|e| fail("tell network namespaces apart (SO_NETNS_COOKIE)")(e.into()))?;
        let addresses = address::watch_addresses().ok();
        if let Some(fd) = &addresses {
            let _ = epoll::add(&*epoll, fd, EventData::new_u64(ADDRESSES), EventFlags::IN);
        }
        let deadline = config.private.then(|| Instant::now() + config.linger + START_GRACE);
        let closings = crate::closings::Closings::start(config.private, &broker);
        let mut monitor = Monitor {
            config,
            endpoint,
            broker: Rc::new(broker),
            clients: Clients::new(epoll.clone(), FIRST_CLIENT),
            turns: Default::default(),
            epoll,
            addresses,
            spare: spare(),
            started: Instant::now(),
            own_uid: rustix::process::geteuid().as_raw(),
            users: BTreeSet::new(),
            descriptors,
            netns,
            locals: BTreeSet::new(),
            arenas: Arenas::default(),
            listeners: Listeners::default(),
            channels: Channels::default(),
            zones: Zones::default(),
            offers: crate::upgrade::Offers::default(),
            ports: Ports::new(KernelPorts::read()),
            registry: Registry::new().map_err(fail("make the registry"))?,
            steers: Default::default(),
            diag: SockDiag::new(),
            closings,
            reports: crate::report::Kept::default(),
            totals: HashMap::new(),
            family_leases: HashMap::new(),
            last_family: 0,
            deadline,
            look_again: None,
            dispatch: Default::default(),
            distrust: Default::default(),
            lifelines: None,
            policy: Default::default(),
        };
        monitor.refresh_addresses();
        if monitor.config.keep.is_some() {
            let broker = monitor.broker.clone();
            monitor.zones.take_over(&broker, monitor.netns);
        }
        monitor.steer_also(&Also::Begin);
        Ok(monitor)
    }

    /// Serves until `stop` is readable or, if private, until nobody needs it.
    ///
    /// # Errors
    /// Of `epoll_wait` and timers; nothing a client does.
    pub fn run(mut self, stop: BorrowedFd<'_>) -> std::io::Result<()> {
        let r = self.serve(stop);
        if let Some(lifelines) = self.lifelines.take() {
            lifelines.end();
        }
        r
    }

    fn serve(&mut self, stop: BorrowedFd<'_>) -> std::io::Result<()> {
        let watchdog = Watchdog::new()?;
        self.lifelines = crate::lifeline::Lifelines::new();
        if self.lifelines.is_none() {
            tracing::warn!("no robust futexes; threads that sleep do not learn when this process is killed");
        }
        epoll::add(&*self.epoll, stop, EventData::new_u64(STOP), EventFlags::IN)?;
        // As many as a flood may have, so that it does not hide others.
        let mut events = Vec::with_capacity(1024);
        loop {
            events.clear();
            let next = self
                .deadline
                .into_iter()
                .chain(self.look_again.map(|(at, _)| at))
                .chain(self.zones.next())
                .chain(self.dispatch.next)
                .chain(self.clients.send_again)
                .chain((!self.turns.is_empty()).then(Instant::now))
                .min();
            let timeout = next.map(|at| {
                let left = at.saturating_duration_since(Instant::now());
                Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
            });
            match epoll::wait(&*self.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
            watchdog.arm();
            for event in &events {
                let (what, flags) = (event.data.u64(), event.flags);
                match what {
                    ENDPOINT => self.accept(),
                    ADDRESSES => self.addresses_changed(),
                    POLICY => self.policy_changed(),
                    STOP => {
                        // A private one ends with its programs.
                        if self.config.private {
                            self.zones.leave_nothing();
                            self.broker.leave_nothing();
                        }
                        return Ok(());
                    }
                    waker if waker & FIRST_WAKER != 0 => self.balance_rung(waker & !FIRST_WAKER),
                    client => self.client_event(client, flags),
                }
                self.settle();
            }
            self.take_turns();
            self.clients.send_again_if_due(&self.arenas);
            self.look_again_if_due();
            self.zones_look();
            self.balance_if_due();
            self.dispatch_if_due();
            self.settle();
            let done = self.is_unneeded();
            watchdog.disarm();
            if done {
                self.zones.leave_nothing();
                self.broker.leave_nothing();
                tracing::info!("nobody needs this monitor any more");
                return Ok(());
            }
        }
    }

    /// What one event has left to do: processes that end, threads to be woken.
    fn settle(&mut self) {
        loop {
            while let Some(id) = self.clients.doomed.pop() {
                self.end_process(id);
            }
            self.clients.send_wakes(&self.arenas);
            if self.clients.doomed.is_empty() {
                return;
            }
        }
    }

    fn look_again_if_due(&mut self) {
        match self.look_again {
            Some((at, waited)) if at <= Instant::now() => {
                self.look_again = None;
                self.sweep();
                // Seldom and seldomer: what nobody takes may lie there for ever.
                if let Some((_, wait)) = &mut self.look_again {
                    *wait = (waited * 2).min(Duration::from_secs(60));
                    self.look_again = Some((Instant::now() + *wait, *wait));
                }
            }
            _ => {}
        }
    }

    fn client_event(&mut self, id: ConnId, flags: EventFlags) {
        if flags.contains(EventFlags::OUT) {
            self.clients.flush(id, &self.arenas);
        }
        let Some(client) = self.clients.get_mut(id) else { return };
        client.hung_up |= flags.intersects(EventFlags::HUP | EventFlags::ERR);
        if client.hung_up || flags.contains(EventFlags::IN) {
            self.turns.add(client.uid, id);
        }
    }

    /// A turn for each user who waits.
    fn take_turns(&mut self) {
        for uid in self.turns.users() {
            let begin = Instant::now();
            while let Some(id) = self.turns.take(uid) {
                if self.serve_one(id) {
                    self.turns.add(uid, id);
                }
                self.settle();
                if begin.elapsed() >= TURN {
                    break;
                }
            }
        }
    }

    /// Handles one message of a process. Whether there was one, and it may have more.
    pub(crate) fn serve_one(&mut self, id: ConnId) -> bool {
        let Some(client) = self.clients.get(id) else { return false };
        if !client.wants_input() && !client.hung_up {
            return false;
        }
        let (received, sender) = wire::receive_from(client.fd.as_fd());
        self.policy.sender = sender;
        let handled = match received {
            Received::Message(msg, fd) => {
                tracing::trace!(process = id, kind = msg.kind, seq = msg.seq, "request");
                self.handle(id, msg, fd)
            }
            Received::Cut(msg) => self.refuse_cut(id, &msg),
            Received::Nothing => return false,
            Received::End => Err(Misbehaved("it is gone")),
            Received::Malformed => Err(Misbehaved("not a message of ours")),
        };
        self.policy.sender = None;
        if let Err(why) = handled {
            self.clients.doom(id, why.0);
            return false;
        }
        true
    }

    fn accept(&mut self) {
        loop {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let fd = match rustix::net::accept_with(&self.endpoint.fd, flags) {
                Ok(fd) => fd,
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(Errno::MFILE | Errno::NFILE) if self.spare.take().is_some() => {
                    // Turn one away, or the loop would spin on it.
                    drop(rustix::net::accept_with(&self.endpoint.fd, flags));
                    self.spare = spare();
                    continue;
                }
                Err(_) => return,
            };
            self.admit(fd);
        }
    }

    fn admit(&mut self, fd: OwnedFd) {
        let Ok((pid, uid)) = descriptor::peer(fd.as_fd()) else { return };
        if self.config.private && uid != self.own_uid && uid != 0 {
            tracing::warn!(uid, "not this user's monitor");
            return;
        }
        if !self.has_share(uid, shares::CLIENT) {
            tracing::warn!(uid, "too many processes");
            return;
        }
        self.vouch(uid, fd.as_fd());
        let family = self.new_family();
        let _ = self.clients.add(Client::new(fd, uid, pid, family));
    }

    /// A process of this user has come over this socket.
    pub(crate) fn vouch(&mut self, uid: u32, control: BorrowedFd<'_>) {
        if self.users.insert(uid) {
            self.broker.user(control);
        }
    }

    pub(crate) fn new_family(&mut self) -> FamilyId {
        self.last_family += 1;
        self.last_family
    }

    /// Whether so many `more` descriptors are within a user's share. Root, and the only user of a private
    /// monitor, get what is there.
    pub(crate) fn has_share(&self, uid: u32, more: u64) -> bool {
        let clients = self.clients.iter().map(|(_, c)| (c.uid, shares::CLIENT));
        let listeners = self.listeners.iter().map(|l| (l.uid, shares::LISTENER));
        let channels = self.channels.iter().map(|ch| (ch.client_uid, shares::CHANNEL + ch.pipes.descriptors()));
        let alone = uid == 0 || self.config.private;
        let (mut own, mut all) = (0, 0);
        for (holder, n) in clients.chain(listeners).chain(channels) {
            all += n;
            own += if holder == uid && !alone { n } else { 0 };
        }
        shares::admits(own, all, more, self.descriptors)
    }

    fn addresses_changed(&mut self) {
        let Some(fd) = &self.addresses else { return };
        let mut scratch = [0u8; 8192];
        // Of addresses the content does not matter, nor that some of it was lost
        // (ENOBUFS): everything is read again.
        let mut rules = false;
        loop {
            match rustix::net::recv(fd, &mut scratch[..], RecvFlags::DONTWAIT) {
                Err(Errno::AGAIN) => break,
                got => rules |= !got.is_ok_and(|(n, _)| address::are_addresses(&scratch[..n])),
            }
        }
        self.refresh_addresses();
        if rules {
            self.policy_changed();
        }
        // A device that went has taken its addresses with it.
        self.steer_also(&Also::Forget);
    }

    /// Asks the broker about steering.
    pub(crate) fn steer_also(&mut self, what: &Also) -> crate::steer::Done {
        let done = self.steers.also(what, &self.broker);
        self.steered(&done);
        done
    }

    /// Tells clients what has changed.
    pub(crate) fn steered(&mut self, done: &crate::steer::Done) {
        if let Some(slices) = self.steers.heard(done) {
            self.registry.set_slices(slices);
        }
    }

    fn refresh_addresses(&mut self) {
        let now = address::local_addresses();
        if now != self.locals {
            self.registry.set_locals(now.iter());
            self.locals = now;
            tracing::debug!(count = self.locals.len(), "local addresses");
        }
    }

    /// Private: keeps the deadline, and says when to go.
    fn is_unneeded(&mut self) -> bool {
        if !self.config.private {
            return false;
        }
        if self.clients.iter().any(|(_, c)| c.is_process()) || !self.steers.is_empty() {
            self.deadline = None;
            return false;
        }
        let now = Instant::now();
        let deadline = *self.deadline.get_or_insert(now + self.config.linger);
        if now < deadline {
            return false;
        }
        // Somebody may be connecting just now. After `hide` nobody can find us;
        // whoever did before is in the backlog, and is served.
        if self.endpoint.hide().is_err() {
            return true;
        }
        let before = self.clients.iter().count();
        self.accept();
        if self.clients.iter().count() == before {
            return true;
        }
        self.deadline = Some(now + self.config.linger);
        self.endpoint.show().is_err()
    }
}

fn spare() -> Option<OwnedFd> {
    rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).ok()
}

/// Raises the limit of descriptors as far as it goes; returns it.
fn raise_nofile() -> u64 {
    use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    getrlimit(Resource::Nofile).current.unwrap_or(1 << 20)
}
