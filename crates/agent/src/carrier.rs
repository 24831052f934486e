//! A carrier transports the bytes of all connections to one other host, in order, until it fails.

use std::io;
use std::os::fd::BorrowedFd;

/// Three words before the bytes: the kind ([`what`]), the number that the receiver gave the
/// connection, and a position.
pub type Head = [u64; 3];
/// Most bytes that go with one head.
pub const CHUNK: usize = 16 * 1024;

pub mod what {
    /// Bytes of the stream.
    pub const DATA: u64 = 1;
    /// The program has read this many bytes since the beginning of the stream.
    pub const READ: u64 = 2;
    /// The stream has ended.
    pub const FIN: u64 = 3;
    /// The connection has been reset.
    pub const RESET: u64 = 4;
}

pub trait Carrier {
    /// Whether the carrier has received something, which shows that it works.
    fn is_ready(&self) -> bool;
    /// A descriptor that is readable when [`Carrier::poll`] has something to do.
    fn fd(&self) -> BorrowedFd<'_>;
    /// Sends a message. Returns false if there is no room now; [`Carrier::poll`] reports when
    /// there is.
    ///
    /// # Errors
    /// The carrier has failed.
    fn send(&mut self, head: &Head, bytes: &[u8]) -> io::Result<bool>;
    /// Passes everything that has arrived to `got`. Returns true if there is room again after a
    /// send was refused.
    ///
    /// # Errors
    /// The carrier has failed.
    fn poll(&mut self, got: &mut dyn FnMut(Head, &[u8])) -> io::Result<bool>;
}
