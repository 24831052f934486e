//! Kernel connections that go over to shared memory while they are in use.
//!
//! A connection between two programs with the library can start in the kernel: one of them
//! had no monitor yet, the client was bound, the queue was full. After some calls each side
//! tells the monitor of its end; the one that has opened it asks for a slot to be
//! connected with the other end. Both go over at one moment at which the
//! stream is at rest in both directions: nothing is on its way, nothing waits to be
//! read, no thread is inside a call on it. So there is nothing to be put in order,
//! and no byte that could be lost. The slot's state decides:
//!
//! OFFERED (opener: its end is at rest, and these bytes have passed) -> TAKEN (accepter: mine, too,
//! and the same; from here on it sends nothing) -> ESTABLISHED (opener) or REFUSED, by either.
//!
//! ([`fsocket_sync::handover`], model-checked.) The kernel connection stays behind the descriptors as
//! their placeholder. Calls on such a connection are counted in `Desc::using` until it is decided;
//! a call that comes while it is decided waits for that.

use crate::signals::Held;
use crate::table::{self, Desc, Kind, DESCS};
use crate::wait::{self, Sleeper};
use crate::{ctl, lately, name, process, registry, route};
use core::sync::atomic::{fence, Ordering};
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

/// Calls between two tries of a connection that comes back when an operator lets its peer.
const PATIENT: u32 = 1024;
/// So many receives after a try wait in a way in which the connection can go over, which costs three system calls each. The
/// other end tries within its next 32 calls, if it is there.
const WAITS: u32 = 64;

/// May connections to other network namespaces of this host go over?
fn reaches_across(ip: &[u8; 16], port: u16) -> bool {
    let recorded = registry::mapped().is_some_and(|r| route::volatile(&r.pairs) != 0);
    recorded && !name::is_loopback(ip) && !lately::STRANGERS.has(ip, port)
}

/// A socket connects to `dst` over the kernel. False: no process there can ever share
/// memory with us, forget it.
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

/// The kernel's `connect` of `d`, which was nothing yet, has failed with `error`. If the socket is
/// unconnected again, it is as it was before, and the next one is over shared memory if it can be:
/// a client that waits until its server is there.
#[cold]
pub fn failed(fd: i32, d: &Desc, error: &sys::errno::Saved) {
    // What an epoll instance watches it watches in the kernel.
    let ours = d.kind() == Kind::Kernel && !d.placeholder().is_watched();
    // Then the kernel has something to say yet.
    let says_more = [Errno::EINPROGRESS, Errno::EALREADY, Errno::EINTR, Errno::EISCONN];
    let pending = says_more.into_iter().any(|e| error.is(e));
    if ours && !pending && !crate::inspect::is_connected(fd) {
        d.disconnect();
    }
}

/// The kernel has accepted a connection; `addr` and `len` are what the caller of `accept`
/// was told, or null.
///
/// # Safety
/// `addr` is null or readable for what `len` says.
pub unsafe fn accepted(fd: i32, addr: *const libc::sockaddr, len: *const u32) {
    if !wanted() || fd <= table::STDIO {
        return;
    }
    let peer = if addr.is_null() || len.is_null() {
        peer_of(fd)
    } else {
        // SAFETY: readable for what `len` says, which may lie anywhere; an address that did not fit is no address.
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

/// For the kernel connection that `was` has become, and that may come back.
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

/// What a call wants.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Call {
    Send,
    /// To receive without waiting.
    Look,
    /// To receive; it waits unless the socket is non-blocking.
    Receive,
}

/// How a call on a descriptor that was no connection of ours goes on.
pub enum Entered {
    /// It is one now.
    Ours,
    /// In the kernel; keep the value for as long.
    Kernel(Option<Using>),
    /// A signal has ended its wait.
    Interrupted,
}

/// A call of the kernel's on a connection that may go over.
pub struct Using(&'static Desc);

impl Drop for Using {
    fn drop(&mut self) {
        self.0.kernel().leave();
    }
}

/// Is it a kernel connection that may go over? If not, [`enter`] changes nothing.
#[inline(always)]
pub fn is_candidate(fd: i32) -> bool {
    table::lookup(fd).is_some_and(|d| d.kind() == Kind::Kernel)
}

/// Before a call on a descriptor.
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
    // The accepter has offered its end. Between namespaces the opener has tried once: perhaps a thread that
    // only receives was inside the kernel.
    let both = d.is_server() || d.kernel().is_across();
    if both && d.kernel().tries() > 0 {
        ctl::poll();
        if call == Call::Receive && wait(fd, d) {
            return Entered::Interrupted;
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
                // It may have gone over before we counted.
                return if d.is_conn() { Entered::Ours } else { Entered::Kernel(Some(using)) };
            }
        }
    }
}

