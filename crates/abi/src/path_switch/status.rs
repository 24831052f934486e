//! The status that the peer has published about its side of a connection.

use crate::channel::status::{CARRIED, CLOSED, FIN, FOR_NOW, MIGRATED, MIGRATING, RST, SHUT_BOTH};
use crate::channel::Prod;
use core::sync::atomic::Ordering;

/// The peer's status word ([`Prod::status`]), read once. The peer may be hostile.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PeerStatus(u32);

impl PeerStatus {
    /// If one of these is set, a send must check further whether it may send.
    const NO_PLAIN_SEND: u32 = RST | CLOSED | SHUT_BOTH | MIGRATING;
    const ALL: u32 = FIN | RST | CLOSED | SHUT_BOTH | MIGRATING | MIGRATED | FOR_NOW | CARRIED;

    /// Reads the status. The caller then also sees what the peer did before it published the
    /// status.
    #[inline(always)]
    pub fn look(of: &Prod) -> PeerStatus {
        // Acquire: pairs with the releases in `mover`, and in the code that publishes the end of a
        // stream.
        PeerStatus(of.status.load(Ordering::Acquire))
    }
    /// Reads the status without ordering, so it may be outdated.
    #[inline(always)]
    pub fn hint(of: &Prod) -> PeerStatus {
        PeerStatus(of.status.load(Ordering::Relaxed))
    }
    #[cfg(test)]
    pub(super) const fn from_bits(bits: u32) -> PeerStatus {
        PeerStatus(bits)
    }

    /// For tests that act as a peer: a switch is under way.
    pub const MOVING: PeerStatus = PeerStatus(MIGRATING);
    /// For tests that act as a peer: the peer has moved.
    pub const MOVED: PeerStatus = PeerStatus(MIGRATING | MIGRATED);
    /// For tests that act as a peer: the raw bits.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Is one of these bits set: FIN, RST, CLOSED, SHUT_BOTH ([`crate::channel::status`])?
    #[inline(always)]
    pub const fn has(self, bits: u32) -> bool {
        self.0 & bits != 0
    }
    /// Is no bit set that a send must check?
    #[inline(always)]
    pub const fn sends_plainly(self) -> bool {
        !self.has(Self::NO_PLAIN_SEND)
    }
    /// Is the peer moving the connection, or has it moved?
    #[inline(always)]
    pub const fn has_begun_to_move(self) -> bool {
        self.has(MIGRATING | MIGRATED)
    }
    /// Is the peer in the middle of a switch: it has neither finished nor given up?
    #[inline(always)]
    pub const fn is_moving(self) -> bool {
        self.has(MIGRATING) && !self.has(MIGRATED | CLOSED | RST)
    }
    #[inline(always)]
    pub const fn has_moved(self) -> bool {
        self.has(MIGRATED)
    }
    /// Has the peer moved, and wants to return to the rings later?
    pub const fn comes_back(self) -> bool {
        self.has(FOR_NOW)
    }
    /// Has the peer put the unread bytes of its ring into this side's kernel socket?
    pub const fn has_carried(self) -> bool {
        self.has(CARRIED)
    }
    /// Has the peer closed its end, without moving before?
    pub const fn is_gone(self) -> bool {
        self.has(CLOSED) && !self.has_moved()
    }
    /// Does the peer read no more, and answer data with a reset? (After a move it has only stopped
    /// using the rings.)
    #[inline(always)]
    pub const fn refuses_data(self) -> bool {
        self.has(CLOSED | SHUT_BOTH) && !self.has_moved()
    }
    /// Has the peer ended the connection, whatever this side does?
    pub const fn has_ended(self) -> bool {
        self.has(CLOSED | RST)
    }
    /// Does the status contradict itself, so that the peer breaks the protocol? A peer that
    /// closes, or reads no more, must first publish how its stream ends. `is_unix`: a Unix socket
    /// that only stops receiving does so without an end of its stream.
    ///
    /// The peer sets the bits one after the other. So a status that contradicts itself now may be
    /// correct at the next look, and then that one counts.
    /// counts.
    pub const fn is_nonsense(self, is_unix: bool) -> bool {
        let ends = if is_unix { CLOSED } else { CLOSED | SHUT_BOTH };
        self.has(!Self::ALL) || self.has(ends) && !self.has(FIN | RST | MIGRATED)
    }
}
