//! This side's end of the kernel connection that takes over, and what is done at the other one.

use crate::chan::Chan;
use crate::table::{self, Desc};
use crate::{chan, ctl, heartbeat, name, process};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::flag;
use fsocket_abi::channel::{status, CLIENT, SERVER};
use fsocket_proto::{kind, switch, Msg};
use fsocket_sys::{self as sys, Errno, Result};

/// A socket of ours to close. -1: this side needs none.
pub struct Own(pub i32);

impl Own {
    pub fn close(&self) {
        if self.0 >= 0 {
            process::close_own(self.0);
        }
    }
}

fn message(d: &Desc, what: u32, side: usize) -> Msg {
    // As this process knows it: what the arena says any process of the fork group can write.
    let channel = chan::of(d);
    let mut m = Msg::new(what);
    m.id = channel.map_or(0, |c| c.id.load(Ordering::Relaxed)) as u64;
    m.arg0 = d.conn().slot_index() as u64 | (side as u64) << 32;
    m.arg1 = d.slot().generation.load(Ordering::Relaxed) as u64;
    m
}

/// A SWITCH with a socket that shows in which network namespace we are.
fn switch(m: Msg, family: i32) -> Result<Option<i32>> {
    let shown = fresh(family).ok();
    let r = ctl::request(m, shown);
    if let Some(fd) = shown {
        process::close_own(fd);
    }
    r.map(|(_, fd)| fd)
}

/// Between network namespaces the kernel connection is still there, idle, behind the descriptors. What
/// was not read the other side sends again.
pub(super) fn is_across(d: &Desc) -> bool {
    d.sock().flags.load(Ordering::Relaxed) & flag::ACROSS != 0
}

/// This side's end of a connection that has never left the kernel.
fn placeholder(d: &Desc) -> Option<i32> {
    let fd = table::fd_of(d)?;
    let end = sys::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0).ok().map(process::high_fd)?;
    if let Ok(fresh) = fresh(d.sock().family.load(Ordering::Relaxed) as i32) {
        heartbeat::end(end, fresh);
        process::close_own(fresh);
    }
    Some(end)
}

/// The monitor makes both ends and keeps the other one for the other side. With the privilege to do
/// so (TCP_REPAIR) it connects them under the addresses of this very connection; else they are an
/// ordinary loopback connection.
pub fn make(d: &Desc) -> Option<Own> {
    if is_across(d) {
        // A peer that is gone sends nothing again: the connection stays, for what it has left.
        let gone = d.rx_dir().prod.status.load(Ordering::Acquire) & status::CLOSED != 0;
        return if gone && crate::conn::ring_has(d) { None } else { placeholder(d).map(Own) };
    }
    let family = d.sock().family.load(Ordering::Relaxed) as i32;
    let side = d.side();
    let mut m = message(d, kind::SWITCH, side);
    m.arg2 = switch::MAKE;
    match switch(m, family) {
        Ok(fd) => fd.map(|fd| Own(process::high_fd(fd))),
        // The other side began at the same time.
        Err(Errno::EALREADY) => claim_within(d, side, 0, 200).map(|fd| Own(process::high_fd(fd))),
        Err(Errno::EXDEV) => plain(d, m, family),
        Err(_) => None,
    }
}

/// Something to do at the other side's end, which is the monitor's to touch; bits of
/// [`switch::act`].
pub fn act(d: &Desc, what: u32) {
    if what == 0 || is_across(d) {
        return;
    }
    let mut m = message(d, kind::SWITCH, d.side());
    m.arg1 |= (what as u64) << 32;
    m.arg2 = switch::ACT;
    let _ = ctl::request(m, None);
}

/// Connect the client's end to the kernel's listener, for the client to come for.
///
/// # Errors
/// EXDEV: the monitor cannot, there.
pub fn dial(c: &Chan, slot: usize, family: i32, patience_ns: u64) -> Result<()> {
    let m = Msg { arg2: switch::DIAL, ..of_slot(c, slot, SERVER, kind::SWITCH) };
    let until = sys::now_ns() + patience_ns;
    loop {
        match switch(m, family) {
            Err(Errno::EINPROGRESS) if sys::now_ns() < until => sys::nanosleep(200_000),
            Err(e) => {
                // The listener has dropped it; another one may get through at once.
                hang_up(c, slot);
                return Err(e);
            }
            Ok(_) => return Ok(()),
        }
    }
}

/// Take back what [`dial`] has made.
pub fn hang_up(c: &Chan, slot: usize) {
    let _ = ctl::request(of_slot(c, slot, CLIENT, kind::RELEASE), None);
}

