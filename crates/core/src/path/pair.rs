//! The two ends of the kernel connection that takes over.

use crate::table::Desc;
use crate::{ctl, name, process};
use core::sync::atomic::Ordering;
use fsocket_proto::{kind, switch, Msg};
use fsocket_sys::{self as sys, Errno, Result};

/// Two connected sockets, ours to close. -1: that end is in the kernel's hands
/// already.
pub struct Ends {
    pub own: i32,
    pub other: i32,
}

impl Ends {
    pub fn close(&self) {
        for fd in [self.own, self.other] {
            if fd >= 0 {
                process::close_own(fd);
            }
        }
    }
}

fn message(d: &Desc, what: u32, side: u32) -> Msg {
    let s = d.sock();
    let mut m = Msg::new(what);
    m.id = s.channel.load(Ordering::Relaxed) as u64;
    m.arg0 = s.slot.load(Ordering::Relaxed) as u64 | (side as u64) << 32;
    m.arg1 = d.slot().generation.load(Ordering::Relaxed) as u64;
    m
}

/// Make both ends and give the monitor a copy of each. With the privilege to do
/// so (TCP_REPAIR) the monitor connects them under the addresses of this very
/// connection; else they are an ordinary loopback connection.
pub fn make(d: &Desc) -> Option<Ends> {
    let family = d.sock().family.load(Ordering::Relaxed) as i32;
    let side = d.side.load(Ordering::Relaxed);
    let own = fresh(family).ok()?;
    let mut m = message(d, kind::SWITCH, side);
    m.arg2 = switch::OWN;
    match ctl::request(m, Some(own)) {
        Ok((a, _)) => {
            let other_family = a.arg0 as i32;
            let Ok(other) = fresh(other_family) else {
                process::close_own(own);
                return None;
            };
            m.arg2 = switch::OTHER;
            match ctl::request(m, Some(other)) {
                Ok(_) => Some(Ends { own, other }),
                Err(e) => {
                    Ends { own, other }.close();
                    (e == Errno::EPERM).then(|| plain(d, m, family, other_family)).flatten()
                }
            }
        }
        Err(e) => {
            process::close_own(own);
            // The other side began at the same time.
            (e == Errno::EALREADY).then(|| taken(d, side)).flatten()
        }
    }
}

/// A socket of which nothing is decided, in place of this side's end.
pub fn make_alone(d: &Desc) -> Option<Ends> {
    let own = fresh(d.sock().family.load(Ordering::Relaxed) as i32).ok()?;
    let mut m = message(d, kind::SWITCH, d.side.load(Ordering::Relaxed));
    m.arg2 = switch::ALONE;
    let ends = Ends { own, other: -1 };
    match ctl::request(m, Some(own)) {
        Ok(_) => Some(ends),
        Err(_) => {
            ends.close();
            None
        }
    }
}

fn taken(d: &Desc, side: u32) -> Option<Ends> {
    let own = process::high_fd(claim(d, side)?);
    match claim(d, 1 - side) {
        Some(other) => Some(Ends { own, other: process::high_fd(other) }),
        None => {
            process::close_own(own);
            None
        }
    }
}

pub fn fresh(family: i32) -> Result<i32> {
    sys::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, libc::IPPROTO_TCP).map(process::high_fd)
}

/// Without the privilege: other port numbers, the same bytes.
fn plain(d: &Desc, mut m: Msg, own_family: i32, other_family: i32) -> Option<Ends> {
    let v4 = name::is_v4(&name::load(&d.sock().local));
    let listener = fresh(other_family).ok()?;
    let ends = connect_to(listener, v4, own_family, other_family);
    process::close_own(listener);
    let ends = ends.ok()?;
    for (fd, what) in [(ends.own, switch::OWN_READY), (ends.other, switch::OTHER_READY)] {
        m.arg2 = what;
        if ctl::request(m, Some(fd)).is_err() {
            ends.close();
            return None;
        }
    }
    Some(ends)
}

/// Give the monitor a copy of an end that exists already, for the other side to
/// come for. (This side needs none of its own.)
pub fn announce(d: &Desc, ends: &Ends) -> bool {
    let mut m = message(d, kind::SWITCH, d.side.load(Ordering::Relaxed));
    [switch::OWN_READY, switch::OTHER_READY].into_iter().all(|what| {
        m.arg2 = what;
        ctl::request(m, Some(ends.other)).is_ok()
    })
}

fn connect_to(listener: i32, v4: bool, own_family: i32, other_family: i32) -> Result<Ends> {
    let (any, len) = loopback(v4, other_family, 0);
    sys::bind(listener, &any[..len])?;
    sys::listen(listener, 1)?;
    let mut b = [0u8; 28];
    sys::getsockname(listener, &mut b)?;
    let (to, len) = loopback(v4, own_family, u16::from_be_bytes([b[2], b[3]]));
    let own = fresh(own_family)?;
    // SAFETY: no address wanted.
    let accept = || unsafe { sys::accept4(listener, core::ptr::null_mut(), core::ptr::null_mut(), libc::SOCK_CLOEXEC) };
    match sys::connect(own, &to[..len]).and_then(|()| accept()) {
        Ok(other) => Ok(Ends { own, other: process::high_fd(other) }),
        Err(e) => {
            process::close_own(own);
            Err(e)
        }
    }
}

/// The loopback address for a socket of `family`: IPv4 (mapped if need be) or ::1.
fn loopback(v4: bool, family: i32, port: u16) -> ([u8; 28], usize) {
    let mut b = [0u8; 28];
    b[..2].copy_from_slice(&(family as u16).to_ne_bytes());
    b[2..4].copy_from_slice(&port.to_be_bytes());
    if family == libc::AF_INET {
        b[4..8].copy_from_slice(&[127, 0, 0, 1]);
        return (b, 16);
    }
    if v4 {
        b[18..24].copy_from_slice(&[0xff, 0xff, 127, 0, 0, 1]);
    } else {
        b[23] = 1;
    }
    (b, 28)
}

/// A descriptor of one end from the monitor.
pub fn claim(d: &Desc, side: u32) -> Option<i32> {
    let m = message(d, kind::CLAIM, side);
    for turn in 0..200u64 {
        match ctl::request(m, None) {
            Ok((_, Some(fd))) => return Some(fd),
            // The mover is between its two requests.
            Err(Errno::EAGAIN) => sys::nanosleep(10_000 * (turn + 1).min(100)),
            _ => return None,
        }
    }
    None
}

/// This side's last holder has its own copies of the end, or is gone.
pub fn release(d: &Desc, side: u32) {
    send_release(releasing(d, side));
}

pub fn releasing(d: &Desc, side: u32) -> Msg {
    message(d, kind::RELEASE, side)
}

pub fn send_release(m: Msg) {
    // With an answer: as long as the monitor has its copy a close of the program's ends nothing.
    // Not from a signal handler on top of a request.
    if ctl::request(m, None).err() == Some(Errno::EAGAIN) {
        let _ = ctl::tell(m, None);
    }
}
