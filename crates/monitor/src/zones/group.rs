//! One group of listeners: its workers, and the state of their queues and flow groups.

use super::flows::Flows;
use super::own::{Own, LOOK, REST, SOON};
use super::queues::{bit, Balance};
use crate::cpus::allowed_cpus;
use crate::foreign::ForeignFd;
use crate::steer::{Move, Spare};
use crate::{ConnId, FamilyId};
use fsocket_abi::balance::{self as abi, ONE};
use fsocket_bpf::select::{Select, GLOBAL, PLACES};
use fsocket_proto::report;
use fsocket_reuseport::listener;
use fsocket_sync::atomic::Ordering;
use rustix::fd::AsRawFd;
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::mem::offset_of;
use std::time::Instant;

pub type GroupId = u64;

pub struct Member {
    /// The worker's process. 0: it joined before this monitor started, and has not announced
    /// itself yet.
    pub(super) conn: ConnId,
    pub(super) pid: u32,
    /// Cookie of the worker's socket.
    pub(super) cookie: u64,
    pub(super) cpu: u32,
    /// The worker is on trial: other workers of its listener may have only the global socket yet.
    pub(super) on_trial: bool,
}

pub struct Group {
    pub(super) id: GroupId,
    /// Cookie of the global listen socket. 0: there is none.
    pub(super) cookie: u64,
    /// Set if the program itself shares the address (SO_REUSEPORT).
    pub(super) own: Option<Own>,
    pub(super) netns: u64,
    pub(super) local: String,
    pub(super) uid: u32,
    pub(super) shape: Vec<u8>,
    pub(super) select: Select,
    /// The workers by their place in the socket map.
    pub(super) members: BTreeMap<u32, Member>,
    /// Processes that have shown the global listen socket.
    pub(super) holders: BTreeSet<ConnId>,
    pub(super) families: BTreeSet<FamilyId>,
    /// The group comes from a former monitor.
    pub(super) taken_over: bool,
    /// Processes that accept without being a worker, and have found no connection. Each is told
    /// once when one comes.
    pub(super) guests: BTreeSet<ConnId>,
    /// Exists once a worker has asked for balancing.
    pub(super) balance: Option<Balance>,
    /// Exists if there are several zones and no device is steered by flow groups.
    pub(super) flows: Option<Flows>,
    /// A process uses only the global listen socket, so all connections must go there.
    pub(super) withdrawn: bool,
}

impl Group {
    pub(super) fn assign(&self) {
        let mut workers: Vec<(u32, u32)> = self.members.iter().map(|(place, m)| (*place, m.cpu)).collect();
        if self.withdrawn || self.own.as_ref().is_some_and(Own::is_mixed) {
            workers.clear();
        }
        // If there is no global socket, connections of a closed socket go to any socket of the
        // address.
        let orphans_to_global = self.own.is_some() || self.members.values().any(|m| m.on_trial);
        let elsewhere = |cpu, slot| self.flows.as_ref().and_then(|f| f.elsewhere(cpu, slot));
        if let Err(e) = self.select.assign(&workers, orphans_to_global, elsewhere) {
            tracing::warn!(group = self.id, "slots: {e}");
        }
    }

    pub(super) fn conns_that_share(&self) -> BTreeSet<ConnId> {
        let shared = |place: &u32| self.balance.as_ref().is_some_and(|b| b.shared.contains_key(place));
        self.members.iter().filter(|(place, _)| shared(place)).map(|(_, m)| m.conn).collect()
    }

    /// Fills the slots, or empties them while there are strangers (sockets of processes without
    /// the library). True: there are none any more, so workers that were left to the kernel should
    /// ask again.
    pub(super) fn settle(&mut self) -> bool {
        let Some(own) = &mut self.own else { return false };
        let before = own.mixed;
        own.look_for_strangers();
        own.look_again_after(if own.mixed { SOON } else { LOOK });
        if own.mixed != before {
            tracing::info!(group = self.id, strangers = own.mixed, "shared address");
        }
        let gone = before && !own.mixed;
        self.assign();
        gone
    }

    /// Looks for strangers if it is time. Returns whether one has joined, or the last one has
    /// gone.
    pub(super) fn settle_if_due(&mut self, now: Instant) -> bool {
        let Some(own) = self.own.as_mut().filter(|o| o.next <= now) else { return false };
        let (was, pause) = (own.mixed, own.pause);
        let lookups = self.select.counts().unwrap_or_default();
        let lookups = lookups.iter().filter(|c| c.name == "lookups").flat_map(|c| &c.by_cpu).sum();
        let busy = std::mem::replace(&mut own.lookups, lookups) != lookups;
        own.look_for_strangers();
        let longer = (pause * 2).min(REST);
        let next = if busy && pause >= LOOK { LOOK } else { longer };
        own.look_again_after(next);
        if own.mixed == was {
            return false;
        }
        own.look_again_after(SOON);
        tracing::info!(group = self.id, strangers = own.mixed, "shared address");
        self.assign();
        true
    }

