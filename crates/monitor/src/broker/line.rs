//! Messages between the two halves: a structure of fixed size and a few descriptors each way.
//! A longer text (a file, a request about steering) comes as JSON or text in a sealed memfd.

use crate::maker::{End, Order};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::SealFlags;
use rustix::io::{Errno, IoSlice, IoSliceMut};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use std::mem::MaybeUninit;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Descriptors of one message, at most.
pub const FDS: usize = 6;

/// Bytes of a memfd, at most.
pub const TEXT: usize = 1 << 24;

/// A request of the front. `fd`: the descriptor that comes with it.
#[derive(Clone, Copy, Debug)]
pub enum Ask {
    /// The user of a control socket (fd) is served.
    User,
    /// A listening socket (fd) was shown.
    Listener,
    /// A bound socket (fd) was shown.
    Bound,
    /// Both ends of a connection, in the network namespace with this SO_NETNS_COOKIE. fd: a socket there, where that is not
    /// the broker's own.
    Connection { order: Order, netns: u64 },
    /// A socket that connects to a listener. The rest as for [`Ask::Connection`].
    Dial { order: Order, netns: u64 },
    /// Another listen socket. fds: the one there is, and the control socket of the process that asks.
    Clone { reservation: bool },
    /// The selector of a group of listeners: program and maps. `kept`: with what is kept.
    Selector { group: u64, kept: bool },
    /// Removes what is kept of a group.
    Forget { group: u64 },
    /// What the monitor before this one has kept of its groups.
    Kept,
    /// Keeps a text (fd) for the next monitor.
    Keep,
    /// Nothing is kept.
    Leave,
    /// The count of listeners that have ended.
    Closings,
    /// A line to sock_diag, in the network namespace of a socket (fd).
    Diag,
    /// Number of a socket's (fd) network namespace.
    Inode,
    /// The executable of a process: that of its pidfd (fd), or else with this number.
    Exe { pid: u32 },
    /// A socket that tells when nf_tables changes.
    Rules,
    /// A socket that tells when policies of IPsec change.
    Xfrm,
    /// Whether nf_tables has chains that local packets pass.
    Chains,
    /// Whether programs of some types (a bit each) are in force for a cgroup (fd).
    Programs { kinds: u64 },
    /// The request of `fastsocket steer`. fds: its text, the control socket, and (from Linux 6.5 on) the sender's pidfd.
    Steer,
    /// The rest of steering ([`crate::steer::Also`]). fd: as text.
    SteerAlso,
    /// Which kinds of policy there are ([`super::found`]). fd: a socket of the network namespace in question.
    Host,
    /// The record of which sockets are the ends of one connection.
    Pairs,
    /// Announces this host. The answer has its maps, or (number 1) the reason why not.
    Hosts,
}

/// An answer.
#[derive(Default)]
pub struct Given {
    pub number: u64,
    pub fds: Vec<OwnedFd>,
}

impl Given {
    pub fn one(fd: OwnedFd) -> Given {
        Given { number: 0, fds: vec![fd] }
    }

    pub fn number(number: u64) -> Given {
        Given { number, fds: Vec::new() }
    }

    pub fn json(what: &impl serde::Serialize) -> Result<Given, Errno> {
        let json = serde_json::to_vec(what).map_err(|_| Errno::NOMEM)?;
        text(&json).map(Given::one)
    }

    pub fn read<T: serde::de::DeserializeOwned>(self) -> Result<T, Errno> {
        serde_json::from_slice(&read(self.fd()?.as_fd())?).map_err(|_| Errno::PROTO)
    }

    /// The only descriptor.
    pub fn fd(self) -> Result<OwnedFd, Errno> {
        self.fds.into_iter().next().ok_or(Errno::PROTO)
    }
}

pub fn errno_of(e: std::io::Error) -> Errno {
    e.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}

/// [`End`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RawEnd {
    ip: [u8; 16],
    uid: u32,
    port: u16,
    v6: u8,
    pad: u8,
}

/// [`Ask`] as it travels; which of the fields count depends on `op`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RawAsk {
    op: u32,
    pad: u32,
    flags: u64,
    netns: u64,
    number: u64,
    client: RawEnd,
    server: RawEnd,
}

/// The client's port is named.
const NAMED: u64 = 1;
/// `number` is a socket's cookie.
const HELD: u64 = 2;

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Told {
    /// An errno, or 0.
    pub error: u32,
    pub pad: u32,
    pub number: u64,
}

impl RawEnd {
    fn of(end: &End) -> RawEnd {
        RawEnd { ip: end.ip, uid: end.uid, port: end.port, v6: end.v6.into(), pad: 0 }
    }

    fn end(&self) -> End {
        End { v6: self.v6 != 0, ip: self.ip, port: self.port, uid: self.uid }
    }
}

impl Ask {
    pub fn raw(&self) -> RawAsk {
        let plain = |op| RawAsk { op, ..RawAsk::default() };
        let number = |op, number| RawAsk { number, ..plain(op) };
        match *self {
            Ask::User => plain(1),
            Ask::Listener => plain(2),
            Ask::Bound => plain(3),
            Ask::Connection { order, netns } => RawAsk::of_order(4, &order, netns),
            Ask::Dial { order, netns } => RawAsk::of_order(5, &order, netns),
            Ask::Clone { reservation } => number(6, reservation.into()),
            Ask::Selector { group, kept } => RawAsk { flags: kept.into(), ..number(7, group) },
            Ask::Forget { group } => number(8, group),
            Ask::Kept => plain(9),
            Ask::Keep => plain(10),
            Ask::Leave => plain(11),
            Ask::Closings => plain(12),
            Ask::Diag => plain(13),
            Ask::Inode => plain(14),
            Ask::Exe { pid } => number(15, pid.into()),
            Ask::Rules => plain(16),
            Ask::Xfrm => number(16, 1),
            Ask::Chains => plain(17),
            Ask::Programs { kinds } => number(18, kinds),
            Ask::Steer => plain(19),
            Ask::SteerAlso => plain(20),
            Ask::Host => plain(21),
            Ask::Pairs => plain(22),
            Ask::Hosts => plain(23),
        }
    }
}

