//! One connection between hosts: the ring of the program on this host, and the state of the other
//! half on the other host.
//!
//! The bytes of a program stay in its ring until the program on the other host has read them. An
//! agent reads them with MSG_PEEK, and removes them when the other agent reports that they were
//! read. So an agent never has the only copy of a byte. If the connection returns to its kernel
//! connection, both sides only agree on two numbers. The library then sends again the bytes that
//! are still in the ring.

use crate::carrier::{what as carried, CHUNK};
use crate::hooked;
use crate::link::{what, Frame};
use crate::peer::Peer;
use crate::stand_in::StandIn;
use std::collections::VecDeque;
use std::io::ErrorKind::WouldBlock;
use std::os::fd::{AsFd, BorrowedFd};

/// Most bytes of one direction that the other program has not read.
const WINDOW: u64 = 256 * 1024;
/// Most bytes that an agent holds for a connection: those that a program has left in its ring, and
/// a window.
const HELD: usize = (1 << 20) + WINDOW as usize;
/// Size of the buffer for peeked bytes.
pub const BUFFER: usize = WINDOW as usize + 64 * 1024;

#[derive(PartialEq, Eq, Debug, Clone, Copy)]
pub enum After {
    Keep,
    Gone,
}
use After::*;

pub struct Mirror {
    id: u32,
    pub peer: usize,
    /// The number that the other agent gave the connection; 0: not known yet.
    pub remote: u64,
    /// The monitor's number of the wish (its request to move a connection), until the connection
    /// has moved here.
    pub wish: Option<u64>,
    pub stand_in: Option<StandIn>,
    /// Bytes of this host's program: those sent to the other agent, and those that the remote
    /// program has read.
    sent: u64,
    read_there: u64,
    /// The program on this host sends nothing more.
    pub ended: bool,
    fin_sent: bool,
    /// Bytes of the remote program: those put into the ring here, and those reported to the other
    /// agent as read.
    delivered: u64,
    told: u64,
    held: VecDeque<u8>,
    fin_came: bool,
    fin_done: bool,
    /// The connection is returning to the kernel. `Some(true)`: the other agent has sent its
    /// number.
    back: Option<bool>,
    /// The connection has returned to the kernel: on this host, and on the other one.
    done: [bool; 2],
    /// The program on the other host has moved to the kernel: how much it has read, and the length
    /// of all that it has sent through the agents.
    left_there: Option<(u64, u64)>,
    /// The program here has moved to the kernel: how much it had read, and the rest of its stream
    /// that must still be sent.
    left_here: Option<(u64, VecDeque<u8>)>,
}

impl Mirror {
    pub fn new(id: u32, peer: usize, remote: u64, wish: Option<u64>, stand_in: Option<StandIn>) -> Mirror {
        Mirror {
            id,
            peer,
            remote,
            wish,
            stand_in,
            sent: 0,
            read_there: 0,
            ended: false,
            fin_sent: false,
            delivered: 0,
            told: 0,
            held: VecDeque::new(),
            fin_came: false,
            fin_done: false,
            back: None,
            done: [false; 2],
            left_there: None,
            left_here: None,
        }
    }

    /// Whether the agent must poll the ring here: it has bytes, and no event reports when the
    /// program reads them.
    pub fn is_to_be_looked_at(&self) -> bool {
        self.stand_in.is_some() && self.back.is_none() && self.told < self.delivered
    }

    /// Whether both programs have ended their streams, and both ends were reported.
    pub fn has_ended(&self) -> bool {
        self.fin_sent && self.fin_done
    }

    fn frame(&self, what: u64, a: u64, b: u64) -> Frame {
        Frame { what, to: self.remote, from: self.id.into(), a, b, ..Frame::default() }
    }

