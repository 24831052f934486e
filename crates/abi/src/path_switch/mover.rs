//! A side moves the connection out of its rings.
//!
//! ```text
//!     Own::stop ──▶ Stopped::announce ──▶ heavy fence ──▶ Announced::look ──▶ Looked::leave_at
//!         ──▶ Looked::finish ──▶ heavy fence ──▶ Finished::look_back
//! ```

use super::status::PeerStatus;
use crate::channel::status::{CARRIED, CLOSED, FOR_NOW, MIGRATED, MIGRATING};
use crate::channel::{status, Dir, Migrated, Prod};
use crate::flags::Flags;
use crate::half::Half;
use core::sync::atomic::Ordering;
use fsocket_sync::atomic::{fence, AtomicU32};
use fsocket_sync::doorbell::FUTEX_BIT;
use fsocket_sync::token::Words as _;

/// If both sides want to move, one of them does. `over`: the peer has ended, so it does not go on even if it had claimed the
/// slot. `word`: [`crate::channel::Slot::switching`].
pub fn claim(word: &AtomicU32, over: bool) -> bool {
    word.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire).is_ok() || over
}

/// The side that has claimed the slot does not move after all.
pub fn unclaim(word: &AtomicU32) {
    word.store(0, Ordering::Release);
}

/// The words that a moving side writes.
#[derive(Clone, Copy)]
pub struct Own<'a> {
    pub group: &'a Flags,
    /// The direction that this side sends into.
    pub dir: &'a Dir,
    /// This side's position there.
    pub tx: &'a Half,
}

impl<'a> Own<'a> {
    /// The rings are the caller's alone from here on, which has the tokens of both directions. Once it gives them back,
    /// each thread that enters sees the flags, or finds no room. None: another process of the fork group was faster.
    pub fn stop(self) -> Option<Stopped<'a>> {
        if !self.group.begin_switch() {
            return None;
        }
        self.tx.set_limit(0);
        self.tx.withdraw();
        Some(Stopped { dir: self.dir, group: self.group })
    }
}

/// A side that sends nothing more into its ring.
#[must_use]
pub struct Stopped<'a> {
    dir: &'a Dir,
    group: &'a Flags,
}

impl<'a> Stopped<'a> {
    /// `peer`: the direction that the peer sends into. A heavy fence must follow ([`Fenced`]).
    pub fn announce(self, peer: &'a Dir) -> Announced<'a> {
        Announced { group: Some(self.group), ..announce(self.dir, peer) }
    }
}

/// The announcement of a side that no fork group has: nobody has ever used its end of the rings.
pub fn announce<'a>(own: &'a Dir, peer: &'a Dir) -> Announced<'a> {
    own.prod.status.fetch_or(MIGRATING, Ordering::Release);
    // Release: a sender that sees the want word armed sees MIGRATING.
    fence(Ordering::Release);
    peer.want_data.hint(FUTEX_BIT);
    Announced { own: &own.prod, peer: &peer.prod, group: None }
}

/// The peer's senders can know that the connection moves.
#[must_use]
pub struct Announced<'a> {
    own: &'a Prod,
    peer: &'a Prod,
    group: Option<&'a Flags>,
}

/// A heavy fence, behind the announcements of all connections that are moved at once.
pub struct Fenced(());

impl Fenced {
    /// `heavy`: the expensive half of [`fsocket_sync::light_fence`].
    pub fn after(heavy: impl FnOnce()) -> Fenced {
        heavy();
        Fenced(())
    }
}

impl<'a> Announced<'a> {
    /// From here on, a record that the mover does not find in the ring has a sender that follows. The same
    /// look finds a peer that closes its end, or the peer finds the mover.
    pub fn look(self, _: &Fenced) -> Looked<'a> {
        Looked { own: self.own, of: self.peer, group: self.group, peer: PeerStatus::look(self.peer) }
    }
}

