//! Actions that a [`Switch`](crate::request::Switch) asks the monitor to do at the other side's
//! end.

/// Bits of [`Acts`](crate::values::Acts), done in this order.
pub mod act {
    /// The monitor sends the bytes that the requester has not read yet, out of the requester's
    /// receiving ring. The requester has stored its position in that ring in `Slot::migrated`.
    pub const POUR: u32 = 1;
    /// `shutdown(SHUT_WR)`.
    pub const FIN: u32 = 2;
    /// Makes the last close send a reset.
    pub const RESET: u32 = 4;
    /// `shutdown(SHUT_RDWR)`.
    pub const SHUT_BOTH: u32 = 8;
    /// Sends one byte, unless this end has an error or the end of the stream.
    pub const SPEAK: u32 = 16;
    /// The monitor closes its copy of the socket: the other side has the socket, too, and the
    /// monitor has nothing to do there.
    pub const LEAVE: u32 = 32;
    pub const ALL: u32 = POUR | FIN | RESET | SHUT_BOTH | SPEAK | LEAVE;
}
