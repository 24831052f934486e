//! Listener groups with local listen sockets: who works where, and the BPF
//! program that selects among them.
//!
//! No descriptor of a listen socket is kept: it must die with its worker. The
//! program's map of sockets holds none either, and loses a socket by itself when
//! that is closed.

mod flows;
mod keep;
mod own;

use crate::arenas::{add, ZoneTotals};
use crate::broker::clone::listening;
use crate::broker::Broker;
use crate::clients::Outgoing;
use crate::descriptor::{self, Attached};
use crate::requests::{reply, Answer};
use crate::steer::Also;
use crate::{ConnId, FamilyId, Monitor};
use fsocket_abi::arena::zone_accept::NAMES;
use fsocket_bpf::select::{Select, GLOBAL, PLACES};
use fsocket_proto::{kind, report, Msg};
use fsocket_zones::listener::Shape;
use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::net::sockopt;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Groups at most, and of one user.
const GROUPS: usize = 1024;
const GROUPS_PER_UID: usize = 64;
/// When a socket was closed: everybody is told to look at once, and again when
/// the kernel has surely finished moving its queue.
const LOOKS: [Duration; 3] = [Duration::ZERO, Duration::from_millis(20), Duration::from_millis(200)];

mod balance;

pub type GroupId = u64;

struct Member {
    /// 0: it had joined before this monitor was started.
    conn: ConnId,
    pid: u32,
    /// Of its socket.
    cookie: u64,
    cpu: u32,
    /// Others of its kind may have no local listen socket yet.
    on_trial: bool,
}

struct Group {
    id: GroupId,
    /// Of the global listen socket; 0: there is none.
    cookie: u64,
    /// The program itself shares the address.
    own: Option<own::Own>,
    netns: u64,
    local: String,
    uid: u32,
    shape: Vec<u8>,
    select: Select,
    /// By place.
    members: BTreeMap<u32, Member>,
    /// Who has shown the global listen socket.
    holders: BTreeSet<ConnId>,
    families: BTreeSet<FamilyId>,
    /// From a monitor before this one.
    taken_over: bool,
    /// Who accepts without being a worker, and has found nothing; told once.
    guests: BTreeSet<ConnId>,
    /// Once a worker has asked for it.
    balance: Option<balance::Balance>,
    /// Where no device is steered by them, and there are several zones.
    flows: Option<flows::Flows>,
    /// Somebody sees the global listen socket only: everything goes there.
    withdrawn: bool,
}

impl Group {
    fn assign(&self) {
        let mut workers: Vec<(u32, u32)> = self.members.iter().map(|(place, m)| (*place, m.cpu)).collect();
        if self.withdrawn || self.own.as_ref().is_some_and(own::Own::is_mixed) {
            workers.clear();
        }
        // Without a global one: to any socket of the address.
        let orphans_to_global = self.own.is_some() || self.members.values().any(|m| m.on_trial);
        let elsewhere = |cpu, slot| self.flows.as_ref().and_then(|f| f.elsewhere(cpu, slot));
        if let Err(e) = self.select.assign(&workers, orphans_to_global, elsewhere) {
            tracing::warn!(group = self.id, "slots: {e}");
        }
    }
}

/// All groups.
#[derive(Default)]
pub struct Zones {
    all: BTreeMap<GroupId, Group>,
    last_id: GroupId,
    /// Keeps groups for a monitor after this one; from [`Zones::take_over`] on.
    keep: Option<Rc<Broker>>,
    /// Something is to be written down.
    changed: bool,
    /// When to look after workers that have not told us of themselves.
    orphans: Option<Instant>,
    /// Groups whose workers must look, and when.
    due: Vec<(Instant, GroupId)>,
    /// Why no program can be loaded; not tried again.
    without: Option<String>,
    /// Accepts by processes that have ended, by user.
    ended: BTreeMap<u32, ZoneTotals>,
    /// When queues are measured next.
    balance_next: Option<Instant>,
}

/// The CPU that a worker names.
fn cpu_of(msg: &Msg) -> Result<u32, Errno> {
    u32::try_from(msg.arg0).ok().filter(|cpu| *cpu < u32::MAX).ok_or(Errno::INVAL)
}

