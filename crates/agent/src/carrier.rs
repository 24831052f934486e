//! What carries the bytes of all connections with one other host, in order, until it fails.

use std::io;
use std::os::fd::BorrowedFd;

/// What goes before bytes: what it is, for which connection, and a number.
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
    /// What has come. True: there is room again for what was refused.
    ///
    /// # Errors
    /// It has failed.
    fn poll(&mut self, got: &mut dyn FnMut(Head, &[u8])) -> io::Result<bool>;
}
