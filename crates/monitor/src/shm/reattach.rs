//! What processes have from a monitor before this one, which has died: arenas, channels, leases of ports.
//!
//! They show it by descriptors (ADR 48). The kernel says of a channel's memory that a monitor has made it, and for which
//! number. A process with the memory of a channel can write anything into it, so the
//! monitor gives nothing away by believing which of the two ends it has. The rest is proven: a process that binds a
//! channel to a listener holds that listener, and processes of one fork group show the same arena with the same rights.

use crate::answer::{Answer, Misbehaved};
use crate::context::Context;
use crate::descriptor::Reuse;
use crate::foreign::ForeignFd;
use crate::memory::FileId;
use crate::shm::channels::{self, Channel, ChannelMem};
use crate::shm::ports::BLOCK;
use crate::shm::state::Shm;
use crate::{limits, shares, ChannelId, ConnId, FamilyId, NOBODY};
use fsocket_abi::arena::{Counter, COUNTERS};
use fsocket_abi::channel::{CHANNEL_SIZE, CLIENT, SERVER};
use fsocket_proto::registry::lessee;
use fsocket_proto::{answer, notice, request, Addr};
use rustix::fd::{AsRawFd, BorrowedFd};
use rustix::fs::SealFlags;
use rustix::io::Errno;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::rc::Rc;

/// A process with a library of another version. It is told so, and gets nothing else.
pub fn other_version(ctx: &mut Context, id: ConnId, theirs: u64) -> Errno {
    let ours = fsocket_abi::VERSION;
    if let Some(client) = ctx.clients.get(id) {
        ctx.ended.counters.entry(client.uid).or_insert([0; COUNTERS.len()])[Counter::FbVersion as usize] += 1;
        let name = std::fs::read_to_string(format!("/proc/{}/comm", client.pid)).unwrap_or_default();
        tracing::warn!(
            pid = client.pid,
            program = name.trim_end(),
            "its library has ABI {theirs}, this monitor {ours}: it uses the kernel until it is restarted"
        );
    }
    Errno::PROTO
}

/// An arena that another process with the same rights has shown: both are of one fork group. False: it is not known.
/// (A child that has given up rights may have kept the descriptor, and stays outside.)
pub fn arena_again(ctx: &mut Context, id: ConnId, fd: BorrowedFd<'_>, inherited: bool) -> bool {
    let Some(client) = ctx.clients.get_mut(id) else { return true };
    let Ok(file) = FileId::of(fd) else { return false };
    let Some(arena) = ctx.arenas.shown(file, client.rights()) else { return false };
    // (One that has leases or listeners already stays in its fork group.)
    if client.family != arena.family && !client.has_nothing() {
        return true;
    }
    client.family = arena.family;
    arena.users.insert(id);
    if !inherited && arena.creator == NOBODY {
        arena.creator = id;
        client.arena = Some(arena.mem.clone());
        client.reserved = None;
    }
    true
}

impl Shm {
    /// The ports of the connections in the arenas of this process are not given to others.
    pub fn ports_in_use(&mut self, ctx: &Context, id: ConnId) {
        let Some((family, uid)) = ctx.clients.get(id).map(|c| (c.family, c.uid)) else { return };
        let mut blocks = BTreeSet::new();
        for mem in ctx.arenas.used_by(id) {
            let clients = mem.open_socks().filter(|s| s.place().side == CLIENT);
            blocks.extend(clients.map(|s| s.local().1 / BLOCK * BLOCK));
        }
        let left = limits::LEASES_PER_UID.saturating_sub(self.leases_of(ctx, uid));
        let room = if uid == 0 || ctx.config.private { usize::MAX } else { left };
        for first in blocks.into_iter().take(room.min(limits::LEASES_PER_PROCESS)) {
            if self.ports.take(first) {
                self.family_leases.entry(family).or_default().push(first);
            }
        }
    }

