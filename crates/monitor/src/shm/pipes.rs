//! The pipes by which the processes of one channel wake each other. ADR 38.

use crate::foreign::ForeignFd;
use crate::ConnId;
use rustix::fd::AsRawFd;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::collections::HashMap;

/// A sleeper (process, waker, waiter) and the process that wakes it.
pub type Pair = (ConnId, u8, u64, ConnId);

/// The pipes of one channel. With a descriptor: the sleeper has not confirmed its end.
#[derive(Default)]
pub struct Pipes(pub HashMap<Pair, Option<ForeignFd>>);

impl Pipes {
    /// A process is gone. Returns the sleepers that had not confirmed their ends.
    pub fn leave(&mut self, id: ConnId) -> Vec<ConnId> {
        let gone = self.0.extract_if(|(sleeper, _, _, ringer), _| *sleeper == id || *ringer == id);
        gone.filter_map(|((sleeper, ..), end)| end.map(|_| sleeper)).collect()
    }
    /// The channel is gone. As [`Self::leave`].
    pub fn unready(&self) -> impl Iterator<Item = ConnId> + '_ {
        self.0.iter().filter(|(_, end)| end.is_some()).map(|((sleeper, ..), _)| *sleeper)
    }
}

/// The sleeper's end, and that of the process that wakes it. They count for this user.
pub fn pipe(uid: u32) -> Result<(ForeignFd, ForeignFd), Errno> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC | rustix::pipe::PipeFlags::NONBLOCK)?;
    let path = format!("/proc/self/fd/{}", write.as_raw_fd());
    let write = rustix::fs::open(path, OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?;
    Ok((ForeignFd::new(read, uid), ForeignFd::new(write, uid)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neither_end_blocks_or_breaks_the_other() {
        let (read, write) = pipe(0).unwrap();
        // Full: the process that wakes is told so, at once.
        let chunk = [0u8; 4096];
        while rustix::io::write(write.as_fd(), &chunk).is_ok() {}
        assert_eq!(rustix::io::write(write.as_fd(), &[1]), Err(Errno::AGAIN));
        // It makes its own end blocking, and takes everything out: the sleeper's is as it was.
        rustix::fs::fcntl_setfl(write.as_fd(), OFlags::RDWR).unwrap();
        let mut all = vec![0u8; 1 << 17];
        assert!(rustix::io::read(write.as_fd(), &mut all).unwrap() > 0);
        assert_eq!(rustix::io::read(read.as_fd(), &mut all), Err(Errno::AGAIN));
        // The sleeper's end: no SIGPIPE, which would end this process.
        drop(read);
        assert_eq!(rustix::io::write(write.as_fd(), &[1]), Ok(1));
    }
}
