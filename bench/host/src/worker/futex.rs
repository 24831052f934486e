//! Two processes that exchange short messages in shared memory and sleep on a futex. Waiting costs at
//! least as much if both processes are on one CPU.

use super::link::Link;
use super::ops::Quick;
use rustix::mm::{mmap, MapFlags, ProtFlags};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

/// Longest message.
const ROOM: usize = 256;

/// One direction: the number of messages so far, and the last message. The peer answers it before the next one is
/// sent.
#[repr(C, align(64))]
struct Slot {
    sent: AtomicU32,
    len: AtomicU32,
    bytes: [u8; ROOM],
}

/// The length that marks the end of the stream.
const END: u32 = u32::MAX;

/// Both directions, as seen by one side.
pub struct Pair {
    out: *mut Slot,
    from: *mut Slot,
    seen: u32,
}

impl Pair {
    /// Maps the file `path`; the server makes it large enough.
    pub fn open(path: &Path, server: bool) -> io::Result<Self> {
        let file = std::fs::File::options().read(true).write(true).open(path)?;
        let size = 2 * size_of::<Slot>();
        if server {
            file.set_len(size as u64)?;
        }
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice; it lives as long as the process.
        let at = unsafe { mmap(std::ptr::null_mut(), size, prot, MapFlags::SHARED, &file, 0)? }.cast::<Slot>();
        // SAFETY: the second slot is inside the mapping.
        let slots = [at, unsafe { at.add(1) }];
        let (out, from) = if server { (slots[1], slots[0]) } else { (slots[0], slots[1]) };
        Ok(Pair { out, from, seen: 0 })
    }

    fn word(slot: *mut Slot) -> &'static AtomicU32 {
        // SAFETY: the mapping is never removed; both sides use the word only as an atomic.
        unsafe { &(*slot).sent }
    }

    fn len(slot: *mut Slot) -> &'static AtomicU32 {
        // SAFETY: the mapping is never removed; both sides use the length only as an atomic.
        unsafe { &(*slot).len }
    }

    fn publish(&mut self, len: u32) {
        Self::len(self.out).store(len, Ordering::Relaxed);
        // Release: publishes the message. It pairs with the peer's acquire load of the count.
        Self::word(self.out).fetch_add(1, Ordering::Release);
        futex(Self::word(self.out), libc::FUTEX_WAKE, 1);
    }
}

/// FUTEX_WAIT: waits while `word` is `value`. FUTEX_WAKE: wakes `value` waiters.
pub fn futex(word: &AtomicU32, operation: libc::c_int, value: u32) {
    let no_limit = std::ptr::null::<libc::timespec>();
    // SAFETY: the word lives through the call, and a null timeout is allowed.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, value, no_limit) };
}

impl Quick for Pair {}

impl Link for Pair {
    fn send(&mut self, message: &[u8]) -> io::Result<()> {
        if message.len() > ROOM {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: the length is checked above. The peer has taken the last message, because it has answered it.
        unsafe { std::ptr::copy_nonoverlapping(message.as_ptr(), (&raw mut (*self.out).bytes).cast(), message.len()) };
        self.publish(message.len() as u32);
        Ok(())
    }

    fn recv(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let word = Self::word(self.from);
        while word.load(Ordering::Acquire) == self.seen {
            futex(word, libc::FUTEX_WAIT, self.seen);
        }
        self.seen = self.seen.wrapping_add(1);
        let len = Self::len(self.from).load(Ordering::Relaxed);
        if len == END {
            return Ok(0);
        }
        if len as usize > buffer.len() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: the peer has published `len` bytes of the slot, and `buffer` has room for them.
        unsafe {
            std::ptr::copy_nonoverlapping((&raw const (*self.from).bytes).cast(), buffer.as_mut_ptr(), len as usize)
        };
        Ok(len as usize)
    }

    fn finish(&mut self) -> io::Result<()> {
        self.publish(END);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_and_end() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut server = Pair::open(file.path(), true).unwrap();
        let mut client = Pair::open(file.path(), false).unwrap();
        let echo = std::thread::spawn({
            let path = file.path().to_owned();
            move || {
                // The thread needs a pair of its own, because pointers cannot be sent to other threads.
                let mut server = Pair::open(&path, true).unwrap();
                let mut buffer = [0; ROOM];
                while let n @ 1.. = server.recv(&mut buffer).unwrap() {
                    server.send(&buffer[..n]).unwrap();
                }
            }
        });
        for round in 1..100u8 {
            client.send(&[round; 8]).unwrap();
            let mut answer = [0; 8];
            assert!(client.recv_all(&mut answer).unwrap() && answer == [round; 8]);
        }
        client.finish().unwrap();
        echo.join().unwrap();
        assert!(server.send(&[0; ROOM + 1]).is_err());
    }
}
