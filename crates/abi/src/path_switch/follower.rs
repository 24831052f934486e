//! A process goes after a connection that has moved.

use super::state::{Party, PathState};
use super::status::PeerStatus;
use crate::channel::{Dir, Migrated, RING_CAP};
use crate::flags::Flags;
use crate::half::Half;
use core::sync::atomic::Ordering;

/// How far a follower is: what happened last.
///
/// | state | Begins | GroupIsLate | PeerIsLate | Refused | HasEnd |
/// | --- | --- | --- | --- | --- | --- |
/// | `Moving(Group)` | AwaitGroup | Claim | Claim | Fail | Install |
/// | `Moved(Group)` | Claim | Claim | Claim | Fail | Install |
/// | `Reset(Some(Group))` | AwaitGroup | Claim | Claim | Fail | Install |
/// | `Moving(Peer)` | AwaitPeer | AwaitPeer | Fail | Fail | Fail |
/// | `Moved(Peer)` | Pour | Pour | Pour | Fail | Resend |
/// | `Draining(fd)` | Drain | Drain | Drain | Drain | Install |
/// | `Kernel(fd)` | Done | Done | Done | Done | Done |
/// | `Closed` | Lost | Lost | Lost | Lost | Lost |
/// | `Rings` | Fail | Fail | Fail | Fail | Fail |
/// | `Failed` | Fail | Fail | Fail | Fail | Fail |
/// | `Reset(None)` | Fail | Fail | Fail | Fail | Fail |
/// | `Reset(Some(Peer))` | Fail | Fail | Fail | Fail | Fail |
///
/// Claim and Pour are [`Step::Claim`] without and with `pours`. A group that was reset may have a mover that is not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Follower {
    Begins,
    /// The process of this group that moves the connection was not done in time, or is.
    GroupIsLate,
    /// The same of the peer.
    PeerIsLate,
    /// The monitor has no end for this side.
    Refused,
    /// The monitor has given this side's end, and the calling thread has the token of the sending direction.
    HasEnd,
}

/// The next step of a follower.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Wait, for a limited time, while [`group_moves`]. Then [`Follower::GroupIsLate`].
    AwaitGroup,
    /// Wait, for a limited time, until the peer has moved. Then [`Follower::PeerIsLate`].
    AwaitPeer,
    /// Ask the monitor for this side's end. `pours`: this process sends itself what the peer has not read.
    Claim { pours: bool },
    /// Send again what the mover did not take along ([`resume_at`]), skip what it had carried ([`Skip`]), then
    /// [`followed`] and [`Step::Install`].
    Resend,
    /// Put the end behind the program's numbers, or behind the ring if that still has something.
    Install,
    /// The ring is read first. Once it is empty, put the kernel socket behind the program's numbers.
    Drain(i32),
    /// Another thread was faster: the connection is in the kernel.
    Done(i32),
    /// Another thread has released the connection.
    Lost,
    /// Reset the connection: the peer died half-way, never meant to move, or its bytes are lost.
    Fail,
}

impl Follower {
    pub const fn next(self, state: PathState) -> Step {
        use {Follower::*, Party::*, PathState::*};
        match (state, self) {
            (Kernel(fd), _) => Step::Done(fd),
            (Closed, _) => Step::Lost,
            (Draining(_) | Moving(Group) | Moved(Group) | Reset(Some(Group)), HasEnd) => Step::Install,
            (Draining(fd), _) => Step::Drain(fd),
            (Moved(Peer), HasEnd) => Step::Resend,
            (_, Refused | HasEnd) => Step::Fail,
            (Moving(Group) | Reset(Some(Group)), Begins) => Step::AwaitGroup,
            (Moving(Group) | Moved(Group) | Reset(Some(Group)), _) => Step::Claim { pours: false },
            (Moving(Peer), Begins | GroupIsLate) => Step::AwaitPeer,
            (Moved(Peer), _) => Step::Claim { pours: true },
            (Rings | Moving(Peer) | Failed | Reset(_), _) => Step::Fail,
        }
    }
}

/// Is a process of the fork group in the middle of a switch?
pub fn group_moves(group: &Flags) -> bool {
    group.look().is_switching()
}

/// A consumer of the ring `tx`, in the state in which the mover has left it (`at`): what it finds is to be sent in the kernel
/// connection, by the monitor for the mover, and then by the follower. The mover itself does not read there any more. None:
/// nonsense, from which a read would leave the ring.
pub fn resume_at(tx: &Dir, at: &Migrated) -> Option<Half> {
    let head = tx.cons.head.load(Ordering::Acquire);
    let (base, limit) = (at.base.load(Ordering::Acquire), at.limit.load(Ordering::Acquire));
    let off = head.wrapping_sub(base) & (RING_CAP as u64 - 1);
    if base > head || limit > RING_CAP as u64 - off {
        return None;
    }
    let h = Half::default();
    h.set_pos(head);
    h.set_base(base);
    h.set_limit(limit);
    Some(h)
}

/// After [`Step::Resend`], with the token of the sending direction: this group has left the rings. What it has not read of the
/// peer's ring comes first, unless [`Skip`] says otherwise.
pub fn followed(group: &Flags) {
    group.follow();
}

/// Bytes that a follower skips in its kernel socket, because it has read them in the peer's ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Skip {
    /// This number of bytes; the ring is not read any more.
    Bytes(u64),
    /// The peer says nonsense.
    Hostile,
}

impl Skip {
    /// The caller has the token of the receiving direction `rx`. `from`: where the peer says what it has carried.
    pub fn begin(group: &Flags, peer: PeerStatus, from: &Migrated, rx: &Half) -> Skip {
        if !peer.has_carried() {
            return Skip::Bytes(0);
        }
        // (Written before CARRIED, which the caller has seen by an acquire.)
        let (first, n) = (from.base.load(Ordering::Relaxed), from.limit.load(Ordering::Relaxed));
        let read = rx.bytes().wrapping_sub(first);
        if n > RING_CAP as u64 || read > n {
            return Skip::Hostile;
        }
        group.drain();
        Skip::Bytes(read)
    }
}
