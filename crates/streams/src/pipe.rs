//! Access to the program's pipes without a wait. `splice` moves bytes between a pipe and a ring
//! by one system call and one copy.
//!
//! These functions make several system calls on a descriptor. If another thread replaces the file
//! behind it between two of them, the call continues with the new file, as a `splice` would that
//! began a moment later.

use crate::user;
use crate::wait::{self, Call, Mask, Restart, Sleep, Source};
use core::ptr;
use fsocket_ring::{Segment, Segments};
use fsocket_sys::{self as sys, Errno, Result};

const PAGE: usize = 4096;
/// A descriptor opened with `O_PATH` can neither be read nor written.
const ACCESS: i32 = libc::O_ACCMODE | libc::O_PATH;

/// A descriptor of a pipe.
pub(crate) struct Pipe {
    pub fd: i32,
    /// Maximum number of bytes in the pipe.
    capacity: usize,
    /// The flags that `F_GETFL` returns.
    flags: i32,
}

impl Pipe {
    /// None: `fd` is no pipe, so the caller asks the kernel for the error.
    pub fn of(fd: i32) -> Option<Pipe> {
        let capacity = sys::fcntl(fd, libc::F_GETPIPE_SZ, 0).ok()? as usize;
        let flags = sys::fcntl(fd, libc::F_GETFL, 0).ok()?;
        Some(Pipe { fd, capacity, flags })
    }

    pub fn can_write(&self) -> bool {
        matches!(self.flags & ACCESS, libc::O_WRONLY | libc::O_RDWR)
    }
    pub fn can_read(&self) -> bool {
        matches!(self.flags & ACCESS, libc::O_RDONLY | libc::O_RDWR)
    }
    /// Is the descriptor open for both directions? `vmsplice` takes the direction from the
    /// descriptor, and would write.
    pub fn is_for_both(&self) -> bool {
        self.flags & ACCESS == libc::O_RDWR
    }
    /// Would a `splice` with these flags wait for this pipe?
    pub fn waits(&self, flags: u32) -> bool {
        self.flags & libc::O_NONBLOCK == 0 && flags & libc::SPLICE_F_NONBLOCK == 0
    }

    /// Number of bytes in the pipe.
    pub fn has(&self) -> usize {
        let mut n = 0i32;
        // SAFETY: an int for the answer.
        let r = unsafe {
            sys::raw(libc::SYS_ioctl, [self.fd as usize, libc::FIONREAD as usize, &raw mut n as usize, 0, 0, 0])
        };
        r.map_or(0, |_| n.max(0) as usize)
    }

    /// Returns those of `events` that the pipe has now.
    pub fn events(&self, events: i16) -> Result<i16> {
        let mut p = libc::pollfd { fd: self.fd, events, revents: 0 };
        // SAFETY: one pollfd.
        unsafe { sys::ppoll(&mut p, 1, Some(0), ptr::null()) }?;
        Ok(p.revents)
    }

    /// Sleeps until the pipe has one of `events`, or its other end is closed.
    ///
    /// # Errors
    /// EINTR, where a signal does not restart the call.
    pub fn wait(&self, events: i16) -> Result<()> {
        loop {
            let fds = &mut [libc::pollfd { fd: self.fd, events, revents: 0 }];
            let sleep = Sleep::of(Call::Kernel, None).restart(Restart::Socket);
            if wait::sleep(Source::Kernel { fds, mask: Mask::NONE }, sleep)? > 0 {
                return Ok(());
            }
        }
    }

    /// Copies up to `n` bytes from the pipe to `dst`. 0: the pipe is empty and has no writer.
    ///
    /// # Errors
    /// EAGAIN: the pipe is empty. EINVAL: [`Pipe::is_for_both`]. [`is_refused`]: this call cannot
    /// do it, another may.
    ///
    /// # Safety
    /// The caller owns `n` bytes at `dst`.
    pub unsafe fn take(&self, dst: *mut u8, n: usize) -> Result<usize> {
        if self.is_for_both() {
            return Err(Errno::EINVAL);
        }
        let to = Segment { at: dst, len: n };
        // SAFETY: `dst` has `n` bytes; the descriptor is open for reading only, so the kernel
        // writes them now, and not later.
        unsafe { vmsplice(self.fd, &to) }
    }

