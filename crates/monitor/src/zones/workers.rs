//! Requests of workers about their local listen sockets.

use super::group::{Group, GroupId, Member};
use super::own::Own;
use super::state::Zones;
use crate::answer::Answer;
use crate::broker::clone::listening;
use crate::context::Context;
use crate::descriptor;
use crate::foreign::ForeignFd;
use crate::{ConnId, FamilyId};
use fsocket_bpf::select::{GLOBAL, PLACES};
use fsocket_proto::{answer, notice, request};
use fsocket_reuseport::listener::Shape;
use rustix::io::Errno;
use rustix::net::sockopt;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Instant;

/// The most groups in all, and of one user.
const GROUPS: usize = 1024;
const GROUPS_PER_UID: usize = 64;
/// The CPU that a worker has named.
fn cpu_of(msg: &request::Local) -> Result<u32, Errno> {
    msg.cpu.filter(|cpu| *cpu < u32::MAX).ok_or(Errno::INVAL)
}

impl Zones {
    /// [`request::Group`].
    pub fn group(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        msg: request::Group,
        fd: Option<ForeignFd>,
    ) -> Answer<answer::Group> {
        let fd = fd.ok_or(Errno::BADF)?;
        if msg.own {
            return self.own_group(ctx, id, &fd);
        }
        let (shape, cookie) = listening(fd.as_fd())?;
        let client = ctx.clients.get(id).ok_or(Errno::BADF)?;
        let (uid, family) = (client.uid, client.family);
        let known = self.all.values().find(|g| g.cookie == cookie).map(|g| g.id);
        let group = match known {
            Some(group) => group,
            None => {
                let netns = descriptor::netns_cookie(fd.as_fd())?;
                self.new_group(ctx, &fd, &shape, None, netns, uid)?
            }
        };
        let g = self.all.get_mut(&group).ok_or(Errno::NOENT)?;
        g.holders.insert(id);
        g.families.insert(family);
        let program = rustix::io::fcntl_dupfd_cloexec(g.select.program(), 0)?;
        Ok((answer::Group { group }, Some(Rc::new(ForeignFd::new(program, 0)))))
    }

    pub(super) fn new_group(
        &mut self,
        ctx: &mut Context,
        fd: &ForeignFd,
        shape: &Shape,
        own: Option<Own>,
        netns: u64,
        uid: u32,
    ) -> Result<GroupId, Errno> {
        let of_uid = self.all.values().filter(|g| g.uid == uid).count();
        if self.all.len() >= GROUPS || (uid != 0 && of_uid >= GROUPS_PER_UID) {
            return Err(Errno::MFILE);
        }
        if self.without.is_some() {
            return Err(Errno::OPNOTSUPP);
        }
        let id = self.last_id + 1;
        let select = match ctx.broker.selector(id, true) {
            Ok(select) => select,
            Err(e) => {
                ctx.broker.forget(id);
                self.without = Some(e.to_string());
                return Err(Errno::OPNOTSUPP);
            }
        };
        let cookie = match own {
            Some(_) => Ok(0),
            // Fails if the socket cannot be in a socket map, because it was not in a SO_REUSEPORT
            // group.
            None => {
                let put = select.put(GLOBAL, fd.as_fd()).map_err(|_| Errno::INVAL);
                put.and_then(|()| sockopt::socket_cookie(fd.as_fd()))
            }
        };
        let cookie = cookie.inspect_err(|_| ctx.broker.forget(id))?;
        self.last_id = id;
        self.changed = true;
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
        self.all.insert(id, group);
        Ok(id)
    }

    /// [`request::Local`].
    pub fn local(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        msg: request::Local,
        fd: Option<ForeignFd>,
    ) -> Answer<answer::Local> {
        let fd = fd.ok_or(Errno::BADF)?;
        let (shape, cookie) = listening(fd.as_fd())?;
        let netns = descriptor::netns_cookie(fd.as_fd())?;
        let g = self.all.get_mut(&msg.group).ok_or(Errno::NOENT)?;
        // Refuses another listener. (If a socket is of this address but not of this group, it only
        // wastes a place: the kernel checks the group at each selection.)
        if !g.holders.contains(&id) || g.netns != netns || g.shape != shape.addr() {
            return Err(Errno::NOENT);
        }
        let pid = ctx.clients.get(id).map_or(0, |c| c.pid);
        self.changed = true;
        let g = self.all.get_mut(&msg.group).ok_or(Errno::NOENT)?;
        let member = |cpu| Member { conn: id, pid, cookie, cpu, on_trial: msg.on_trial };
        let (place, cpu, gone) = if g.own.is_some() {
            let cpu = msg.cpu.unwrap_or(u32::MAX);
            g.add_own(member(cpu), &fd)?
        } else {
            // A socket that has stayed open since a former monitor, and that this monitor has
            // found in the map.
            let known = g.members.iter().find(|(_, m)| m.conn == 0 && m.cookie == cookie).map(|(place, _)| *place);
            let free = || (GLOBAL + 1..PLACES).find(|p| !g.members.contains_key(p)).ok_or(Errno::AGAIN);
            let place = known.map_or_else(free, Ok)?;
            if known.is_none() {
                g.select.put(place, fd.as_fd()).map_err(|_| Errno::INVAL)?;
            }
            g.members.insert(place, member(cpu_of(&msg)?));
            g.assign();
            (place, cpu_of(&msg)?, false)
        };
        let is_first = g.members.len() == 1;
        tracing::debug!(group = g.id, process = %ctx.clients.name(id), cpu, place, "worker");
        if is_first || gone {
            // Other processes of the fork group may be sleeping on the global socket, where no
            // more connections come. They may join now.
            self.call(msg.group);
            self.zones_look(ctx);
        }
        Ok((answer::Local { group: msg.group, place, cpu }, None))
    }

