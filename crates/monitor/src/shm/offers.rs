//! Ends of kernel connections that their processes offer to move to shared memory.

use crate::sockdiag::Connected;
use crate::{ConnId, ListenerId};
use std::collections::HashMap;
use std::hash::Hash;
use std::net::SocketAddr;

/// Offers kept for one process, at most.
const PER_CLIENT: usize = 1024;

/// One end: the network namespace, its own address, and the address of the peer.
pub type End = (u64, SocketAddr, SocketAddr);

/// Offered ends by their identity, each with its process and notes about it.
pub struct Offers<E, N> {
    by_end: HashMap<E, (ConnId, N)>,
    number: HashMap<ConnId, usize>,
}

/// The notes about an end that is identified by its addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Here {
    /// The number by which the process knows this end.
    pub name: u64,
    /// The listener that has accepted the connection, if the process has received the socket from
    /// another process.
    pub listener: Option<ListenerId>,
    /// SO_COOKIE of the socket that was shown.
    pub socket: u64,
}

pub type Local = Offers<End, Here>;

/// Offered Unix sockets, by inode number.
pub type Unix = Offers<u32, Accepted>;

/// The accepting end of a Unix connection, as its process has shown it.
#[derive(Clone, Copy)]
pub struct Accepted {
    /// The process's name for the end.
    pub name: u64,
    pub netns: u64,
    pub kernel: Connected,
    pub listener: ListenerId,
}

impl<E, N> Default for Offers<E, N> {
    fn default() -> Self {
        Offers { by_end: HashMap::new(), number: HashMap::new() }
    }
}

impl<E: Eq + Hash, N: Copy> Offers<E, N> {
    pub fn add(&mut self, end: E, by: ConnId, name: N) {
        if self.number.get(&by).is_some_and(|n| *n >= PER_CLIENT) {
            // Offers are not removed when their connection ends, so old ones pile up. All of the
            // process's are dropped.
            self.leave(by);
        }
        if let Some((before, _)) = self.by_end.insert(end, (by, name)) {
            self.less(before);
        }
        *self.number.entry(by).or_default() += 1;
    }
    fn less(&mut self, by: ConnId) {
        if let Some(n) = self.number.get_mut(&by) {
            *n -= 1;
            if *n == 0 {
                self.number.remove(&by);
            }
        }
    }
    pub fn get(&self, end: &E) -> Option<(ConnId, N)> {
        self.by_end.get(end).copied()
    }
    pub fn take(&mut self, end: &E) -> Option<(ConnId, N)> {
        let found = self.by_end.remove(end)?;
        self.less(found.0);
        Some(found)
    }
    /// Forgets the offers of a process that has ended.
    pub fn leave(&mut self, id: ConnId) {
        if self.number.remove(&id).is_some() {
            self.by_end.retain(|_, (by, _)| *by != id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offers_go_with_their_process_and_are_bounded() {
        let at = |port: u16| (1, SocketAddr::from(([127, 0, 0, 1], port)), SocketAddr::from(([127, 0, 0, 1], 9)));
        let mut o = Local::default();
        let named = |name| Here { name, ..Here::default() };
        o.add(at(1), 7, named(70));
        o.add(at(2), 8, named(80));
        o.add(at(1), 7, named(71));
        assert_eq!(o.take(&at(1)), Some((7, named(71))));
        assert_eq!(o.take(&at(1)), None);
        assert!(!o.number.contains_key(&7));
        o.leave(8);
        assert!(o.by_end.is_empty() && o.number.is_empty());
        for port in 0..3 * PER_CLIENT as u16 {
            o.add(at(port), 7, named(1));
        }
        assert!(o.by_end.len() <= PER_CLIENT);
    }
}
