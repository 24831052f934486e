//! Groups of sockets that a program itself has made to share an address
//! (SO_REUSEPORT).
//!
//! The kernel lets any socket of the same user join such a group, also one of a process
//! without the library, which would then get nothing: the program that selects
//! does not know it. So all sockets of the address are counted: while one is there that
//! nobody has shown us, the slots are empty, and the kernel's hash chooses among
//! all, as it did before. Nobody tells us when a socket joins; it is looked for while
//! connections come.

use crate::descriptor::Listening;
use crate::sockdiag::SockDiag;
use fsocket_proto::Addr;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// How often strangers are looked for while connections come, and at most how
/// seldom while none do.
pub(super) const LOOK: Duration = Duration::from_secs(1);
pub(super) const REST: Duration = Duration::from_secs(8);
/// A socket that was just made is shown to us in a moment.
pub(super) const SOON: Duration = Duration::from_millis(20);

/// As it is kept for a monitor after this one.
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
    /// `netns`: of this process.
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

/// What such a group has beside others.
pub struct Own {
    pub(super) info: Listening,
    /// Of the sockets: the kernel's groups are of one user.
    pub(super) uid: u32,
    /// Sockets of processes with the library, by cookie.
    pub(super) known: BTreeSet<u64>,
    pub(super) diag: Option<SockDiag>,
    /// Some socket at the address is not known.
    pub(super) mixed: bool,
    /// Our program has been given out, so that it may be the group's.
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

    /// Is there a socket at the address that nobody has shown us?
    pub fn is_mixed(&self) -> bool {
        self.mixed
    }

    pub fn next(&self) -> Instant {
        self.next
    }

    pub(super) fn look_for_strangers(&mut self) {
        // Where the kernel cannot be asked nobody can be ruled out.
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
