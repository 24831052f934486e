//! Groups of sockets that a program itself has made to share an address
//! (SO_REUSEPORT).
//!
//! The kernel lets any socket of the same user join such a group, also one of a process
//! without the library, which would then get nothing: the program that selects
//! does not know it. So all sockets of the address are counted: while one is there that
//! nobody has shown us, the slots are empty, and the kernel's hash chooses among
//! all, as it did before. Nobody tells us when a socket joins; it is looked for while
//! connections come.

use super::{reply, Answer, Group, Member};
use crate::broker::clone::listening;
use crate::cpus::allowed_cpus;
use crate::descriptor::{self, Attached, Listening};
use crate::sockdiag::SockDiag;
use crate::{ConnId, Monitor};
use fsocket_bpf::select::{GLOBAL, PLACES};
use fsocket_proto::{Addr, Msg};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// How often strangers are looked for while connections come, and at most how
/// seldom while none do.
const LOOK: Duration = Duration::from_secs(1);
const REST: Duration = Duration::from_secs(8);
/// A socket that was just made is shown to us in a moment.
const SOON: Duration = Duration::from_millis(20);

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
    info: Listening,
    /// Of the sockets: the kernel's groups are of one user.
    uid: u32,
    /// Sockets of processes with the library, by cookie.
    known: BTreeSet<u64>,
    diag: Option<SockDiag>,
    /// Some socket at the address is not known.
    mixed: bool,
    /// Our program has been given out, so that it may be the group's.
    given: bool,
    next: Instant,
    pause: Duration,
    lookups: u64,
}

impl Own {
    fn new(info: Listening, uid: u32, diag: Option<SockDiag>) -> Own {
        let known = BTreeSet::from([info.cookie]);
        Own { info, uid, known, diag, mixed: false, given: false, next: Instant::now(), pause: SOON, lookups: 0 }
    }

    pub fn keep(&self) -> KeptOwn {
        let Listening { cookie, netns, addr } = self.info;
        let Addr { ip, port, family, v6only } = addr;
        KeptOwn { cookie, netns, ip, port, family, v6only, uid: self.uid, known: self.known.clone() }
    }

    fn is_for(&self, info: &Listening, uid: u32) -> bool {
        (self.info.netns, self.info.addr, self.uid) == (info.netns, info.addr, uid)
    }

    /// Is there a socket at the address that nobody has shown us?
    pub fn is_mixed(&self) -> bool {
        self.mixed
    }

    pub fn next(&self) -> Instant {
        self.next
    }

    fn look_for_strangers(&mut self) {
        // Where the kernel cannot be asked nobody can be ruled out.
        match self.diag.as_mut().and_then(|d| d.listeners(&self.info.addr)) {
            Some(there) => {
                self.mixed = there.iter().any(|cookie| !self.known.contains(cookie));
                self.known.retain(|cookie| there.contains(cookie));
            }
            None => self.mixed = true,
        }
    }

    fn look_again_after(&mut self, pause: Duration) {
        self.pause = pause;
        self.next = Instant::now() + pause;
    }
}

impl Group {
    /// Fills or empties the slots, as there are strangers or not. True: the last one has gone,
    /// or was none; workers that were left to the kernel are to ask again.
    fn settle(&mut self) -> bool {
        let Some(own) = &mut self.own else { return false };
        let before = own.mixed;
        own.look_for_strangers();
        own.look_again_after(if own.mixed { SOON } else { LOOK });
        if own.mixed != before {
            tracing::info!(group = self.id, strangers = own.mixed, "shared address");
        }
        let gone = before && !own.mixed;
        self.assign();
        gone
    }

