//! This side's end of the kernel connection that takes over, and what is done at the other one.

use crate::chan::Chan;
use crate::table::{self, Desc};
use crate::{chan, ctl, heartbeat, name, process};
use core::sync::atomic::Ordering;
use fsocket_abi::channel::{status, CLIENT, SERVER};
use fsocket_abi::flags::FlagSet;
use fsocket_proto::request;
use fsocket_proto::values::{Acts, End, Switching};
use fsocket_sys::{self as sys, Errno, Result};

/// A socket that this side closes. -1: it needs none.
pub struct Own(pub i32);

impl Own {
    pub fn close(&self) {
        if self.0 >= 0 {
            process::close_own(self.0);
        }
    }
}

/// How messages name an end of a connection.
#[derive(Clone, Copy)]
struct Named {
    channel: u32,
    end: End,
    generation: u32,
}

impl Named {
    fn of(d: &Desc, side: usize) -> Named {
        // As this process knows it: what the arena says any process of the fork group can write.
        let channel = chan::of(d).map_or(0, |c| c.id.load(Ordering::Relaxed));
        let end = End { slot: d.conn().slot_index(), side };
        Named { channel, end, generation: d.slot().generation.load(Ordering::Relaxed) }
    }

    fn of_slot(c: &Chan, slot: usize, side: usize) -> Named {
        let generation = c.slot(slot).generation.load(Ordering::Relaxed);
        Named { channel: c.id.load(Ordering::Relaxed), end: End { slot, side }, generation }
    }

    fn switch(self, what: Switching) -> request::Switch {
        let Named { channel, end, generation } = self;
        request::Switch { channel, end, generation, acts: Acts(0), what }
    }

    fn release(self) -> request::Release {
        let Named { channel, end, generation } = self;
        request::Release { channel, end, generation, read_all: false }
    }
}

/// A request with a socket that shows in which network namespace we are.
fn switch(ask: request::Switch, family: i32) -> Result<Option<i32>> {
    let shown = fresh(family).ok();
    let r = ctl::request(ask, shown);
    if let Some(fd) = shown {
        process::close_own(fd);
    }
    r.map(|(_, fd)| fd)
}

/// Between network namespaces the kernel connection is still there, idle, behind the descriptors. What
/// was not read the other side sends again.
pub(super) fn is_across(d: &Desc) -> bool {
    d.sock().flags.get().has(FlagSet::ACROSS)
}

/// This side's end of a connection that has never left the kernel.
fn placeholder(d: &Desc) -> Option<i32> {
    let fd = table::fd_of(d)?;
    let end = sys::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0).ok().map(process::high_fd)?;
    if d.is_unix() {
        return Some(end);
    }
    if let Ok(fresh) = fresh(d.sock().family() as i32) {
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
        let helped = d.is_unix() && monitor_has_other_end(d);
        // A peer that is gone sends nothing again: the connection stays, for what it has left.
        let gone = d.peer_status().has(status::CLOSED);
        return if gone && !helped && crate::conn::ring_has(d) { None } else { placeholder(d).map(Own) };
    }
    let family = d.sock().family() as i32;
    let side = d.side();
    let named = Named::of(d, side);
    match switch(named.switch(Switching::Make), family) {
        Ok(fd) => fd.map(|fd| Own(process::high_fd(fd))),
        // The other side began at the same time.
        Err(Errno::EALREADY) => claim_within(d, side, false, 200).map(|fd| Own(process::high_fd(fd))),
        Err(Errno::EXDEV) => plain(d, named, family),
        Err(_) => None,
    }
}

/// A Unix connection has gone over to shared memory. `fd` is this side's end, which the monitor keeps for the way back: where
/// this process is killed, nobody else could send what the other side has not read.
pub fn keep_end(d: &Desc, fd: i32) {
    if d.is_unix() {
        let _ = ctl::request(Named::of(d, d.side()).switch(Switching::Keep), Some(fd));
    }
}

/// Can the monitor act at the other side's end of a Unix connection? It cannot after a restart, for connections of two
/// users, and where descriptors are scarce. Then the other side sends again what was not read.
fn monitor_has_other_end(d: &Desc) -> bool {
    let has = ctl::request(Named::of(d, d.side()).switch(Switching::Return), None);
    matches!(has, Ok(_) | Err(Errno::EALREADY))
}

/// Something to do at the other side's end, which is the monitor's to touch; bits of
/// [`fsocket_proto::switch::act`].
pub fn act(d: &Desc, what: u32) {
    Late::of(d).act(d, what);
}

