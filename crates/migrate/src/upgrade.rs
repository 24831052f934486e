//! Kernel connections that move to shared memory while they are in use.
//!
//! A connection between two programs with the library can start in the kernel: a program had no
//! monitor yet, the client was bound, or the queue was full. After some calls each side shows its
//! end to the monitor. The side that opened the connection (the *opener*) asks for a slot, and
//! the monitor finds the side that accepted it (the *accepter*). Both ends move at one moment,
//! when the stream is at rest in both directions: nothing is in flight, nothing waits to be read,
//! and no thread is inside a call on the connection. So no bytes have to be put in order, and
//! none can be lost. The slot's state decides:
//!
//! OFFERED (by the opener: its end is at rest, with these byte counts) -> TAKEN (by the accepter:
//! its end is at rest, too, with the same counts; it sends nothing from here on) -> ESTABLISHED
//! (by the opener), or REFUSED (by either).
//!
//! ([`fsocket_sync::handover`], model-checked.) The kernel connection stays behind the
//! descriptors as their placeholder. Before the decision,
//! [`Calls`](fsocket_sync::handover::Calls) counts the running calls on such a connection. A call
//! that comes during the decision waits for it.

use crate::signals::Held;
use crate::table::{self, Desc, Kind, DESCS};
use crate::{ctl, lately, name, process, registry, route};
use fsocket_abi::channel::{CLIENT, SERVER};
use fsocket_abi::flags::FlagSet;
use fsocket_proto::{request, Addr};
use fsocket_sync::handover::Entry;
use fsocket_sys::{self as sys, Errno};

mod calls;
mod offer;
mod passed;
mod rest;
pub mod unix;
mod unix_rest;
mod waiting;
mod worth;

pub use calls::init;
pub use offer::{answer, asked, epoch};
pub use passed::{before_fork, give_up, let_go, received, sent, tell};
pub use worth::ended;

use calls::{at_once, begin, is_on, is_too_often, missed, wanted, CALLS, LOOKS, OFFERED};
use offer::{key, open};
use passed::is_passed;
use rest::{is_here, lingers, own_of, peer_of, rest_of, usual};
use unix_rest::is_quiet;

/// For a connection that comes back when an operator allows its peer to come back: the number of
/// calls between two tries.
const PATIENT: u32 = 1024;
/// After a try, this many receives wait in a way that lets the connection move. Each of them
/// costs three system calls more. If the other end exists, it tries within its next 32 calls.
const WAITS: u32 = 64;

/// May connections to other network namespaces of this host move?
fn reaches_across(ip: &[u8; 16], port: u16) -> bool {
    let recorded = registry::mapped().is_some_and(|r| route::volatile(&r.pairs) != 0);
    recorded && !name::is_loopback(ip) && !lately::STRANGERS.has(ip, port)
}

/// The kernel is about to connect the socket to `dst`. False: no process there can ever share
/// memory with this one, so the library does not track the connection.
pub fn connecting(d: &'static Desc, dst: &Addr) -> bool {
    let across = reaches_across(&dst.ip, dst.port);
    if !wanted() || !(across || is_here(&dst.ip)) {
        return false;
    }
    begin(d, CLIENT);
    d.kernel().set_across(across);
    if across {
        worth::begins(d);
    }
    if !across && lately::PASSED_ON.has(&dst.ip, dst.port) {
        at_once(d);
    }
    true
}

/// The kernel's `connect` of `d`, a socket without a path until then, has failed with `error`. If
/// the socket is unconnected again, it becomes a fresh socket. Its next `connect` may use shared
/// memory. (Some clients call `connect` until their server is there.)
#[cold]
pub fn failed(fd: i32, d: &Desc, error: &sys::errno::Saved) {
    // If a kernel epoll instance watches the socket, it stays with the kernel.
    let ours = d.kind() == Kind::Kernel && !d.placeholder().is_watched();
    // After these errors the `connect` is not over.
    let says_more = [Errno::EINPROGRESS, Errno::EALREADY, Errno::EINTR, Errno::EISCONN];
    let pending = says_more.into_iter().any(|e| error.is(e));
    if ours && !pending && !crate::inspect::is_connected(fd) {
        d.disconnect();
    }
}

