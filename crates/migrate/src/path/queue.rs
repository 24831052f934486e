//! Connections that nobody has accepted, when this program stops to listen over
//! shared memory and its listener goes on: they are queued in the kernel's
//! listener instead, where any process that has the socket finds them.
//!
//! The server's end is made by a real `connect` to the listener from the client's
//! address, by the monitor. The client's end of that is handed over like any other
//! ([`super`]): what the client has sent is sent again in it.

use super::{pair, settle, start};
use crate::chan::{Chan, Rings};
use crate::establish::{establish, End};
use crate::listen::{self, Listener};
use crate::table::{self, Desc, Kind};
use crate::{claim, ctl, name, process, socks, stats, zone};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::Reason;
use fsocket_abi::channel::{CLIENT, SERVER};
use fsocket_abi::path_switch::Fenced;
use fsocket_proto::switch::act;
use fsocket_proto::values::Unpublishing;
use fsocket_proto::Addr;
use fsocket_sys::{self as sys, Errno, Result};

/// The kernel's limit on a backlog (net.core.somaxconn) may be lower.
const MOST: i32 = 65535;
/// How long the kernel's queue may refuse one of them, nanoseconds.
const PATIENCE_NS: u64 = 200_000_000;
/// How often one of them is tried.
const TRIES: u32 = 2;

/// Put everything that waits for `d`, a listener that takes no new connections
/// over shared memory any more, into the kernel's queue. A process that is no worker leaves that to the monitor, which
/// does the same: it has no channels, and to ask for them would count as serving the listener.
pub fn requeue(d: &'static Desc) {
    let Some(l) = listen::of(d).filter(|l| l.is_worker()) else { return };
    ctl::poll();
    let mut raised = false;
    while let Some((c, slot)) = l.take(true) {
        if let Some((dst, port)) = claim::claim(l, c, slot) {
            one_or_refuse(d, l, c, slot, dst, port, &mut raised);
        }
    }
    lower(d, l, raised);
}

/// The same with a connection that this process has claimed, and whose rings it cannot map. So will the next one's be: the
/// listener is the kernel's from now on.
pub fn cannot_map(d: &'static Desc, l: &Listener, c: &'static Chan, slot: usize, dst: [u8; 16], port: u16) {
    let mut raised = false;
    one_or_refuse(d, l, c, slot, dst, port, &mut raised);
    lower(d, l, raised);
    give_up(l.id.load(Ordering::Relaxed));
}

fn one_or_refuse(d: &Desc, l: &Listener, c: &'static Chan, slot: usize, dst: [u8; 16], port: u16, raised: &mut bool) {
    if one(d, l, c, slot, dst, port, raised).is_none() {
        claim::refuse(c, slot);
    }
}

/// The backlog is the program's again. (Where several processes do this at once, the last one decides.)
fn lower(d: &Desc, l: &Listener, raised: bool) {
    if raised {
        let _ = l.backlog().map(|limit| sys::listen(table::fd_of(d).unwrap_or(-1), limit));
    }
}

/// Has the kernel's queue no room for another connection? (The kernel takes one more than the limit.)
fn is_full(d: &Desc) -> bool {
    let fd = table::fd_of(d).unwrap_or(-1);
    fsocket_reuseport::listener::backlog(fd).is_ok_and(|(limit, waiting)| waiting >= limit)
}

/// Our queues take more than the program's backlog, and perhaps no process accepts. True: it
/// is raised. If this process is killed before it has set it back it stays so: not without need.
fn raise(d: &Desc, l: &Listener) -> bool {
    let fd = table::fd_of(d).unwrap_or(-1);
    let mut on = [0u8; 4];
    let listens = sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN, &mut on).is_ok() && on != [0; 4];
    listens && l.backlog().is_some() && sys::listen(fd, MOST).is_ok()
}

fn one(
    listener: &Desc,
    l: &Listener,
    c: &'static Chan,
    slot: usize,
    dst: [u8; 16],
    port: u16,
    raised: &mut bool,
) -> Option<()> {
    // The client itself sends its bytes again.
    let rings = Rings::none()?;
    let server = l.addr().port;
    let client_family = c.slot(slot).family.load(Ordering::Relaxed);
    // Each time: another process of the fork group that does the same may have finished, and set it back. Also
    // between the two calls, and then the kernel's queue may be full.
    // -1: the monitor has it.
    let other = (0..TRIES).find_map(|failed| {
        if failed > 0 || is_full(listener) {
            *raised |= raise(listener, l);
        }
        match pair::dial(c, slot, i32::from(client_family), PATIENCE_NS) {
            Err(Errno::EXDEV) => dial(client_family as i32, &name::source_for(&dst), port, &dst, server).ok(),
            r => r.ok().map(|()| -1),
        }
    })?;
    let hand_over = |d: &Desc| other < 0 || pair::announce(d, other);
    let parts = table::alloc(Kind::Fresh).and_then(|d| match socks::alloc_sock() {
        Some(s) => Some((d, s)),
        None => {
            table::release(d);
            None
        }
    });
    let Some((d, sock)) = parts else {
        pair::Own(other).close();
        pair::hang_up(c, slot);
        return None;
    };
    let family = listener.family() as u16;
    d.set_family(family as u32);
    let e = End::usual(c, (slot, rings), SERVER, &Addr { ip: dst, family, port: server, v6only: 0 }, port);
    establish(d, sock, &e);
    let begun = if hand_over(d) { start(d, |_| Some(pair::Own(-1))) } else { None };
    pair::Own(other).close();
    let Some(begun) = begun else {
        // Reset, as by a listener that is closed.
        pair::act(d, act::RESET);
        pair::release(d, CLIENT);
        (crate::upcalls::upcalls().last_reference)(d);
        table::done_with(d);
        return Some(());
    };
    let done = begun.take_along(&Fenced::after(sys::heavy_fence)).finish();
    done.look_back(&Fenced::after(sys::heavy_fence));
    d.disconnect();
    settle::leave(d);
    table::release(d);
    Some(())
}