fn of_slot(c: &Chan, slot: usize, side: usize, what: u32) -> Msg {
    let mut m = Msg::new(what);
    m.id = c.id.load(Ordering::Relaxed) as u64;
    m.arg0 = slot as u64 | (side as u64) << 32;
    m.arg1 = c.slot(slot).generation.load(Ordering::Relaxed) as u64;
    m
}

/// A socket of which nothing is decided, in place of this side's end.
pub fn make_alone(d: &Desc) -> Option<Own> {
    let own = Own(fresh(d.sock().family.load(Ordering::Relaxed) as i32).ok()?);
    // Other processes of the fork group come to the monitor for it.
    d.sock().flags.fetch_and(!flag::ACROSS, Ordering::AcqRel);
    let mut m = message(d, kind::SWITCH, d.side());
    m.arg2 = switch::ALONE;
    if ctl::request(m, Some(own.0)).is_err() {
        own.close();
        return None;
    }
    Some(own)
}

pub fn fresh(family: i32) -> Result<i32> {
    sys::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, libc::IPPROTO_TCP).map(process::high_fd)
}

/// In a network namespace that the monitor cannot enter: other port numbers, the same bytes.
fn plain(d: &Desc, mut m: Msg, family: i32) -> Option<Own> {
    let v4 = name::is_v4(&name::load(&d.sock().local));
    let listener = fresh(family).ok()?;
    let ends = connect_to(listener, v4, family);
    process::close_own(listener);
    let (own, other) = ends.ok()?;
    let mut kept = [(own, switch::OWN_READY), (other, switch::OTHER_READY)].into_iter().map(|(fd, what)| {
        m.arg2 = what;
        ctl::request(m, Some(fd)).is_ok()
    });
    let both = kept.all(|ok| ok);
    process::close_own(other);
    if !both {
        process::close_own(own);
    }
    both.then_some(Own(own))
}

/// Give the monitor a copy of an end that exists already, for the other side to
/// come for. (This side needs none of its own.)
pub fn announce(d: &Desc, other: i32) -> bool {
    let mut m = message(d, kind::SWITCH, d.side());
    [switch::OWN_READY, switch::OTHER_READY].into_iter().all(|what| {
        m.arg2 = what;
        ctl::request(m, Some(other)).is_ok()
    })
}

/// This side's end and the other one, of the same family.
fn connect_to(listener: i32, v4: bool, family: i32) -> Result<(i32, i32)> {
    let (any, len) = loopback(v4, family, 0);
    sys::bind(listener, &any[..len])?;
    sys::listen(listener, 1)?;
    let mut b = [0u8; 28];
    sys::getsockname(listener, &mut b)?;
    let (to, len) = loopback(v4, family, u16::from_be_bytes([b[2], b[3]]));
    let own = fresh(family)?;
    // SAFETY: no address wanted.
    let accept = || unsafe { sys::accept4(listener, core::ptr::null_mut(), core::ptr::null_mut(), libc::SOCK_CLOEXEC) };
    match sys::connect(own, &to[..len]).and_then(|()| accept()) {
        Ok(other) => Ok((own, process::high_fd(other))),
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

/// A descriptor of this side's end from the monitor. A peer that says it has moved has made both
/// ends before. `pours`: the caller sends itself what that one has not read.
pub fn claim(d: &Desc, side: usize, pours: bool) -> Option<i32> {
    claim_within(d, side, if pours { switch::POURS } else { 0 }, 4)
}

fn claim_within(d: &Desc, side: usize, how: u64, turns: u64) -> Option<i32> {
    if is_across(d) {
        return placeholder(d);
    }
    let m = Msg { arg2: how, ..message(d, kind::CLAIM, side) };
    for turn in 0..turns {
        match ctl::request(m, None) {
            Ok((_, Some(fd))) => return Some(fd),
            // The mover is between two requests.
            Err(Errno::EAGAIN) => sys::nanosleep(10_000 * (turn + 1).min(100)),
            _ => return None,
        }
    }
    None
}

/// This side's last holder has its own copies of the end, or is gone.
pub fn release(d: &Desc, side: usize) {
    if !is_across(d) {
        send_release(releasing(d, side));
    }
}

pub fn releasing(d: &Desc, side: usize) -> Msg {
    message(d, kind::RELEASE, side)
}

pub fn send_release(m: Msg) {
    // With an answer: as long as the monitor has its copy a close of the program's ends nothing.
    // Not from a signal handler on top of a request.
    if ctl::request(m, None).err() == Some(Errno::EAGAIN) {
        let _ = ctl::tell(m, None);
    }
}
