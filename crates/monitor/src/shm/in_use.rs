//! Whether a connection over shared memory has an address, so that the kernel would refuse it to another
//! socket.

use crate::answer::{reply, Answer};
use crate::descriptor::{self, Reuse};
use crate::foreign::ForeignFd;
use crate::shm::channels::Channel;
use crate::shm::Shm;
use fsocket_abi::channel::{slot_state, status, Slot, CLIENT, SERVER};
use fsocket_proto::{Addr, Msg};
use fsocket_sync::atomic::Ordering;
use rustix::io::Errno;

impl Shm {
    /// [`fsocket_proto::kind::IN_USE`].
    pub fn in_use(&mut self, msg: &Msg, fd: Option<ForeignFd>) -> Answer {
        let fd = fd.ok_or(Errno::BADF)?;
        let netns = descriptor::netns_cookie(fd.as_fd())?;
        let mut here = self.channels.iter().filter(|ch| ch.netns == netns);
        if msg.arg0 != 0 {
            let port = descriptor::bound_port(fd.as_fd())?;
            let same = |ch: &Channel| {
                ch.addr.port == msg.addr.port
                    && self.has_port(ch, port)
                    && ch.open_ends(CLIENT).any(|s| s.is(port, &msg.addr))
            };
            return if here.any(same) { Err(Errno::ADDRNOTAVAIL) } else { Ok((reply(msg), None)) };
        }
        let reuse = descriptor::reuse(fd.as_fd())?;
        let held = here.any(|ch| {
            let port = msg.addr.port;
            let served = ch.addr.port == port && !reuse.is_shared_with(&ch.reuse);
            served && ch.open_ends(SERVER).any(|s| accepts_at(&ch.addr, &s.dst) && overlap(&msg.addr, &s.dst))
                || self.has_port(ch, port)
                    && ch.open_ends(CLIENT).any(|s| s.client_port == port && overlap(&msg.addr, &s.src()))
        });
        if held {
            return Err(Errno::ADDRINUSE);
        }
        Ok((reply(msg), None))
    }
}

/// What a slot says of a connection that one side has not closed. The clients write that, and it may be wrong. It
/// counts for ports of the channel and addresses of its listener only: a connection of the kernel's could hold those, too.
struct Open {
    client_port: u16,
    dst: [u8; 16],
}

impl Open {
    fn is(&self, client_port: u16, dst: &Addr) -> bool {
        self.client_port == client_port && self.dst == dst.ip
    }

    /// The client's address, which follows from the destination.
    fn src(&self) -> [u8; 16] {
        match crate::address::is_v4(&self.dst) && crate::address::is_loopback(&self.dst) {
            true => crate::address::destination(crate::address::V4_ANY),
            false => self.dst,
        }
    }
}

impl Channel {
    fn open_ends(&self, side: usize) -> impl Iterator<Item = Open> + '_ {
        self.mem.touched_slots().map(|i| self.mem.slot(i)).filter(move |slot| is_open(slot, side)).map(|slot| Open {
            client_port: slot.client_port.load(Ordering::Relaxed),
            dst: std::array::from_fn(|i| slot.dst[i].load(Ordering::Relaxed)),
        })
    }
}

fn is_open(slot: &Slot, side: usize) -> bool {
    matches!(slot.state.load(Ordering::Acquire), slot_state::SYN | slot_state::ESTABLISHED)
        && slot.dir[side].prod.status.load(Ordering::Acquire) & status::CLOSED == 0
}

/// Does a listener bound to `own` accept connections to this address?
fn accepts_at(own: &Addr, to: &[u8; 16]) -> bool {
    own.ip == *to || own.ip == crate::address::V6_ANY && own.v6only == 0 || overlap(own, to)
}

/// Can a socket bound to `asked` not be beside one with the address `has`?
fn overlap(asked: &Addr, has: &[u8; 16]) -> bool {
    let v4 = crate::address::is_v4(has);
    match asked.ip {
        crate::address::V4_ANY => v4,
        // (A dual-stack one; what IPV6_V6ONLY says is not asked.)
        crate::address::V6_ANY => !v4,
        ip => ip == *has,
    }
}

impl Reuse {
    /// The kernel's rule for two sockets of which none listens.
    fn is_shared_with(&self, other: &Reuse) -> bool {
        self.address && other.address || self.port && other.port && self.uid == other.uid
    }
}
