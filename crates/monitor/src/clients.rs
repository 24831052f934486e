//! Connected processes and what waits to be sent to them.

use crate::arenas::Arenas;
use crate::{wire, ChannelId, ConnId, FamilyId, ListenerId};
use fsocket_proto::Msg;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::rc::Rc;

/// Messages that may wait for one process; a process that lets more pile up is
/// not reading, and is dropped.
const OUT_MAX: usize = 8192;
/// While this many wait, no further requests of that process are read.
const OUT_PAUSE: usize = 64;

pub struct Client {
    pub fd: OwnedFd,
    /// From SO_PEERCRED; of an adopted process, its parent's.
    pub uid: u32,
    /// For display only.
    pub pid: u32,
    /// Names the process in the `holders` of its family's sockets; 0: no HELLO
    /// yet.
    pub nonce: u64,
    pub greeted: bool,
    pub family: FamilyId,
    /// Listeners that it holds, and those that it works for.
    pub holds: BTreeSet<ListenerId>,
    pub works: BTreeSet<ListenerId>,
    /// Announced before an `exec`.
    pub is_heir: bool,
    /// By whom, until it has taken over.
    pub heir_of: Option<ConnId>,
    /// Of `holds`: left to an heir that has not shown that it has them.
    pub unclaimed: BTreeSet<ListenerId>,
    pub bells: HashMap<u64, OwnedFd>,
    /// Its leases: for which channel, and the first port of each.
    pub leases: Vec<(ChannelId, u16)>,
    out: VecDeque<Outgoing>,
    interest: EventFlags,
    /// Something unasked was sent before it had an arena.
    pub missed_pending: bool,
}

pub struct Outgoing {
    pub msg: Msg,
    pub fd: Option<Rc<OwnedFd>>,
    /// Not an answer: bump `pending` once it is sent.
    pub unasked: bool,
}

impl Client {
    pub fn new(fd: OwnedFd, uid: u32, pid: u32, family: FamilyId) -> Client {
        Client {
            fd,
            uid,
            pid,
            nonce: 0,
            greeted: false,
            family,
            holds: BTreeSet::new(),
            works: BTreeSet::new(),
            is_heir: false,
            heir_of: None,
            unclaimed: BTreeSet::new(),
            bells: HashMap::new(),
            leases: Vec::new(),
            out: VecDeque::new(),
            interest: EventFlags::IN,
            missed_pending: false,
        }
    }

    /// Whether it counts as a process that uses the monitor (and not one that
    /// only wants a report).
    pub fn is_process(&self) -> bool {
        self.nonce != 0
    }

    /// Whether to read its next request now.
    pub fn wants_input(&self) -> bool {
        self.out.len() < OUT_PAUSE
    }
}

/// All clients. A client that must go is only noted in `doomed`, because its
/// end touches everything else; the event loop does that in between.
pub struct Clients {
    all: HashMap<ConnId, Client>,
    epoll: Rc<OwnedFd>,
    last_id: ConnId,
    pub doomed: Vec<ConnId>,
    /// Who has which bell.
    bell_owners: HashMap<u64, Vec<ConnId>>,
}

impl Clients {
    /// `first_id`: numbers below are other things in the epoll instance.
    pub fn new(epoll: Rc<OwnedFd>, first_id: ConnId) -> Clients {
        Clients { all: HashMap::new(), epoll, last_id: first_id, doomed: Vec::new(), bell_owners: HashMap::new() }
    }

    pub fn get(&self, id: ConnId) -> Option<&Client> {
        self.all.get(&id)
    }

    pub fn get_mut(&mut self, id: ConnId) -> Option<&mut Client> {
        self.all.get_mut(&id)
    }

    pub fn iter(&self) -> impl Iterator<Item = (ConnId, &Client)> {
        self.all.iter().map(|(id, c)| (*id, c))
    }

    pub fn family_members(&self, family: FamilyId) -> Vec<ConnId> {
        self.all.iter().filter(|(_, c)| c.family == family).map(|(id, _)| *id).collect()
    }