    /// A lease that a channel has from before.
    pub fn lease_again(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        channel: ChannelId,
        first: u16,
    ) -> Answer<answer::Ports> {
        if self.channels.get(channel).is_none_or(|ch| ch.client != id) {
            return Err(Errno::NOENT);
        }
        let family = ctx.clients.get(id).ok_or(Errno::BADF)?.family;
        let kept = self.family_leases.get_mut(&family);
        // Its channels may share a block, to different destinations: the client's own concern, as the servers may
        // not have come yet.
        let has = ctx.clients.get(id).map_or(&[][..], |c| c.leases.of(first));
        let shared = self.registry.owner(first) == lessee(channel) && !has.is_empty() && !has.contains(&channel);
        let known = kept.and_then(|kept| kept.iter().position(|f| *f == first).map(|at| kept.remove(at)));
        if known.is_none() && !shared {
            self.may_lease(ctx, id)?;
            // A port in it may have been bound for another channel meanwhile.
            let mut block = first..=first.saturating_add(BLOCK - 1);
            if block.any(|port| self.registry.owner(port) != 0) || !self.ports.take(first) {
                return Err(Errno::ADDRINUSE);
            }
        }
        self.registry.set_owner(first..=first + (BLOCK - 1), channel);
        if let Some(client) = ctx.clients.get_mut(id) {
            client.leases.add(channel, first);
        }
        Ok((answer::Ports { first, count: BLOCK.into() }, None))
    }

    /// A process shows a channel of which it is at one side.
    pub fn attach(
        &mut self,
        ctx: &mut Context,
        id: ConnId,
        msg: request::Attach,
        fd: Option<ForeignFd>,
    ) -> Result<(), Misbehaved> {
        let fd = fd.ok_or(Misbehaved("ATTACH without a descriptor"))?;
        let channel = Some(msg.channel).filter(|c| lessee(*c) != 0).ok_or(Misbehaved("ATTACH of no channel"))?;
        let Some(client) = ctx.clients.get(id) else { return Ok(()) };
        let (uid, pid, family) = (client.uid, client.pid, client.family);
        if self.channels.get(channel).is_none() {
            // For lack of room it stays what it is for its two sides, without us. (While its client is not known
            // it counts for the user that has shown it.)
            if !self.has_share(ctx, uid, shares::CHANNEL) {
                return Ok(());
            }
            match channel_memory(fd, channel) {
                Ok(mem) => self.channels.add(from_before(channel, mem, uid)),
                Err(e) if e.kind() == io::ErrorKind::InvalidInput => return Err(Misbehaved("not a channel")),
                Err(_) => return Ok(()),
            }
        } else if !self.channels.get(channel).is_some_and(|ch| {
            ch.is_from_before && FileId::of(fd.as_fd()).is_ok_and(|file| FileId::of(ch.mem.fd().as_fd()) == Ok(file))
        }) {
            return Ok(());
        }
        let was_whole = self.channels.get(channel).is_some_and(Channel::is_whole);
        let done = match msg.side.0 {
            CLIENT => {
                let has_left = self.has_share(ctx, uid, shares::CHANNEL);
                self.attach_client(channel, (id, uid, pid, family), msg.opens, has_left)
            }
            SERVER => self.attach_server(ctx, channel, id, family, msg.listener),
            _ => return Err(Misbehaved("ATTACH to no side")),
        };
        if let Some(ch) = self.channels.get_mut(channel).filter(|_| done) {
            ch.known_to.insert(id);
            let told = match (was_whole, ch.is_whole()) {
                (false, true) => ch.known_to.clone(),
                (true, _) => BTreeSet::from([id]),
                _ => BTreeSet::new(),
            };
            for process in &told {
                tell_watched_of(ctx, *process, channel);
            }
            if !told.is_empty() {
                self.dispatch.arrives(channel, &ctx.config.balance);
                self.waiting.arrives(channel);
            }
        }
        self.sweep(ctx);
        Ok(())
    }