impl RawAsk {
    fn of_order(op: u32, order: &Order, netns: u64) -> RawAsk {
        let flags = if order.named { NAMED } else { 0 } | if order.holder.is_some() { HELD } else { 0 };
        let (client, server) = (RawEnd::of(&order.client), RawEnd::of(&order.server));
        RawAsk { op, pad: 0, flags, netns, number: order.holder.unwrap_or(0), client, server }
    }

    fn order(&self) -> Order {
        Order {
            client: self.client.end(),
            server: self.server.end(),
            named: self.flags & NAMED != 0,
            holder: (self.flags & HELD != 0).then_some(self.number),
        }
    }

    fn yes(word: u64) -> Result<bool, Errno> {
        match word {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Errno::INVAL),
        }
    }

    /// # Errors
    /// EINVAL: nothing of this kind can be asked for.
    pub fn ask(&self) -> Result<Ask, Errno> {
        let RawAsk { netns, number, .. } = *self;
        Ok(match self.op {
            1 => Ask::User,
            2 => Ask::Listener,
            3 => Ask::Bound,
            4 => Ask::Connection { order: self.order(), netns },
            5 => Ask::Dial { order: self.order(), netns },
            6 => Ask::Clone { reservation: Self::yes(number)? },
            7 => Ask::Selector { group: number, kept: Self::yes(self.flags)? },
            8 => Ask::Forget { group: number },
            9 => Ask::Kept,
            10 => Ask::Keep,
            11 => Ask::Leave,
            12 => Ask::Closings,
            13 => Ask::Diag,
            14 => Ask::Inode,
            15 => Ask::Exe { pid: u32::try_from(number).map_err(|_| Errno::INVAL)? },
            16 if Self::yes(number)? => Ask::Xfrm,
            16 => Ask::Rules,
            17 => Ask::Chains,
            18 => Ask::Programs { kinds: number },
            19 => Ask::Steer,
            20 => Ask::SteerAlso,
            21 => Ask::Host,
            22 => Ask::Pairs,
            23 => Ask::Hosts,
            _ => return Err(Errno::INVAL),
        })
    }
}

/// Sends; it waits while the other half is busy.
///
/// # Errors
/// EPIPE and the like: the other half is gone.
pub fn send(line: BorrowedFd<'_>, what: &impl IntoRaw, fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    let bytes = what.as_bytes();
    rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(line, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).map(drop)
    })
}

/// Plain structures of this file.
pub trait IntoRaw: IntoBytes + Immutable {}
impl IntoRaw for RawAsk {}
impl IntoRaw for Told {}

/// Descriptors of a message. EMFILE: there was no room for them.
pub type Shown = Result<Vec<OwnedFd>, Errno>;

/// Receives. None: the other half is gone.
///
/// # Errors
/// EPROTO: it is not such a message. Else of the call.
pub fn receive<T: FromBytes>(line: BorrowedFd<'_>) -> Result<Option<(T, Shown)>, Errno> {
    let mut bytes = [0u8; 256];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(line, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if got.bytes == 0 {
        return Ok(None);
    }
    let what = T::read_from_bytes(&bytes[..got.bytes]).map_err(|_| Errno::PROTO)?;
    let cut = got.flags.contains(ReturnFlags::CTRUNC);
    Ok(Some((what, if cut { Err(Errno::MFILE) } else { Ok(fds) })))
}

/// A text that does not fit into a message.
pub fn text(bytes: &[u8]) -> Result<OwnedFd, Errno> {
    crate::memory::memfd_of("fastsocket-broker", bytes).map_err(errno_of)
}

/// What such a text says. Sealed, so that nobody changes it meanwhile, nor can hold up who reads it.
///
/// # Errors
/// EINVAL: something else.
pub fn read(fd: BorrowedFd<'_>) -> Result<Vec<u8>, Errno> {
    let seals = rustix::fs::fcntl_get_seals(fd.as_fd())?;
    let size = usize::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(usize::MAX);
    if !seals.contains(SealFlags::SHRINK | SealFlags::WRITE) || size > TEXT {
        return Err(Errno::INVAL);
    }
    let mut bytes = vec![0; size];
    let n = rustix::io::pread(fd, &mut bytes, 0)?;
    if n != size {
        return Err(Errno::INVAL);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_comes_back() {
        for op in 0..=64 {
            for (flags, number) in [(0, 0), (1, 1), (1, u64::MAX), (3, 7), (u64::MAX, 2)] {
                let raw = RawAsk { op, flags, number, netns: 5, ..RawAsk::default() };
                let again = raw.ask().map(|ask| ask.raw());
                assert!((1..=23).contains(&op) || again.is_err(), "{op}");
                if let Ok(again) = again {
                    assert_eq!(again.ask().map(|ask| ask.raw()), Ok(again), "{raw:?}");
                }
            }
        }
        assert!((1..=23).all(|op| RawAsk { op, ..RawAsk::default() }.ask().is_ok_and(|ask| ask.raw().op == op)));
    }
}