impl Monitor {
    /// [`kind::GROUP`].
    pub(crate) fn group(&mut self, id: ConnId, msg: &Msg, fd: Option<Attached>) -> Answer {
        let fd = fd.ok_or(Errno::BADF)?;
        if msg.arg0 == 1 {
            return self.own_group(id, msg, &fd);
        }
        let (shape, cookie) = listening(fd.as_fd())?;
        let client = self.clients.get(id).ok_or(Errno::BADF)?;
        let (uid, family) = (client.uid, client.family);
        let known = self.zones.all.values().find(|g| g.cookie == cookie).map(|g| g.id);
        let group = match known {
            Some(group) => group,
            None => {
                let netns = descriptor::netns_cookie(fd.as_fd())?;
                self.new_group(&fd, &shape, None, netns, uid)?
            }
        };
        let g = self.zones.all.get_mut(&group).ok_or(Errno::NOENT)?;
        g.holders.insert(id);
        g.families.insert(family);
        let program = rustix::io::fcntl_dupfd_cloexec(g.select.program(), 0)?;
        Ok((Msg { id: group, ..reply(msg) }, Some(Rc::new(program))))
    }

    fn new_group(
        &mut self,
        fd: &Attached,
        shape: &Shape,
        own: Option<own::Own>,
        netns: u64,
        uid: u32,
    ) -> Result<GroupId, Errno> {
        let of_uid = self.zones.all.values().filter(|g| g.uid == uid).count();
        if self.zones.all.len() >= GROUPS || (uid != 0 && of_uid >= GROUPS_PER_UID) {
            return Err(Errno::MFILE);
        }
        if self.zones.without.is_some() {
            return Err(Errno::OPNOTSUPP);
        }
        let id = self.zones.last_id + 1;
        let select = match self.broker.selector(id, true) {
            Ok(select) => select,
            Err(e) => {
                self.broker.forget(id);
                self.zones.without = Some(e.to_string());
                return Err(Errno::OPNOTSUPP);
            }
        };
        let mut cookie = 0;
        if own.is_none() {
            // Not a member of a kernel group: no local one was made.
            select.put(GLOBAL, fd.as_fd()).map_err(|_| Errno::INVAL)?;
            cookie = sockopt::socket_cookie(fd.as_fd())?;
        }
        self.zones.last_id = id;
        self.zones.changed = true;
        let local = rustix::net::getsockname(fd.as_fd())
            .ok()
            .and_then(|a| std::net::SocketAddr::try_from(a).ok())
            .map(|a| a.to_string())
            .unwrap_or_default();
        tracing::info!(group = id, addr = local, "zones");
        let group = Group {
            id,
            cookie,
            own,
            netns,
            local,
            uid,
            shape: shape.addr().to_vec(),
            select,
            members: BTreeMap::new(),
            holders: BTreeSet::new(),
            families: BTreeSet::new(),
            taken_over: false,
            guests: BTreeSet::new(),
            balance: None,
            flows: None,
            withdrawn: false,
        };
        self.zones.all.insert(id, group);
        Ok(id)
    }

    /// [`kind::LOCAL`].
    pub(crate) fn local(&mut self, id: ConnId, msg: &Msg, fd: Option<Attached>) -> Answer {
        let fd = fd.ok_or(Errno::BADF)?;
        let (shape, cookie) = listening(fd.as_fd())?;
        let netns = descriptor::netns_cookie(fd.as_fd())?;
        let g = self.zones.all.get_mut(&msg.id).ok_or(Errno::NOENT)?;
        // Somebody else's listener; a socket that is not of this group would only
        // waste a place, for the kernel checks that at each selection.
        if !g.holders.contains(&id) || g.netns != netns || g.shape != shape.addr() {
            return Err(Errno::NOENT);
        }
        let pid = self.clients.get(id).map_or(0, |c| c.pid);
        self.zones.changed = true;
        let g = self.zones.all.get_mut(&msg.id).ok_or(Errno::NOENT)?;
        let member = |cpu| Member { conn: id, pid, cookie, cpu, on_trial: msg.arg1 != 0 };
        let (place, cpu, gone) = if g.own.is_some() {
            let cpu = if msg.arg0 == u64::MAX { u32::MAX } else { cpu_of(msg)? };
            g.add_own(member(cpu), &fd)?
        } else {
            // One from before this monitor, that has found it.
            let known = g.members.iter().find(|(_, m)| m.conn == 0 && m.cookie == cookie).map(|(place, _)| *place);
            let free = || (GLOBAL + 1..PLACES).find(|p| !g.members.contains_key(p)).ok_or(Errno::AGAIN);
            let place = known.map_or_else(free, Ok)?;
            if known.is_none() {
                g.select.put(place, fd.as_fd()).map_err(|_| Errno::INVAL)?;
            }
            g.members.insert(place, member(cpu_of(msg)?));
            g.assign();
            (place, cpu_of(msg)?, false)
        };
        let is_first = g.members.len() == 1;
        tracing::debug!(group = g.id, process = id, cpu, place, "worker");
        if is_first || gone {
            // Others of the fork group sleep on the global socket, where nothing comes
            // any more: they may join now.
            self.zones.call(msg.id);
            self.zones_look();
        }
        Ok((Msg { arg0: u64::from(place), arg1: u64::from(cpu), ..reply(msg) }, None))
    }

