//! Requests to the kernel over netlink, and its answers.

use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{netlink, AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType};

/// Size of `struct nlmsghdr` in bytes.
const HEAD: usize = 16;

pub struct Netlink {
    fd: OwnedFd,
    seq: u32,
}

/// A socket of this netlink family that receives the messages of `groups` (a bit mask).
///
/// # Errors
/// Those of the kernel.
pub fn socket(protocol: Option<Protocol>, groups: u32) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol)?;
    rustix::net::bind(&fd, &netlink::SocketAddrNetlink::new(0, groups))?;
    Ok(fd)
}

impl Netlink {
    /// # Errors
    /// Those of the kernel.
    pub fn new(protocol: Option<Protocol>) -> Result<Netlink, Errno> {
        socket(protocol, 0).map(Netlink::on)
    }

    /// Uses a socket that another process may have made.
    pub fn on(fd: OwnedFd) -> Netlink {
        Netlink { fd, seq: 0 }
    }

    pub fn into_fd(self) -> OwnedFd {
        self.fd
    }

    /// Sends one request and calls `each` for each answer, with the answer's kind and the bytes
    /// behind its header. The kernel answers within the system calls, so this does not wait.
    ///
    /// # Errors
    /// The errno that the kernel answers, or EPROTO for a malformed answer.
    pub fn ask(&mut self, kind: u16, dump: bool, body: &[u8], mut each: impl FnMut(u16, &[u8])) -> Result<(), Errno> {
        self.seq = self.seq.wrapping_add(1);
        let flags = libc::NLM_F_REQUEST | if dump { libc::NLM_F_DUMP } else { 0 };
        let mut message = Vec::with_capacity(HEAD + body.len());
        message.extend_from_slice(&((HEAD + body.len()) as u32).to_ne_bytes());
        message.extend_from_slice(&kind.to_ne_bytes());
        message.extend_from_slice(&(flags as u16).to_ne_bytes());
        message.extend_from_slice(&self.seq.to_ne_bytes());
        message.extend_from_slice(&[0; 4]);
        message.extend_from_slice(body);
        rustix::net::send(&self.fd, &message, SendFlags::empty())?;
        let mut bytes = [0u8; 32768];
        loop {
            let (n, _) = rustix::net::recv(&self.fd, &mut bytes[..], RecvFlags::DONTWAIT)?;
            let mut rest = &bytes[..n];
            while rest.len() >= HEAD {
                let len = u32_at(rest, 0) as usize;
                if len < HEAD || len > rest.len() {
                    return Err(Errno::PROTO);
                }
                let (kind, seq, body) = (u16_at(rest, 4), u32_at(rest, 8), &rest[HEAD..len]);
                rest = &rest[len.next_multiple_of(4).min(rest.len())..];
                if seq != self.seq {
                    continue; // left over from a question that failed
                }
                match i32::from(kind) {
                    libc::NLMSG_DONE => return Ok(()),
                    libc::NLMSG_ERROR if body.len() >= 4 => {
                        return match u32_at(body, 0) as i32 {
                            0 => Ok(()),
                            e => Err(Errno::from_raw_os_error(e.wrapping_neg())),
                        }
                    }
                    _ => each(kind, body),
                }
                if !dump {
                    return Ok(());
                }
            }
        }
    }
}

pub fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes([bytes[at], bytes[at + 1]])
}
pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Appends an attribute (`struct nlattr`, `rtattr`).
pub fn put(to: &mut Vec<u8>, kind: u16, value: &[u8]) {
    to.extend_from_slice(&((4 + value.len()) as u16).to_ne_bytes());
    to.extend_from_slice(&kind.to_ne_bytes());
    to.extend_from_slice(value);
    to.resize(to.len().next_multiple_of(4), 0);
}

/// The kinds of the attributes at this level.
pub fn kinds(rest: &[u8]) -> impl Iterator<Item = u16> + '_ {
    attributes(rest).map(|(kind, _)| kind)
}

/// The attributes at this level: kind and value.
pub fn attributes(mut rest: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let len = (rest.len() >= 4).then(|| usize::from(u16_at(rest, 0)))?;
        if len < 4 || len > rest.len() {
            return None;
        }
        // The upper two bits, which tell how the value is encoded, are removed.
        let attribute = (u16_at(rest, 2) & 0x3fff, &rest[4..len]);
        rest = &rest[len.next_multiple_of(4).min(rest.len())..];
        Some(attribute)
    })
}

/// The messages of one datagram: for each, its kind and the bytes behind its header.
pub fn messages(mut rest: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let len = (rest.len() >= HEAD).then(|| u32_at(rest, 0) as usize)?;
        if len < HEAD || len > rest.len() {
            return None;
        }
        let message = (u16_at(rest, 4), &rest[HEAD..len]);
        rest = &rest[len.next_multiple_of(4).min(rest.len())..];
        Some(message)
    })
}
