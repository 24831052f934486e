//! The monitor refuses what the kernel or the administrator refuses.
//!
//! The kernel may have many reasons against a connection: netfilter, `ip rule`, Landlock, filters
//! of system calls, cgroup programs, security modules. The monitor has one test for all of them:
//! the kernel's own handshake. A client that may be refused must connect over the kernel first
//! (ENOKEY). When that connection is established, the client shows it to the monitor. Then it may
//! have shared memory to that destination for [`WINDOW`]. So the monitor need not understand any
//! policy. It only needs to detect that there may be a policy ([`kernel`], [`process`]). ADR 36.

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
    /// No policy may concern the connection.
    AtOnce,
    /// The kernel has allowed a connection of an equal socket.
    Proved,
}

impl Context {
    /// Records what the kernel says about the sender of the current message. Checks for other
    /// processes' messages use the record.
    pub fn note_party(&mut self, id: ConnId, with_cgroup: bool) -> Result<Party, Errno> {
        let rules = &self.config.rules;
        let programs = &self.config.programs;
        let wanted = Wanted {
            exe: rules.needs_exe() || programs.iter().any(|p| p.exe.is_some()),
            cgroup: with_cgroup
                || rules.needs_cgroup()
                || programs.iter().any(|p| p.unit.is_some() || p.cgroup.is_some()),
        };
        // A message without credentials was sent before the socket asked for them: its sender is
        // unknown.
        let policy = &mut self.policy;
        let party = policy.sender.as_ref().ok_or(Errno::NOENT)?.party(wanted, &self.broker, &mut policy.cgroups);
        self.policy.parties.insert(id, party.clone());
        Ok(party)
    }

    /// ENOENT: the process has said nothing yet (its parent has announced it before a fork or
    /// `exec`).
    pub fn known_as(&self, id: ConnId) -> Result<&Party, Errno> {
        self.policy.parties.get(&id).ok_or(Errno::NOENT)
    }

    /// Whether these two processes may be the ends of a connection: `share` must allow it, and no
    /// rule may deny it. Returns the action of the first rule that fits.
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

    /// Whether a process that wants to accept for a listener may be paired with all clients that
    /// have channels to that listener.
    pub fn may_work(&self, id: ConnId, l: &Listener, channels: &Channels) -> Result<(), Errno> {
        let to = Destination::Inet(Inet { ip: l.info.addr.ip, port: l.info.addr.port, netns: None });
        let clients = l.channels.iter().filter_map(|ch| channels.get(*ch)).filter(|ch| !ch.client_gone);
        clients.map(|ch| (ch.client, ch.client_uid)).try_for_each(|(client, uid)| {
            // A client that has ended may have left connections to other processes of its fork
            // group.
            let ended = Party { uid, gid: u32::MAX, ..Party::default() };
            self.may_pair(self.known_as(client).unwrap_or(&ended), id, &to).map(drop)
        })
    }

    /// Whether this process may have a channel to a listener, which is reached at `place`. EPERM:
    /// another user's listener. EACCES: a rule or the kernel forbids it. ENOKEY: the client must
    /// first connect over the kernel, with the same socket that it has shown.
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
            // The processes that will accept are not known yet, so neither are their users.
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
                // The cgroup is what the kernel says. `identity` is what the process says about
                // its own socket; if it lies, it deceives only itself.
                let mut hash = DefaultHasher::new();
                (identity, &party.cgroup).hash(&mut hash);
                self.proof(id, (place, hash.finish()), end).map(|()| Granted::Proved)
            }
            Seen::MayLeadElsewhere(_) => Err(Errno::ACCESS),
        }
    }

    /// Whether the client must connect over the kernel first, and why.
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
        // Where a private monitor cannot look, it allows the connection: its programs have the
        // same user, and could share memory without it.
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
            // The client must have shown this socket while it was still unused. An older
            // connection says nothing about the policy of today. A connection handed over by
            // another process says nothing about this process.
            Use::Connected { .. } if !proofs.unused.iter().any(shown) => Err(Errno::NOKEY),
            Use::Connected { own, peer } => {
                proofs.unused.retain(|s| !shown(s));
                // If addresses are translated, the connection has reached another server than the
                // listener.
                if end.netns == self.netns && self.policy.host.is_connected(own, peer) == Some(false) {
                    return Err(Errno::ACCESS);
                }
                proofs.reached.push_back((now, place));
                Ok(())
            }
        }
    }

    /// From the first look on, watches the sockets by which the kernel announces changes of its
    /// rules.
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

    /// Handles an announcement of the kernel. Returns whether a policy may have changed: then
    /// libraries must ask again before their next connection.
    pub fn policy_changed(&mut self) -> bool {
        let changed = self.policy.host.changed();
        if changed {
            self.policy.proofs.clear();
        }
        changed
    }
}
