//! Idle kernel sockets of Unix connections that have moved to shared memory.
//!
//! Such a socket stays idle behind its descriptor, for the way back to the kernel. On the way back
//! each process puts bytes into its own end for the other side. A process that was killed cannot
//! do that. So the monitor keeps a copy of each end while the connection is in shared memory. When
//! one side moves back, the monitor uses the other side's end to send what the mover has not read
//! yet, as for TCP ([`super::switch`]). See ADR 82.

use crate::foreign::ForeignFd;
use rustix::io::Errno;
use std::collections::HashMap;

/// With fewer entries than this, the monitor does not search them for ended connections.
const FEW: usize = 64;

/// A slot, a side, and the slot's generation.
type Which = (usize, usize, u32);

#[derive(Default)]
struct Idle {
    generation: u32,
    end: [Option<ForeignFd>; 2],
    /// A side has moved the connection back, or has reported its end. An end that is shown later
    /// is not kept, because no message would say when to close it.
    is_over: bool,
}

/// The kept ends of one channel, by slot.
#[derive(Default)]
pub struct IdleEnds {
    ends: HashMap<usize, Idle>,
    /// Number of entries after the last search for ended connections.
    looked: usize,
}

impl IdleEnds {
    /// Keeps the end of one side. `is_open`: whether a slot still has the connection with this
    /// generation.
    ///
    /// # Errors
    /// EALREADY: the connection does not need this end.
    pub fn keep(
        &mut self,
        (slot, side, generation): Which,
        fd: ForeignFd,
        is_open: impl Fn(usize, u32) -> bool,
    ) -> Result<(), Errno> {
        if self.ends.len() >= FEW.max(self.looked * 2) {
            self.ends.retain(|slot, idle| is_open(*slot, idle.generation));
            self.looked = self.ends.len();
        }
        let idle = self.ends.entry(slot).or_default();
        if idle.generation != generation {
            *idle = Idle { generation, ..Idle::default() };
        }
        let end = &mut idle.end[side & 1];
        if idle.is_over || end.is_some() {
            return Err(Errno::ALREADY);
        }
        *end = Some(fd);
        Ok(())
    }

    /// Takes out the other side's end, because one side moves the connection back. (The mover has
    /// its own end.)
    pub fn take_other(&mut self, (slot, side, generation): Which) -> Option<ForeignFd> {
        let idle = self.ends.entry(slot).or_default();
        let mut end = match idle.generation == generation {
            true => std::mem::take(&mut idle.end),
            false => [None, None],
        };
        *idle = Idle { generation, is_over: true, ..Idle::default() };
        end[(1 - side) & 1].take()
    }

    /// Closes both ends, because neither side needs them any more.
    pub fn release(&mut self, slot: usize, generation: u32) {
        if let Some(idle) = self.ends.get_mut(&slot).filter(|idle| idle.generation == generation) {
            *idle = Idle { generation, is_over: true, ..Idle::default() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    fn pair() -> [ForeignFd; 2] {
        let (a, b) = UnixStream::pair().unwrap();
        [a, b].map(|end| ForeignFd::new(end.into(), 0))
    }

    #[test]
    fn the_mover_gets_at_the_other_end_once() {
        let mut all = IdleEnds::default();
        for (side, end) in pair().into_iter().enumerate() {
            all.keep((3, side, 7), end, |_, _| true).unwrap();
        }
        assert!(all.take_other((3, 0, 6)).is_none(), "of another connection");
        for (side, end) in pair().into_iter().enumerate() {
            all.keep((3, side, 7), end, |_, _| true).unwrap();
        }
        assert!(all.take_other((3, 0, 7)).is_some());
        assert!(all.take_other((3, 1, 7)).is_none());
    }

    #[test]
    fn an_end_that_comes_too_late_is_closed() {
        let mut all = IdleEnds::default();
        let [a, b] = pair();
        assert!(all.take_other((3, 0, 7)).is_none());
        assert_eq!(all.keep((3, 1, 7), a, |_, _| true), Err(Errno::ALREADY));
        // The next connection in the same slot.
        assert_eq!(all.keep((3, 1, 8), b, |_, _| true), Ok(()));
        all.release(3, 8);
        assert!(all.take_other((3, 0, 8)).is_none());
    }

    #[test]
    fn ends_of_closed_connections_do_not_pile_up() {
        let mut all = IdleEnds::default();
        for slot in 0..10 * FEW {
            let [a, _] = pair();
            all.keep((slot, 0, 1), a, |slot, _| slot < 2).unwrap();
        }
        assert!(all.ends.len() <= FEW + 2);
    }
}
