//! One connection: the ring of the program here, and its other half on the other host.
//!
//! The bytes that the program has written stay in its ring until the other host's program has read them (the agents look,
//! MSG_PEEK, and take it out when the other one says so). So neither agent holds bytes that only it has, and
//! whenever the connection goes back to its kernel connection, it is enough to agree on two numbers: the library sends
//! again there what was not taken out of the ring.

use crate::carrier::{what as carried, CHUNK};
use crate::hooked;
use crate::link::{what, Frame};
use crate::peer::Peer;
use crate::stand_in::StandIn;
use std::collections::VecDeque;
use std::io::ErrorKind::WouldBlock;
use std::os::fd::{AsFd, BorrowedFd};

/// Bytes of one direction that the other program has not read, at most.
const WINDOW: u64 = 256 * 1024;
/// As much as an agent may hold of a peer's: what a program has left in its ring, and a window.
const HELD: usize = (1 << 20) + WINDOW as usize;
/// Room for what is looked at.
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
    /// The other agent's number for it; 0: not known yet.
    pub remote: u64,
    /// The monitor's, until it has gone over here.
    pub wish: Option<u64>,
    pub stand_in: Option<StandIn>,
    /// Of the program here: sent to the other agent, and read by the program there.
    sent: u64,
    read_there: u64,
    /// It sends no more.
    pub ended: bool,
    fin_sent: bool,
    /// Of the program there: in the ring here, and how much of that the other agent knows to be read.
    delivered: u64,
    told: u64,
    held: VecDeque<u8>,
    fin_came: bool,
    fin_done: bool,
    /// It goes back; whether the other agent's number has come.
    back: Option<bool>,
    /// It has gone back: here, and there.
    done: [bool; 2],
    /// The program there has left: what it has read, and all that it has sent by this way.
    left_there: Option<(u64, u64)>,
    /// The program here has left: how much it had read, and what is still to be sent of its stream.
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

    /// Something is in the ring here of which nobody says when it is read.
    pub fn is_to_be_looked_at(&self) -> bool {
        self.stand_in.is_some() && self.back.is_none() && self.told < self.delivered
    }

    /// Both programs have said that they send no more, and all has been said on.
    pub fn has_ended(&self) -> bool {
        self.fin_sent && self.fin_done
    }

    fn frame(&self, what: u64, a: u64, b: u64) -> Frame {
        Frame { what, to: self.remote, from: self.id.into(), a, b, ..Frame::default() }
    }

    /// Moves what can be moved.
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

    /// The connection of the program here has failed.
    fn fails(&mut self, peer: &mut Peer) -> After {
        if !peer.carry([carried::RESET, self.remote, 0], &[]) {
            peer.say(self.frame(what::CANCEL, 0, 0));
        }
        Gone
    }

    /// A message by the carrier has arrived.
    pub fn came(&mut self, peer: &mut Peer, what: u64, number: u64, bytes: &[u8], buffer: &mut [u8]) -> After {
        // Late bytes are dropped: the other agent has been told that they were not delivered.
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

    /// The program there has read so much: its bytes may go.
    fn take_out(&mut self, read: u64, buffer: &mut [u8]) {
        let Some(stand_in) = &self.stand_in else { return };
        while self.read_there < read {
            let n = buffer.len().min((read - self.read_there) as usize);
            match hooked::recv(stand_in.near.as_fd(), &mut buffer[..n], false) {
                Ok(n @ 1..) => self.read_there += n as u64,
                // They were there.
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

    /// The way between the agents has failed, or the other agent has said so: back to the kernel connections.
    pub fn go_back(&mut self, peer: &mut Peer) {
        if self.remote == 0 || self.stand_in.is_none() && self.left_here.is_none() && !self.done[0] {
            return;
        }
        self.held.clear();
        self.back.get_or_insert(false);
        let read = self.left_here.as_ref().map_or(self.delivered, |(read, _)| *read);
        peer.say(self.frame(what::BACK, read, 0));
    }

    /// [`what::BACK`].
    pub fn comes_back(&mut self, peer: &mut Peer, read: u64, buffer: &mut [u8]) -> After {
        if self.back.is_none() {
            self.go_back(peer);
        }
        if self.left_here.is_some() {
            // (What it had sent is in no ring any more.)
            let lost = read != self.sent + self.tail();
            peer.say(self.frame(what::CONFIRM, lost.into(), 0));
            peer.say(self.frame(what::DONE, 0, 0));
            return Gone;
        }
        if self.back == Some(true) || self.done[0] {
            // It was said again: the connection between the agents has failed meanwhile.
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
        // A program that has closed sends nothing again.
        let near = self.stand_in.as_ref().map(|s| s.near.as_fd());
        let is_gone = near.is_some_and(|fd| hooked::place(fd).is_some_and(|place| place.closed != 0));
        let is_left = is_gone && near.is_some_and(|fd| hooked::recv(fd, &mut buffer[..1], true).is_ok_and(|n| n > 0));
        peer.say(self.frame(what::CONFIRM, is_left.into(), 0));
        Keep
    }

    /// [`what::CONFIRM`].
    pub fn confirmed(&mut self, peer: &mut Peer, lost: bool) -> After {
        if lost || self.back != Some(true) {
            self.reset();
        } else if !self.done[0] {
            self.leave();
            // (A connection that was reset has none.)
            self.done[0] = self.stand_in.take().is_some();
        }
        peer.say(self.frame(what::DONE, 0, 0));
        // Until the other side is done the other agent may have to hear all this once more.
        if self.done == [true, false] {
            Keep
        } else {
            Gone
        }
    }

    /// [`what::DONE`].
    pub fn done_there(&mut self) -> After {
        self.done[1] = true;
        if self.done[0] {
            Gone
        } else {
            Keep
        }
    }

    /// [`what::LEFT`].
    pub fn leaves_there(&mut self, peer: &mut Peer, read: u64, all: u64) -> After {
        if !(self.read_there..=self.sent).contains(&read) || all < self.delivered {
            peer.say(self.frame(what::CANCEL, 0, 0));
            return self.reset();
        }
        self.left_there = Some((read, all));
        Keep
    }

    /// From here on the program's kernel connection is the only one.
    fn leave(&mut self) -> After {
        let Some(stand_in) = &self.stand_in else { return Gone };
        hooked::leave(stand_in.near.as_fd());
        match hooked::place(stand_in.near.as_fd()) {
            None => Gone,
            // It has closed meanwhile.
            Some(_) => self.reset(),
        }
    }

    /// The program here has left shared memory by itself.
    fn leaves_here(&mut self, peer: &mut Peer, buffer: &mut [u8]) -> After {
        let Some(stand_in) = self.stand_in.take() else { return Gone };
        let near: BorrowedFd<'_> = stand_in.near.as_fd();
        // The rest of its stream; the first bytes of it have been sent, but were not taken out.
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
