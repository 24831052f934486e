//! Reads counts from messages that still wait for their turn, so that a report includes them.

use super::Monitor;
use crate::foreign::ForeignFd;
use crate::ConnId;
use fsocket_proto::{request, Msg, MSG_SIZE};
use rustix::io::Errno;
use rustix::net::{recv, RecvFlags};
use zerocopy::FromBytes;

/// One report handles at most this many messages of a process.
const MOST: usize = 64;

impl Monitor {
    /// Handles two kinds of waiting messages: counts that processes have sent, and arenas in which
    /// they count from now on. All other messages wait for their turns.
    pub(super) fn hear_counts(&mut self) {
        let clients = self.ctx.clients.iter();
        let silent = clients.filter(|(_, c)| c.is_process() && c.arena.is_none() && c.unfinished.is_none());
        let ids: Vec<ConnId> = silent.map(|(id, _)| id).collect();
        for id in ids {
            for _ in 0..MOST {
                let is_next = self.ctx.clients.get(id).is_some_and(|c| is_counted(&c.fd));
                if !is_next || !self.serve_one(id) {
                    break;
                }
            }
        }
    }
}

/// Whether the next message on a control socket tells counts, or an arena that has them. The
/// message stays in the socket.
fn is_counted(socket: &ForeignFd) -> bool {
    let mut bytes = [0u8; MSG_SIZE + 1];
    let mut look = || recv(socket.as_fd(), &mut bytes[..], RecvFlags::PEEK | RecvFlags::DONTWAIT);
    let length = match look() {
        // The process closed its end without reading everything. The kernel reports this once,
        // before the messages of the process.
        Err(Errno::CONNRESET) => look(),
        length => length,
    };
    // (`recv` returns the number of bytes that were read, and the length of the message.)
    let Ok((MSG_SIZE, MSG_SIZE)) = length else { return false };
    let is_one = |msg: Msg| msg.is::<request::Counts>() || msg.is::<request::Arena>();
    Msg::read_from_bytes(&bytes[..MSG_SIZE]).is_ok_and(|msg| msg.is_of_our_version() && is_one(msg))
}
