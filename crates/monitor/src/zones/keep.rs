//! The state that a restarted monitor takes over: the pinned BPF maps of the groups, and a file
//! that describes them. Between the two monitors, the BPF programs go on selecting, and a socket
//! that is closed leaves the maps by itself. See ADR 25.

use super::group::{Group, GroupId, Member};
use super::own::{KeptOwn, Own};
use super::state::Zones;
use crate::broker::Broker;
use fsocket_bpf::select::GLOBAL;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// How often the monitor checks workers that have not announced themselves to it yet.
const LOOK: Duration = Duration::from_secs(1);

#[derive(Serialize, Deserialize)]
struct Kept {
    last_id: GroupId,
    groups: Vec<KeptGroup>,
}

#[derive(Serialize, Deserialize)]
struct KeptGroup {
    id: GroupId,
    cookie: u64,
    own: Option<KeptOwn>,
    netns: u64,
    local: String,
    uid: u32,
    shape: Vec<u8>,
    members: Vec<KeptMember>,
}

#[derive(Serialize, Deserialize)]
struct KeptMember {
    place: u32,
    cpu: u32,
    cookie: u64,
    pid: u32,
}

impl KeptGroup {
    fn of(g: &Group) -> KeptGroup {
        let member =
            |(place, m): (&u32, &Member)| KeptMember { place: *place, cpu: m.cpu, cookie: m.cookie, pid: m.pid };
        KeptGroup {
            id: g.id,
            cookie: g.cookie,
            own: g.own.as_ref().map(Own::keep),
            netns: g.netns,
            local: g.local.clone(),
            uid: g.uid,
            shape: g.shape.clone(),
            members: g.members.iter().map(member).collect(),
        }
    }

    /// Rebuilds the group, if one of its sockets is still open.
    fn take_over(self, broker: &Broker, netns: u64) -> Option<Group> {
        let select = broker.selector(self.id, true);
        let select = select.inspect_err(|e| tracing::warn!(group = self.id, "not taken over: {e}")).ok()?;
        let lives = |m: &KeptMember| select.cookie(m.place) == Some(m.cookie);
        let member =
            |m: KeptMember| (m.place, Member { conn: 0, pid: m.pid, cookie: m.cookie, cpu: m.cpu, on_trial: false });
        let members: BTreeMap<u32, Member> = self.members.into_iter().filter(lives).map(member).collect();
        if members.is_empty() && (self.cookie == 0 || select.cookie(GLOBAL) != Some(self.cookie)) {
            return None;
        }
        let group = Group {
            id: self.id,
            cookie: self.cookie,
            own: self.own.map(|o| o.take_over(netns)),
            netns: self.netns,
            local: self.local,
            uid: self.uid,
            shape: self.shape,
            select,
            members,
            holders: BTreeSet::new(),
            families: BTreeSet::new(),
            taken_over: true,
            guests: BTreeSet::new(),
            balance: None,
            flows: None,
            withdrawn: false,
        };
        group.assign();
        tracing::info!(group = group.id, addr = group.local, workers = group.members.len(), "taken over");
        Some(group)
    }
}

impl Zones {
    /// Takes over the groups that a former monitor has left. `netns`: SO_NETNS_COOKIE of this
    /// process.
    pub fn take_over(&mut self, broker: &Rc<Broker>, netns: u64) {
        if let Some(kept) = broker.kept().and_then(|text| serde_json::from_slice::<Kept>(&text).ok()) {
            self.last_id = kept.last_id;
            for group in kept.groups {
                let id = group.id;
                match group.take_over(broker, netns) {
                    Some(group) => {
                        self.all.insert(id, group);
                    }
                    None => broker.forget(id),
                }
            }
        }
        self.keep = Some(broker.clone());
        self.orphans = Some(Instant::now() + LOOK);
    }

    /// Drops workers that have ended without being noticed, and saves changes.
    pub(super) fn keep_up(&mut self, now: Instant) {
        if self.orphans.is_some_and(|at| at <= now) {
            let mut call = Vec::new();
            for g in self.all.values_mut().filter(|g| g.taken_over) {
                if g.drop_dead() {
                    g.assign();
                    call.push(g.id);
                }
            }
            self.changed |= !call.is_empty();
            call.into_iter().for_each(|group| self.call(group));
            let left = self.all.values().any(|g| g.members.values().any(|m| m.conn == 0));
            self.orphans = left.then(|| now + LOOK);
        }
        if std::mem::take(&mut self.changed) {
            self.write();
        }
    }

    fn write(&self) {
        let Some(keep) = &self.keep else { return };
        let kept = Kept { last_id: self.last_id, groups: self.all.values().map(KeptGroup::of).collect() };
        let written = serde_json::to_vec(&kept).map_err(|_| Errno::NOMEM).and_then(|text| keep.keep(&text));
        if let Err(e) = written {
            tracing::warn!("groups of listeners are not kept: {e}");
        }
    }

    /// Removes what was kept: no program needs this monitor or a later one.
    pub fn leave_nothing(&mut self) {
        if let Some(keep) = self.keep.take() {
            self.all.keys().for_each(|group| keep.forget(*group));
        }
    }
}