    /// [`request::Left`].
    pub fn left(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        request::Left { group, place }: request::Left,
    ) -> Answer<answer::Left> {
        let known = self.all.get_mut(&group);
        if let Some(g) = known.filter(|g| g.members.get(&place).is_some_and(|m| m.conn == id)) {
            g.members.remove(&place);
            g.select.take_out(place);
            g.assign();
            self.changed = true;
            self.unshare(ctx, group, place, id);
            self.call(group);
            self.zones_look(ctx);
        }
        Ok((answer::Left {}, None))
    }

    /// Removes a process that has ended.
    pub fn leave_zones(&mut self, ctx: &mut Context, id: ConnId) {
        let mut call = Vec::new();
        let mut left = Vec::new();
        for g in self.all.values_mut() {
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
            self.unshare(ctx, group, place, id);
        }
        // A master process that accepts nothing itself has shown nothing. It still holds the
        // listener for future workers. So the group stays as long as its fork group lives. A new
        // group would have another program, and connections waiting at the old sockets could not
        // be moved.
        let living: BTreeSet<FamilyId> = ctx.clients.iter().map(|(_, c)| c.family).collect();
        let keep = &self.keep;
        let mut changed = !call.is_empty();
        self.all.retain(|id, g| {
            let stays = !g.holders.is_empty() || g.families.iter().any(|f| living.contains(f)) || g.lives_on();
            if !stays {
                changed = true;
                keep.iter().for_each(|k| k.forget(*id));
            }
            stays
        });
        self.changed |= changed;
        for group in call {
            self.call(group);
        }
        self.zones_look(ctx);
    }

    /// Does all work on groups that is due, and tells the workers of groups that must look.
    pub fn zones_look(&mut self, ctx: &mut Context) {
        let now = Instant::now();
        self.keep_up(now);
        let settled: Vec<GroupId> =
            self.all.values_mut().filter_map(|g| g.settle_if_due(now).then_some(g.id)).collect();
        settled.into_iter().for_each(|group| self.call(group));
        let (due, later) = std::mem::take(&mut self.due).into_iter().partition(|(at, _)| *at <= now);
        self.due = later;
        let due: BTreeSet<GroupId> = due.iter().map(|(_, g): &(Instant, GroupId)| *g).collect();
        for group in due {
            let Some(g) = self.all.get(&group) else { continue };
            // Processes without a local listen socket are told, too, because they have the global
            // one.
            let to: Vec<ConnId> =
                ctx.clients.iter().filter(|(_, c)| g.families.contains(&c.family)).map(|(id, _)| id).collect();
            for id in to {
                ctx.clients.notify(id, notice::Look { group });
            }
        }
    }

    /// [`request::Clone`].
    pub fn clone_listener(
        &self,
        ctx: &Context,
        id: ConnId,
        msg: request::Clone,
        fd: Option<ForeignFd>,
    ) -> Answer<answer::Clone> {
        let fd = fd.ok_or(Errno::BADF)?;
        let client = ctx.clients.get(id).ok_or(Errno::BADF)?;
        let made = ctx.broker.clone_listener(fd.as_fd(), client.fd.as_fd(), msg.reservation)?;
        Ok((answer::Clone {}, Some(Rc::new(ForeignFd::new(made, client.uid)))))
    }

    /// [`request::Group`] for sockets that the program itself has made to share an address.
    pub(super) fn own_group(&mut self, ctx: &mut Context, id: ConnId, fd: &ForeignFd) -> Answer<answer::Group> {
        let info = descriptor::listening(fd.as_fd())?;
        if self.all.values().any(|g| g.cookie == info.cookie) {
            // The program did not make this socket share its address: the library did, in the
            // program before `exec`.
            return Err(Errno::EXIST);
        }
        let owner = rustix::fs::fstat(fd.as_fd())?.st_uid;
        let client = ctx.clients.get(id).ok_or(Errno::BADF)?;
        let (uid, family) = (client.uid, client.family);
        let known = self.all.values().find(|g| g.own.as_ref().is_some_and(|o| o.is_for(&info, owner)));
        let group = match known.map(|g| g.id) {
            Some(group) => group,
            None => {
                let (shape, _) = listening(fd.as_fd())?;
                let own = Own::new(info, owner, ctx.broker.diag(fd.as_fd()).ok());
                self.new_group(ctx, fd, &shape, Some(own), info.netns, uid)?
            }
        };
        let g = self.all.get_mut(&group).ok_or(Errno::NOENT)?;
        g.holders.insert(id);
        g.families.insert(family);
        if let Some(own) = &mut g.own {
            own.known.insert(info.cookie);
            if own.diag.is_none() {
                own.diag = ctx.broker.diag(fd.as_fd()).ok();
            }
        }
        let gone = g.settle();
        // A stranger may have attached a program of its own, which must not be replaced.
        if g.own.as_ref().is_some_and(|o| o.mixed && !o.given) {
            return Ok((answer::Group { group }, None));
        }
        if let Some(own) = &mut g.own {
            own.given = true;
        }
        let program = rustix::io::fcntl_dupfd_cloexec(g.select.program(), 0)?;
        if gone {
            self.call(group);
            self.zones_look(ctx);
        }
        Ok((answer::Group { group }, Some(Rc::new(ForeignFd::new(program, 0)))))
    }
}