    /// When its time has come. Whether a stranger has joined, or has gone.
    pub fn settle_if_due(&mut self, now: Instant) -> bool {
        let Some(own) = self.own.as_mut().filter(|o| o.next <= now) else { return false };
        let (was, pause) = (own.mixed, own.pause);
        let lookups = self.select.counts().unwrap_or_default();
        let lookups = lookups.iter().filter(|c| c.name == "lookups").flat_map(|c| &c.by_cpu).sum();
        let busy = std::mem::replace(&mut own.lookups, lookups) != lookups;
        own.look_for_strangers();
        let longer = (pause * 2).min(REST);
        let next = if busy && pause >= LOOK { LOOK } else { longer };
        own.look_again_after(next);
        if own.mixed == was {
            return false;
        }
        own.look_again_after(SOON);
        tracing::info!(group = self.id, strangers = own.mixed, "shared address");
        self.assign();
        true
    }

    /// Takes a socket of the program's as local listen socket of `member`; its place and CPU,
    /// and as [`Group::settle`].
    pub(super) fn add_own(&mut self, mut member: Member, fd: &Attached) -> Result<(u32, u32, bool), Errno> {
        if member.cpu == u32::MAX {
            let on = |cpu: &u32| self.members.values().filter(|m| m.cpu == *cpu).count();
            member.cpu = allowed_cpus().into_iter().min_by_key(|cpu| (on(cpu), *cpu)).unwrap_or(0);
        }
        let cpu = member.cpu;
        // The workers of a reload use the same sockets as those before them.
        let known = self.members.iter().find(|(_, m)| m.cookie == member.cookie).map(|(place, _)| *place);
        let place = match known {
            Some(place) => place,
            None => {
                let place = (GLOBAL + 1..PLACES).find(|p| !self.members.contains_key(p)).ok_or(Errno::AGAIN)?;
                self.select.put(place, fd.as_fd()).map_err(|_| Errno::INVAL)?;
                place
            }
        };
        if let Some(own) = &mut self.own {
            own.known.insert(member.cookie);
        }
        self.members.insert(place, member);
        let gone = self.settle();
        Ok((place, cpu, gone))
    }
}

impl Monitor {
    /// [`GROUP`](fsocket_proto::kind::GROUP) of a program's own sockets.
    pub(super) fn own_group(&mut self, id: ConnId, msg: &Msg, fd: &Attached) -> Answer {
        let info = descriptor::listening(fd.as_fd())?;
        if self.zones.all.values().any(|g| g.cookie == info.cookie) {
            // Not the program: we have made it share its address, for the program before.
            return Err(Errno::EXIST);
        }
        let owner = rustix::fs::fstat(fd.as_fd())?.st_uid;
        let client = self.clients.get(id).ok_or(Errno::BADF)?;
        let (uid, family) = (client.uid, client.family);
        let known = self.zones.all.values().find(|g| g.own.as_ref().is_some_and(|o| o.is_for(&info, owner)));
        let group = match known.map(|g| g.id) {
            Some(group) => group,
            None => {
                let (shape, _) = listening(fd.as_fd())?;
                let own = Own::new(info, owner, self.broker.diag(fd.as_fd()).ok());
                self.new_group(fd, &shape, Some(own), info.netns, uid)?
            }
        };
        let g = self.zones.all.get_mut(&group).ok_or(Errno::NOENT)?;
        g.holders.insert(id);
        g.families.insert(family);
        if let Some(own) = &mut g.own {
            own.known.insert(info.cookie);
            if own.diag.is_none() {
                own.diag = self.broker.diag(fd.as_fd()).ok();
            }
        }
        let gone = g.settle();
        // Strangers may have a selector of their own.
        if g.own.as_ref().is_some_and(|o| o.mixed && !o.given) {
            return Ok((Msg { id: group, ..reply(msg) }, None));
        }
        if let Some(own) = &mut g.own {
            own.given = true;
        }
        let program = rustix::io::fcntl_dupfd_cloexec(g.select.program(), 0)?;
        if gone {
            self.zones.call(group);
            self.zones_look();
        }
        Ok((Msg { id: group, ..reply(msg) }, Some(Rc::new(program))))
    }
}
