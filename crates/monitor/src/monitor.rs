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

/// A private monitor gives its first client this much longer.
const START_GRACE: Duration = Duration::from_secs(10);

pub struct Monitor {
    ctx: Context,
    shm: Shm,
    zones: Zones,
    steers: Front,
    endpoint: Endpoint,
    addresses: Option<OwnedFd>,
    /// Given up for a moment when descriptors run out, to turn somebody away.
    spare: Option<OwnedFd>,
    own_uid: u32,
    turns: Turns,
    fair: Fair,
    arrivals: Arrivals,
    pace: Pace,
    /// Reports that took long to make.
    reports: crate::report::Kept,
    /// Private: when to exit unless somebody comes.
    deadline: Option<Instant>,
    /// Private: a program that may come, by its pidfd.
    asleep: Option<OwnedFd>,
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
        let descriptors = shares::total(shares::raise_nofile().min(config.descriptors));
        crate::membarrier::register();
        let broker = broker.announcing(config.hosts.clone());
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
        let closings = Closings::start(config.private, &broker);
        let registry = Registry::new().map_err(fail("make the registry"))?;
        let mut monitor = Monitor {
            ctx: Context::new(config, broker, epoll, netns, descriptors),
            shm: Shm::new(registry, Ports::new(KernelPorts::read()), closings),
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
        if monitor.ctx.config.hosts.is_some() {
            monitor.ctx.hosts = crate::hosts::State::of(monitor.ctx.broker.hosts());
        }
        Ok(monitor)
    }

    /// Another thread asks the kernel for the ports in use, before a client needs to know.
    pub fn asks_for_ports_beside(mut self) -> Monitor {
        self.shm.ports.ask_beside();
        self
    }

    /// Serves metrics until this monitor ends.
    /// # Errors
    /// Of the calls.
    pub fn serve_metrics(&mut self, listener: std::net::TcpListener) -> std::io::Result<()> {
        crate::metrics::serve(&mut self.ctx, listener)
    }

    /// Serves until `stop` is readable and `ends` says that this is the end or, if private, until nobody needs it.
    ///
    /// # Errors
    /// Of `epoll_wait` and timers; nothing a client does.
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
        // As many as a flood may have, so that it does not hide others.
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
                tracing::info!("nobody needs this monitor any more");
                return Ok(());
            }
        }
    }

    /// What one event has left to do: processes that end, threads to be woken.
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
        // Of addresses the content does not matter, nor that some of it was lost
        // (ENOBUFS): everything is read again.
        while !matches!(rustix::net::recv(fd, &mut scratch[..], RecvFlags::DONTWAIT), Err(Errno::AGAIN)) {}
        self.refresh_addresses();
        // A device that went has taken its addresses with it.
        self.steer_also(&Also::Forget);
    }

    /// Asks the broker about steering.
    fn steer_also(&mut self, what: &Also) -> Done {
        let done = self.steers.also(what, &self.ctx.broker);
        self.steered(&done);
        done
    }

    /// Listeners may have come or gone.
    fn refresh_steering(&mut self) {
        if std::mem::take(&mut self.shm.listeners_changed) {
            self.steer_also(&Also::Refresh);
        }
    }

    /// Looks at the queues of listener groups if it is time.
    fn balance(&mut self) {
        let Some(also) = self.zones.balance_if_due(&mut self.ctx, &mut self.steers) else { return };
        if self.steer_also(&also).away {
            self.zones.balance_at(Instant::now() + self.ctx.config.balance.interval);
        }
    }

    /// Looks at where connections over shared memory go if it is time.
    fn dispatch(&mut self) {
        let Shm { dispatch, channels, listeners, .. } = &mut self.shm;
        for channel in dispatch.look_if_due(&self.ctx, channels, listeners, &mut self.steers) {
            self.shm.end_broken(&mut self.ctx, channel, None);
        }
    }

    /// A policy may have changed: libraries ask again before their next connection.
    fn policy_changed(&mut self) {
        if self.ctx.policy_changed() {
            self.shm.registry.touch();
        }
    }

    /// Tells clients what has changed.
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
