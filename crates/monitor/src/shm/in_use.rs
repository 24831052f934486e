//! Finds out whether a connection over shared memory uses an address. The kernel would refuse such
//! an address to another socket.

use crate::address::{V4_ANY, V6_ANY};
use crate::answer::Answer;
use crate::descriptor::{self, Reuse};
use crate::foreign::ForeignFd;
use crate::shm::channels::Channel;
use crate::shm::Shm;
use crate::turns::TURN;
use crate::ChannelId;
use fsocket_abi::channel::{sharing, slot_state, status, Slot, CLIENT, SERVER};
use fsocket_proto::{answer, request, Addr};
use fsocket_sync::atomic::Ordering;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use rustix::net::sockopt;
use std::time::Instant;

/// The answer to IN_USE, or where the search goes on in the user's next turn.
pub enum Looked {
    Done(Answer<answer::InUse>),
    Later(ForeignFd, ChannelId),
}

impl Shm {
    /// [`request::InUse`]. `from`: the first channel that was not searched yet.
    pub fn in_use(&self, msg: request::InUse, fd: Option<ForeignFd>, from: ChannelId) -> Looked {
        let Some(fd) = fd else { return Looked::Done(Err(Errno::BADF)) };
        match self.look(msg, fd.as_fd(), from) {
            Ok(Some(next)) => Looked::Later(fd, next),
            Ok(None) => Looked::Done(Ok((answer::InUse {}, None))),
            Err(e) => Looked::Done(Err(e)),
        }
    }

    /// Searches for the duration of one turn. Returns the channel at which to go on; `None`: the
    /// address is free.
    fn look(&self, msg: request::InUse, fd: BorrowedFd<'_>, from: ChannelId) -> Result<Option<ChannelId>, Errno> {
        let began = Instant::now();
        let netns = descriptor::netns_cookie(fd)?;
        let bound = if msg.connects { Some(descriptor::bound_port(fd)?) } else { None };
        let asked = Asked {
            addr: msg.addr,
            v6only: i32::from(msg.addr.family) == libc::AF_INET6 && sockopt::ipv6_v6only(fd)?,
            reuse: descriptor::reuse(fd)?,
        };
        let has_from = |ch: &Channel, port: u16| {
            ch.addr.port == msg.addr.port
                && self.has_port(ch, port)
                && ch.open_ends(CLIENT).any(|s| s.is(port, &msg.addr))
        };
        let held = |ch: &Channel| {
            let port = msg.addr.port;
            let served = |s: &Open| accepts_at(&ch.addr, &s.dst) && asked.meets(&s.server(ch));
            let opened = |s: &Open| s.client_port == port && asked.meets(&s.client(ch));
            ch.addr.port == port && ch.open_ends(SERVER).any(|s| served(&s))
                || self.has_port(ch, port) && ch.open_ends(CLIENT).any(|s| opened(&s))
        };
        for (n, ch) in self.channels.from(from).enumerate() {
            if n > 0 && began.elapsed() >= TURN {
                return Ok(Some(ch.id));
            }
            match bound {
                _ if ch.netns != netns => {}
                Some(port) if has_from(ch, port) => return Err(Errno::ADDRNOTAVAIL),
                None if held(ch) => return Err(Errno::ADDRINUSE),
                _ => {}
            }
        }
        Ok(None)
    }
}

/// The state of a slot whose connection is still open on one side. Processes write it, so it may
/// be false. It counts only for the channel's own ports and the listener's addresses, which a real
/// kernel connection could occupy, too.
struct Open {
    client_port: u16,
    dst: [u8; 16],
    /// Bits of [`sharing`].
    sharing: u8,
}

/// A socket that has an address.
struct Has {
    ip: [u8; 16],
    v6only: bool,
    reuse: Reuse,
}

/// A socket that asks for an address.
struct Asked {
    addr: Addr,
    v6only: bool,
    reuse: Reuse,
}

impl Open {
    fn is(&self, client_port: u16, dst: &Addr) -> bool {
        self.client_port == client_port && self.dst == dst.ip
    }

    fn client(&self, ch: &Channel) -> Has {
        let is_on = |bit| self.sharing & bit != 0;
        let reuse = Reuse { address: is_on(sharing::ADDRESS), port: is_on(sharing::PORT), uid: ch.client_uid };
        Has { ip: self.src(), v6only: is_on(sharing::V6ONLY), reuse }
    }

    /// The options of the accepted socket: those of the listener, unless the program has changed
    /// them.
    fn server(&self, ch: &Channel) -> Has {
        let now = |what: u8, then: bool| match self.sharing & what << sharing::CHANGED_SHIFT {
            0 => then,
            _ => self.sharing & what << sharing::SERVER_SHIFT != 0,
        };
        let (address, port) = (now(sharing::ADDRESS, ch.reuse.address), now(sharing::PORT, ch.reuse.port));
        Has { ip: self.dst, v6only: ch.addr.v6only != 0, reuse: Reuse { address, port, ..ch.reuse } }
    }

    /// The client's address, which depends on the destination only.
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
            sharing: slot.sharing.load(Ordering::Relaxed),
        })
    }
}

fn is_open(slot: &Slot, side: usize) -> bool {
    matches!(slot.state.load(Ordering::Acquire), slot_state::SYN | slot_state::ESTABLISHED)
        && slot.dir[side].prod.status.load(Ordering::Acquire) & status::CLOSED == 0
}

/// Whether a listener bound to `own` accepts connections to this address.
fn accepts_at(own: &Addr, to: &[u8; 16]) -> bool {
    own.ip == *to || own.ip == crate::address::V6_ANY && own.v6only == 0 || overlap(own, to)
}

/// Whether two addresses overlap. The first one may be a wildcard.
fn overlap(asked: &Addr, has: &[u8; 16]) -> bool {
    let v4 = crate::address::is_v4(has);
    match asked.ip {
        crate::address::V4_ANY => v4,
        crate::address::V6_ANY => !v4,
        ip => ip == *has,
    }
}

impl Asked {
    /// Whether the kernel would refuse the address because of this socket of a connection
    /// (`inet_csk_bind_conflict`).
    fn meets(&self, has: &Has) -> bool {
        let v4 = crate::address::is_v4(&has.ip);
        let same = match self.addr.ip {
            // An IPv6 socket also has an IPv4 address, unless it is for IPv6 only.
            V4_ANY if i32::from(self.addr.family) == libc::AF_INET => !has.v6only,
            V4_ANY => v4 && !has.v6only,
            V6_ANY => !(v4 && self.v6only),
            ip => ip == has.ip && !(v4 && has.v6only),
        };
        same && !self.reuse.is_shared_with(&has.reuse)
    }
}

impl Reuse {
    /// Whether the kernel lets two sockets that do not listen share an address.
    fn is_shared_with(&self, other: &Reuse) -> bool {
        self.address && other.address || self.port && other.port && self.uid == other.uid
    }
}
