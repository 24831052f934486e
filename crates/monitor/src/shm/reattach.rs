//! State that processes have from a former monitor: arenas, channels, and leases of ports.
//!
//! Processes show this state by descriptors (ADR 48). The kernel proves that a monitor of this
//! user made the memory of a channel, and for which channel number. A process that has the memory
//! can write anything into it anyway. So it does no harm if the monitor believes the process which
//! side it is on. The rest is proved: a process that binds a channel to a listener holds that
//! listener, and processes of one fork group show the same arena with the same rights.

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

/// Answers a process whose library has another version. The process gets this answer and nothing
/// else.
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

/// Handles an arena that another process with the same rights has shown before: both processes
/// belong to one fork group. False: the arena is unknown. (A child that has given up rights may
/// still have the descriptor, but is not let into the group.)
pub fn arena_again(ctx: &mut Context, id: ConnId, fd: BorrowedFd<'_>, inherited: bool) -> bool {
    let Some(client) = ctx.clients.get_mut(id) else { return true };
    let Ok(file) = FileId::of(fd) else { return false };
    let Some(arena) = ctx.arenas.shown(file, client.rights()) else { return false };
    // (A process that already has leases or listeners stays in its fork group.)
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
    /// Reserves the ports of connections in this process's arenas, so that no other process gets
    /// them.
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

    /// Renews a lease that a channel had from the former monitor.
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
        // Channels of one client may share a block if their destinations differ. The monitor does
        // not check that here, because the servers may not have announced themselves yet. Only the
        // client suffers from a false claim.
        let has = ctx.clients.get(id).map_or(&[][..], |c| c.leases.of(first));
        let shared = self.registry.owner(first) == lessee(channel) && !has.is_empty() && !has.contains(&channel);
        let known = kept.and_then(|kept| kept.iter().position(|f| *f == first).map(|at| kept.remove(at)));
        if known.is_none() && !shared {
            self.may_lease(ctx, id)?;
            // A port of the block may have been bound for another channel meanwhile.
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

    /// A process shows a channel and says on which side of it the process is.
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
            // If there is no room, the channel goes on between its two sides without the monitor.
            // (While the client is unknown, the channel counts for the user of the process that
            // has shown it.)
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
        // A process that claims the server side first may be lying, so a channel with a listener
        // refuses it.
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
            // The process has accepted connections, and has closed the listener or left it to its
            // fork group.
            _ if own => {}
            _ => return false,
        }
        ch.server_families.insert(family);
        true
    }

    /// Repeats WATCHED for a forked child: the child may have been forked before its parent read
    /// that message.
    pub fn tell_watched(&mut self, ctx: &mut Context, child: ConnId) {
        let whole = |ch: &&Channel| ch.is_from_before && ch.is_whole() && ch.known_to.contains(&child);
        for channel in self.channels.iter().filter(whole).map(|ch| ch.id).collect::<Vec<_>>() {
            tell_watched_of(ctx, child, channel);
        }
    }
}

/// Checks memory that a process shows as channel `id` of a former monitor. The proof is the owner
/// of the memfd and its name, which no process can change. (Any process that has it can change its
/// contents.)
///
/// # Errors
/// EINVAL: not such memory, or it could shrink during its use. EPERM: no monitor of this user has
/// made the memory for channel `id`.
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

/// A channel of which neither side is known yet.
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
        // (A child may still have connections of a client that has ended.)
        client_ended: true,
        client_gone: false,
        listener_gone: false,
        is_ending: false,
    }
}