/// A side that has seen what the peer did before the fence.
#[must_use]
pub struct Looked<'a> {
    own: &'a Prod,
    of: &'a Prod,
    group: Option<&'a Flags>,
    peer: PeerStatus,
}

impl<'a> Looked<'a> {
    pub fn peer(&self) -> PeerStatus {
        self.peer
    }
    /// The peer sends again what is behind this position of its ring ([`super::resume_at`]). `at` belongs to that direction.
    pub fn leave_at(&self, at: &Migrated, base: u64, limit: u64) {
        leave_at(at, base, limit);
    }
    /// What the peer had not read of this side's ring comes first in its kernel socket: `bytes` of the stream, from byte
    /// `first` on. `at` belongs to this side's direction.
    pub fn carried(&self, at: &Migrated, first: u64, bytes: u64) {
        at.base.store(first, Ordering::Relaxed);
        at.limit.store(bytes, Ordering::Relaxed);
        // Release: the two above.
        self.own.status.fetch_or(CARRIED, Ordering::Release);
    }
    /// The others of its group and the peer can follow. `comes_back`: it wants to return to the rings. A heavy fence must
    /// follow ([`Fenced`]).
    pub fn finish(self, comes_back: bool) -> Finished<'a> {
        let how = if comes_back { FOR_NOW } else { 0 };
        // Release: all that the mover did before.
        self.own.status.fetch_or(MIGRATED | how, Ordering::Release);
        if let Some(group) = self.group {
            group.end_switch();
        }
        Finished { of: self.of, before: self.peer }
    }
}

/// A side that has moved. Since its look the peer may have published a record, a FIN or its close, and have found the
/// mover not done. Its program need not make another call, so the mover takes that along, too.
#[must_use]
pub struct Finished<'a> {
    of: &'a Prod,
    before: PeerStatus,
}

impl Finished<'_> {
    /// The peer's status before, and now. What is published after this has a sender that follows, and a peer that closes
    /// after this finds a mover that is done.
    pub fn look_back(self, _: &Fenced) -> (PeerStatus, PeerStatus) {
        (self.before, PeerStatus::look(self.of))
    }
}

/// The consumer of a ring has stopped here. See [`Looked::leave_at`].
pub fn leave_at(at: &Migrated, base: u64, limit: u64) {
    at.base.store(base, Ordering::Relaxed);
    at.limit.store(limit, Ordering::Release);
}

/// The acts of a mover at the peer's end of the kernel connection, in the peer's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remains {
    /// The peer has closed its end, and does not come for it.
    pub gone: bool,
    /// The peer has sent a FIN.
    pub fin: bool,
    /// The peer has answered with a reset, or would.
    pub reset: bool,
}

impl Remains {
    /// `refused`: this side has sent something to a peer that had closed, which a reset answers.
    ///
    /// A reset behind a FIN is a broken pipe. A peer that is gone and has not reset the connection sends its FIN when its end is
    /// closed.
    pub const fn of(peer: PeerStatus, refused: bool) -> Remains {
        let gone = peer.is_gone();
        let answered = peer.has(status::RST) || refused;
        Remains { gone, fin: peer.has(status::FIN) && (answered || !gone), reset: gone && answered }
    }
}

/// This side is done with the rings: the last holder of an end that has moved lets go of it. `closes`: nobody has the end any
/// more, and its slot can be used again.
pub fn leave(own: &Prod, closes: bool) {
    let how = if closes { CLOSED } else { 0 };
    own.status.fetch_or(MIGRATING | MIGRATED | how, Ordering::Release);
}

/// After CLOSED was published: does the peer move just now, or has it? Then it may have taken its last look before that, and
/// nobody comes for this side's end of the kernel connection.
pub fn closes_beside_mover(peer: &Prod) -> bool {
    // The mover fences heavily between MIGRATING and its look.
    fence(Ordering::SeqCst);
    PeerStatus::look(peer).has_begun_to_move()
}
