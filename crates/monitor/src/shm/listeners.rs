//! Listeners: who holds them, who accepts on them, and which one a destination
//! means.

use crate::address::{is_v4, V4_ANY, V6_ANY};
use crate::descriptor::{Listening, Reuse};
use crate::{ChannelId, ConnId, FamilyId, ListenerId, Rights};
use fsocket_abi::channel::WORKERS;
use fsocket_proto::Addr;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

pub struct Listener {
    pub id: ListenerId,
    pub info: Listening,
    /// User of the process that registered it first.
    pub uid: u32,
    /// Which other sockets may have its address.
    pub reuse: Reuse,
    /// Processes with a descriptor for it; the last one to go ends it.
    pub holders: BTreeSet<ConnId>,
    /// The worker with each number; numbers of the dead are reused.
    pub workers: [Option<ConnId>; WORKERS],
    /// Workers beyond [`WORKERS`]: they only steal.
    pub stealers: BTreeSet<ConnId>,
    /// Two processes or more accept, or did: a connection may be in the queue of one that does not take it.
    pub is_shared: bool,
    /// Families that have had a worker: they may be on the server side of
    /// connections.
    pub families: BTreeSet<FamilyId>,
    pub channels: BTreeSet<ChannelId>,
    /// Connections opened through channels that are gone.
    pub opened: u64,
    /// Rights of those that work for it: they share the channels.
    pub served_by: Option<Rights>,
    /// Processes with other rights want to: the kernel serves all of them.
    pub is_mixed: bool,
    /// Processes that we do not know may hold it: where nobody works for it the kernel serves it.
    pub held_elsewhere: bool,
    pub shown: Shown,
    /// Its connections waited for too long at least once, which is in the log.
    pub had_untaken: bool,
    /// The name of the Unix sockets for whose connections it stands ([`Listeners::add_unix`]).
    pub unix: Option<Rc<str>>,
}

/// Whether clients find a listener.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shown {
    Yes,
    /// Not until somebody works for it.
    WhenServed,
    /// Not until somebody accepts: those that work for it may only look, and leave accepting to processes without
    /// the library.
    WhenAccepted,
    Never,
}

impl Listener {
    /// Bit w: worker w is there.
    pub fn worker_mask(&self) -> u64 {
        self.workers.iter().enumerate().fold(0, |mask, (i, w)| mask | u64::from(w.is_some()) << i)
    }

    /// Everybody who accepts.
    pub fn accepting(&self) -> impl Iterator<Item = ConnId> + '_ {
        self.workers.iter().flatten().chain(&self.stealers).copied()
    }

    /// The number of a worker that is already there.
    pub fn number_of(&self, conn: ConnId) -> Option<usize> {
        self.workers.iter().position(|w| *w == Some(conn))
    }

    /// Makes a process a worker, under the number `wish` if it is free; `None`: all numbers are taken.
    pub fn join(&mut self, conn: ConnId, wish: Option<usize>) -> Option<usize> {
        if let Some(n) = self.number_of(conn) {
            return Some(n);
        }
        let is_shared = self.accepting().any(|other| other != conn);
        self.is_shared |= is_shared;
        let wish = wish.filter(|n| self.workers.get(*n).is_some_and(Option::is_none));
        let Some(n) = wish.or_else(|| self.workers.iter().position(Option::is_none)) else {
            self.stealers.insert(conn);
            return None;
        };
        self.stealers.remove(&conn);
        self.workers[n] = Some(conn);
        Some(n)
    }

    /// The number of a worker that has been replaced goes to its successor, and the queue with it.
    pub fn inherit(&mut self, conn: ConnId, number: usize) -> bool {
        let free = self.number_of(conn).is_none() && self.workers.get(number).is_some_and(Option::is_none);
        if free {
            self.workers[number] = Some(conn);
        }
        free
    }

    /// The number that becomes free, if it had one.
    pub fn leave(&mut self, conn: ConnId) -> Option<usize> {
        self.stealers.remove(&conn);
        let n = self.number_of(conn)?;
        self.workers[n] = None;
        Some(n)
    }
}

/// Key of the address index: network namespace, address, port.
type Key = (u64, [u8; 16], u16);

#[derive(Default)]
pub struct Listeners {
    all: BTreeMap<ListenerId, Listener>,
    by_address: HashMap<Key, Vec<ListenerId>>,
    /// How many there are at each port.
    ports: HashMap<u16, u32>,
    turn: usize,
    /// How many there are of each user's.
    users: HashMap<u32, u64>,
}

impl Listeners {
    pub fn get(&self, id: ListenerId) -> Option<&Listener> {
        self.all.get(&id)
    }

