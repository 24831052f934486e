//! Captures packets as tcpdump does: by a packet socket on the loopback device.

use rustix::fd::{AsRawFd, FromRawFd, OwnedFd};
use rustix::io::Errno;
use std::time::{Duration, SystemTime};

/// The longest packet: the device takes segments of 64 KiB, and more with BIG TCP.
pub const LONGEST: usize = 256 << 10;
/// Size of the socket's receive buffer: the kernel keeps at most this many bytes until the command
/// reads them.
const BUFFER: libc::c_int = 64 << 20;
/// Without this option the socket sees each packet twice (linux/if_packet.h, since 4.20).
const PACKET_IGNORE_OUTGOING: libc::c_int = 23;

/// A packet socket that receives what passes the loopback device.
pub struct Loopback {
    pub fd: OwnedFd,
}

fn checked(rc: libc::c_int) -> Result<libc::c_int, Errno> {
    if rc < 0 {
        Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
    } else {
        Ok(rc)
    }
}

impl Loopback {
    /// # Errors
    /// PERM: the user lacks CAP_NET_RAW.
    pub fn open() -> Result<Loopback, Errno> {
        let all = (libc::ETH_P_ALL as u16).to_be();
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // The protocol is set by `bind` only. A socket created with a protocol would receive
        // packets of all devices until it is bound.
        // SAFETY: `socket` takes no pointers, and the new descriptor has no other owner.
        let fd = unsafe { OwnedFd::from_raw_fd(checked(libc::socket(libc::AF_PACKET, kind, 0))?) };
        let set = |level, name, value: libc::c_int| {
            let size = size_of::<libc::c_int>() as libc::socklen_t;
            // SAFETY: `value` is a live int, and `size` is its size.
            checked(unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, (&raw const value).cast(), size) })
        };
        set(libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)?;
        let _ = set(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, BUFFER);
        // SAFETY: the argument is a C string literal, so it ends with NUL.
        let index = unsafe { libc::if_nametoindex(c"lo".as_ptr()) };
        // SAFETY: sockaddr_ll has integer fields only, for which zero is valid.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = all;
        address.sll_ifindex = index as libc::c_int;
        let size = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: `address` is a live sockaddr_ll, and `size` is its size.
        checked(unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), size) })?;
        Ok(Loopback { fd })
    }

    /// The next packet. `None`: no packet waits now.
    pub fn next<'a>(&self, buffer: &'a mut [u8]) -> Result<Option<Packet<'a>>, Errno> {
        let fd = self.fd.as_raw_fd();
        // SAFETY: `buffer` is a live slice that nobody else uses, and its own length is passed.
        let got = unsafe { libc::recv(fd, buffer.as_mut_ptr().cast(), buffer.len(), libc::MSG_TRUNC) };
        let length = match checked(got as libc::c_int) {
            Ok(length) => length as usize,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(e) => return Err(e),
        };
        let mut at = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        const SIOCGSTAMPNS: libc::c_ulong = 0x8907;
        // SAFETY: SIOCGSTAMPNS writes one timespec, and `at` is one.
        let known = unsafe { libc::ioctl(fd, SIOCGSTAMPNS as _, &raw mut at) } == 0;
        let at = match known {
            true => Duration::new(at.tv_sec as u64, at.tv_nsec as u32),
            false => SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default(),
        };
        Ok(Some(Packet { bytes: &buffer[..length.min(buffer.len())], length, at }))
    }

    /// Number of packets that the kernel dropped since the last call because the receive buffer
    /// was full.
    pub fn lost(&self) -> u32 {
        let mut counts = [0u32; 2];
        let mut size = size_of_val(&counts) as libc::socklen_t;
        let (fd, to) = (self.fd.as_raw_fd(), (&raw mut counts).cast());
        // SAFETY: the kernel writes struct tpacket_stats, two u32. `counts` has that size, which
        // `size` says.
        match unsafe { libc::getsockopt(fd, libc::SOL_PACKET, libc::PACKET_STATISTICS, to, &raw mut size) } {
            0 => counts[1],
            _ => 0,
        }
    }
}

/// A captured packet.
pub struct Packet<'a> {
    pub bytes: &'a [u8],
    /// Length of the packet on the device; `bytes` may be shorter.
    pub length: usize,
    /// When the kernel received the packet, as time since 1970.
    pub at: Duration,
}

/// A signalfd: `fd` becomes readable when SIGINT or SIGTERM arrives.
pub struct Stop {
    pub fd: OwnedFd,
}

impl Stop {
    /// Blocks SIGINT and SIGTERM, so that they no longer end this process, and makes a descriptor
    /// that reports them.
    pub fn on_signals() -> Result<Stop, Errno> {
        // SAFETY: `set` is a live local variable, for which zero is valid. The new descriptor has
        // no other owner.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            libc::sigaddset(&raw mut set, libc::SIGINT);
            libc::sigaddset(&raw mut set, libc::SIGTERM);
            checked(libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()))?;
            let fd = checked(libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC))?;
            Ok(Stop { fd: OwnedFd::from_raw_fd(fd) })
        }
    }
}