    /// # Errors
    /// Of `epoll_ctl`; the client is then not added.
    pub fn add(&mut self, client: Client) -> Result<ConnId, Errno> {
        self.last_id += 1;
        epoll::add(&*self.epoll, &client.fd, EventData::new_u64(self.last_id), EventFlags::IN)?;
        self.all.insert(self.last_id, client);
        Ok(self.last_id)
    }

    pub fn remove(&mut self, id: ConnId) -> Option<Client> {
        let client = self.all.remove(&id)?;
        // Explicitly: somebody else may have a duplicate of an adopted socket,
        // and closing ours would leave it in the set.
        let _ = epoll::delete(&*self.epoll, &client.fd);
        for key in client.bells.keys() {
            self.forget_bell_owner(*key, id);
        }
        Some(client)
    }

    pub fn doom(&mut self, id: ConnId, why: &str) {
        if let Some(client) = self.all.get(&id) {
            tracing::debug!(process = id, pid = client.pid, why, "dropping");
            self.doomed.push(id);
        }
    }

    /// Sends now or as soon as the process reads.
    pub fn send(&mut self, id: ConnId, out: Outgoing, arenas: &Arenas) {
        let Some(client) = self.all.get_mut(&id) else { return };
        if client.out.len() >= OUT_MAX {
            return self.doom(id, "it does not read");
        }
        client.out.push_back(out);
        self.flush(id, arenas);
    }

    /// Sends what can be sent.
    pub fn flush(&mut self, id: ConnId, arenas: &Arenas) {
        let Some(client) = self.all.get_mut(&id) else { return };
        let mut unasked = false;
        let mut failed = false;
        while let Some(next) = client.out.front() {
            match wire::send(client.fd.as_fd(), &next.msg, next.fd.as_ref().map(|fd| fd.as_fd())) {
                Ok(()) => {
                    unasked |= next.unasked;
                    client.out.pop_front();
                }
                Err(Errno::AGAIN) => break,
                Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN | Errno::CONNREFUSED) => {
                    // Gone; but what it sent before is still to be read (an
                    // ADOPT, say). The end comes when that is done.
                    client.out.clear();
                }
                Err(_) => {
                    failed = true;
                    break;
                }
            }
        }
        if unasked {
            match arenas.of(id) {
                Some(arena) => arena.mem.bump_pending(),
                None => client.missed_pending = true,
            }
        }
        let mut interest = EventFlags::empty();
        interest.set(EventFlags::IN, client.wants_input());
        interest.set(EventFlags::OUT, !client.out.is_empty());
        if interest != client.interest {
            client.interest = interest;
            failed |= epoll::modify(&*self.epoll, &client.fd, EventData::new_u64(id), interest).is_err();
        }
        if failed {
            self.doom(id, "sending failed");
        }
    }

    /// Adds or replaces a bell.
    pub fn add_bell(&mut self, id: ConnId, key: u64, bell: OwnedFd) {
        let Some(client) = self.all.get_mut(&id) else { return };
        if client.bells.insert(key, bell).is_none() {
            self.bell_owners.entry(key).or_default().push(id);
        }
    }

    /// Has anybody announced a bell with this key?
    pub fn knows_bell(&self, key: u64) -> bool {
        self.bell_owners.contains_key(&key)
    }

    pub fn remove_bell(&mut self, id: ConnId, key: u64) {
        if self.all.get_mut(&id).is_some_and(|c| c.bells.remove(&key).is_some()) {
            self.forget_bell_owner(key, id);
        }
    }

    fn forget_bell_owner(&mut self, key: u64, id: ConnId) {
        if let Some(owners) = self.bell_owners.get_mut(&key) {
            owners.retain(|&o| o != id);
            if owners.is_empty() {
                self.bell_owners.remove(&key);
            }
        }
    }

    /// The bell with this key whose owner belongs to a family that `fits`. Keys
    /// are chosen by clients: a stranger's bell with the same key is not it.
    pub fn bell(&self, key: u64, fits: impl Fn(FamilyId) -> bool) -> Option<&OwnedFd> {
        let owners = self.bell_owners.get(&key)?;
        owners.iter().filter_map(|id| self.all.get(id)).find(|c| fits(c.family))?.bells.get(&key)
    }
}