    pub fn get_mut(&mut self, id: ListenerId) -> Option<&mut Listener> {
        self.all.get_mut(&id)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Listener> {
        self.all.values()
    }

    pub fn has_port(&self, port: u16) -> bool {
        self.ports.contains_key(&port)
    }

    /// The listener that is this very socket. A socket that was closed,
    /// rebound and listens again has a new cookie.
    pub fn by_cookie(&self, cookie: u64) -> Option<ListenerId> {
        self.all.contains_key(&cookie).then_some(cookie)
    }

    pub fn owned_by(&self, uid: u32) -> usize {
        self.users.get(&uid).map_or(0, |n| *n as usize)
    }

    /// How many each user has.
    pub fn by_user(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        self.users.iter().map(|(uid, n)| (*uid, *n))
    }

    pub fn add(&mut self, info: Listening, uid: u32) -> ListenerId {
        let id = info.cookie;
        *self.users.entry(uid).or_default() += 1;
        *self.ports.entry(info.addr.port).or_default() += 1;
        self.by_address.entry(key(info.netns, &info.addr)).or_default().push(id);
        self.all.insert(
            id,
            Listener {
                id,
                info,
                uid,
                reuse: Reuse::default(),
                holders: BTreeSet::new(),
                workers: [None; WORKERS],
                stealers: BTreeSet::new(),
                is_shared: false,
                families: BTreeSet::new(),
                channels: BTreeSet::new(),
                opened: 0,
                served_by: None,
                is_mixed: false,
                held_elsewhere: false,
                shown: Shown::Yes,
                had_untaken: false,
                unix: None,
            },
        );
        id
    }

    pub fn remove(&mut self, id: ListenerId) -> Option<Listener> {
        let listener = self.all.remove(&id)?;
        if let Some(n) = self.users.get_mut(&listener.uid) {
            *n -= 1;
            if *n == 0 {
                self.users.remove(&listener.uid);
            }
        }
        if let Some(n) = self.ports.get_mut(&listener.info.addr.port) {
            *n -= 1;
            if *n == 0 {
                self.ports.remove(&listener.info.addr.port);
            }
        }
        let key = key(listener.info.netns, &listener.info.addr);
        if let Some(ids) = self.by_address.get_mut(&key) {
            ids.retain(|&i| i != id);
            if ids.is_empty() {
                self.by_address.remove(&key);
            }
        }
        Some(listener)
    }

    /// Listeners with exactly this address.
    pub fn siblings(&self, netns: u64, addr: &Addr) -> Vec<ListenerId> {
        self.by_address.get(&key(netns, addr)).cloned().unwrap_or_default()
    }

    /// Nobody finds it by its address any more.
    pub fn hide(&mut self, id: ListenerId) {
        let Some(key) = self.all.get(&id).map(|l| key(l.info.netns, &l.info.addr)) else { return };
        if let Some(ids) = self.by_address.get_mut(&key) {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                self.by_address.remove(&key);
            }
        }
    }

    /// The same of one that has just been added.
    pub fn hide_until_served(&mut self, id: ListenerId) {
        self.hide(id);
        if let Some(l) = self.all.get_mut(&id) {
            l.shown = Shown::WhenServed;
        }
    }

    /// The same: nothing ever leads there by an address.
    pub fn hide_for_good(&mut self, id: ListenerId) {
        self.hide(id);
        if let Some(l) = self.all.get_mut(&id) {
            l.shown = Shown::Never;
        }
    }

    /// One that stands for the connections of a fork group that were accepted at Unix sockets of this name. Nothing leads
    /// there by an address.
    pub fn add_unix(&mut self, info: Listening, uid: u32, name: Rc<str>) -> ListenerId {
        let id = self.add(info, uid);
        self.hide_for_good(id);
        if let Some(l) = self.all.get_mut(&id) {
            l.unix = Some(name);
        }
        id
    }

    /// After [`Listeners::hide`].
    pub fn show(&mut self, id: ListenerId) {
        let Some(l) = self.all.get(&id) else { return };
        self.by_address.entry(key(l.info.netns, &l.info.addr)).or_default().push(id);
    }

