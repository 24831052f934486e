//! Listeners: their holders, their workers, and which listener a destination leads to.

use crate::address::{is_v4, V4_ANY, V6_ANY};
use crate::by_user::Counts;
use crate::descriptor::{Listening, Reuse};
use crate::{ChannelId, ConnId, FamilyId, ListenerId, Rights};
use fsocket_abi::channel::WORKERS;
use fsocket_proto::Addr;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

pub struct Listener {
    pub id: ListenerId,
    pub info: Listening,
    /// User of the process that has registered the listener first.
    pub uid: u32,
    /// The options that say which other sockets may have the same address.
    pub reuse: Reuse,
    /// Processes that have a descriptor of the listener. When the last one goes, the listener
    /// ends.
    pub holders: BTreeSet<ConnId>,
    /// The worker for each number. The numbers of workers that have ended are reused.
    pub workers: [Option<ConnId>; WORKERS],
    /// Workers for which no number was left: they only take connections from others' queues.
    pub stealers: BTreeSet<ConnId>,
    /// At least two processes accept, or did. So a connection may be in the queue of a process
    /// that does not take it.
    pub is_shared: bool,
    /// Families with a former or current worker: they may have the server side of connections.
    pub families: BTreeSet<FamilyId>,
    pub channels: BTreeSet<ChannelId>,
    /// Connections opened through channels that have ended.
    pub opened: u64,
    /// The rights of its workers, all of which share the channels.
    pub served_by: Option<Rights>,
    /// Processes with different rights want to accept, so all of them use the kernel.
    pub is_mixed: bool,
    /// Processes unknown to the monitor may hold the listener. While no worker accepts,
    /// connections go to the kernel.
    pub held_elsewhere: bool,
    pub shown: Shown,
    /// The log already says that this listener's connections wait too long.
    pub had_untaken: bool,
    /// For a stand-in for Unix connections, the name of their sockets ([`Listeners::add_unix`]).
    pub unix: Option<Rc<str>>,
}

/// When clients find a listener.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shown {
    Yes,
    /// As soon as a process works for it.
    WhenServed,
    /// As soon as a process accepts. Before that, a worker may only poll, and leave `accept` to
    /// processes without the library.
    WhenAccepted,
    Never,
}

impl Listener {
    /// Bit mask of the existing workers.
    pub fn worker_mask(&self) -> u64 {
        self.workers.iter().enumerate().fold(0, |mask, (i, w)| mask | u64::from(w.is_some()) << i)
    }

    /// All processes that accept.
    pub fn accepting(&self) -> impl Iterator<Item = ConnId> + '_ {
        self.workers.iter().flatten().chain(&self.stealers).copied()
    }

    /// The number of a worker; `None`: the process has none.
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

    /// Gives a process after `exec` the number of the worker that it replaces, and thereby that
    /// worker's queue.
    pub fn inherit(&mut self, conn: ConnId, number: usize) -> bool {
        let free = self.number_of(conn).is_none() && self.workers.get(number).is_some_and(Option::is_none);
        if free {
            self.workers[number] = Some(conn);
        }
        free
    }

    /// Removes a worker. Returns the worker's number, if any.
    pub fn leave(&mut self, conn: ConnId) -> Option<usize> {
        self.stealers.remove(&conn);
        let n = self.number_of(conn)?;
        self.workers[n] = None;
        Some(n)
    }
}

/// Key of the index by address: network namespace, address, port.
type Key = (u64, [u8; 16], u16);

#[derive(Default)]
pub struct Listeners {
    all: BTreeMap<ListenerId, Listener>,
    by_address: HashMap<Key, Vec<ListenerId>>,
    /// Number of listeners at each port.
    ports: Counts<u16>,
    turn: usize,
    /// Number of listeners of each user.
    users: Counts<u32>,
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
        self.ports.of(port) > 0
    }

    /// The listener of this very socket. (If a program closes a socket and listens at the same
    /// address again, the new socket has another cookie.)
    pub fn by_cookie(&self, cookie: u64) -> Option<ListenerId> {
        self.all.contains_key(&cookie).then_some(cookie)
    }

    pub fn owned_by(&self, uid: u32) -> usize {
        self.users.of(uid) as usize
    }

    /// Number of listeners of each user.
    pub fn by_user(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        self.users.iter()
    }

    pub fn add(&mut self, info: Listening, uid: u32) -> ListenerId {
        let id = info.cookie;
        self.users.change(uid, 1);
        self.ports.change(info.addr.port, 1);
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
        self.users.change(listener.uid, -1);
        self.ports.change(listener.info.addr.port, -1);
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

    /// Removes the listener from the index: no address leads to it any more.
    pub fn hide(&mut self, id: ListenerId) {
        let Some(key) = self.all.get(&id).map(|l| key(l.info.netns, &l.info.addr)) else { return };
        if let Some(ids) = self.by_address.get_mut(&key) {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                self.by_address.remove(&key);
            }
        }
    }

    /// Hides a listener that was just added until a process works for it.
    pub fn hide_until_served(&mut self, id: ListenerId) {
        self.hide(id);
        if let Some(l) = self.all.get_mut(&id) {
            l.shown = Shown::WhenServed;
        }
    }

    /// Hides a listener forever.
    pub fn hide_for_good(&mut self, id: ListenerId) {
        self.hide(id);
        if let Some(l) = self.all.get_mut(&id) {
            l.shown = Shown::Never;
        }
    }

    /// Adds a stand-in listener for Unix connections. It stands for the connections that a fork
    /// group has accepted at Unix sockets of this name. No address leads to it.
    pub fn add_unix(&mut self, info: Listening, uid: u32, name: Rc<str>) -> ListenerId {
        let id = self.add(info, uid);
        self.hide_for_good(id);
        if let Some(l) = self.all.get_mut(&id) {
            l.unix = Some(name);
        }
        id
    }

    /// Undoes [`Listeners::hide`].
    pub fn show(&mut self, id: ListenerId) {
        let Some(l) = self.all.get(&id) else { return };
        self.by_address.entry(key(l.info.netns, &l.info.addr)).or_default().push(id);
    }

    /// The listener that the kernel would choose for a destination on this host. The exact address
    /// comes first, then the wildcard of the same family, then an IPv6 wildcard that takes IPv4,
    /// too. At one address a socket of the same family comes first (`compute_score`). Sockets that
    /// share the address by SO_REUSEPORT take turns.
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