/// As how many calls one counts. Between network namespaces each byte in the kernel is dear, so a
/// connection that is asked something again goes over soon: the third request, or the second answer, is
/// the first try, unless another one has tried right before. A connection for one request pays nothing.
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

/// The same for a number.
pub fn give_up_fd(fd: i32) {
    if let Some(d) = table::lookup(fd) {
        give_up(d);
    }
}

/// Others will have our descriptors.
pub fn give_up_all() {
    let ours = |d: &&Desc| d.kind() == Kind::Kernel && d.is_used();
    (0..DESCS.len()).filter_map(|i| DESCS.get(i)).filter(ours).for_each(give_up);
}

/// In a forked child.
#[link_section = ".text.fsocket_start"]
pub fn become_child() {
    offer::become_child();
    passed::become_child();
}

/// Before a receive sleeps: in a way in which the connection can go over. True: a signal has ended the wait.
fn wait(fd: i32, d: &Desc) -> bool {
    // The others stay inside the kernel, as those before the first try.
    if !d.kernel().may_wait() {
        return false;
    }
    if !is_unlimited(fd, d) {
        d.kernel().allow_waits(0);
        return false;
    }
    loop {
        let Some(mut sleeper) = Sleeper::new() else { return false };
        // The waker before the look; `went_over` does the reverse.
        fence(Ordering::SeqCst);
        let ours = d.kind() != Kind::Kernel || d.kernel().stays();
        let mut p = [fd, -1, -1].map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
        let r = match ours {
            true => Ok(0),
            // SAFETY: no mask.
            false => unsafe { wait::sleep(&mut p, Some(&mut sleeper), None, core::ptr::null()) },
        };
        sleeper.end(|_| ());
        wait::heed(&p);
        if ours || p[0].revents != 0 || d.kind() != Kind::Kernel {
            return false;
        }
        if r == Err(Errno::EINTR) && !wait::restarts(false) {
            return true;
        }
    }
}

/// Does a receive wait until something comes?
fn is_unlimited(fd: i32, d: &Desc) -> bool {
    let blocking = sys::fcntl(fd, libc::F_GETFL, 0).is_ok_and(|f| f & libc::O_NONBLOCK == 0);
    let mut t = [0u8; 16];
    blocking
        && d.options().receive_timeout() == 0
        && sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVTIMEO, &mut t).is_ok()
        && t == [0; 16]
}

/// Enough calls have gone by for a try.
fn consider(fd: i32, d: &'static Desc, call: Call, calls: u32) {
    /// A side that never sends is tried while it receives.
    const QUIET: u32 = 16;
    // No try: one late answer would use up all of a busy connection.
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
    // Before a request most connections are at rest; behind it the answer may be on its way.
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
        // With an answer: until the monitor has read it the message holds the socket, and a close
        // of the program's would not end the connection.
        match ctl::request(offer, Some(fd)) {
            // The monitor keeps it until the opener asks, or there are very many of this process's.
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
    // A handler that comes in between would wait for us.
    let _held = Held::all();
    rests_soon(fd, d);
    if d.kernel().decide() {
        let r = open(fd, d);
        d.kernel().decided(r == Err(Errno::EXDEV));
    }
}

/// A stream in one direction rests once its reader has what there is: wait a moment for that.
fn rests_soon(fd: i32, d: &Desc) {
    const MOMENT: u64 = 1_000_000;
    const NAP: u64 = 20_000;
    let end = sys::now_ns() + MOMENT;
    while rest_of(fd, d).is_none() && is_quiet(fd) && sys::now_ns() < end {
        sys::nanosleep(NAP);
    }
}

/// The other end of a connection that was accepted is on another host.
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
