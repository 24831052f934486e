//! Pipes by which the processes of one channel wake each other directly. ADR 38.

use crate::foreign::ForeignFd;
use crate::ConnId;
use fsocket_proto::values::Waiter;
use rustix::fd::AsRawFd;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::collections::{BTreeSet, HashMap};

/// A sleeping process, its waker and its waiter; and the process that rings.
pub type Pair = (ConnId, u8, Waiter, ConnId);

/// The pipes of one channel. Those with a descriptor: the sleeper has not confirmed its end yet.
#[derive(Default)]
pub struct Pipes(pub HashMap<Pair, Option<ForeignFd>>, BTreeSet<Rung>);

/// A process has woken another one through the monitor: ringer, sleeper, waker of the sleeper.
type Rung = (ConnId, ConnId, u8);
/// The most such facts kept for one channel. Further rings are delivered but lead to no pipes.
const RUNG: usize = 1024;

impl Pipes {
    pub fn note_rung(&mut self, rung: Rung) {
        if self.1.len() < RUNG {
            self.1.insert(rung);
        }
    }
    /// Whether the sleeper may ask for a pipe for that process, which then gets an end of it.
    pub fn was_rung(&self, rung: Rung) -> bool {
        self.1.contains(&rung)
    }
    /// Removes the pipes of a process that has ended. Returns the sleepers that had not confirmed
    /// their ends.
    pub fn leave(&mut self, id: ConnId) -> Vec<ConnId> {
        self.1.retain(|(ringer, sleeper, _)| *ringer != id && *sleeper != id);
        let gone = self.0.extract_if(|(sleeper, _, _, ringer), _| *sleeper == id || *ringer == id);
        gone.filter_map(|((sleeper, ..), end)| end.map(|_| sleeper)).collect()
    }
    /// The sleepers that have not confirmed their ends, when the channel ends.
    pub fn unready(&self) -> impl Iterator<Item = ConnId> + '_ {
        self.0.iter().filter(|(_, end)| end.is_some()).map(|((sleeper, ..), _)| *sleeper)
    }
}

/// Makes a pipe: the sleeper's end, and the end of the process that wakes it. Both count for this
/// user.
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
        // The pipe is full now. The writer gets an error at once instead of waiting.
        let chunk = [0u8; 4096];
        while rustix::io::write(write.as_fd(), &chunk).is_ok() {}
        assert_eq!(rustix::io::write(write.as_fd(), &[1]), Err(Errno::AGAIN));
        // The writer sets its own end to blocking mode and drains the pipe. The sleeper's end must
        // stay in non-blocking mode.
        rustix::fs::fcntl_setfl(write.as_fd(), OFlags::RDWR).unwrap();
        let mut all = vec![0u8; 1 << 17];
        assert!(rustix::io::read(write.as_fd(), &mut all).unwrap() > 0);
        assert_eq!(rustix::io::read(read.as_fd(), &mut all), Err(Errno::AGAIN));
        // After the sleeper has closed its end, a write must not cause SIGPIPE: it would end this
        // process.
        drop(read);
        assert_eq!(rustix::io::write(write.as_fd(), &[1]), Ok(1));
    }
}
