//! The raw limit: a byte queue in shared memory between two processes, and nothing else. It has one producer, one
//! consumer and 8-byte headers in the stream. Both sides spin and never sleep. There are no sockets, and no
//! protection from a hostile peer. A socket over shared memory cannot be faster.
//!
//! A header holds the length and the kind, and is never zero. The producer clears the *next* header before it
//! publishes one. So the consumer polls exactly the word that will change, and a small message is one cache line.
//!
//! Records are published in batches: the producer holds back the header of a batch's first record, and stores it
//! last. So a stream of small messages costs one transfer of a cache line for each [`BATCH`] bytes, and the sides
//! share no index meanwhile. A side publishes its batch before it waits to receive, so that a round trip is not
//! delayed.

use crate::worker::link::Link;
use rustix::mm::{mmap, MapFlags, ProtFlags};
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of one direction; a power of two.
const CAP: usize = 2 << 20;
/// Bytes of the longest record: the consumer copies one while the producer writes the next.
const RECORD: usize = 32 * 1024;
/// Bytes after which a batch is published.
const BATCH: u64 = 1024;
const DATA: u64 = 1 << 32;
const PAD: u64 = 2 << 32;
const FIN: u64 = 3 << 32;
/// Bytes of one direction: a page with the consumer's position, then the ring.
const DIRECTION: usize = 4096 + CAP;
/// Size of the shared file.
pub const SIZE: usize = 2 * DIRECTION;

/// One direction, mapped into this process.
#[derive(Clone, Copy)]
struct Ring {
    at: *mut u8,
}

impl Ring {
    fn head(&self) -> &AtomicU64 {
        // SAFETY: the mapping lives as long as the process; its first word is
        // only used as this atomic.
        unsafe { &*self.at.cast::<AtomicU64>() }
    }

    fn header(&self, pos: u64) -> &AtomicU64 {
        // SAFETY: positions of headers are multiples of 8 and masked to the
        // ring; both sides use headers only as atomics.
        unsafe { &*self.at.add(4096 + (pos as usize & (CAP - 1))).cast::<AtomicU64>() }
    }

    fn data(&self, pos: u64) -> *mut u8 {
        // SAFETY: the mask keeps the offset inside the ring.
        unsafe { self.at.add(4096 + (pos as usize & (CAP - 1))) }
    }
}

/// Both directions, as seen by one side.
pub struct Queue {
    tx: Ring,
    tail: u64,
    /// The position of the present batch, and the header that publishes it (0: no batch is held back).
    held: (u64, u64),
    /// The peer's read position, as last seen.
    free_from: u64,
    rx: Ring,
    head: u64,
    /// Bytes of the present record that are not read yet; they begin at `head`.
    rest: usize,
    /// Position of the next record's header.
    next: u64,
}

impl Queue {
    /// Maps the file `path` of [`SIZE`] zero bytes.
    pub fn open(path: &Path, server: bool) -> io::Result<Self> {
        let file = File::options().read(true).write(true).open(path)?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { mmap(std::ptr::null_mut(), SIZE, prot, MapFlags::SHARED | MapFlags::POPULATE, &file, 0)? };
        // SAFETY: inside the mapping.
        let rings = [Ring { at: at.cast() }, Ring { at: unsafe { at.cast::<u8>().add(DIRECTION) } }];
        let (tx, rx) = if server { (rings[1], rings[0]) } else { (rings[0], rings[1]) };
        Ok(Queue { tx, tail: 0, held: (0, 0), free_from: 0, rx, head: 0, rest: 0, next: 0 })
    }

    /// Waits until `bytes` and one more header are free after the tail.
    #[inline]
    fn reserve(&mut self, bytes: usize) {
        let fits = |tail: u64, head: u64| tail - head + bytes as u64 + 8 <= CAP as u64;
        if !fits(self.tail, self.free_from) {
            self.flush();
        }
        while !fits(self.tail, self.free_from) {
            std::hint::spin_loop();
            self.free_from = self.tx.head().load(Ordering::Acquire);
        }
    }

    /// Adds a record to the batch. Its `len` bytes are in the ring already.
    #[inline]
    fn publish(&mut self, header: u64, len: usize) {
        let next = self.tail + 8 + len.next_multiple_of(8) as u64;
        self.tx.header(next).store(0, Ordering::Relaxed);
        if self.held.1 == 0 {
            self.held = (self.tail, header);
        } else {
            self.tx.header(self.tail).store(header, Ordering::Relaxed);
        }
        self.tail = next;
        if next - self.held.0 >= BATCH {
            self.flush();
        }
    }

