//! One connected process, and the monitor's state about it.

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

/// While this many answers wait, the monitor reads no further requests of that process.
/// (Unrequested messages do not count: a process that sleeps may have many of them, and sends a
/// request when it wakes.)
const OUT_PAUSE: usize = 64;

pub struct Client {
    pub fd: ForeignFd,
    /// The user, from SO_PEERCRED. An adopted process has its parent's user.
    pub uid: u32,
    /// The process number, for display only.
    pub pid: u32,
    /// Names the process in the `holders` of its family's sockets. 0: the process has not sent
    /// HELLO yet.
    pub nonce: u64,
    pub greeted: bool,
    /// The name of the program, as the process itself tells it.
    pub name: String,
    /// The counters of a process without an arena.
    pub told: Option<Box<Totals>>,
    /// The monitor has sent the counts of ended listeners to this client.
    pub has_closings: bool,
    pub family: FamilyId,
    /// The library's number for what the process may do and become. A client shares memory only
    /// with processes of one user that have the same rights.
    pub class: u64,
    /// Part of [`Rights`], read when HELLO comes.
    pub kernel: u64,
    /// Listeners of which the process has a descriptor. `works`: those from which it accepts
    /// connections.
    pub holds: BTreeSet<ListenerId>,
    pub works: BTreeSet<ListenerId>,
    /// The predecessor has announced this process before an `exec`.
    pub is_successor: bool,
    /// Whether an operator wants this process and its children to use the kernel; `None`: no such
    /// wish.
    pub off: Option<bool>,
    /// Index of the configuration entry for its program.
    pub program: Option<usize>,
    /// The process before the `exec`, until this one has taken over.
    pub successor_of: Option<ConnId>,
    /// Those of `holds` that its predecessor had, and that this process has not shown yet.
    pub unclaimed: BTreeSet<ListenerId>,
    /// Read ends of pipes that were sent to the process, and that it has not confirmed.
    pub pipes_unready: usize,
    /// The wakers of the process for which a WOKEN waits in `out`, with the channel that it names.
    pub(super) woken: BTreeSet<(u8, Option<ChannelId>)>,
    /// The last channel that the process has made; 0: none.
    pub last_channel: ChannelId,
    pub leases: Leases,
    pub(super) out: Queue,
    /// Descriptors sent since the process was last known to have received all of them.
    pub(super) in_flight: u64,
    /// A request that has used up its turn. In the next turn it goes on at this channel.
    pub unfinished: Option<(Msg, ForeignFd, ChannelId)>,
    /// The process has closed its end; its earlier messages are still to be read.
    pub hung_up: bool,
    /// The events for which epoll watches the socket. Edge-triggered: otherwise epoll would report
    /// each client that waits for its turn again in each turn of the others.
    pub(super) interest: EventFlags,
    /// The arena that the process has made.
    pub arena: Option<Rc<ArenaMem>>,
    /// Descriptors reserved for the arena that the process may still make.
    pub reserved: Option<Reserved>,
    /// An unrequested message was sent before the process had an arena.
    pub missed_pending: bool,
}

impl Client {
    /// `fd`: the control socket, from which only the monitor reads.
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

    /// Adds the counts that a process without an arena sends, because there is no arena to read
    /// them from.
    pub fn counted(&mut self, msg: request::Counts) {
        let told = self.told.get_or_insert_with(|| Box::new([0; COUNTERS.len()]));
        for counted in msg.counts.into_iter().flatten() {
            add(&mut told[counted.counter], counted.n);
        }
    }

    /// A client may share a channel only with processes that have equal rights.
    pub fn rights(&self) -> Rights {
        Rights { uid: self.uid, class: self.class, kernel: self.kernel }
    }

    /// Whether the client may still change its fork group: it holds no listener and no ports yet.
    pub fn has_nothing(&self) -> bool {
        self.holds.is_empty() && self.leases.is_empty()
    }

    /// Whether this client is a process that uses the monitor, not one that only wants a report.
    pub fn is_process(&self) -> bool {
        self.nonce != 0
    }

    /// Whether one more descriptor may be sent to the process now. If not, the kernel reports when
    /// the process has received some.
    pub(super) fn may_have_descriptor(&mut self) -> bool {
        if self.in_flight >= shares::FLIGHT && descriptor::is_received(self.fd.as_fd()) {
            self.in_flight = 0;
        }
        self.in_flight < shares::FLIGHT
    }

    /// Whether to read the next request of the process now.
    pub fn wants_input(&self) -> bool {
        self.out.answers() < OUT_PAUSE && !self.out.has_descriptors()
    }
}
