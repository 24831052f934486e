//! What a [`crate::kind::SWITCH`] asks for, its `arg2`. The monitor makes the sockets, and no process is
//! ever given the other side's end: an explicitly bound socket keeps its port for whoever holds it.

/// Make both ends. fd: any TCP socket of the connection's network namespace, which says only
/// where that is. Answered with the requester's end.
pub const MAKE: u64 = 0;
/// Do something at the other side's end, in that side's name: see [`act`] for `arg1`'s high
/// half.
pub const ACT: u64 = 1;
/// After EXDEV: the two ends of an ordinary connection that the requester has made, its own and
/// the other one.
pub const OWN_READY: u64 = 2;
pub const OTHER_READY: u64 = 3;
/// A fresh TCP socket in place of the requester's end, and none for the other.
pub const ALONE: u64 = 4;
/// Nobody has accepted the connection: connect the client's end to the kernel's listener. From
/// the server's side. fd as for MAKE. `result` EINPROGRESS: ask again in a moment.
pub const DIAL: u64 = 5;

/// `arg2` of CLAIM: the claimant sends itself what the other side has not read; an [`ACT`] that comes
/// later (nobody waited for it) does not.
pub const POURS: u64 = 1;

/// `arg2` of RELEASE: the side closes, and has read all of the ring. The same bytes in its end ([`CARRIED`]) are not unread
/// ones, which the kernel would answer with a reset.
///
/// [`CARRIED`]: fsocket_abi::channel::status::CARRIED
pub const READ_ALL: u64 = 1;

/// Bits of [`ACT`], done in this order.
pub mod act {
    /// What the requester has not read yet is sent. The requester has written its place in the
    /// ring into `Slot::migrated`.
    pub const POUR: u32 = 1;
    /// `shutdown(SHUT_WR)`.
    pub const FIN: u32 = 2;
    /// The last close sends a reset.
    pub const RESET: u32 = 4;
    /// `shutdown(SHUT_RDWR)`.
    pub const SHUT_BOTH: u32 = 8;
    /// One byte, unless the end has met an error or its end.
    pub const SPEAK: u32 = 16;
}
