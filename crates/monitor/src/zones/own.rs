//! Groups of sockets that share an address because the program has made them so (SO_REUSEPORT).
//!
//! The kernel lets any socket of the same user join such a group, even one of a process without
//! the library (a *stranger*). A stranger would get no connections, because the selecting BPF
//! program does not know it. So the monitor lists all sockets at the address. While one of them is
//! unknown, the slots are empty, and the kernel's hash chooses among all sockets, as without
//! Fastsocket. No event announces a socket that joins, so the monitor looks for strangers while
//! connections come.

use crate::descriptor::Listening;
use crate::sockdiag::SockDiag;
use fsocket_proto::Addr;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Time between two looks for strangers while connections come, and the longest time while none
/// come.
pub(super) const LOOK: Duration = Duration::from_secs(1);
pub(super) const REST: Duration = Duration::from_secs(8);
/// A process with the library usually announces a new socket within this time.
pub(super) const SOON: Duration = Duration::from_millis(20);

/// The state that the next monitor takes over.
#[derive(Serialize, Deserialize)]
pub struct KeptOwn {
    cookie: u64,
    netns: u64,
    ip: [u8; 16],
    port: u16,
    family: u16,
    v6only: u32,
    uid: u32,
    known: BTreeSet<u64>,
}

impl KeptOwn {
    /// `netns`: SO_NETNS_COOKIE of this process.
    pub fn take_over(self, netns: u64) -> Own {
        let KeptOwn { cookie, ip, port, family, v6only, uid, known, .. } = self;
        let info = Listening { cookie, netns: self.netns, addr: Addr { ip, port, family, v6only } };
        let diag = (netns == self.netns).then(SockDiag::new).flatten();
        let mut own =
            Own { info, uid, known, diag, mixed: false, given: true, next: Instant::now(), pause: SOON, lookups: 0 };
        own.look_for_strangers();
        own
    }
}

/// The state that only such a group has.
pub struct Own {
    pub(super) info: Listening,
    /// The owner of the sockets. (All sockets of such a kernel group belong to one user.)
    pub(super) uid: u32,
    /// Sockets of processes with the library, by cookie.
    pub(super) known: BTreeSet<u64>,
    pub(super) diag: Option<SockDiag>,
    /// A stranger's socket is at the address.
    pub(super) mixed: bool,
    /// The monitor has given the BPF program to a process, so the program may be attached to the
    /// group.
    pub(super) given: bool,
    pub(super) next: Instant,
    pub(super) pause: Duration,
    pub(super) lookups: u64,
}

impl Own {
    pub fn new(info: Listening, uid: u32, diag: Option<SockDiag>) -> Own {
        let known = BTreeSet::from([info.cookie]);
        Own { info, uid, known, diag, mixed: false, given: false, next: Instant::now(), pause: SOON, lookups: 0 }
    }

    pub fn keep(&self) -> KeptOwn {
        let Listening { cookie, netns, addr } = self.info;
        let Addr { ip, port, family, v6only } = addr;
        KeptOwn { cookie, netns, ip, port, family, v6only, uid: self.uid, known: self.known.clone() }
    }

    pub fn is_for(&self, info: &Listening, uid: u32) -> bool {
        (self.info.netns, self.info.addr, self.uid) == (info.netns, info.addr, uid)
    }

    /// Whether there is a socket at the address that no process has shown to the monitor.
    pub fn is_mixed(&self) -> bool {
        self.mixed
    }

    pub fn next(&self) -> Instant {
        self.next
    }

    pub(super) fn look_for_strangers(&mut self) {
        // If the kernel does not answer, the monitor must assume that there are strangers.
        match self.diag.as_mut().and_then(|d| d.listeners(&self.info.addr)) {
            Some(there) => {
                self.mixed = there.iter().any(|cookie| !self.known.contains(cookie));
                self.known.retain(|cookie| there.contains(cookie));
            }
            None => self.mixed = true,
        }
    }

    pub(super) fn look_again_after(&mut self, pause: Duration) {
        self.pause = pause;
        self.next = Instant::now() + pause;
    }
}
