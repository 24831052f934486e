//! Channels: the shared memory between a client process and a listener group.

mod memory;

use crate::address::{V4_ANY, V6_ANY};
use crate::by_user::Counts;
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
    /// The client process, which may have ended.
    pub client: ConnId,
    pub client_pid: u32,
    pub client_uid: u32,
    pub client_family: FamilyId,
    /// Families of processes that got this channel as a worker.
    pub server_families: BTreeSet<FamilyId>,
    /// Processes that got the channel's memory, or whose parent had it. Only they are told of the
    /// channel's end: a parent whose children come and go would never read messages about all
    /// their channels.
    pub known_to: BTreeSet<ConnId>,
    pub mem: Rc<ChannelMem>,
    /// Address, network namespace and owner of the listener. (The client is in the same
    /// namespace.)
    pub addr: Addr,
    pub netns: u64,
    /// Options that its connections inherit.
    pub reuse: Reuse,
    pub server_uid: u32,
    /// Blocks of ports leased for this channel by a process that has ended.
    pub leases: Vec<u16>,
    /// Ports that the client has bound itself, and its sockets' cookies.
    pub bound: BTreeMap<u16, u64>,
    /// Kernel ends of connections that have changed their path.
    pub switched: RefCell<Switched>,
    pub pipes: Pipes,
    /// A former monitor has made the channel.
    pub is_from_before: bool,
    pub client_ended: bool,
    pub client_gone: bool,
    /// Since when the monitor has found only connections that a worker may be about to claim.
    pub claimed_from: Cell<Option<Instant>>,
    pub listener_gone: bool,
    /// The listener has ended, and the clients of waiting connections have not been told yet.
    pub is_ending: bool,
}

impl Channel {
    /// Whether processes of both sides have announced the channel. (False only for a channel that
    /// a former monitor has made.)
    pub fn is_whole(&self) -> bool {
        !self.is_from_before || self.client_family != 0 && !self.server_families.is_empty()
    }

    /// Whether its connections are Unix connections. (Unknown for a channel of a former monitor.)
    pub fn is_unix(&self) -> bool {
        i32::from(self.addr.family) == libc::AF_UNIX
    }

    /// Whether a connection here and one in `other` may have the same destination. Then their
    /// ports must differ.
    pub fn meets(&self, other: &Channel) -> bool {
        let any = |ch: &Channel| ch.addr.ip == V4_ANY || ch.addr.ip == V6_ANY;
        let same = self.addr.ip == other.addr.ip || any(self) || any(other);
        self.netns == other.netns && self.addr.port == other.addr.port && same
    }

    /// Whether processes of this family may be at this side.
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
    /// Number of channels by the client's user.
    users: Counts<u32>,
}

impl Default for Channels {
    /// The first number is random, because channels of a former monitor may still be in use.
    fn default() -> Channels {
        Channels {
            all: BTreeMap::new(),
            last_lessee: RandomState::new().build_hasher().finish() as u32,
            users: Counts::default(),
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

    /// Channels from this number on, in order.
    pub fn from(&self, id: ChannelId) -> impl Iterator<Item = &Channel> {
        self.all.range(id..).map(|(_, ch)| ch)
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Channel> {
        self.all.values_mut()
    }

    pub fn remove(&mut self, id: ChannelId) -> Option<Channel> {
        let ch = self.all.remove(&id)?;
        self.users.change(ch.client_uid, -1);
        Some(ch)
    }

    /// Number of channels of each user, as client.
    pub fn by_user(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        self.users.iter()
    }

    /// Records that the client is now a process of another user.
    pub fn is_of_user(&mut self, id: ChannelId, uid: u32) {
        let Some(ch) = self.all.get_mut(&id) else { return };
        let before = std::mem::replace(&mut ch.client_uid, uid);
        self.users.change(before, -1);
        self.users.change(uid, 1);
    }

    /// The channels of one [`lessee`].
    pub fn made_by(&self, lessee: u32) -> impl Iterator<Item = &Channel> {
        let first = lessee.saturating_mul(CHANNELS_OF_ONE);
        self.all.range(first..=first | (CHANNELS_OF_ONE - 1)).map(|(_, ch)| ch)
    }

    /// An unused number for a client whose last one was `last`. All channels of a client have one
    /// [`lessee`], until its numbers are used up. Numbers of ended channels come back as late as
    /// possible.
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
        self.users.change(channel.client_uid, 1);
        self.all.insert(channel.id, channel);
    }
}
