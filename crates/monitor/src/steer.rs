//! Steering of network devices: who asks for it, and what the libraries and the kernel are told
//! about it. `fsocket_bpf::steer` does the steering itself.
//!
//! XDP programs are held by descriptors of this process only, and nothing is pinned. So if the
//! monitor dies, devices are as they were before.

pub mod front;
pub(crate) mod groups;
mod keep;
pub(crate) mod place;
mod plain;
mod sys;
mod xdp;

use fsocket_proto::report::FlowGroups;
use fsocket_proto::steer::{Answer, Attach, Request};
use groups::Groups;
pub use groups::{Move, Spare};
use place::Place;
use plain::{Plain, Way};
use rustix::fd::BorrowedFd;
use serde::{Deserialize, Serialize};
use std::time::Instant;
use xdp::{attach_in, Steered};

/// All devices that are steered.
#[derive(Default)]
pub struct Steers {
    all: Vec<Steered>,
    /// Devices that are steered without an XDP program.
    plain: Vec<Plain>,
    /// Which CPUs have time to spare.
    spare: Spare,
    /// The file from which the next monitor takes steering up again, and SO_NETNS_COOKIE of this
    /// process.
    keep: Option<(std::path::PathBuf, u64)>,
}

/// Operations of steering that the front asks for by itself, not for a client.
#[derive(Debug, Serialize, Deserialize)]
pub enum Also {
    /// Take up what a former monitor has left.
    Begin,
    /// Listeners have come or gone.
    Refresh,
    /// Devices may have been removed.
    Forget,
    /// Flow groups must move ([`Steers::migrate`]).
    Migrate {
        moves: Vec<Move>,
        zones: Vec<(u64, u32)>,
        asked: u32,
    },
    Report,
}

/// The result of an operation, and the state after it.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Done {
    pub answer: Answer,
    pub groups: Vec<FlowGroups>,
    /// Some flow groups are not on their own CPUs.
    pub away: bool,
    /// `None`: the state has not changed.
    pub state: Option<State>,
}

/// The front's knowledge of the steered devices.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct State {
    any: bool,
    /// Slices of source ports: network namespace, first port, ports in a slice, CPU of each slice.
    slices: Vec<(u64, u16, u32, Vec<u32>)>,
    /// Network namespaces in which flow groups are steered.
    groups: Vec<u64>,
}

impl Steers {
    /// Carries out a request of a privileged client. `socket`: the client's control socket.
    pub fn steer(&mut self, request: Request, socket: BorrowedFd<'_>) -> Done {
        let done = Place::of(socket).and_then(|place| self.steer_in(request, place));
        let answer = done.unwrap_or_else(|error| Answer { error: Some(error), ..Default::default() });
        Done { answer, state: Some(self.state()), ..Done::default() }
    }

    /// Carries out another operation.
    pub fn also(&mut self, what: Also) -> Done {
        let before = if matches!(what, Also::Begin) { State::default() } else { self.state() };
        let mut done = Done::default();
        match what {
            Also::Begin => {}
            Also::Refresh => self.refresh(),
            Also::Forget => self.forget_gone(),
            Also::Migrate { moves, zones, asked } => done.away = self.migrate(&moves, &zones, asked, Instant::now()),
            Also::Report => done.groups = self.report(),
        }
        let now = self.state();
        done.state = (now != before).then_some(now);
        done
    }

    fn steer_in(&mut self, request: Request, place: Place) -> Result<Answer, String> {
        let netns = place.cookie;
        match request {
            Request::Attach(attach) => {
                // The new program replaces the old one, because a device can have only one.
                plain::ways(&attach)?;
                self.unsteer(netns, &attach.device);
                self.attach(place, attach)?;
                self.write();
            }
            Request::Detach { device } => {
                if !self.unsteer(netns, &device) {
                    return Err(format!("device {device} is not steered"));
                }
            }
            Request::Status => {}
        }
        self.refresh();
        let here = self.all.iter().filter(|s| s.netns == netns);
        let mut devices = here.map(Steered::describe).collect::<Result<Vec<_>, _>>()?;
        devices.extend(self.plain.iter().filter(|p| p.netns == netns).map(Plain::describe));
        // Removed only now, so that the answer has shown them once as gone.
        self.forget_gone();
        Ok(Answer { error: None, devices })
    }

    /// Ends the steering of a device. False: it was not steered.
    fn unsteer(&mut self, netns: u64, device: &str) -> bool {
        let before = self.all.len() + self.plain.len();
        self.plain.retain(|p| p.netns != netns || p.request.device != device);
        self.all.retain(|s| s.netns != netns || s.request.device != device);
        if self.all.len() + self.plain.len() == before {
            return false;
        }
        self.write();
        tracing::info!(device, "not steered any more");
        true
    }