    /// Copies bytes of a ring into the pipe. Returns their number.
    ///
    /// # Errors
    /// EAGAIN: the pipe is full. EPIPE: it has no reader, and the thread has got SIGPIPE.
    /// [`is_refused`]: this call cannot do it.
    pub fn put(&self, all: &Segments) -> Result<usize> {
        if self.flags & libc::O_DIRECT != 0 {
            // A packet pipe: `write` would make a packet of the bytes, and `splice` does not.
            return self.put_pages(all);
        }
        let (fd, at, n) = (self.fd as usize, all.first() as usize, all.len());
        // SAFETY: `n` segments, which are in a ring that stays mapped.
        match unsafe { sys::raw(libc::SYS_pwritev2, [fd, at, n, usize::MAX, usize::MAX, libc::RWF_NOWAIT as usize]) } {
            // Linux before 6.4 returns these errors, and so does a pipe to which something else
            // was spliced.
            Err(e) if [libc::EOPNOTSUPP, libc::ENOSYS, libc::EINVAL].contains(&e.raw()) => self.put_pages(all),
            r => r,
        }
    }

    /// As [`Pipe::put`], but copies the bytes to new pages and gives these to the pipe.
    #[cold]
    fn put_pages(&self, all: &Segments) -> Result<usize> {
        // (The pipe takes a page as one unit, so a page cannot be too long.)
        let most = all.bytes().min(self.capacity.max(PAGE));
        let len = most.next_multiple_of(PAGE);
        let how = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
        let pages = sys::mmap_briefly(len, libc::PROT_READ | libc::PROT_WRITE, how, -1, 0)?;
        let mut done = 0;
        let mut copied = Ok(());
        for i in 0..all.len() {
            // SAFETY: the list has `all.len()` segments.
            let Segment { at, len } = unsafe { *all.first().add(i) };
            let n = len.min(most - done);
            // SAFETY: `n` bytes of a ring that stays mapped; the pages have room for them.
            copied = copied.and_then(|()| unsafe { user::write(at, pages.add(done), n) });
            done += n;
        }
        // SAFETY: the mapping has `done` bytes, and no code writes there any more.
        let r = copied.and_then(|()| unsafe { vmsplice(self.fd, &Segment { at: pages, len: done }) });
        // SAFETY: this is the mapping made here; pages that the pipe has taken stay with the
        // pipe.
        let _ = unsafe { sys::munmap(pages, len) };
        r
    }
}

/// Moves bytes to or from a pipe; the direction depends on how the descriptor was opened.
///
/// # Safety
/// The caller owns the segment, and nobody writes it any more if the descriptor is open for writing.
unsafe fn vmsplice(fd: i32, of: &Segment) -> Result<usize> {
    let args = [fd as usize, &raw const *of as usize, 1, libc::SPLICE_F_NONBLOCK as usize, 0, 0];
    // SAFETY: one vector, a local variable. The kernel fills its memory during the call, or
    // refers to memory that does not change.
    unsafe { sys::raw(libc::SYS_vmsplice, args) }
}

/// Did the library's own system call fail (a container's filter, no memory), and not the
/// program's call?
pub(crate) fn is_refused(e: Errno) -> bool {
    [libc::EPERM, libc::EACCES, libc::ENOSYS, libc::ENOMEM].contains(&e.raw())
}

/// The kernel's `splice`, between a pipe and a socket.
pub(crate) fn splice(input: i32, out: i32, n: usize, flags: u32) -> Result<usize> {
    // SAFETY: no memory involved.
    unsafe { sys::raw(libc::SYS_splice, [input as usize, 0, out as usize, 0, n, flags as usize]) }
}