    fn attach_client(
        &mut self,
        channel: ChannelId,
        (id, uid, pid, family): (ConnId, u32, u32, FamilyId),
        opens: bool,
        has_left: bool,
    ) -> bool {
        let Some(ch) = self.channels.get_mut(channel) else { return false };
        if ch.client_family != 0 && ch.client_family != family || ch.client_uid != uid && !has_left {
            return false;
        }
        ch.client_family = family;
        if opens && ch.client == NOBODY {
            (ch.client, ch.client_pid, ch.client_ended) = (id, pid, false);
            self.channels.is_of_user(channel, uid);
        }
        true
    }

    fn attach_server(
        &mut self,
        ctx: &Context,
        channel: ChannelId,
        id: ConnId,
        family: FamilyId,
        listener: u64,
    ) -> bool {
        let holds = ctx.clients.get(id).is_some_and(|c| c.holds.contains(&listener));
        let l = self.listeners.get_mut(listener).filter(|_| holds);
        let Some(ch) = self.channels.get_mut(channel) else { return false };
        // A process that came to the server's side first need not be of this server: it gets no listener's channel.
        let own = ch.server_families.is_empty() || ch.server_families.contains(&family);
        match l {
            Some(l) if ch.listener == listener || ch.listener == 0 && own => {
                if ch.listener == 0 {
                    self.registry.serves(l.info.addr.port);
                }
                (ch.listener, ch.addr, ch.netns, ch.server_uid) = (listener, l.info.addr, l.info.netns, l.uid);
                ch.reuse = l.reuse;
                l.channels.insert(channel);
                l.families.insert(family);
                ch.mem.set_workers(l.worker_mask());
            }
            // It has accepted, and closed the listener, or left it to a process of its fork group.
            _ if own => {}
            _ => return false,
        }
        ch.server_families.insert(family);
        true
    }

    /// To a forked child, which may have been made before its parent has read that.
    pub fn tell_watched(&mut self, ctx: &mut Context, child: ConnId) {
        let whole = |ch: &&Channel| ch.is_from_before && ch.is_whole() && ch.known_to.contains(&child);
        for channel in self.channels.iter().filter(whole).map(|ch| ch.id).collect::<Vec<_>>() {
            tell_watched_of(ctx, child, channel);
        }
    }
}

/// Memory that a monitor before this one has made for channel `id`, as a process shows it. The kernel says so: by the
/// owner of the memfd and its name, which nobody can change. (What is in it anybody can write.)
/// # Errors
/// EINVAL: it is none, or could shrink under us. EPERM: no monitor of this user has made it for that number.
fn channel_memory(fd: ForeignFd, id: ChannelId) -> io::Result<ChannelMem> {
    let sealed = rustix::fs::fcntl_get_seals(fd.as_fd())?;
    let stat = rustix::fs::fstat(fd.as_fd())?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    if !sealed.contains(seals) || stat.st_size != CHANNEL_SIZE as i64 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let named = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()))?;
    let own = named.as_os_str() == format!("/memfd:{} (deleted)", channels::name_of(id)).as_str();
    if !own || stat.st_uid != rustix::process::geteuid().as_raw() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    ChannelMem::of(fd)
}

fn tell_watched_of(ctx: &mut Context, process: ConnId, channel: ChannelId) {
    ctx.clients.notify(process, notice::Watched { channel });
}

/// Of which neither side is known yet.
fn from_before(id: ChannelId, mem: ChannelMem, uid: u32) -> Channel {
    Channel {
        id,
        listener: 0,
        client: NOBODY,
        client_pid: 0,
        client_uid: uid,
        client_family: 0,
        server_families: BTreeSet::new(),
        known_to: BTreeSet::new(),
        mem: Rc::new(mem),
        addr: Addr::default(),
        reuse: Reuse::default(),
        claimed_from: Cell::new(None),
        netns: 0,
        server_uid: uid,
        leases: Vec::new(),
        bound: BTreeMap::new(),
        switched: RefCell::default(),
        pipes: Default::default(),
        is_from_before: true,
        // Of a client that has died meanwhile a child may have connections.
        client_ended: true,
        client_gone: false,
        listener_gone: false,
        is_ending: false,
    }
}