/// A connection from the client's address to the listener's, in the kernel: where the monitor
/// cannot make one.
fn dial(family: i32, from: &[u8; 16], port: u16, to: &[u8; 16], to_port: u16) -> Result<i32> {
    let fd = pair::fresh(family)?;
    let r = (|| {
        sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, &1i32.to_ne_bytes())?;
        let (a, len) = name::sockaddr(family, from, port);
        if sys::bind(fd, &a[..len]).is_err() {
            // Somebody has the port; better another one than none.
            let (a, len) = name::sockaddr(family, from, 0);
            sys::bind(fd, &a[..len])?;
        }
        sys::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK as usize)?;
        let (a, len) = name::sockaddr(family, to, to_port);
        match sys::connect(fd, &a[..len]) {
            Err(Errno::EINPROGRESS) => {
                let mut p = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
                // SAFETY: one pollfd.
                unsafe { sys::ppoll(&mut p, 1, Some(PATIENCE_NS), core::ptr::null()) }?;
                // Still on its way, or refused.
                sys::connect(fd, &a[..len]).map_err(|e| if e == Errno::EISCONN { Errno::EIO } else { e })
            }
            r => r,
        }?;
        sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, &0i32.to_ne_bytes())?;
        sys::fcntl(fd, libc::F_SETFL, 0)
    })();
    if r.is_err() {
        process::close_own(fd);
    }
    r.map(|_| fd)
}

/// The program accepts below the hooks from now on. That goes for processes of the fork group as well: one that
/// holds the listener and never accepts (a master process) would keep it in shared memory, where no process
/// looks. What waits goes into the kernel's queue, where all of them look.
pub fn abandon(d: &'static Desc, why: Reason) {
    pass_on(d, why);
    listen::closed(d);
    let zoned = zone::of(d).is_some();
    d.unlisten(zoned);
}

/// A process without the library is about to accept here: for all processes of the fork group, new connections
/// are the kernel's, and what waits goes into its queue.
pub fn pass_on(d: &'static Desc, why: Reason) {
    stats::fall_back(why);
    if let Some(l) = listen::of(d) {
        listen::unpublish_id(l.id.load(Ordering::Relaxed), Unpublishing::ForGood);
        requeue(d);
    }
}

/// Another process gets the listener, and it is not known which one. Shared memory serves it as long as a process
/// with the library accepts; where none does, what waits is the kernel's.
pub fn share(d: &'static Desc) {
    if let Some(l) = listen::of(d) {
        if listen::unpublish_id(l.id.load(Ordering::Relaxed), Unpublishing::UnlessServed) {
            requeue(d);
        }
    }
}

/// [`pass_on`] for those.
pub fn pass_on_exec_prepared() {
    listen::exec_prepared().for_each(|d| pass_on(d, Reason::Resource));
}

/// This program does not listen over shared memory any more, but its listener
/// goes on. If no other process listens there either, what waits in our queues
/// waits in the kernel's from now on.
pub fn leave_to_kernel(d: &'static Desc) {
    if let Some(l) = listen::of(d) {
        if listen::unpublish_id(l.id.load(Ordering::Relaxed), Unpublishing::IfLast) {
            requeue(d);
        }
    }
}

/// Puts what waits for those into the kernel's queue.
#[inline]
pub fn answer() {
    listen::take_unserved().for_each(give_up);
    for d in listen::take_wanted_by_others() {
        stats::fall_back(Reason::Option);
        requeue(d);
    }
}

/// This process is about to lose its channels. No process with other rights gets those in which
/// it may have had connections: what waits there, and what comes, goes into the kernel's queue.
pub fn pass_on_used() {
    for d in table::all().filter(|d| d.listening().accepts()) {
        if listen::of(d).is_some_and(listen::Listener::is_worker) {
            pass_on(d, Reason::Option);
        }
    }
}

/// A channel cannot be mapped here: the kernel serves this listener from now on. The monitor moves what waits in its queues
/// to the kernel's. Where nothing is locked: a client in this very process may wait for the monitor's answer.
pub fn give_up(id: u64) {
    stats::fall_back(Reason::Resource);
    for i in 0..table::DESCS.len() {
        let Some(d) = table::DESCS.get(i) else { continue };
        if listen::of(d).is_some_and(|l| l.id.load(Ordering::Relaxed) == id) {
            leave_to_kernel(d);
            listen::closed(d);
            let zoned = zone::of(d).is_some();
            d.unlisten(zoned);
        }
    }
}

/// All listeners of this process accept over the kernel alone from now on.
pub fn give_up_all() {
    for l in listen::used() {
        let id = l.id.load(Ordering::Relaxed);
        if id != 0 {
            give_up(id);
        }
    }
}
