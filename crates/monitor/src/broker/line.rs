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

/// What can be asked for.
pub mod op {
    /// The user of a control socket is served.
    pub const USER: u32 = 1;
    /// A listening socket was shown.
    pub const LISTENER: u32 = 2;
    /// A bound socket was shown.
    pub const BOUND: u32 = 3;
    /// Both ends of a connection.
    pub const CONNECTION: u32 = 4;
    /// A socket that connects to a listener.
    pub const DIAL: u32 = 5;
    /// Another listen socket; fds: the one there is, the control socket of who asks.
    pub const CLONE: u32 = 6;
    /// The selector of a group of listeners (its number): program and maps; with what is kept (flag 1).
    pub const SELECTOR: u32 = 7;
    /// Removes what is kept of a group.
    pub const FORGET: u32 = 8;
    /// What the monitor before this one has kept of its groups.
    pub const KEPT: u32 = 9;
    /// Keeps it for the one after this.
    pub const KEEP: u32 = 10;
    /// Nothing is kept.
    pub const LEAVE: u32 = 11;
    /// The count of listeners that have ended.
    pub const CLOSINGS: u32 = 12;
    /// A line to sock_diag, in the network namespace of a socket.
    pub const DIAG: u32 = 13;
    /// Number of a socket's network namespace.
    pub const INODE: u32 = 14;
    /// The executable of a process: its pidfd, or else its number.
    pub const EXE: u32 = 15;
    /// A socket that tells when nf_tables changes, or (number 1) policies of IPsec.
    pub const RULES: u32 = 16;
    /// Whether nf_tables has chains that local packets pass.
    pub const CHAINS: u32 = 17;
    /// Whether programs of some types (a bit each) are in force for a cgroup.
    pub const PROGRAMS: u32 = 18;
    /// The request of `fastsocket steer`; fds: its text, the control socket, and (from Linux 6.5 on) the sender's pidfd.
    pub const STEER: u32 = 19;
    /// The rest of steering ([`crate::steer::Also`]).
    pub const STEER_ALSO: u32 = 20;
    /// Which kinds of policy there are ([`super::super::found`]); fd: a socket of the network namespace in question.
    pub const HOST: u32 = 21;
    /// The record of which sockets are the ends of one connection.
    pub const PAIRS: u32 = 22;
    /// Announces this host; its maps, or (number 1) the reason why not.
    pub const HOSTS: u32 = 23;
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
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RawEnd {
    ip: [u8; 16],
    uid: u32,
    port: u16,
    v6: u8,
    pad: u8,
}

/// What the talking half asks for; which of the fields count depends on `op` ([`op`]).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Ask {
    pub op: u32,
    pub pad: u32,
    pub flags: u64,
    /// SO_NETNS_COOKIE of where it is to be done.
    pub netns: u64,
    pub number: u64,
    pub client: RawEnd,
    pub server: RawEnd,
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
    pub fn new(op: u32) -> Ask {
        Ask { op, ..Ask::default() }
    }

    pub fn of(op: u32, order: &Order, netns: u64) -> Ask {
        let flags = if order.named { NAMED } else { 0 } | if order.holder.is_some() { HELD } else { 0 };
        let (client, server) = (RawEnd::of(&order.client), RawEnd::of(&order.server));
        Ask { flags, netns, number: order.holder.unwrap_or(0), client, server, ..Ask::new(op) }
    }

    pub fn order(&self) -> Order {
        Order {
            client: self.client.end(),
            server: self.server.end(),
            named: self.flags & NAMED != 0,
            holder: (self.flags & HELD != 0).then_some(self.number),
        }
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
impl IntoRaw for Ask {}
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
