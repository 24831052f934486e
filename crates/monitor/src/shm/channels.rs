//! Channels: the shared memory between a client process and a listener group.

mod memory;

use crate::address::{V4_ANY, V6_ANY};
use crate::descriptor::Reuse;
use crate::shm::pipes::Pipes;
use crate::shm::switched::Switched;
use crate::{ChannelId, ConnId, FamilyId, ListenerId};
use fsocket_abi::channel::{CLIENT, SERVER};
use fsocket_proto::registry::{lessee, CHANNELS_OF_ONE};
use fsocket_proto::Addr;
pub use memory::{name_of, ChannelMem};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::rc::Rc;
use std::time::Instant;

pub struct Channel {
    pub id: ChannelId,
    pub listener: ListenerId,
    /// The client process; it may be gone.
    pub client: ConnId,
    pub client_pid: u32,
    pub client_uid: u32,
    pub client_family: FamilyId,
    /// Families with a process that was handed this channel as a worker.
    pub server_families: BTreeSet<FamilyId>,
    /// Processes that were sent its memory, or were forked by one that had it. Others are not told of
    /// its end: a parent whose children come and go would never read all that.
    pub known_to: BTreeSet<ConnId>,
    pub mem: Rc<ChannelMem>,
    /// Of the listener: address, network namespace (the client's, too), and whose it is.
    pub addr: Addr,
    pub netns: u64,
    /// What its connections inherit.
    pub reuse: Reuse,
    pub server_uid: u32,
    /// Blocks of ports leased for this channel whose process has ended.
    pub leases: Vec<u16>,
    /// Ports that the client has bound itself, and its sockets' cookies.
    pub bound: BTreeMap<u16, u64>,
    /// Kernel ends of connections that have changed their path.
    pub switched: RefCell<Switched>,
    pub pipes: Pipes,
    /// A monitor before this one has made it.
    pub is_from_before: bool,
    pub client_ended: bool,
    pub client_gone: bool,
    /// When only such connections were found in it as a worker may be about to claim.
    pub claimed_from: Cell<Option<Instant>>,
    pub listener_gone: bool,
    /// Its listener has ended, and those that wait in it are not told yet.
    pub is_ending: bool,
}

impl Channel {
    /// Have both sides been shown? (Always, unless it is from a monitor before this one.)
    pub fn is_whole(&self) -> bool {
        !self.is_from_before || self.client_family != 0 && !self.server_families.is_empty()
    }

    /// May two connections, one in each, have the same destination? Then their ports differ.
    pub fn meets(&self, other: &Channel) -> bool {
        let any = |ch: &Channel| ch.addr.ip == V4_ANY || ch.addr.ip == V6_ANY;
        let same = self.addr.ip == other.addr.ip || any(self) || any(other);
        self.netns == other.netns && self.addr.port == other.addr.port && same
    }

    /// Whether processes of this family may be at this end.
    pub fn is_party(&self, side: usize, family: FamilyId) -> bool {
        match side {
            CLIENT => self.client_family == family,
            SERVER => self.server_families.contains(&family),
            _ => false,
        }
    }
}

pub struct Channels {
    all: BTreeMap<ChannelId, Channel>,
    last_lessee: u32,
    /// How many there are by the client's user.
    users: BTreeMap<u32, u64>,
}

impl Default for Channels {
    /// Numbers begin anywhere: those of a monitor before this one are still in use.
    fn default() -> Channels {
        Channels {
            all: BTreeMap::new(),
            last_lessee: RandomState::new().build_hasher().finish() as u32,
            users: BTreeMap::new(),
        }
    }
}

impl Channels {
    pub fn get(&self, id: ChannelId) -> Option<&Channel> {
        self.all.get(&id)
    }

    pub fn get_mut(&mut self, id: ChannelId) -> Option<&mut Channel> {
        self.all.get_mut(&id)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Channel> {
        self.all.values()
    }

    pub fn number(&self) -> usize {
        self.all.len()
    }

    /// From this number on, in order.
    pub fn from(&self, id: ChannelId) -> impl Iterator<Item = &Channel> {
        self.all.range(id..).map(|(_, ch)| ch)
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Channel> {
        self.all.values_mut()
    }

    pub fn remove(&mut self, id: ChannelId) -> Option<Channel> {
        let ch = self.all.remove(&id)?;
        self.count(ch.client_uid, -1);
        Some(ch)
    }

    fn count(&mut self, uid: u32, more: i64) {
        let n = self.users.entry(uid).or_default();
        *n = n.saturating_add_signed(more);
        if *n == 0 {
            self.users.remove(&uid);
        }
    }

    /// How many each user has, of those that are its clients'.
    pub fn by_user(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        self.users.iter().map(|(uid, n)| (*uid, *n))
    }

    /// Another user's process is the client from now on.
    pub fn is_of_user(&mut self, id: ChannelId, uid: u32) {
        let Some(ch) = self.all.get_mut(&id) else { return };
        let before = std::mem::replace(&mut ch.client_uid, uid);
        self.count(before, -1);
        self.count(uid, 1);
    }

    /// Those of one [`lessee`].
    pub fn made_by(&self, lessee: u32) -> impl Iterator<Item = &Channel> {
        let first = lessee.saturating_mul(CHANNELS_OF_ONE);
        self.all.range(first..=first | (CHANNELS_OF_ONE - 1)).map(|(_, ch)| ch)
    }

    /// A number that no channel has, for a client that has had `last` before: all that it makes have one
    /// [`lessee`], until that one's numbers are used up. Those of channels that are gone come back as late
    /// as possible.
    pub fn next_id(&mut self, last: ChannelId) -> ChannelId {
        let next = last.wrapping_add(1);
        if last != 0 && lessee(next) == lessee(last) && !self.all.contains_key(&next) {
            return next;
        }
        loop {
            self.last_lessee = self.last_lessee.wrapping_add(1) % lessee(ChannelId::MAX);
            let first = (self.last_lessee + 1) * CHANNELS_OF_ONE;
            if self.all.range(first..=first + (CHANNELS_OF_ONE - 1)).next().is_none() {
                return first;
            }
        }
    }

    pub fn add(&mut self, channel: Channel) {
        self.count(channel.client_uid, 1);
        self.all.insert(channel.id, channel);
    }
}
