//! The state of the monitor, and its event loop.

mod accepting;
mod counts;
mod handle;
mod serving;

use crate::arrivals::Arrivals;
use crate::broker::Broker;
use crate::context::Context;
use crate::endpoint::{self, Config, Endpoint, StartError};
use crate::event::{ADDRESSES, ASLEEP, ENDPOINT, FIRST_WAKER, PAIRS, POLICY, STOP};
use crate::fair::Fair;
use crate::foreign::closer;
use crate::netlink;
use crate::pace::{Doing, Pace};
use crate::shm::closings::Closings;
use crate::shm::ports::{KernelPorts, Ports};
use crate::shm::registry::Registry;
use crate::shm::Shm;
use crate::steer::front::Front;
use crate::steer::{Also, Done};
use crate::turns::Turns;
use crate::watchdog::Watchdog;
use crate::zones::Zones;
use crate::{address, descriptor, shares, ConnId};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::Timespec;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// A private or retired monitor waits for its first client this much longer than
/// [`Config::linger`](crate::Config).
const START_GRACE: Duration = Duration::from_secs(10);

pub struct Monitor {
    ctx: Context,
    shm: Shm,
    zones: Zones,
    steers: Front,
    endpoint: Endpoint,
    addresses: Option<OwnedFd>,
    /// Closed for a moment when no descriptor is free, to accept one client and turn it away.
    spare: Option<OwnedFd>,
    own_uid: u32,
    turns: Turns,
    fair: Fair,
    arrivals: Arrivals,
    pace: Pace,
    /// Reports that took long to make, and are used again for a while.
    reports: crate::report::Kept,
    /// Private or retired: when to exit if no client connects.
    deadline: Option<Instant>,
    /// Private: the pidfd of a program that may still connect.
    asleep: Option<OwnedFd>,
}

