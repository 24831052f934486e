//! The RDMA carrier: an agent writes bytes into the other agent's memory, and a message tells
//! where they are.
//!
//! For each direction the receiver has places of [`CHUNK`] bytes, which are used in turn. Each of
//! its messages tells how many places it has emptied. If it has nothing to send, it sends a
//! message for this purpose only.

use crate::carrier::{Carrier, Head, CHUNK};
use fsocket_rdma::agree::{Key, Role};
use fsocket_rdma::{Access, Agent, Body, Event, Mapping, Refused, Region, Transfer, Window};
use rustix::fs::{fcntl_add_seals, ftruncate, memfd_create, MemfdFlags, SealFlags};
use std::io;
use std::net::{IpAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;

const PLACES: u64 = 64;
const SIZE: usize = PLACES as usize * CHUNK;
/// Kinds in addition to [`crate::carrier::what`]. The first one tells where the places are; the
/// second one only that places are empty.
const WINDOW: u64 = 101;
const EMPTIED: u64 = 102;

pub struct Verbs {
    agent: Agent,
    link: u32,
    out: Region,
    /// The other agent may write here at any time.
    into: Region,
    theirs: Option<Window>,
    /// Places of the other agent that this one has used, and those that the other agent has
    /// emptied since.
    used: u64,
    emptied_there: u64,
    /// Places here that were emptied, and how many of them the other agent was told about.
    emptied: u64,
    told: u64,
    refused: bool,
    events: Vec<Event>,
}

fn memory() -> io::Result<Rc<Mapping>> {
    let fd = memfd_create("fastsocket-agent", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&fd, SIZE as u64)?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Mapping::new(fd, SIZE).map_err(io::Error::other)
}

impl Verbs {
    /// Makes a carrier on the device with the address `own`, to the agent at the other end of
    /// `stream`.
    pub fn new(own: IpAddr, stream: TcpStream, role: Role, key: &Key) -> anyhow::Result<Verbs> {
        let mut agent = Agent::new(own)?;
        let link = agent.link(stream, role, key)?;
        let made = agent.get(link).ok_or(fsocket_rdma::Error::NotSupported)?;
        let out = made.register(&memory()?, 0..SIZE, Access::None)?;
        let into = made.register(&memory()?, 0..SIZE, Access::Write)?;
        let Window { addr, rkey, len } = into.window();
        let said = made.post(&[WINDOW, addr, rkey.into(), len.into(), 0, 0, 0], None);
        anyhow::ensure!(said.is_ok(), "the link has failed at once");
        Ok(Verbs {
            agent,
            link,
            out,
            into,
            theirs: None,
            used: 0,
            emptied_there: 0,
            emptied: 0,
            told: 0,
            refused: false,
            events: Vec::new(),
        })
    }

    fn post(&mut self, head: &Head, bytes: &[u8]) -> io::Result<bool> {
        let Some(theirs) = self.theirs else { return Ok(false) };
        let Some(link) = self.agent.get(self.link) else { return Err(io::ErrorKind::NotConnected.into()) };
        if bytes.len() > CHUNK {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let place = (self.used % PLACES) as usize * CHUNK;
        let transfer = (!bytes.is_empty()).then(|| {
            // SAFETY: the place and at most CHUNK bytes are within the region. No send reads them,
            // because the other agent has emptied this place.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.out.start().add(place), bytes.len()) };
            Transfer { region: &self.out, from: place..place + bytes.len(), to: theirs, at: place }
        });
        let [what, to, a] = *head;
        let body: Body = [what, to, a, bytes.len() as u64, self.used, self.emptied, 0];
        match link.post(&body, transfer) {
            Ok(()) => {
                self.told = self.emptied;
                self.used += u64::from(!bytes.is_empty());
                Ok(true)
            }
            Err(Refused::Full) => Ok(false),
            Err(_) => Err(io::ErrorKind::ConnectionAborted.into()),
        }
    }

    fn heard(&mut self, body: Body, chunk: &mut [u8], got: &mut dyn FnMut(Head, &[u8])) -> io::Result<()> {
        let hostile = || Err(io::ErrorKind::InvalidData.into());
        let [what, to, a, len, number, emptied, _] = body;
        if what == WINDOW {
            let (Ok(rkey), Ok(len), None) = (to_u32(a), to_u32(len), self.theirs) else { return hostile() };
            self.theirs = Some(Window { addr: to, rkey, len });
            return if len as usize == SIZE { Ok(()) } else { hostile() };
        }
        if !(self.emptied_there..=self.used).contains(&emptied) || len as usize > CHUNK {
            return hostile();
        }
        self.emptied_there = emptied;
        let bytes = &mut chunk[..len as usize];
        if len > 0 {
            if number != self.emptied {
                return hostile();
            }
            // SAFETY: the place is within the region, and `bytes` is not longer than a place.
            unsafe {
                let from = self.into.start().add((number % PLACES) as usize * CHUNK);
                std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len());
            }
            self.emptied += 1;
        }
        if what != EMPTIED {
            got([what, to, a], bytes);
        }
        Ok(())
    }
}

fn to_u32(n: u64) -> Result<u32, std::num::TryFromIntError> {
    u32::try_from(n)
}

impl Carrier for Verbs {
    fn is_ready(&self) -> bool {
        self.theirs.is_some()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.agent.as_fd()
    }

    fn send(&mut self, head: &Head, bytes: &[u8]) -> io::Result<bool> {
        let is_full = !bytes.is_empty() && self.used - self.emptied_there >= PLACES;
        let sent = !is_full && self.post(head, bytes)?;
        self.refused |= !sent;
        Ok(sent)
    }

    fn poll(&mut self, got: &mut dyn FnMut(Head, &[u8])) -> io::Result<bool> {
        let mut chunk = [0u8; CHUNK];
        let mut events = std::mem::take(&mut self.events);
        loop {
            let more = self.agent.poll(&mut events).map_err(io::Error::other)?;
            for event in events.drain(..) {
                match event {
                    Event::Message(_, body) => self.heard(body, &mut chunk, got)?,
                    Event::Down(_, down) => return Err(io::Error::other(format!("{down:?}"))),
                    Event::Idle(_) | Event::Room(_) => {}
                }
            }
            // If there is no room for the message now, an event will report room, and this code
            // runs again.
            if self.emptied - self.told >= PLACES / 2 {
                self.post(&[EMPTIED, 0, 0], &[])?;
            }
            if !more {
                break;
            }
        }
        self.events = events;
        Ok(std::mem::take(&mut self.refused))
    }
}