    /// Makes a socket of the program the local listen socket of `member`. Returns its place and
    /// CPU, and the result of [`Group::settle`].
    pub(super) fn add_own(&mut self, mut member: Member, fd: &ForeignFd) -> Result<(u32, u32, bool), Errno> {
        if member.cpu == u32::MAX {
            let on = |cpu: &u32| self.members.values().filter(|m| m.cpu == *cpu).count();
            member.cpu = allowed_cpus().into_iter().min_by_key(|cpu| (on(cpu), *cpu)).unwrap_or(0);
        }
        let cpu = member.cpu;
        // After a reload, the new workers use the same sockets as the old ones.
        let known = self.members.iter().find(|(_, m)| m.cookie == member.cookie).map(|(place, _)| *place);
        let place = match known {
            Some(place) => place,
            None => {
                let place = (GLOBAL + 1..PLACES).find(|p| !self.members.contains_key(p)).ok_or(Errno::AGAIN)?;
                self.select.put(place, fd.as_fd()).map_err(|_| Errno::INVAL)?;
                place
            }
        };
        if let Some(own) = &mut self.own {
            own.known.insert(member.cookie);
        }
        self.members.insert(place, member);
        let gone = self.settle();
        Ok((place, cpu, gone))
    }

    /// Makes flow groups for the zones that share connections, if wanted. New ones are made when
    /// the zones have changed.
    pub(super) fn fit_flows(&mut self, wanted: bool, now: Instant) {
        let shared = self.balance.iter().flat_map(Balance::places);
        let cpus: BTreeSet<u32> = shared.filter_map(|place| Some(self.members.get(place)?.cpu)).collect();
        let cpus: Vec<u32> = cpus.into_iter().collect();
        let is_mixed = self.own.as_ref().is_some_and(Own::is_mixed);
        let before = if !wanted || cpus.len() < 2 || is_mixed {
            self.flows.take()
        } else if self.flows.as_ref().is_none_or(|f| f.cpus() != cpus) {
            self.flows.replace(Flows::new(cpus, self.select.per_cpu(), now))
        } else {
            return;
        };
        if before.is_some() {
            self.assign();
        }
    }

    /// Moves flow groups between zones. Returns whether some are not at home.
    pub(super) fn move_flows(&mut self, stolen: &[Move], spare: &Spare, asked: u32, now: Instant) -> bool {
        let is_quiet = self.balance.as_ref().is_none_or(Balance::is_parked);
        let Some(flows) = self.flows.as_mut().filter(|f| !is_quiet || f.groups().any_away()) else { return false };
        let counts = self.select.counts().unwrap_or_default();
        let received = counts.into_iter().filter(|c| c.name == "lookups").flat_map(|c| c.by_cpu);
        let shared = flows.share(&(0..).zip(received).collect(), spare, now);
        let (away, moved) = flows.turn(stolen, spare, asked);
        if shared || moved {
            self.assign();
        }
        away
    }

    /// Where the flow groups of this group are, for the report.
    pub(super) fn report_flows(&self) -> Option<report::FlowGroups> {
        let g = self.flows.as_ref()?.groups();
        let (by_cpu, away, moved, returned) = (g.by_cpu(), g.away(), g.moved, g.returned);
        Some(report::FlowGroups { device: self.local.clone(), by_cpu, away, moved, returned })
    }

    /// Whether a group of a former monitor still has an open socket. (Its processes have not
    /// announced themselves yet.)
    pub(super) fn lives_on(&self) -> bool {
        self.taken_over && (!self.members.is_empty() || self.select.cookie(GLOBAL).is_some())
    }

    /// Drops workers that have ended without being noticed. Returns whether there were any.
    pub(super) fn drop_dead(&mut self) -> bool {
        let before = self.members.len();
        let select = &self.select;
        self.members.retain(|place, m| m.conn != 0 || select.cookie(*place) == Some(m.cookie));
        self.members.len() != before
    }

    /// Queues, and steals by pair of workers, for the report.
    pub(super) fn report_balance(&self) -> Option<report::Balance> {
        let b = self.balance.as_ref()?;
        let busy = b.busy().load(Ordering::Relaxed);
        let queues = b.shared.iter().map(|(place, s)| {
            let q = b.queue(*place);
            report::Queue {
                place: *place,
                cpu: self.members.get(place).map_or(0, |m| m.cpu),
                length: listener::backlog(s.socket.as_fd().as_raw_fd()).map_or(0, |(_, n)| n),
                counted: q.length(),
                average: f64::from(q.average.load(Ordering::Relaxed)) / f64::from(ONE),
                busy: busy & bit(*place) != 0,
                added: q.added.load(Ordering::Relaxed),
                taken: q.taken.load(Ordering::Relaxed),
            }
        });
        let steals = b.shared.keys().flat_map(|thief| {
            let row = b.stolen(*thief);
            row.into_iter().enumerate().filter(|(_, n)| *n > 0).map(move |(victim, n)| report::Steals {
                thief: *thief,
                victim: victim as u32 + 1,
                connections: n.into(),
            })
        });
        Some(report::Balance {
            limit: b.word(offset_of!(abi::Balance, limit)).load(Ordering::Relaxed),
            queues: queues.collect(),
            steals: steals.collect(),
        })
    }
}
