//! Messages between the front and the broker: a short JSON text and a few descriptors each way. A
//! longer text (a file, a request about steering) travels in a sealed memfd.

use crate::ancillary;
use crate::maker::Order;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::net::SendFlags;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Bytes of one message, at most.
const MESSAGE: usize = 1024;

/// Bytes of such a memfd, at most.
pub const TEXT: usize = 1 << 24;

/// A request of the front. `fd` in the descriptions is the descriptor that comes with the request.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Ask {
    /// A client of this user has connected. fd: its control socket.
    User,
    /// A client has shown a listening socket (fd).
    Listener,
    /// A client has shown a bound socket (fd).
    Bound,
    /// Make both ends of a connection, in the network namespace with this SO_NETNS_COOKIE. fd: a
    /// socket of that namespace, unless it is the broker's own.
    Connection { order: Order, netns: u64 },
    /// Make a socket that connects to a listener. `netns` and fd are as in [`Ask::Connection`].
    Dial { order: Order, netns: u64 },
    /// Make another listen socket. fds: the existing one, and the control socket of the client
    /// that asks.
    Clone { reservation: bool },
    /// Load the selector of a listener group: program and maps. `kept`: use the maps that a former
    /// monitor has kept.
    Selector { group: u64, kept: bool },
    /// Remove what is kept of a group.
    Forget { group: u64 },
    /// Return the state of groups that the former monitor has kept.
    Kept,
    /// Keep a text (fd) for the next monitor.
    Keep,
    /// Remove all that is kept.
    Leave,
    /// Return the page with the counts of sockets that have stopped listening.
    Closings,
    /// Open a sock_diag socket in the network namespace of a socket (fd).
    Diag,
    /// Return the inode number of a socket's (fd) network namespace.
    Inode,
    /// Return the executable of a process: that of a pidfd (fd) if there is one, else that with
    /// this number.
    Exe { pid: u32 },
    /// Open a socket that is readable when nf_tables changes.
    Rules,
    /// Open a socket that is readable when IPsec policies change.
    Xfrm,
    /// Say whether nf_tables has chains through which local packets pass.
    Chains,
    /// Say whether BPF programs of some types (a bit for each) are in force for a cgroup (fd).
    Programs { kinds: u64 },
    /// Carry out a request of `fastsocket steer`. fds: its text, the control socket, and (from
    /// Linux 6.5 on) the sender's pidfd.
    Steer,
    /// Carry out another operation of steering ([`crate::steer::Also`]). fd: its text.
    SteerAlso,
    /// Say which kinds of policy there are ([`super::found`]). fd: a socket of the network
    /// namespace in question.
    Host,
    /// Return the record of which sockets are the ends of one connection.
    Pairs,
    /// Announce this host. The answer has the maps, or (number 1) a text with the reason why it is
    /// impossible.
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

    pub fn json(what: &impl Serialize) -> Result<Given, Errno> {
        let json = serde_json::to_vec(what).map_err(|_| Errno::NOMEM)?;
        text(&json).map(Given::one)
    }

    pub fn read<T: DeserializeOwned>(self) -> Result<T, Errno> {
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

/// An answer as it is sent, without its descriptors.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Told {
    /// An errno, or 0.
    pub error: i32,
    pub number: u64,
}

/// Sends a message. Waits while the other process is busy.
///
/// # Errors
/// EPIPE and the like: the other process has ended.
pub fn send(line: BorrowedFd<'_>, what: &impl Serialize, fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let bytes = serde_json::to_vec(what).map_err(|_| Errno::INVAL)?;
    ancillary::send(line, &bytes, fds, SendFlags::empty())
}

/// The descriptors of a message. EMFILE: this process had no room for them.
pub type Shown = Result<Vec<OwnedFd>, Errno>;

/// Receives a message. `None`: the other process has ended.
///
/// # Errors
/// EPROTO: the message cannot be decoded. Else those of `recvmsg`.
pub fn receive<T: DeserializeOwned>(line: BorrowedFd<'_>) -> Result<Option<(T, Shown)>, Errno> {
    let mut bytes = [0u8; MESSAGE];
    let got = ancillary::wait(line, &mut bytes)?;
    if got.length == 0 {
        return Ok(None);
    }
    if got.is_longer {
        return Err(Errno::PROTO);
    }
    let what = serde_json::from_slice(&bytes[..got.length]).map_err(|_| Errno::PROTO)?;
    Ok(Some((what, if got.is_cut { Err(Errno::MFILE) } else { Ok(got.fds) })))
}

/// A memfd with a text that does not fit into a message.
pub fn text(bytes: &[u8]) -> Result<OwnedFd, Errno> {
    crate::memory::memfd_of("fastsocket-broker", bytes).map_err(errno_of)
}

/// Reads such a memfd. It must be sealed, so that no process can change the text or block the
/// reader meanwhile.
///
/// # Errors
/// EINVAL: not a memfd of this kind.
pub fn read(fd: BorrowedFd<'_>) -> Result<Vec<u8>, Errno> {
    let seals = rustix::fs::fcntl_get_seals(fd.as_fd())?;
    let size = usize::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(usize::MAX);
    if !seals.contains(SealFlags::SHRINK | SealFlags::WRITE) || size > TEXT {
        return Err(Errno::INVAL);
    }
    let mut bytes = vec![0; size];
    let n = rustix::io::retry_on_intr(|| rustix::io::pread(fd, &mut bytes, 0))?;
    if n != size {
        return Err(Errno::INVAL);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::maker::End;

    #[test]
    fn the_longest_message_fits() {
        let end = End { v6: false, ip: [255; 16], port: u16::MAX, uid: u32::MAX };
        let order = Order { client: end, server: end, named: false, holder: Some(u64::MAX) };
        let ask = serde_json::to_vec(&Ask::Connection { order, netns: u64::MAX }).unwrap();
        assert!(ask.len() <= MESSAGE, "{}", ask.len());
        for bad in ["", "1", "\"Nothing\"", "{\"Clone\":{}}", "{\"Exe\":{\"pid\":4294967296}}", "\"User\" 1"] {
            assert!(serde_json::from_str::<Ask>(bad).is_err(), "{bad}");
        }
    }
}
