//! A carrier takes the bytes of all connections to one other host, in order, until it fails.

use std::io;
use std::os::fd::BorrowedFd;

/// Three words before the bytes: the kind ([`what`]), the receiver's number of the connection, and a position.
pub type Head = [u64; 3];
/// Bytes that go with one head, at most.
pub const CHUNK: usize = 16 * 1024;

pub mod what {
    /// Bytes of the stream.
    pub const DATA: u64 = 1;
    /// The program has read so many, from the beginning.
    pub const READ: u64 = 2;
    /// There are no more.
    pub const FIN: u64 = 3;
    /// It has been reset.
    pub const RESET: u64 = 4;
}

pub trait Carrier {
    /// Something has come by it: it works.
    fn is_ready(&self) -> bool;
    /// Readable when there is something to [`Carrier::poll`] for.
    fn fd(&self) -> BorrowedFd<'_>;
    /// False: not now; [`Carrier::poll`] says when there is room.
    ///
    /// # Errors
    /// It has failed.
    fn send(&mut self, head: &Head, bytes: &[u8]) -> io::Result<bool>;
    /// Gives all that has arrived to `got`. True: there is room again after a send was refused.
    ///
    /// # Errors
    /// It has failed.
    fn poll(&mut self, got: &mut dyn FnMut(Head, &[u8])) -> io::Result<bool>;
}