/// The kernel has accepted a connection; `addr` and `len` are the results of the caller's `accept`,
/// or null.
///
/// # Safety
/// `addr` is null or readable for `*len` bytes.
pub unsafe fn accepted(fd: i32, addr: *const libc::sockaddr, len: *const u32) {
    if !wanted() || fd <= table::STDIO {
        return;
    }
    let peer = if addr.is_null() || len.is_null() {
        peer_of(fd)
    } else {
        // SAFETY: `addr` is readable for `*len` bytes, and `len` may be unaligned. An address that did not fit
        // counts as none.
        unsafe { name::parse(addr, len.read_unaligned()) }
    };
    let Some(peer) = peer else { return };
    let across = reaches_across(&peer.ip, 0);
    if !across && !is_here(&peer.ip) {
        return;
    }
    let Some(d) = table::alloc(Kind::Fresh) else { return };
    d.set_families(peer.family as u32);
    begin(d, SERVER);
    d.kernel().set_across(across);
    if across {
        worth::begins(d);
    }
    if !table::install(fd, d) {
        table::release(d);
    }
}

/// The new description of the kernel connection that continues `was`, and that may come back.
pub fn candidate(was: &Desc) -> Option<&'static Desc> {
    if !is_on() {
        return None;
    }
    let across = was.sock().flags.get().has(FlagSet::ACROSS);
    let d = table::alloc(Kind::Fresh)?;
    let family = was.family();
    d.set_families(family);
    begin(d, was.side());
    d.kernel().set_across(across);
    d.path().set_comes_back(true);
    Some(d)
}

/// What a call does.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Call {
    Send,
    /// A receive that does not wait.
    Look,
    /// A receive that waits, unless the socket is non-blocking.
    Receive,
}

/// How a call goes on, on a descriptor that was no connection over shared memory before.
pub enum Entered {
    /// The connection is in shared memory now.
    Ours,
    /// The call goes to the kernel; the value must live as long as the call.
    Kernel(Option<Using>),
    /// The call's wait has ended: with EINTR by a signal, with EAGAIN after the time of SO_RCVTIMEO.
    Ended(Errno),
}