impl Monitor {
    /// Does everything that can fail. When this returns, clients can connect.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(config: Config) -> Result<Monitor, StartError> {
        let endpoint = Endpoint::publish(&config)?;
        let broker = Broker::here(endpoint.fd.as_fd(), config.keep.as_deref(), config.socket.parent());
        Monitor::on(config, endpoint, broker)
    }

    /// Like [`Self::start`], with an endpoint and a broker that may belong to another process.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn on(config: Config, mut endpoint: Endpoint, broker: Broker) -> Result<Monitor, StartError> {
        let fail = |what| move |e: std::io::Error| StartError::System { what, source: e };
        let descriptors = shares::total(shares::raise_nofile().min(config.descriptors));
        crate::membarrier::register();
        let broker = broker.announcing(config.hosts.clone()).retired(config.retired);
        let epoll =
            Rc::new(epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| fail("make an epoll instance")(e.into()))?);
        epoll::add(&*epoll, &endpoint.fd, EventData::new_u64(ENDPOINT), EventFlags::IN)
            .map_err(|e| fail("watch the socket")(e.into()))?;
        let netns = rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .and_then(|s| descriptor::netns_cookie(s.as_fd()))
            .map_err(|e| fail("tell network namespaces apart (SO_NETNS_COOKIE)")(e.into()))?;
        // (This socket is readable when an address of this host is added or removed.)
        let groups = (libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR) as u32;
        let addresses = netlink::socket(None, groups).ok();
        if let Some(fd) = &addresses {
            let _ = epoll::add(&*epoll, fd, EventData::new_u64(ADDRESSES), EventFlags::IN);
        }
        let deadline = config.is_temporary().then(|| Instant::now() + config.linger + START_GRACE);
        let closings = Closings::start(config.private, &broker);
        let registry = Registry::new().map_err(fail("make the registry"))?;
        let mut monitor = Monitor {
            ctx: Context::new(config, broker, epoll, netns, descriptors),
            shm: Shm::new(registry, Ports::new(KernelPorts::read()).among(endpoint.leases.take()), closings),
            zones: Zones::default(),
            steers: Front::default(),
            endpoint,
            addresses,
            spare: endpoint::spare(),
            own_uid: rustix::process::geteuid().as_raw(),
            turns: Turns::default(),
            fair: Fair::default(),
            arrivals: Arrivals::default(),
            pace: Pace::default(),
            reports: crate::report::Kept::default(),
            deadline,
            asleep: None,
        };
        monitor.refresh_addresses();
        if monitor.ctx.config.keep.is_some() {
            let broker = monitor.ctx.broker.clone();
            monitor.zones.take_over(&broker, monitor.ctx.netns);
        }
        monitor.steer_also(&Also::Begin);
        if monitor.ctx.config.hosts.is_some() && !monitor.ctx.config.retired {
            monitor.ctx.hosts = crate::hosts::State::of(monitor.ctx.broker.hosts());
        }
        Ok(monitor)
    }

    /// Makes another thread ask the kernel for the ports in use, so that they are known before a
    /// client needs them.
    pub fn asks_for_ports_beside(mut self) -> Monitor {
        self.shm.ports.ask_beside();
        self
    }

    /// Serves metrics until this monitor ends.
    ///
    /// # Errors
    /// Those of the system calls.
    pub fn serve_metrics(&mut self, listener: std::net::TcpListener) -> std::io::Result<()> {
        crate::metrics::serve(&mut self.ctx, listener)
    }

    /// Serves until `stop` is readable and `ends` returns true. A private or retired monitor also
    /// ends when no program needs it.
    ///
    /// # Errors
    /// Those of `epoll_wait` and timers. Nothing that a client does causes an error.
    pub fn run(mut self, stop: BorrowedFd<'_>, ends: impl FnMut() -> bool) -> std::io::Result<()> {
        let r = self.serve(stop, ends);
        self.leave_report();
        if let Some(lifelines) = self.ctx.lifelines.take() {
            lifelines.end();
        }
        drop(self);
        closer().end();
        r
    }

    fn serve(&mut self, stop: BorrowedFd<'_>, mut ends: impl FnMut() -> bool) -> std::io::Result<()> {
        let watchdog = Watchdog::new()?;
        self.ctx.lifelines = crate::lifeline::Lifelines::new();
        if self.ctx.lifelines.is_none() {
            tracing::warn!("no robust futexes; threads that sleep do not learn when this process is killed");
        }
        epoll::add(&*self.ctx.epoll, stop, EventData::new_u64(STOP), EventFlags::IN)?;
        // The buffer takes all events at once, even those of a flood of clients, so that every
        // client's events are seen.
        let mut events = Vec::with_capacity(1024);
        loop {
            events.clear();
            let next = self
                .deadline
                .into_iter()
                .chain(self.shm.next())
                .chain(self.zones.next())
                .chain(self.ctx.clients.send_again)
                .chain(closer().next_attempt())
                .chain(self.has_turns().then(Instant::now))
                .min();
            let timeout = next.map(|at| {
                let left = at.saturating_duration_since(Instant::now());
                Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
            });
            let woken = epoll::wait(&*self.ctx.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref());
            if !watchdog.after_sleep(woken)? {
                continue;
            }
            self.pace.begin();
            for event in &events {
                let (what, flags) = (event.data.u64(), event.flags);
                match what {
                    ENDPOINT => self.arrivals.come = true,
                    ADDRESSES => self.addresses_changed(),
                    POLICY => self.policy_changed(),
                    PAIRS => self.shm.pairs_ended(&self.ctx),
                    ASLEEP => self.asleep = None,
                    STOP if !ends() => {}
                    STOP => {
                        if self.ctx.config.private {
                            self.zones.leave_nothing();
                            self.ctx.broker.leave_nothing();
                        }
                        return Ok(());
                    }
                    waker if waker & FIRST_WAKER != 0 => self.zones.balance_rung(waker & !FIRST_WAKER),
                    client => self.client_event(client, flags),
                }
                self.settle();
                self.pace.lap();
            }
            self.accept_some();
            self.take_turns();
            self.pace.is(Doing::Due);
            self.ctx.clients.send_again_if_due();
            closer().begin_again_if_due();
            self.shm.look_again_if_due(&mut self.ctx);
            self.pace.lap();
            self.pace.is(Doing::Zones);
            self.zones.zones_look(&mut self.ctx);
            self.balance();
            self.pace.lap();
            self.pace.is(Doing::Dispatching);
            self.dispatch();
            self.settle();
            self.pace.lap();
            if self.is_unneeded() {
                self.zones.leave_nothing();
                self.ctx.broker.leave_nothing();
                tracing::info!("no process needs this monitor any more");
                return Ok(());
            }
        }
    }

    /// Finishes an event: removes processes that have ended, and wakes threads.
    fn settle(&mut self) {
        loop {
            while let Some(id) = self.ctx.clients.doomed.pop() {
                self.end_in_turns(id);
            }
            self.refresh_steering();
            self.ctx.clients.send_wakes();
            if self.ctx.clients.doomed.is_empty() {
                return;
            }
        }
    }

    fn client_event(&mut self, id: ConnId, flags: EventFlags) {
        if flags.contains(EventFlags::OUT) {
            self.ctx.clients.flush(id);
        }
        let Some(client) = self.ctx.clients.get_mut(id) else { return };
        client.hung_up |= flags.intersects(EventFlags::HUP | EventFlags::ERR);
        if client.hung_up || flags.contains(EventFlags::IN) {
            self.turns.add(client.uid, id);
        }
    }

    fn addresses_changed(&mut self) {
        let Some(fd) = &self.addresses else { return };
        let mut scratch = [0u8; 8192];
        // The messages are only drained. Their content does not matter, nor that some may be lost
        // (ENOBUFS), because all addresses are read again.
        while !matches!(rustix::net::recv(fd, &mut scratch[..], RecvFlags::DONTWAIT), Err(Errno::AGAIN)) {}
        self.refresh_addresses();
        // A network device may have been removed: then its addresses have disappeared, too.
        self.steer_also(&Also::Forget);
    }

    /// Asks the broker for an operation of steering.
    fn steer_also(&mut self, what: &Also) -> Done {
        let done = self.steers.also(what, &self.ctx.broker);
        self.steered(&done);
        done
    }

    /// Refreshes steering if listeners have come or gone.
    fn refresh_steering(&mut self) {
        if std::mem::take(&mut self.shm.listeners_changed) {
            self.steer_also(&Also::Refresh);
        }
    }

    /// Measures the queues of listener groups if it is time, and moves load.
    fn balance(&mut self) {
        let Some(also) = self.zones.balance_if_due(&mut self.ctx, &mut self.steers) else { return };
        if self.steer_also(&also).away {
            self.zones.balance_at(Instant::now() + self.ctx.config.balance.interval);
        }
    }

    /// Looks where connections over shared memory should go, if it is time.
    fn dispatch(&mut self) {
        let Shm { dispatch, channels, listeners, .. } = &mut self.shm;
        for channel in dispatch.look_if_due(&self.ctx, channels, listeners, &mut self.steers) {
            self.shm.end_broken(&mut self.ctx, channel, None);
        }
    }

    /// After a change that may concern a policy, makes libraries ask the monitor again before
    /// their next connection.
    fn policy_changed(&mut self) {
        if self.ctx.policy_changed() {
            self.shm.registry.touch();
        }
    }

    /// Tells clients what a steering operation has changed.
    fn steered(&mut self, done: &Done) {
        if let Some(slices) = self.steers.heard(done) {
            self.shm.registry.set_slices(slices);
        }
    }

    fn refresh_addresses(&mut self) {
        let now = address::local_addresses();
        if now != self.ctx.locals {
            self.shm.registry.set_locals(now.iter());
            self.ctx.locals = now;
            tracing::debug!(count = self.ctx.locals.len(), "local addresses");
        }
    }
}