    /// Publishes the batch.
    #[inline]
    fn flush(&mut self) {
        let (at, header) = std::mem::take(&mut self.held);
        if header != 0 {
            // Release: publishes the records of the batch. It pairs with the consumer's acquire load of a header.
            self.tx.header(at).store(header, Ordering::Release);
        }
    }

    fn put(&mut self, piece: &[u8]) {
        let need = 8 + piece.len().next_multiple_of(8);
        let to_end = CAP - (self.tail as usize & (CAP - 1));
        if need > to_end {
            self.reserve(to_end);
            self.publish(PAD | (to_end - 8) as u64, to_end - 8);
        }
        self.reserve(need);
        // SAFETY: `reserve` made sure that the consumer is done with these
        // bytes, and they do not wrap.
        unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), self.tx.data(self.tail + 8), piece.len()) };
        self.publish(DATA | piece.len() as u64, piece.len());
    }
}

impl Link for Queue {
    #[inline]
    fn send(&mut self, message: &[u8]) -> io::Result<()> {
        for piece in message.chunks(RECORD) {
            self.put(piece);
        }
        Ok(())
    }

    /// Waits for the first byte, then takes what is there, as `recv` does.
    #[inline]
    fn recv(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut got = 0;
        while got < buffer.len() {
            if self.rest == 0 {
                self.head = self.next;
                let header = self.rx.header(self.head).load(Ordering::Acquire);
                if header == 0 {
                    if got > 0 {
                        break;
                    }
                    self.rx.head().store(self.head, Ordering::Release);
                    self.flush();
                    while self.rx.header(self.head).load(Ordering::Acquire) == 0 {
                        std::hint::spin_loop();
                    }
                    continue;
                }
                let len = header as u32 as usize;
                match header & !0xffff_ffff {
                    FIN => {
                        // Publish the batch: the peer has ended its stream, but may wait for an answer.
                        self.flush();
                        return Ok(got);
                    }
                    PAD => {
                        self.next = self.head + 8 + len as u64;
                        continue;
                    }
                    _ => {}
                }
                self.rest = len;
                self.next = self.head + 8 + len.next_multiple_of(8) as u64;
                self.head += 8;
            }
            let n = self.rest.min(buffer.len() - got);
            // SAFETY: `rest` bytes from `head` on are published and do not wrap.
            unsafe { std::ptr::copy_nonoverlapping(self.rx.data(self.head), buffer[got..].as_mut_ptr(), n) };
            got += n;
            self.head += n as u64;
            self.rest -= n;
        }
        let done = if self.rest == 0 { self.next } else { self.head & !7 };
        self.rx.head().store(done, Ordering::Release);
        Ok(got)
    }

    fn finish(&mut self) -> io::Result<()> {
        self.reserve(8);
        self.publish(FIN, 0);
        self.flush();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_arrive_in_order_across_wraps() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(SIZE as u64).unwrap();
        let mut client = Queue::open(file.path(), false).unwrap();
        let mut server = Queue::open(file.path(), true).unwrap();
        let (mut sent, mut seen) = (0u32, 0u32);
        let mut buffer = vec![0; 70_000];
        for round in 0..200usize {
            let message: Vec<u8> = (0..(round * 977) % 66_000 + 1).map(|i| (sent as usize + i) as u8).collect();
            client.send(&message).unwrap();
            sent = sent.wrapping_add(message.len() as u32);
            client.flush();
            while seen != sent {
                let room = 1 + (round * 31_337) % 65_536;
                let n = server.recv(&mut buffer[..room]).unwrap();
                for b in &buffer[..n] {
                    assert_eq!(*b, seen as u8);
                    seen = seen.wrapping_add(1);
                }
            }
        }
        client.finish().unwrap();
        assert_eq!(server.recv(&mut buffer).unwrap(), 0);
        // A message that is sent after the peer's end arrives, although its sender only receives afterwards.
        server.send(b"total").unwrap();
        assert_eq!(server.recv(&mut buffer).unwrap(), 0);
        assert_eq!(client.recv(&mut buffer).unwrap(), 5);
    }
}