/// A call in the kernel on a connection that may move.
pub struct Using(&'static Desc);

impl Drop for Using {
    fn drop(&mut self) {
        self.0.kernel().leave();
    }
}

/// Is `fd` a kernel connection that may move? If not, [`enter`] changes nothing.
#[inline(always)]
pub fn is_candidate(fd: i32) -> bool {
    table::lookup(fd).is_some_and(|d| d.kind() == Kind::Kernel)
}

/// Called before a call on a descriptor.
#[inline(always)]
pub fn enter(fd: i32, call: Call) -> Entered {
    match table::lookup(fd) {
        Some(d) if d.kind() == Kind::Kernel => {
            if d.kernel().stays() {
                return Entered::Kernel(None);
            }
            enter_counted(fd, d, call)
        }
        _ => Entered::Kernel(None),
    }
}

#[cold]
fn enter_counted(fd: i32, d: &'static Desc, call: Call) -> Entered {
    let weight = weight(d, call);
    let calls = d.kernel().count_call(weight);
    if calls >= d.kernel().next_try() {
        consider(fd, d, call, calls);
    }
    // The accepter has offered its end, or (between namespaces) the opener has tried once. The
    // other side may have come since: look. A thread that only receives may have been inside the
    // kernel.
    let both = d.is_server() || d.kernel().is_across();
    if both && d.kernel().tries() > 0 {
        ctl::poll();
        if call == Call::Receive {
            if let Err(e) = waiting::wait(fd, d) {
                return Entered::Ended(e);
            }
        }
    }
    loop {
        if d.is_conn() {
            return Entered::Ours;
        }
        if d.kind() != Kind::Kernel {
            return if d.is_conn() { Entered::Ours } else { Entered::Kernel(None) };
        }
        match d.kernel().enter() {
            Entry::Never => return Entered::Kernel(None),
            Entry::Wait => sys::nanosleep(20_000),
            Entry::Counted => {
                let using = Using(d);
                // The connection may have moved before this call was counted as running.
                return if d.is_conn() { Entered::Ours } else { Entered::Kernel(Some(using)) };
            }
        }
    }
}

/// How much one call counts towards the next try. Between network namespaces each byte through
/// the kernel is expensive, so a connection with several requests moves soon: the first try is at
/// the third request or the second answer, unless another connection has tried right before. A
/// connection with one request has no extra cost.
fn weight(d: &Desc, call: Call) -> u32 {
    if !d.kernel().is_across() {
        return 1;
    }
    let receives = call != Call::Send;
    match d.kernel().turns(receives) {
        true if !receives => worth::TURN,
        _ => 1,
    }
}

/// As [`give_up`], for a descriptor.
pub fn give_up_fd(fd: i32) {
    if let Some(d) = table::lookup(fd) {
        give_up(d);
    }
}

/// Other processes will have the descriptors, so no kernel connection of this process will move.
pub fn give_up_all() {
    let ours = |d: &&Desc| d.kind() == Kind::Kernel && d.is_used();
    (0..DESCS.len()).filter_map(|i| DESCS.get(i)).filter(ours).for_each(give_up);
}

/// In a forked child: drops the parent's messages, and tracks inherited Unix connections again.
#[link_section = ".text.fsocket_start"]
pub fn become_child() {
    offer::become_child();
    passed::become_child();
}

/// Enough calls were made for a try: tries to move, or puts it off.
fn consider(fd: i32, d: &'static Desc, call: Call, calls: u32) {
    /// After this many more calls, a side that never sends tries while it receives.
    const QUIET: u32 = 16;
    // The monitor is slow, so there is no try now: one late answer would use up all tries of a
    // busy connection.
    if ctl::is_slow() {
        return d.kernel().set_next_try(calls.saturating_add(CALLS));
    }
    let opener = !d.is_server();
    let early = worth::first_try(d, opener, calls);
    if let Err(later) = early {
        return d.kernel().set_next_try(later);
    }
    // Another thread may have tried meanwhile.
    let late = calls.saturating_sub(d.kernel().next_try());
    // Before a request most connections are at rest. After it, the answer may be in flight.
    if opener && (call != Call::Send && late < QUIET || late < LOOKS && rest_of(fd, d).is_none()) {
        return;
    }
    if process::is_off() {
        d.kernel().set_next_try(calls.saturating_add(CALLS));
        return;
    }
    let longer = if d.kernel().is_across() || is_passed(d) { 2 } else { 4 };
    let comes_back = d.path().comes_back();
    let most = if comes_back { calls.saturating_add(PATIENT) } else { u32::MAX };
    d.kernel().set_next_try(calls.saturating_mul(longer).min(most));
    ctl::wanted();
    if ctl::dead() {
        return; // it may come
    }
    passed::arrives(d);
    let tries = d.kernel().count_tries(1);
    d.kernel().allow_waits(WAITS);
    if is_too_often(tries, calls) && !comes_back || !process::enabled() {
        return give_up(d);
    }
    if lingers(fd) {
        return;
    }
    if d.is_unix() && tries == 0 && unix::stays(fd) {
        return give_up(d);
    }
    worth::tried(fd, d, early == Ok(true));
    if !opener {
        let across = d.kernel().is_across();
        let offer = request::Offer { name: key(d), across, received: is_passed(d) };
        // The message needs an answer, because it carries the socket until the monitor has read
        // it. Until then a close by the program would not end the connection.
        match ctl::request(offer, Some(fd)) {
            // The monitor keeps the offer until the opener asks, or until this process has very
            // many of them.
            Ok(_) => {
                let times = if tries == 0 { 16 } else { longer };
                d.kernel().set_next_try(calls.saturating_mul(times).min(most));
                missed(d, OFFERED);
            }
            Err(Errno::EXDEV) => stranger(fd, d),
            _ => {}
        }
        return;
    }
    // A signal handler that makes a call on the connection would wait for this thread, so signals
    // are blocked.
    let _held = Held::all();
    rests_soon(fd, d);
    if d.kernel().decide() {
        let r = open(fd, d);
        d.kernel().decided(r == Err(Errno::EXDEV));
    }
}

/// A stream in one direction is at rest once its reader has all bytes. Waits a moment for that.
fn rests_soon(fd: i32, d: &Desc) {
    const MOMENT: u64 = 1_000_000;
    const NAP: u64 = 20_000;
    let end = sys::now_ns() + MOMENT;
    while rest_of(fd, d).is_none() && is_quiet(fd) && sys::now_ns() < end {
        sys::nanosleep(NAP);
    }
}

/// The other end of an accepted connection turned out to be on another host.
fn stranger(fd: i32, d: &Desc) {
    worth::is_stranger(d);
    if d.is_unix() {
        return give_up(d);
    }
    let (Some(me), Some(peer)) = (own_of(fd), peer_of(fd)) else { return };
    if !usual(&peer, &me) {
        lately::STRANGERS.note(&peer.ip, 0);
        give_up(d);
    }
}
