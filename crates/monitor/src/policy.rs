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
pub mod rules;
pub mod state;

use crate::ancillary::Sender;
use crate::context::Context;
use crate::descriptor::{ClientEnd, Use};
use crate::event::POLICY;
use crate::shm::channels::Channels;
use crate::shm::listeners::Listener;
use crate::ConnId;
use kernel::Question;
use process::Wanted;
use rules::{Action, Destination, Party};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use state::Place;
use std::time::Instant;

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
        let to = Destination { ip: l.info.addr.ip, port: l.info.addr.port, netns: None };
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
        fd: BorrowedFd<'_>,
    ) -> Result<(), Errno> {
        let party = self.note_party(id, true)?;
        if self.is_off(id) || l.holders.iter().any(|holder| self.is_off(*holder)) {
            return Err(Errno::ACCESS);
        }
        let netns = if self.config.rules.needs_netns() { self.broker.netns_inode(fd) } else { None };
        let to = Destination { ip: place.0, port: place.1, netns };
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
            actions.push(self.may_pair(&party, *server, &to)?);
        }
        if self.why_kernel_first(&actions, &party, &servers, &to, listener_netns).is_none() {
            return Ok(());
        }
        self.proof(id, place, end)
    }

    /// Why the kernel is to be asked first, if it is.
    fn why_kernel_first(
        &mut self,
        actions: &[Option<Action>],
        client: &Party,
        servers: &[ConnId],
        to: &Destination,
        listener_netns: u64,
    ) -> Option<&'static str> {
        let policy = &mut self.policy;
        let restraint = policy.sender.as_ref().map(|s: &Sender| s.restraint(policy.labels));
        let why = if restraint.is_none_or(|r| r.is_more_than(&policy.own)) {
            Some("the process may be restricted")
        } else if actions.contains(&Some(Action::KernelFirst)) {
            Some("a rule")
        } else if actions.iter().all(|a| *a == Some(Action::Allow)) {
            None
        } else {
            let cgroup = |id| policy.parties.get(id).and_then(|p| p.cgroup.as_deref());
            let question = Question {
                ip: to.ip,
                port: to.port,
                uid: client.uid,
                client_cgroup: client.cgroup.as_deref(),
                server_cgroups: servers.iter().map(cgroup).collect(),
            };
            let seen = match listener_netns == self.netns {
                true => policy.host.look(&question, &self.broker),
                false => Err("another network namespace"),
            };
            // Programs under a private monitor could share memory without it.
            seen.unwrap_or_else(|cannot| (!self.config.private).then_some(cannot))
        };
        self.watch_policy();
        if let Some(why) = why {
            tracing::debug!(why, addr = crate::address::show_ip(&to.ip, to.port), "kernel first");
        }
        why
    }

    /// Whether the kernel has let this process reach the place lately.
    fn proof(&mut self, id: ConnId, place: Place, end: &ClientEnd) -> Result<(), Errno> {
        let now = Instant::now();
        let proofs = self.policy.proofs.entry(id).or_default();
        proofs.forget_old(now);
        if proofs.reached.iter().any(|(_, p)| *p == place) {
            return Ok(());
        }
        let shown = |(_, p, cookie): &(Instant, Place, u64)| *p == place && *cookie == end.cookie;
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
        if let Some(events) = self.policy.host.events().filter(|_| !self.policy.is_watched) {
            use rustix::event::epoll::{add, EventData, EventFlags};
            let data = EventData::new_u64(POLICY);
            self.policy.is_watched = add(&*self.epoll, events, data, EventFlags::IN).is_ok();
        }
    }

    /// A policy has changed: libraries ask again before their next connection.
    pub fn policy_changed(&mut self) {
        self.policy.host.changed();
        self.policy.proofs.clear();
    }
}
