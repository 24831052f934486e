//! The kernel's own capture: a packet socket on the loopback device.

use rustix::fd::{AsRawFd, FromRawFd, OwnedFd};
use rustix::io::Errno;
use std::time::{Duration, SystemTime};

/// The longest packet: the device takes segments of 64 KiB, and more with BIG TCP.
pub const LONGEST: usize = 256 << 10;
/// What may wait, bytes.
const BUFFER: libc::c_int = 64 << 20;
/// Without it each packet is seen twice there (linux/if_packet.h, since 4.20).
const PACKET_IGNORE_OUTGOING: libc::c_int = 23;

/// See the module's description.
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
    /// PERM: this user may not.
    pub fn open() -> Result<Loopback, Errno> {
        let all = (libc::ETH_P_ALL as u16).to_be();
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // Of no protocol until it is bound: nothing of other devices comes first.
        // SAFETY: numbers only; then the descriptor is ours.
        let fd = unsafe { OwnedFd::from_raw_fd(checked(libc::socket(libc::AF_PACKET, kind, 0))?) };
        let set = |level, name, value: libc::c_int| {
            let size = size_of::<libc::c_int>() as libc::socklen_t;
            // SAFETY: an int of ours, and its size.
            checked(unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, (&raw const value).cast(), size) })
        };
        set(libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)?;
        let _ = set(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, BUFFER);
        // SAFETY: a NUL-terminated name.
        let index = unsafe { libc::if_nametoindex(c"lo".as_ptr()) };
        // SAFETY: plain data, for which zero is valid.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = all;
        address.sll_ifindex = index as libc::c_int;
        let size = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: an address of ours, and its size.
        checked(unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), size) })?;
        Ok(Loopback { fd })
    }

    /// The next packet. None: there is none now.
    pub fn next<'a>(&self, buffer: &'a mut [u8]) -> Result<Option<Packet<'a>>, Errno> {
        let fd = self.fd.as_raw_fd();
        // SAFETY: the buffer is as long as said.
        let got = unsafe { libc::recv(fd, buffer.as_mut_ptr().cast(), buffer.len(), libc::MSG_TRUNC) };
        let length = match checked(got as libc::c_int) {
            Ok(length) => length as usize,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(e) => return Err(e),
        };
        let mut at = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        const SIOCGSTAMPNS: libc::c_ulong = 0x8907;
        // SAFETY: the kernel writes a timespec.
        let known = unsafe { libc::ioctl(fd, SIOCGSTAMPNS as _, &raw mut at) } == 0;
        let at = match known {
            true => Duration::new(at.tv_sec as u64, at.tv_nsec as u32),
            false => SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default(),
        };
        Ok(Some(Packet { bytes: &buffer[..length.min(buffer.len())], length, at }))
    }

    /// Packets of the device for which there was no room.
    pub fn lost(&self) -> u32 {
        let mut counts = [0u32; 2];
        let mut size = size_of_val(&counts) as libc::socklen_t;
        let (fd, to) = (self.fd.as_raw_fd(), (&raw mut counts).cast());
        // SAFETY: struct tpacket_stats is two words, and there is room for them.
        match unsafe { libc::getsockopt(fd, libc::SOL_PACKET, libc::PACKET_STATISTICS, to, &raw mut size) } {
            0 => counts[1],
            _ => 0,
        }
    }
}

/// What was captured.
pub struct Packet<'a> {
    pub bytes: &'a [u8],
    /// On the device.
    pub length: usize,
    /// When, since 1970.
    pub at: Duration,
}

/// Readable once SIGINT or SIGTERM has come.
pub struct Stop {
    pub fd: OwnedFd,
}

impl Stop {
    /// SIGINT and SIGTERM no longer end this process.
    pub fn on_signals() -> Result<Stop, Errno> {
        // SAFETY: a set of ours; numbers only; then the descriptor is ours.
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