    /// Moves as many bytes as possible.
    pub fn serve(&mut self, peer: &mut Peer, buffer: &mut [u8]) -> After {
        if self.left_here.is_some() {
            return self.send_tail(peer);
        }
        let Some(stand_in) = self.stand_in.as_ref().filter(|_| self.back.is_none()) else { return Keep };
        let near = stand_in.near.as_fd();
        if hooked::place(near).is_none_or(|place| place.draining != 0) {
            return self.leaves_here(peer, buffer);
        }
        while !self.held.is_empty() {
            match hooked::send(near, self.held.as_slices().0) {
                Ok(n) => {
                    self.held.drain(..n);
                    self.delivered += n as u64;
                }
                Err(e) if e.kind() == WouldBlock => break,
                Err(_) => return self.fails(peer),
            }
        }
        if let Some((read, _)) = self.left_there.filter(|(_, all)| *all == self.delivered) {
            self.take_out(read, buffer);
            return self.leave();
        }
        if self.fin_came && self.held.is_empty() && !self.fin_done {
            hooked::shutdown_write(near);
            self.fin_done = true;
        }
        let Some(place) = hooked::place(near) else { return Keep };
        let read = self.delivered.saturating_sub(place.unread);
        if read > self.told && peer.carry([carried::READ, self.remote, read], &[]) {
            self.told = read;
        }
        let all_sent = loop {
            let out = (self.sent - self.read_there) as usize;
            if out as u64 >= WINDOW {
                break false;
            }
            match hooked::recv(near, &mut buffer[..out + BUFFER - WINDOW as usize], true) {
                Ok(0) => {
                    self.ended = true;
                    break true;
                }
                Ok(n) if n <= out => break true,
                Ok(n) => {
                    for chunk in buffer[out..n].chunks(CHUNK) {
                        if !peer.carry([carried::DATA, self.remote, self.sent], chunk) {
                            return Keep;
                        }
                        self.sent += chunk.len() as u64;
                    }
                }
                Err(e) if e.kind() == WouldBlock => break true,
                Err(_) => return self.fails(peer),
            }
        };
        if self.ended && all_sent && !self.fin_sent {
            self.fin_sent = peer.carry([carried::FIN, self.remote, self.sent], &[]);
        }
        let is_over = self.has_ended() && self.read_there == self.sent && self.told == self.delivered;
        if is_over {
            Gone
        } else {
            Keep
        }
    }

    /// The connection to the program here has failed.
    fn fails(&mut self, peer: &mut Peer) -> After {
        if !peer.carry([carried::RESET, self.remote, 0], &[]) {
            peer.say(self.frame(what::CANCEL, 0, 0));
        }
        Gone
    }

    /// Handles a message that has come through the carrier.
    pub fn came(&mut self, peer: &mut Peer, what: u64, number: u64, bytes: &[u8], buffer: &mut [u8]) -> After {
        // Drop late bytes: the other agent knows that they were not delivered.
        if self.back.is_some() || self.left_here.is_some() {
            return Keep;
        }
        match what {
            carried::DATA if self.held.len() + bytes.len() <= HELD && !self.fin_came => self.held.extend(bytes),
            carried::READ if (self.read_there..=self.sent).contains(&number) => self.take_out(number, buffer),
            carried::FIN => self.fin_came = true,
            carried::RESET => return self.reset(),
            _ => {
                tracing::warn!(peer = %peer.at, what, "the other agent breaks the protocol");
                peer.say(self.frame(what::CANCEL, 0, 0));
                return self.reset();
            }
        }
        Keep
    }

    /// Removes bytes from the ring that the program on the other host has read.
    fn take_out(&mut self, read: u64, buffer: &mut [u8]) {
        let Some(stand_in) = &self.stand_in else { return };
        while self.read_there < read {
            let n = buffer.len().min((read - self.read_there) as usize);
            match hooked::recv(stand_in.near.as_fd(), &mut buffer[..n], false) {
                Ok(n @ 1..) => self.read_there += n as u64,
                // Cannot happen: the agent has seen these bytes before.
                _ => return,
            }
        }
    }

    pub fn reset(&mut self) -> After {
        if let Some(stand_in) = self.stand_in.take() {
            stand_in.reset();
        }
        Gone
    }

    /// Returns the connection to the kernel, because the carrier has failed here or for the other
    /// agent.
    pub fn go_back(&mut self, peer: &mut Peer) {
        if self.remote == 0 || self.stand_in.is_none() && self.left_here.is_none() && !self.done[0] {
            return;
        }
        self.held.clear();
        self.back.get_or_insert(false);
        let read = self.left_here.as_ref().map_or(self.delivered, |(read, _)| *read);
        peer.say(self.frame(what::BACK, read, 0));
    }

