//! Kernel ends of the connections of one channel that have been switched, until each process that
//! needs one has taken its copy.

use crate::foreign::ForeignFd;
use crate::shm::idle_ends::IdleEnds;
use crate::ChannelId;
use fsocket_abi::channel::CLIENT;
use fsocket_proto::values::End;
use rustix::io::Errno;
use std::collections::HashMap;
use std::rc::Rc;

/// The subject of a message.
#[derive(Clone, Copy)]
pub struct Named {
    pub channel: ChannelId,
    pub slot: usize,
    pub side: usize,
    pub generation: u32,
}

impl Named {
    pub fn of(channel: ChannelId, end: End, generation: u32) -> Named {
        Named { channel, slot: end.slot, side: end.side, generation }
    }
}

#[derive(Default)]
pub struct Ends {
    generation: u32,
    pub end: [Option<Rc<ForeignFd>>; 2],
    pub ready: bool,
    /// The side that has asked for them.
    pub asked: usize,
    /// By side: it has fetched its end, and itself sends what the other side has not read.
    pub poured: [bool; 2],
    /// By side: it has fetched its end.
    pub claimed: [bool; 2],
}

/// The connections of one channel that have moved from shared memory to kernel TCP, by slot.
#[derive(Default)]
pub struct Switched {
    ends: HashMap<usize, Ends>,
    /// Client's ends that are being connected to the listener, with their slots' generations.
    pub dialling: HashMap<usize, (u32, ForeignFd)>,
    /// Ends of connections that the kernel has made, and that are over shared memory.
    pub idle: IdleEnds,
    /// The monitor has found that it cannot make sockets where this channel is.
    pub elsewhere: bool,
}

impl Switched {
    /// Is there an end that a process may still fetch?
    pub fn is_waiting(&self) -> bool {
        self.ends.values().any(|ends| ends.ready)
    }

    /// A side does not need its end any more.
    pub fn release(&mut self, slot: usize, side: usize, generation: u32, how: Release) {
        self.hang_up(slot, side, generation);
        if let Some(ends) = self.ends.get_mut(&slot).filter(|e| e.generation == generation) {
            let end = ends.end[side & 1].take();
            let claimed = ends.claimed[side & 1];
            match (how, end.filter(|_| ends.ready)) {
                (Release::Reset, Some(end)) => end.reset_on_close(),
                (Release::ReadAll(n), Some(end)) if !claimed => discard(&end, n),
                _ => {}
            }
            // The requester died in between, or both ends are done with.
            if !ends.ready || ends.end.iter().all(Option::is_none) {
                self.ends.remove(&slot);
            }
        }
    }

    /// The client's end is no longer being connected.
    pub fn hang_up(&mut self, slot: usize, side: usize, generation: u32) {
        if side == CLIENT && self.dialling.get(&slot).is_some_and(|(of, _)| *of == generation) {
            self.dialling.remove(&slot);
        }
    }

    /// All that there are, with their slots' generations.
    pub fn all(&self) -> Vec<(usize, u32)> {
        let dialling = self.dialling.iter().map(|(slot, (generation, _))| (*slot, *generation));
        self.ends.iter().map(|(slot, ends)| (*slot, ends.generation)).chain(dialling).collect()
    }

    pub fn of(&self, named: &Named) -> Option<&Ends> {
        self.ends.get(&named.slot).filter(|e| e.generation == named.generation)
    }

    pub fn of_mut(&mut self, named: &Named) -> Option<&mut Ends> {
        self.ends.get_mut(&named.slot).filter(|e| e.generation == named.generation)
    }

    pub fn end(&self, named: &Named, side: usize) -> Option<Rc<ForeignFd>> {
        self.of(named).filter(|e| e.ready)?.end[side & 1].clone()
    }

    pub fn keep(&mut self, named: &Named, end: [Option<ForeignFd>; 2], ready: bool) {
        let end = end.map(|e| e.map(Rc::new));
        let ends = Ends { generation: named.generation, end, ready, asked: named.side, ..Ends::default() };
        self.ends.insert(named.slot, ends);
    }

    /// An end that the requester has made, in two steps.
    pub fn ready_made(&mut self, named: &Named, own: bool, fd: ForeignFd) -> Result<(), Errno> {
        let side = if own { named.side } else { 1 - named.side };
        if own {
            if self.of(named).is_some() {
                return Err(Errno::ALREADY);
            }
            let mut end = [None, None];
            end[side] = Some(fd);
            self.keep(named, end, false);
            return Ok(());
        }
        let ends = self.ends.get_mut(&named.slot).filter(|e| e.generation == named.generation && !e.ready);
        let ends = ends.filter(|e| e.end[1 - side].is_some()).ok_or(Errno::INVAL)?;
        ends.end[side] = Some(Rc::new(fd));
        ends.ready = true;
        Ok(())
    }
}

/// The reason why a side does not need its end any more.
#[derive(Clone, Copy)]
pub enum Release {
    /// The side has copies of its own.
    Copied,
    /// The side closes with a reset, if no other process has that end.
    Reset,
    /// The side closes, and has read the end's first bytes in the ring.
    ReadAll(usize),
}

/// The bytes are there, because the loopback interface delivers at once.
fn discard(end: &ForeignFd, mut n: usize) {
    let mut bytes = [0; 4096];
    while n > 0 {
        let part = n.min(bytes.len());
        match end.recv(&mut bytes[..part]) {
            Ok(k @ 1..) => n -= k,
            _ => return,
        }
    }
}
