//! On which path a connection is, and what a process does next. [`super`] has the tables.

use super::status::PeerStatus;
use crate::flags::{FlagSet, Stage};

/// One of the two parties that may move a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Party {
    /// The other side of the connection.
    Peer,
    /// The processes that share this side by fork, including the calling one. (If one of these
    /// processes follows the peer, it moves this side for all of them.)
    Group,
}

/// On which path a connection is, as far as the calling process knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathState {
    /// Both directions are in the rings.
    Rings,
    /// A party is switching the path at this moment.
    Moving(Party),
    /// A party has moved, and this process has not followed yet.
    Moved(Party),
    /// The peer has ended in the middle of a switch.
    Failed,
    /// The program first reads the rest of the ring, then the kernel socket. The number is a
    /// descriptor of the library.
    Draining(i32),
    /// In the kernel. The number is a descriptor of the program.
    Kernel(i32),
    /// The peer broke the protocol, or a switch failed: the program gets a reset. The party is the
    /// one that had moved before.
    Reset(Option<Party>),
    /// The socket has no connection, or not any more.
    Closed,
}

/// An event of a connection in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A call needs to know on which path its bytes go. `waits`: the call may wait for the peer.
    Call { waits: bool },
    /// The process has published a record, and a want word was armed.
    Sent,
    /// A call asks for readiness. It never waits.
    Look,
    /// The program shuts down a direction.
    Shutdown,
    /// The program has closed the last descriptor in this process.
    Close,
    /// The connection must become a kernel socket.
    Leave,
}

/// What the process must do after an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Continue on the present path. In the rings, these also tell how the connection has ended.
    Stay,
    /// Follow the other party ([`super::Follower`]).
    Follow,
    /// Do nothing for now: the peer is in the middle of a switch, and will wake this side when it
    /// has finished.
    Later,
    /// Move the connection, if [`super::claim`] says that this process is the mover.
    Move,
    /// Read the rest of the ring, and use the kernel socket for everything else.
    Both(i32),
    /// Use the kernel socket.
    Kernel(i32),
}

impl PathState {
    /// The state of a connection. `end`: this process's own descriptor of the kernel socket in
    /// which the stream continues after the ring.
    #[inline]
    pub const fn of(end: Option<i32>, group: FlagSet, peer: PeerStatus) -> PathState {
        match (group.stage(), end) {
            (Stage::Poisoned, _) if group.has_left() => PathState::Reset(Some(Party::Group)),
            (Stage::Poisoned, _) if peer.has_moved() => PathState::Reset(Some(Party::Peer)),
            (Stage::Poisoned, _) => PathState::Reset(None),
            (_, Some(fd)) => PathState::Draining(fd),
            (Stage::Switching, None) => PathState::Moving(Party::Group),
            (Stage::Moved, None) => PathState::Moved(Party::Group),
            (Stage::Rings, None) if peer.is_moving() => PathState::Moving(Party::Peer),
            (Stage::Rings, None) if peer.has_moved() => PathState::Moved(Party::Peer),
            (Stage::Rings, None) if peer.has_begun_to_move() => PathState::Failed,
            (Stage::Rings, None) => PathState::Rings,
        }
    }

    /// The next step after an event. The table in [`super`] lists all of them.
    pub const fn next(self, event: Event) -> Next {
        use {Party::*, PathState::*};
        match (self, event) {
            (Rings | Moving(Peer) | Failed | Reset(None), Event::Leave) => Next::Move,
            (Moving(Peer), Event::Call { waits: true } | Event::Close) => Next::Follow,
            (Moving(Peer), Event::Call { .. } | Event::Sent | Event::Look) => Next::Later,
            (Moving(Group) | Moved(Group), Event::Sent) => Next::Stay,
            (Moving(Group) | Moved(_) | Failed, _) => Next::Follow,
            (Draining(_), Event::Call { .. } | Event::Leave) => Next::Follow,
            (Draining(fd), Event::Look | Event::Shutdown) => Next::Both(fd),
            (Kernel(fd), Event::Call { .. } | Event::Look | Event::Shutdown) => Next::Kernel(fd),
            (Rings | Moving(Peer) | Draining(_) | Kernel(_) | Reset(_) | Closed, _) => Next::Stay,
        }
    }

    /// Do the rings serve the connection, or tell how it has ended?
    pub const fn in_rings(self) -> bool {
        matches!(self, PathState::Rings | PathState::Reset(_))
    }
    /// Has a switch begun that this process has not followed?
    pub const fn is_pending(self) -> bool {
        matches!(self, PathState::Moving(_) | PathState::Moved(_) | PathState::Failed)
    }
    /// Has this side left the rings, or is it about to? True also if the connection was reset
    /// since.
    pub const fn group_has_left(self) -> bool {
        use {Party::Group, PathState::*};
        matches!(self, Moving(Group) | Moved(Group) | Reset(Some(Group)) | Draining(_) | Kernel(_))
    }
    /// This process's descriptor of the kernel socket, if any.
    pub const fn kernel_socket(self) -> Option<i32> {
        match self {
            PathState::Draining(fd) | PathState::Kernel(fd) => Some(fd),
            _ => None,
        }
    }
}

/// Like [`PathState::in_rings`], for hot paths.
#[inline(always)]
pub const fn in_rings(end: Option<i32>, group: FlagSet, peer: PeerStatus) -> bool {
    group.is_poisoned() || end.is_none() && !group.has_left() && !peer.has_begun_to_move()
}
