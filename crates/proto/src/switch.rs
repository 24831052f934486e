//! Actions of a [`Switch`](crate::request::Switch) at the other side's end.

/// Bits of [`Acts`](crate::values::Acts), done in this order.
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
    pub const ALL: u32 = POUR | FIN | RESET | SHUT_BOTH | SPEAK;
}