    /// Of ours the one that the kernel would pick for a destination of this host: the exact address, else
    /// the wildcard of the same family, else a v6 wildcard that takes v4, too; at one address a socket of
    /// the same family first (`compute_score`). Sockets that share the address by SO_REUSEPORT take turns.
    pub fn find(&mut self, netns: u64, ip: [u8; 16], port: u16) -> Option<ListenerId> {
        let v4 = is_v4(&ip);
        let wildcards: &[[u8; 16]] = if v4 { &[V4_ANY, V6_ANY] } else { &[V6_ANY] };
        for candidate in std::iter::once(&ip).chain(wildcards) {
            let Some(ids) = self.by_address.get(&(netns, *candidate, port)) else { continue };
            let addr = |id: &ListenerId| self.all.get(id).map(|l| l.info.addr).unwrap_or_default();
            let own_family = v4 && ids.iter().any(|id| i32::from(addr(id).family) == libc::AF_INET);
            let fits: Vec<_> = ids
                .iter()
                .copied()
                .filter(|id| !(v4 && *candidate == V6_ANY) || addr(id).v6only == 0)
                .filter(|id| !own_family || i32::from(addr(id).family) == libc::AF_INET)
                .collect();
            if !fits.is_empty() {
                self.turn = self.turn.wrapping_add(1);
                return Some(fits[self.turn % fits.len()]);
            }
        }
        None
    }
}

fn key(netns: u64, addr: &Addr) -> Key {
    (netns, addr.ip, addr.port)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, Ipv6Addr};

    fn v4(s: &str) -> [u8; 16] {
        s.parse::<Ipv4Addr>().unwrap().to_ipv6_mapped().octets()
    }
    fn v6(s: &str) -> [u8; 16] {
        s.parse::<Ipv6Addr>().unwrap().octets()
    }
    fn add(l: &mut Listeners, cookie: u64, ip: [u8; 16], v6only: u32) -> ListenerId {
        let family = if is_v4(&ip) { libc::AF_INET } else { libc::AF_INET6 } as u16;
        l.add(Listening { cookie, netns: 1, addr: Addr { ip, port: 80, family, v6only } }, 0)
    }

    #[test]
    fn the_most_exact_address_wins() {
        let mut l = Listeners::default();
        let any6 = add(&mut l, 1, V6_ANY, 0);
        assert_eq!(l.find(1, v4("127.0.0.1"), 80), Some(any6));
        assert_eq!(l.find(1, v6("::1"), 80), Some(any6));
        let any4 = add(&mut l, 2, V4_ANY, 0);
        assert_eq!(l.find(1, v4("127.0.0.1"), 80), Some(any4));
        let exact = add(&mut l, 3, v4("127.0.0.1"), 0);
        assert_eq!(l.find(1, v4("127.0.0.1"), 80), Some(exact));
        assert_eq!(l.find(1, v4("127.0.0.2"), 80), Some(any4));
        assert_eq!(l.find(2, v4("127.0.0.1"), 80), None);
        assert_eq!(l.find(1, v4("127.0.0.1"), 81), None);
        l.remove(exact);
        l.remove(any4);
        assert_eq!(l.find(1, v4("127.0.0.1"), 80), Some(any6));
    }

    #[test]
    fn v6only_takes_no_v4() {
        let mut l = Listeners::default();
        let id = add(&mut l, 1, V6_ANY, 1);
        assert_eq!(l.find(1, v4("127.0.0.1"), 80), None);
        assert_eq!(l.find(1, v6("::1"), 80), Some(id));
    }

    #[test]
    fn reuseport_takes_turns() {
        let mut l = Listeners::default();
        let both = [add(&mut l, 1, V4_ANY, 0), add(&mut l, 2, V4_ANY, 0)];
        let a = l.find(1, v4("127.0.0.1"), 80).unwrap();
        let b = l.find(1, v4("127.0.0.1"), 80).unwrap();
        assert_ne!(a, b);
        assert!(both.contains(&a) && both.contains(&b));
        assert_eq!(l.by_cookie(2), Some(both[1]));
    }

    #[test]
    fn worker_numbers_are_reused() {
        let mut l = Listeners::default();
        let id = add(&mut l, 1, V4_ANY, 0);
        let l = l.get_mut(id).unwrap();
        for conn in 0..WORKERS as u64 {
            assert_eq!(l.join(conn, None), Some(conn as usize));
        }
        assert_eq!(l.join(99, None), None);
        assert_eq!(l.join(5, None), Some(5));
        assert_eq!(l.leave(5), Some(5));
        assert_eq!(l.worker_mask(), !(1 << 5));
        assert_eq!(l.join(99, Some(7)), Some(5), "another one has 7");
        assert_eq!(l.leave(7), Some(7));
        assert_eq!(l.leave(8), Some(8));
        assert_eq!((l.join(8, Some(8)), l.join(7, None)), (Some(8), Some(7)));
        assert_eq!(l.accepting().count(), WORKERS);
        assert_eq!(l.leave(1234), None);
    }
}