    /// [`kind::LEFT`].
    pub(crate) fn left(&mut self, id: ConnId, msg: &Msg) {
        let Some(g) = self.zones.all.get_mut(&msg.id) else { return };
        let Ok(place) = u32::try_from(msg.arg0) else { return };
        if g.members.get(&place).is_some_and(|m| m.conn == id) {
            g.members.remove(&place);
            g.select.take_out(place);
            g.assign();
            self.zones.changed = true;
            self.unshare(msg.id, place, id);
            self.zones.call(msg.id);
            self.zones_look();
        }
    }

    /// A process is gone.
    pub(crate) fn leave_zones(&mut self, id: ConnId) {
        let mut call = Vec::new();
        let mut left = Vec::new();
        for g in self.zones.all.values_mut() {
            let places: Vec<u32> = g.members.iter().filter(|(_, m)| m.conn == id).map(|(place, _)| *place).collect();
            for place in &places {
                g.members.remove(place);
                g.select.take_out(*place);
                left.push((g.id, *place));
            }
            if !places.is_empty() {
                g.assign();
                call.push(g.id);
            }
            g.holders.remove(&id);
            g.guests.remove(&id);
        }
        for (group, place) in left {
            self.unshare(group, place, id);
        }
        // A master that waits for nothing itself has shown nothing, and still holds
        // the listener for the workers to come. What replaces a group has another
        // program, and the connections that wait with the old one move nowhere.
        let living: BTreeSet<FamilyId> = self.clients.iter().map(|(_, c)| c.family).collect();
        let keep = &self.zones.keep;
        let mut changed = !call.is_empty();
        self.zones.all.retain(|id, g| {
            let stays = !g.holders.is_empty() || g.families.iter().any(|f| living.contains(f)) || g.lives_on();
            if !stays {
                changed = true;
                keep.iter().for_each(|k| k.forget(*id));
            }
            stays
        });
        self.zones.changed |= changed;
        for group in call {
            self.zones.call(group);
        }
        self.zones_look();
    }

    /// Tells the workers of groups that are due.
    pub(crate) fn zones_look(&mut self) {
        let now = Instant::now();
        self.zones.keep_up(now);
        let settled: Vec<GroupId> =
            self.zones.all.values_mut().filter_map(|g| g.settle_if_due(now).then_some(g.id)).collect();
        settled.into_iter().for_each(|group| self.zones.call(group));
        let (due, later) = std::mem::take(&mut self.zones.due).into_iter().partition(|(at, _)| *at <= now);
        self.zones.due = later;
        let due: BTreeSet<GroupId> = due.iter().map(|(_, g): &(Instant, GroupId)| *g).collect();
        for group in due {
            let Some(g) = self.zones.all.get(&group) else { continue };
            // Also those without a local listen socket: they have the global one.
            let to: Vec<ConnId> =
                self.clients.iter().filter(|(_, c)| g.families.contains(&c.family)).map(|(id, _)| id).collect();
            for id in to {
                let msg = Msg { id: group, ..Msg::new(kind::LOOK) };
                self.clients.send(id, Outgoing { msg, fd: None, unasked: true }, &self.arenas);
            }
        }
    }

