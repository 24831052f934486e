//! What the kernel or the administrator refuses, we refuse.
//!
//! One mechanism for everything that the kernel may have against a connection (netfilter, `ip rule`,
//! Landlock, filters of system calls, cgroup programs, security modules): its own handshake. A
//! client that may be refused has to connect over the kernel (ENOKEY). Once that connection is
//! established the client shows it, and has shared memory to that destination for [`WINDOW`]. So
//! nothing here has to understand a policy; it is enough to see that there may be one ([`kernel`],
//! [`process`]). ADR 36.

pub mod cgroups;
pub mod file;
pub mod kernel;
pub mod process;
pub mod programs;
pub mod routing;
pub mod rules;
pub mod state;

use crate::ancillary::Sender;
use crate::context::Context;
use crate::descriptor::{ClientEnd, Use};
use crate::event::POLICY;
use crate::shm::channels::Channels;
use crate::shm::listeners::Listener;
use crate::ConnId;
use kernel::{HostPolicy, Question, Seen};
use process::Wanted;
use rules::{Action, Destination, Inet, Party};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use state::{Path, Place, Policy};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::AsRawFd;
use std::time::Instant;

/// Why a process may have a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Granted {
    /// There is no policy.
    AtOnce,
    /// The kernel has allowed such a connection; for sockets like that one.
    Proved,
}

impl Context {
    /// Notes what the kernel says of the sender. Later messages of others look it up.
    pub fn note_party(&mut self, id: ConnId, with_cgroup: bool) -> Result<Party, Errno> {
        let rules = &self.config.rules;
        let programs = &self.config.programs;
        let wanted = Wanted {
            exe: rules.needs_exe() || programs.iter().any(|p| p.exe.is_some()),
            cgroup: with_cgroup
                || rules.needs_cgroup()
                || programs.iter().any(|p| p.unit.is_some() || p.cgroup.is_some()),
        };
        // Without credentials (sent before the socket asked for them) it is nobody.
        let policy = &mut self.policy;
        let party = policy.sender.as_ref().ok_or(Errno::NOENT)?.party(wanted, &self.broker, &mut policy.cgroups);
        self.policy.parties.insert(id, party.clone());
        Ok(party)
    }

    /// ENOENT: it has said nothing yet (announced before a fork or `exec`).
    pub fn known_as(&self, id: ConnId) -> Result<&Party, Errno> {
        self.policy.parties.get(&id).ok_or(Errno::NOENT)
    }

    /// Whether these two may be the ends of a connection, by `share` and by rules that deny.
    /// What else there is to say of it.
    pub fn may_pair(&self, client: &Party, server: ConnId, to: &Destination) -> Result<Option<Action>, Errno> {
        if self.config.private && self.config.rules.rules.is_empty() {
            return Ok(None);
        }
        let server = self.known_as(server)?;
        if !self.config.private && !self.config.rules.may_share(client, server) {
            return Err(Errno::PERM);
        }
        match self.config.rules.action(client, server, to) {
            Some(Action::Deny) => Err(Errno::ACCESS),
            action => Ok(action),
        }
    }

    /// Whether a process that now wants to work for a listener may meet the clients that have
    /// channels to it.
    pub fn may_work(&self, id: ConnId, l: &Listener, channels: &Channels) -> Result<(), Errno> {
        let to = Destination::Inet(Inet { ip: l.info.addr.ip, port: l.info.addr.port, netns: None });
        let clients = l.channels.iter().filter_map(|ch| channels.get(*ch)).filter(|ch| !ch.client_gone);
        clients.map(|ch| (ch.client, ch.client_uid)).try_for_each(|(client, uid)| {
            // One that has ended may have left connections to others of its family.
            let ended = Party { uid, gid: u32::MAX, ..Party::default() };
            self.may_pair(self.known_as(client).unwrap_or(&ended), id, &to).map(drop)
        })
    }