/// The acts of a mover that is done. Its slot may be another connection's by then, so this names the connection.
#[derive(Clone, Copy)]
pub struct Late(Named);

impl Late {
    pub fn of(d: &Desc) -> Late {
        Late(Named::of(d, d.side()))
    }
    pub fn is_of(self, d: &Desc) -> bool {
        d.slot().generation.load(Ordering::Relaxed) == self.0.generation
    }
    pub fn act(self, d: &Desc, what: u32) {
        if what == 0 || is_across(d) && !d.is_unix() {
            return;
        }
        let ask = self.0.switch(Switching::Act);
        let _ = ctl::request(request::Switch { acts: Acts(what), ..ask }, None);
    }
    /// The other side is gone. `read_all`: it has read all that this side had carried.
    pub fn release(self, d: &Desc, read_all: bool) {
        if !is_across(d) || d.is_unix() {
            let end = End { side: 1 - self.0.end.side, ..self.0.end };
            send_release(request::Release { read_all, ..Named { end, ..self.0 }.release() });
        }
    }
}

/// Connect the client's end to the kernel's listener, for the client to come for.
///
/// # Errors
/// EXDEV: the monitor cannot, there.
pub fn dial(c: &Chan, slot: usize, family: i32, patience_ns: u64) -> Result<()> {
    let ask = Named::of_slot(c, slot, SERVER).switch(Switching::Dial);
    let until = sys::now_ns() + patience_ns;
    loop {
        match switch(ask, family) {
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
    let _ = ctl::request(Named::of_slot(c, slot, CLIENT).release(), None);
}

/// A socket of which nothing is decided, in place of this side's end.
pub fn make_alone(d: &Desc) -> Option<Own> {
    let own = Own(fresh(d.sock().family() as i32).ok()?);
    // Other processes of the fork group come to the monitor for it.
    d.sock().flags.clear(FlagSet::ACROSS);
    let ask = Named::of(d, d.side()).switch(Switching::Alone);
    if ctl::request(ask, Some(own.0)).is_err() {
        own.close();
        return None;
    }
    Some(own)
}

pub fn fresh(family: i32) -> Result<i32> {
    sys::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, libc::IPPROTO_TCP).map(process::high_fd)
}

/// In a network namespace that the monitor cannot enter: other port numbers, the same bytes.
fn plain(d: &Desc, named: Named, family: i32) -> Option<Own> {
    let v4 = name::is_v4(&d.sock().local().0);
    let listener = fresh(family).ok()?;
    let ends = connect_to(listener, v4, family);
    process::close_own(listener);
    let (own, other) = ends.ok()?;
    let ready = [(own, Switching::OwnReady), (other, Switching::OtherReady)];
    let both = ready.into_iter().all(|(fd, what)| ctl::request(named.switch(what), Some(fd)).is_ok());
    process::close_own(other);
    if !both {
        process::close_own(own);
    }
    both.then_some(Own(own))
}

/// Give the monitor a copy of an end that exists already, for the other side to
/// come for. (This side needs none of its own.)
pub fn announce(d: &Desc, other: i32) -> bool {
    let named = Named::of(d, d.side());
    let ready = [Switching::OwnReady, Switching::OtherReady];
    ready.into_iter().all(|what| ctl::request(named.switch(what), Some(other)).is_ok())
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
    claim_within(d, side, pours, 4)
}

fn claim_within(d: &Desc, side: usize, pours: bool, turns: u64) -> Option<i32> {
    let Named { channel, end, generation } = Named::of(d, side);
    if is_across(d) {
        if d.is_unix() && pours {
            // The monitor neither sends the same bytes nor reads here what the other side had carried.
            if let Ok((_, Some(copy))) = ctl::request(request::Claim { channel, end, generation, pours }, None) {
                let _ = sys::close(copy);
            }
        }
        return placeholder(d);
    }
    for turn in 0..turns {
        match ctl::request(request::Claim { channel, end, generation, pours }, None) {
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
    if !is_across(d) || d.is_unix() {
        send_release(releasing(d, side));
    }
}

/// Both sides of a connection that was over shared memory have closed it.
pub fn forget_ends(m: request::Release) {
    let _ = ctl::tell(m, None);
}

pub fn releasing(d: &Desc, side: usize) -> request::Release {
    Named::of(d, side).release()
}

pub fn send_release(m: request::Release) {
    // With an answer: as long as the monitor has its copy a close of the program's ends nothing.
    // Not from a signal handler on top of a request.
    if ctl::request(m, None).err() == Some(Errno::EAGAIN) {
        let _ = ctl::tell(m, None);
    }
}