    /// [`kind::CLONE`].
    pub(crate) fn clone_listener(&mut self, id: ConnId, msg: &Msg, fd: Option<Attached>) -> Answer {
        let fd = fd.ok_or(Errno::BADF)?;
        let client = self.clients.get(id).ok_or(Errno::BADF)?;
        let reservation = match msg.arg0 {
            0 => false,
            1 => true,
            _ => return Err(Errno::INVAL),
        };
        let made = self.broker.clone_listener(fd.as_fd(), client.fd.as_fd(), reservation)?;
        Ok((reply(msg), Some(Rc::new(made))))
    }

    /// Accepts by zone and kind.
    pub(crate) fn report_accepts(&self, sees: &dyn Fn(u32) -> bool) -> Vec<report::Zone> {
        let live = self.arenas.iter().filter(|a| sees(a.uid)).flat_map(|a| a.mem.zones());
        let ended = self.zones.ended.iter().filter(|(uid, _)| sees(**uid)).flat_map(|(_, t)| t);
        let mut sum = ZoneTotals::new();
        for (zone, accepted) in live.chain(ended.map(|(zone, a)| (*zone, *a))) {
            for (sum, n) in sum.entry(zone).or_default().iter_mut().zip(accepted) {
                add(sum, n);
            }
        }
        let named = |v: [u64; 4]| NAMES.iter().zip(v).map(|(name, n)| ((*name).to_owned(), n)).collect();
        sum.into_iter().map(|(cpu, accepted)| report::Zone { cpu, accepted: named(accepted) }).collect()
    }

    /// Sets the counters of what a user sees to zero: accepts and selections.
    pub(crate) fn reset_zones(&mut self, sees: &dyn Fn(u32) -> bool) {
        for arena in self.arenas.iter().filter(|a| sees(a.uid)) {
            arena.mem.fold_zones(&mut ZoneTotals::new());
        }
        self.zones.ended.retain(|uid, _| !sees(*uid));
        for g in self.zones.all.values().filter(|g| sees(g.uid)) {
            if let Err(e) = g.select.reset() {
                tracing::warn!(group = g.id, "counters: {e}");
            }
        }
    }

    /// For the report: flow groups of devices and of listeners.
    pub(crate) fn report_flow_groups(&self, sees: &dyn Fn(u32) -> bool) -> Vec<report::FlowGroups> {
        let none = self.steers.is_empty();
        let steered = if none { Vec::new() } else { self.broker.steer_also(&Also::Report).groups };
        let groups = self.zones.all.values().filter(|g| sees(g.uid));
        steered.into_iter().chain(groups.filter_map(Group::report_flows)).collect()
    }

    /// For the report.
    pub(crate) fn report_zones(&self, sees: &dyn Fn(u32) -> bool) -> Vec<report::Group> {
        let groups = self.zones.all.values().filter(|g| sees(g.uid));
        groups
            .map(|g| report::Group {
                id: g.id,
                local: g.local.clone(),
                balance: g.report_balance(),
                workers: g
                    .members
                    .iter()
                    .map(|(place, m)| report::ZoneWorker { pid: m.pid, cpu: m.cpu, place: *place })
                    .collect(),
                selections: g
                    .select
                    .counts()
                    .unwrap_or_default()
                    .into_iter()
                    .map(|c| (c.name.to_owned(), c.by_cpu))
                    .collect(),
            })
            .collect()
    }
}

impl Zones {
    /// What the ended processes of a user have accepted.
    pub fn totals(&mut self, uid: u32) -> &mut ZoneTotals {
        self.ended.entry(uid).or_default()
    }

    fn call(&mut self, group: GroupId) {
        let now = Instant::now();
        // Looks that are due later than the new ones add nothing.
        self.due.retain(|(at, g)| *g != group || *at <= now);
        self.due.extend(LOOKS.iter().map(|after| (now + *after, group)));
    }

    /// When `Monitor::zones_look` has something to do.
    pub fn next(&self) -> Option<Instant> {
        let looks = |o: &&own::Own, g: &Group| !g.members.is_empty() || o.is_mixed();
        let strangers = self.all.values().filter_map(|g| g.own.as_ref().filter(|o| looks(o, g)));
        self.due
            .iter()
            .map(|(at, _)| *at)
            .chain(strangers.map(own::Own::next))
            .chain(self.orphans)
            .chain(self.balance_next)
            .min()
    }

    /// Why there is no BPF selection, if there is none.
    pub fn without(&self) -> Option<&str> {
        self.without.as_deref()
    }
}