    /// Whether this process may have a channel to a listener, by which `place` is reached. EPERM: it
    /// is another user's; EACCES: a rule, or the kernel, is against it; ENOKEY: the kernel is to be
    /// asked first, with the very socket that was shown.
    pub fn judge(
        &mut self,
        id: ConnId,
        l: &Listener,
        place: Place,
        end: &ClientEnd,
        (fd, identity): (BorrowedFd<'_>, u64),
    ) -> Result<Granted, Errno> {
        let party = self.note_party(id, true)?;
        if self.is_off(id) || l.holders.iter().any(|holder| self.is_off(*holder)) {
            return Err(Errno::ACCESS);
        }
        let netns = if self.config.rules.needs_netns() { self.broker.netns_inode(fd) } else { None };
        let to = Inet { ip: place.0, port: place.1, netns };
        let mut servers: Vec<ConnId> = l.accepting().collect();
        if servers.is_empty() {
            // The users of the future workers are not known yet.
            if !self.config.private {
                return Err(Errno::NOENT);
            }
            servers.extend(l.holders.iter().filter(|id| self.policy.parties.contains_key(id)));
        }
        let listener_netns = l.info.netns;
        let mut actions = Vec::with_capacity(servers.len());
        for server in &servers {
            actions.push(self.may_pair(&party, *server, &Destination::Inet(to))?);
        }
        match self.verdict(&actions, &party, &servers, &to, listener_netns, fd) {
            Seen::Nothing => Ok(Granted::AtOnce),
            Seen::MayRefuse(_) if identity == fsocket_proto::ODD => Err(Errno::NOKEY),
            Seen::MayRefuse(_) => {
                // The cgroup by what the kernel says; the rest is the process's word, and concerns its own sockets.
                let mut hash = DefaultHasher::new();
                (identity, &party.cgroup).hash(&mut hash);
                self.proof(id, (place, hash.finish()), end).map(|()| Granted::Proved)
            }
            Seen::MayLeadElsewhere(_) => Err(Errno::ACCESS),
        }
    }

    /// Whether the kernel is to be asked first, and why.
    fn verdict(
        &mut self,
        actions: &[Option<Action>],
        client: &Party,
        servers: &[ConnId],
        to: &Inet,
        listener_netns: u64,
        socket: BorrowedFd<'_>,
    ) -> Seen {
        let policy = &mut self.policy;
        let cgroup = |id| policy.parties.get(id).and_then(|p| p.cgroup.as_deref());
        let question = Question {
            ip: to.ip,
            port: to.port,
            uid: client.uid,
            socket,
            client_cgroup: client.cgroup.as_deref(),
            server_cgroups: servers.iter().map(cgroup).collect(),
        };
        let allowed = actions.iter().all(|a| *a == Some(Action::Allow));
        let seen = match listener_netns == self.netns {
            _ if allowed => Ok(Seen::Nothing),
            true => policy.host.look(&question, &self.broker),
            false => HostPolicy::look_elsewhere(socket, &self.broker),
        };
        // Programs under a private monitor could share memory without it.
        let cannot = |why| if self.config.private { Seen::Nothing } else { Seen::MayRefuse(why) };
        let restraint = policy.sender.as_ref().map(|s: &Sender| s.restraint(policy.labels));
        let seen = match seen.unwrap_or_else(cannot) {
            Seen::MayLeadElsewhere(why) => Seen::MayLeadElsewhere(why),
            _ if restraint.is_none_or(|r| r.is_more_than(&policy.own)) => {
                Seen::MayRefuse("the process may be restricted")
            }
            _ if actions.contains(&Some(Action::KernelFirst)) => Seen::MayRefuse("a rule"),
            seen => seen,
        };
        self.watch_policy();
        if let Seen::MayRefuse(why) | Seen::MayLeadElsewhere(why) = seen {
            tracing::debug!(why, addr = crate::address::show_ip(&to.ip, to.port), "kernel first");
        }
        seen
    }

    /// Whether the kernel has let this process reach the place lately.
    fn proof(&mut self, id: ConnId, place: Path, end: &ClientEnd) -> Result<(), Errno> {
        let now = Instant::now();
        let proofs = self.policy.proofs.entry(id).or_default();
        proofs.forget_old(now);
        if proofs.reached.iter().any(|(_, p)| *p == place) {
            return Ok(());
        }
        let shown = |(_, p, cookie): &(Instant, Path, u64)| *p == place && *cookie == end.cookie;
        match end.state {
            Use::Unused => {
                proofs.unused.retain(|s| !shown(s));
                proofs.unused.push_back((now, place, end.cookie));
                Err(Errno::NOKEY)
            }
            // An older connection says nothing of the policy now, and one that somebody has handed
            // over nothing of what the kernel lets this process do.
            Use::Connected { .. } if !proofs.unused.iter().any(shown) => Err(Errno::NOKEY),
            Use::Connected { own, peer } => {
                proofs.unused.retain(|s| !shown(s));
                // Translated addresses lead to another server than the listener of that address.
                if end.netns == self.netns && self.policy.host.is_connected(own, peer) == Some(false) {
                    return Err(Errno::ACCESS);
                }
                proofs.reached.push_back((now, place));
                Ok(())
            }
        }
    }

    /// From the first look on the kernel tells us when its rules change.
    fn watch_policy(&mut self) {
        let Policy { host, watched, .. } = &mut self.policy;
        for events in host.events() {
            use rustix::event::epoll::{add, EventData, EventFlags};
            let data = EventData::new_u64(POLICY);
            if !watched.contains(&events.as_raw_fd()) && add(&*self.epoll, events, data, EventFlags::IN).is_ok() {
                watched.insert(events.as_raw_fd());
            }
        }
    }

    /// The kernel tells of a change. Whether a policy may have changed: then libraries ask again before their next
    /// connection.
    pub fn policy_changed(&mut self) -> bool {
        let changed = self.policy.host.changed();
        if changed {
            self.policy.proofs.clear();
        }
        changed
    }
}