    /// Handles [`what::BACK`].
    pub fn comes_back(&mut self, peer: &mut Peer, read: u64, buffer: &mut [u8]) -> After {
        if self.back.is_none() {
            self.go_back(peer);
        }
        if self.left_here.is_some() {
            // The bytes that the program has sent are in no ring any more, so those that were not
            // delivered are lost.
            let lost = read != self.sent + self.tail();
            peer.say(self.frame(what::CONFIRM, lost.into(), 0));
            peer.say(self.frame(what::DONE, 0, 0));
            return Gone;
        }
        if self.back == Some(true) || self.done[0] {
            // The other agent repeats the message, because the connection between the agents has
            // failed meanwhile.
            peer.say(self.frame(what::CONFIRM, 0, 0));
            return Keep;
        }
        if !(self.read_there..=self.sent).contains(&read) {
            tracing::warn!(peer = %peer.at, "the other agent breaks the protocol");
            peer.say(self.frame(what::CANCEL, 0, 0));
            return self.reset();
        }
        self.take_out(read, buffer);
        self.back = Some(true);
        // If the program has closed, its library will not send the bytes again.
        let near = self.stand_in.as_ref().map(|s| s.near.as_fd());
        let is_gone = near.is_some_and(|fd| hooked::place(fd).is_some_and(|place| place.closed != 0));
        let is_left = is_gone && near.is_some_and(|fd| hooked::recv(fd, &mut buffer[..1], true).is_ok_and(|n| n > 0));
        peer.say(self.frame(what::CONFIRM, is_left.into(), 0));
        Keep
    }

    /// Handles [`what::CONFIRM`].
    pub fn confirmed(&mut self, peer: &mut Peer, lost: bool) -> After {
        if lost || self.back != Some(true) {
            self.reset();
        } else if !self.done[0] {
            self.leave();
            // A connection that was reset has no stand-in.
            self.done[0] = self.stand_in.take().is_some();
        }
        peer.say(self.frame(what::DONE, 0, 0));
        // Until the other side has finished, the other agent may need all these messages again.
        if self.done == [true, false] {
            Keep
        } else {
            Gone
        }
    }

    /// Handles [`what::DONE`].
    pub fn done_there(&mut self) -> After {
        self.done[1] = true;
        if self.done[0] {
            Gone
        } else {
            Keep
        }
    }

    /// Handles [`what::LEFT`].
    pub fn leaves_there(&mut self, peer: &mut Peer, read: u64, all: u64) -> After {
        if !(self.read_there..=self.sent).contains(&read) || all < self.delivered {
            peer.say(self.frame(what::CANCEL, 0, 0));
            return self.reset();
        }
        self.left_there = Some((read, all));
        Keep
    }

    /// Moves the program here to its kernel connection, which is the only path from now on.
    fn leave(&mut self) -> After {
        let Some(stand_in) = &self.stand_in else { return Gone };
        hooked::leave(stand_in.near.as_fd());
        match hooked::place(stand_in.near.as_fd()) {
            None => Gone,
            // The program has closed in the meantime.
            Some(_) => self.reset(),
        }
    }

    /// Handles that the program on this host has left shared memory by itself.
    fn leaves_here(&mut self, peer: &mut Peer, buffer: &mut [u8]) -> After {
        let Some(stand_in) = self.stand_in.take() else { return Gone };
        let near: BorrowedFd<'_> = stand_in.near.as_fd();
        // Read the rest of its stream. The first of these bytes were sent already, but were not
        // removed from the ring.
        let mut skip = (self.sent - self.read_there) as usize;
        let mut tail = VecDeque::new();
        while let Ok(n @ 1..) = hooked::recv(near, buffer, false) {
            let known = skip.min(n);
            skip -= known;
            tail.extend(&buffer[known..n]);
        }
        self.read_there = self.sent;
        let read = self.delivered.saturating_sub(stand_in.left_unread());
        self.held.clear();
        self.left_here = Some((read, tail));
        self.send_tail(peer)
    }

    fn tail(&self) -> u64 {
        self.left_here.as_ref().map_or(0, |(_, tail)| tail.len() as u64)
    }

    fn send_tail(&mut self, peer: &mut Peer) -> After {
        let remote = self.remote;
        let Some((read, tail)) = &mut self.left_here else { return Gone };
        while !tail.is_empty() {
            let first = tail.as_slices().0;
            let n = first.len().min(CHUNK);
            if !peer.carry([carried::DATA, remote, self.sent], &first[..n]) {
                return Keep;
            }
            tail.drain(..n);
            self.sent += n as u64;
        }
        let read = *read;
        if self.back.is_some() {
            return Keep;
        }
        let left = self.frame(what::LEFT, read, self.sent);
        peer.say(left);
        Gone
    }
}
