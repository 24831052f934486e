//! One connected process, and what the monitor knows of it.

use super::queue::Queue;
use crate::arenas::{add, ArenaMem, Totals};
use crate::foreign::{ForeignFd, Reserved};
use crate::leased::Leases;
use crate::{descriptor, shares, ChannelId, ConnId, FamilyId, ListenerId, Rights};
use fsocket_abi::arena::COUNTERS;
use fsocket_proto::{request, Msg};
use rustix::event::epoll::EventFlags;
use std::collections::BTreeSet;
use std::rc::Rc;

/// While this many answers wait, no further requests of that process are read. (What it did not ask
/// for does not count: who sleeps may have much of it, and asks for something when it wakes.)
const OUT_PAUSE: usize = 64;

pub struct Client {
    pub fd: ForeignFd,
    /// From SO_PEERCRED; of an adopted process, its parent's.
    pub uid: u32,
    /// For display only.
    pub pid: u32,
    /// Names the process in the `holders` of its family's sockets; 0: no HELLO yet.
    pub nonce: u64,
    pub greeted: bool,
    /// Of its program, as it says.
    pub name: String,
    /// What it has counted without an arena.
    pub told: Option<Box<Totals>>,
    /// It was sent the counts of ended listeners.
    pub has_closings: bool,
    pub family: FamilyId,
    /// Its rights, in a number of the library's: what it can do and become. Of processes of one user
    /// only those with the same share memory with a client.
    pub class: u64,
    /// Of [`Rights`]: read at HELLO.
    pub kernel: u64,
    /// Listeners that it holds, and those that it works for.
    pub holds: BTreeSet<ListenerId>,
    pub works: BTreeSet<ListenerId>,
    /// Announced before an `exec`.
    pub is_successor: bool,
    /// An operator wants it, and its children, to use the kernel, or not to.
    pub off: Option<bool>,
    /// What the configuration says of it: place in the list.
    pub program: Option<usize>,
    /// By whom, until it has taken over.
    pub successor_of: Option<ConnId>,
    /// Of `holds`: left to a successor that has not shown that it has them.
    pub unclaimed: BTreeSet<ListenerId>,
    /// Read ends of pipes that it was sent, and has not confirmed.
    pub pipes_unready: usize,
    /// Its wakers for which a WOKEN waits in `out`, with the channel that WOKEN names.
    pub(super) woken: BTreeSet<(u8, Option<ChannelId>)>,
    /// The channel that it has made last; 0: none.
    pub last_channel: ChannelId,
    pub leases: Leases,
    pub(super) out: Queue,
    /// Descriptors sent since it had received everything.
    pub(super) in_flight: u64,
    /// A request that has taken a turn: it goes on at this channel in the next one.
    pub unfinished: Option<(Msg, ForeignFd, ChannelId)>,
    /// Nobody is at the other end; what was sent before is still to be read.
    pub hung_up: bool,
    /// What epoll says of it. Once for each change: one that waits for its turn, and many do in a flood, is not looked at
    /// before each turn of others.
    pub(super) interest: EventFlags,
    /// The arena that it made.
    pub arena: Option<Rc<ArenaMem>>,
    /// For the arena that it may yet make.
    pub reserved: Option<Reserved>,
    /// Something unasked was sent before it had an arena.
    pub missed_pending: bool,
}

impl Client {
    /// `fd`: its control socket, which is the monitor's to read.
    pub fn new(fd: ForeignFd, uid: u32, pid: u32, family: FamilyId) -> Client {
        Client {
            fd: fd.control().sends(),
            uid,
            pid,
            nonce: 0,
            greeted: false,
            name: String::new(),
            told: None,
            has_closings: false,
            family,
            class: 0,
            kernel: 0,
            holds: BTreeSet::new(),
            works: BTreeSet::new(),
            is_successor: false,
            off: None,
            program: None,
            successor_of: None,
            unclaimed: BTreeSet::new(),
            pipes_unready: 0,
            woken: BTreeSet::new(),
            last_channel: 0,
            leases: Leases::default(),
            out: Queue::default(),
            in_flight: 0,
            hung_up: false,
            unfinished: None,
            interest: EventFlags::IN | EventFlags::ET,
            arena: None,
            reserved: Some(Reserved::new(uid, shares::ARENA)),
            missed_pending: false,
        }
    }

    /// It has no arena that could be looked at, and says what it has counted.
    pub fn counted(&mut self, msg: request::Counts) {
        let told = self.told.get_or_insert_with(|| Box::new([0; COUNTERS.len()]));
        for counted in msg.counts.into_iter().flatten() {
            add(&mut told[counted.counter], counted.n);
        }
    }

    /// Whose processes may share a channel with it, on its side.
    pub fn rights(&self) -> Rights {
        Rights { uid: self.uid, class: self.class, kernel: self.kernel }
    }

    /// Whether it may still become one of another fork group: nothing goes with the one that it has.
    pub fn has_nothing(&self) -> bool {
        self.holds.is_empty() && self.leases.is_empty()
    }

    /// Whether it counts as a process that uses the monitor (and not one that
    /// only wants a report).
    pub fn is_process(&self) -> bool {
        self.nonce != 0
    }

    /// Whether it may be sent one more descriptor now. If not, the kernel tells when it receives.
    pub(super) fn may_have_descriptor(&mut self) -> bool {
        if self.in_flight >= shares::FLIGHT && descriptor::is_received(self.fd.as_fd()) {
            self.in_flight = 0;
        }
        self.in_flight < shares::FLIGHT
    }

    /// Whether to read its next request now.
    pub fn wants_input(&self) -> bool {
        self.out.answers() < OUT_PAUSE && !self.out.has_descriptors()
    }
}