    /// Updates the ports of listeners, because listeners may have come or gone.
    fn refresh(&mut self) {
        self.all.iter_mut().for_each(Steered::refresh_listened);
    }

    /// Drops devices that do not exist any more.
    fn forget_gone(&mut self) {
        let before = self.all.len() + self.plain.len();
        self.all.retain(|s| s.steering.is_alive());
        self.plain.retain(Plain::is_alive);
        if self.all.len() + self.plain.len() != before {
            self.write();
        }
    }

    fn state(&self) -> State {
        let mut state = State { any: !self.all.is_empty() || !self.plain.is_empty(), ..State::default() };
        let by_xdp = self.all.iter().map(|s| (s.netns, &s.slices, s.groups.is_some()));
        let plain = self.plain.iter().map(|p| (p.netns, &p.slices, p.groups.is_some()));
        for (netns, slices, groups) in by_xdp.chain(plain) {
            if let (Some(s), false) = (slices, state.slices.iter().any(|known| known.0 == netns)) {
                state.slices.push((netns, s.first, s.ports, s.cpus.clone()));
            }
            if groups {
                state.groups.push(netns);
            }
        }
        state
    }
}

impl Steers {
    /// Steers a device in the first way that the device and the kernel support.
    fn attach(&mut self, place: Place, attach: Attach) -> Result<(), String> {
        let mut refused = Vec::new();
        for way in plain::ways(&attach)? {
            let there = place.again()?;
            let done = match way {
                Way::Xdp => attach_in(there, attach.clone(), &self.all).map(|mut steered| {
                    steered.because.splice(0..0, refused.iter().cloned());
                    self.all.push(steered);
                }),
                way => Plain::attach(there, &attach, way, &refused, &self.all).map(|plain| self.plain.push(plain)),
            };
            match done {
                Ok(()) => {
                    tracing::info!(device = attach.device, policy = attach.policy, ?way, "steering");
                    return Ok(());
                }
                Err(e) => refused.push(match way {
                    Way::Xdp => e,
                    Way::Ntuple => format!("rules in the card: {e}"),
                    Way::Rss => format!("RSS table: {e}"),
                    Way::Rps => format!("RPS: {e}"),
                }),
            }
        }
        Err(refused.join("; "))
    }
}

impl Steers {
    /// Moves flow groups of devices, and brings them back ([`Groups::turn`]). Returns whether some
    /// are not on their own CPUs. `zones`: SO_NETNS_COOKIE and CPU of each balanced zone.
    pub fn migrate(&mut self, moves: &[Move], zones: &[(u64, u32)], asked: u32, now: Instant) -> bool {
        let Steers { all, plain, spare, .. } = self;
        let mut turn = |groups: &mut Groups, netns, cpus: &[u32], set: &mut dyn FnMut(u32, u32) -> bool| -> bool {
            let here = |m: &&Move| m.netns == netns && cpus.contains(&m.from) && cpus.contains(&m.to);
            let moves: Vec<&Move> = moves.iter().filter(here).collect();
            let zone = |cpu: &u32| cpus.contains(cpu) && zones.contains(&(netns, *cpu));
            groups.turn(&moves, zone, spare.look(now), asked, set)
        };
        let mut away = false;
        for s in all {
            if let (Some(groups), steering) = (&mut s.groups, &s.steering) {
                away |= turn(groups, s.netns, &s.cpus, &mut |group, cpu| steering.set_group(group, Some(cpu)).is_ok());
            }
        }
        for p in plain {
            let (netns, cpus) = (p.netns, p.cpus.clone());
            if let Some((groups, table, nic)) = &mut p.groups {
                away |= turn(groups, netns, &cpus, &mut |group, cpu| table.set(nic, group, cpu));
            }
        }
        away
    }

    /// The flow groups of all devices, for the report.
    pub fn report(&self) -> Vec<FlowGroups> {
        let of = |g: &Groups, request: &Attach| FlowGroups {
            device: request.device.clone(),
            by_cpu: g.by_cpu(),
            away: g.away(),
            moved: g.moved,
            returned: g.returned,
        };
        let by_xdp = self.all.iter().filter_map(|s| Some(of(s.groups.as_ref()?, &s.request)));
        let in_card = self.plain.iter().filter_map(|p| Some(of(&p.groups.as_ref()?.0, &p.request)));
        by_xdp.chain(in_card).collect()
    }
}
