//! Decides which listeners have zones, and follows their life.

use crate::cow::Sparing;
use crate::cpu::{self, Pin};
use crate::listener::{close, count, enabled, of, state, used, Zoned, LOCALS, MAX, ON, USED, ZONED};
use crate::number::Number;
use crate::process;
use crate::table::{self, Desc, Kind};
use crate::upcalls::watcher;
use crate::values;
use core::sync::atomic::Ordering;
use fsocket_abi::arena::Reason;
use fsocket_fdtable::ctl;
use fsocket_proto::program;
use fsocket_reuseport::listener::Shape;
use fsocket_reuseport::reservation::{self};
use fsocket_sys::{self as sys};

/// Called once, before `main`.
pub fn init(on: bool, pin: Pin) {
    cpu::set_pin(pin);
    ON.store(on, Ordering::Release);
}

/// Called after the kernel's `listen` on `fd` has succeeded: gives the listener zones, if it may
/// have them.
pub fn listened(fd: i32) {
    // (The registry says whether the program may. If it has not come yet, the library assumes
    // so.)
    if enabled() && (ctl::registry().is_none() || !process::is_told(program::NO_ZONES)) {
        listened_with(fd, None);
    }
}

/// `reservation`: the reservation that the previous program has made.
pub(super) fn listened_with(fd: i32, reservation: Option<i32>) {
    let known = table::lookup(fd);
    if let Some(z) = known.and_then(of) {
        z.changed();
        return;
    }
    if Shape::of(fd).is_err() {
        return; // not TCP
    }
    let shared = reservation.is_none() && reservation::is_open_anyway(fd);
    let places = (0..MAX).map_while(|i| Some((i, ZONED.make(i)?)));
    let Some((i, z)) = { places }.find(|(_, z)| z.claim()) else {
        return count(Reason::ZoneResource);
    };
    USED.fetch_max(i as u32 + 1, Ordering::AcqRel);
    z.fd.store(fd, Ordering::Relaxed);
    z.reservation.store(reservation.unwrap_or(-1), Ordering::Relaxed);
    if shared && !z.announce(fd) {
        z.free();
        return count(Reason::ZoneShared);
    }
    let d = match known {
        Some(d) => d,
        None => match table::alloc(Kind::Fresh) {
            Some(d) if table::install(fd, d) => d,
            other => {
                if let Some(d) = other {
                    table::release(d);
                }
                return z.free();
            }
        },
    };
    if d.is_unconnected() {
        // The listener has no SYN queues, so the kernel serves it, except for zones.
        (watcher().leave_to_kernel)(d);
        if let Ok(limit) = sys::time_option(fd, libc::SO_RCVTIMEO) {
            d.options().set_receive_timeout(limit);
        }
        d.listen_in_kernel();
    }
    d.listening().set_zone(i as u32);
}

/// The last descriptor of a listener is closed in this process, or `shutdown` has ended the
/// listening: closes the local listen sockets, which must not outlive the global one.
pub fn closed(d: &Desc) {
    if let Some(z) = d.listening().take_zone().and_then(|place| ZONED.get(place as usize)) {
        z.end();
    }
}

/// From now on this process accepts from the global listen socket only. False: this was so
/// already.
pub fn leave(d: &Desc, why: Reason) -> bool {
    let Some(z) = of(d).filter(|z| z.state() != state::OFF) else { return false };
    z.off(why);
    true
}

/// Handles `shutdown` of a listener, which affects all processes that share the listener.
pub fn shut(d: &Desc) {
    end_for_all(d, false);
    closed(d);
}

/// A program without the library is about to accept here, and uses the global listen socket only.
/// All processes that share the listener close their local sockets, and the kernel moves waiting
/// connections to the global socket.
pub fn pass_on(d: &Desc) {
    if end_for_all(d, true) {
        count(Reason::ZoneShared);
    }
}

/// `goes_on`: the global socket stays open. Returns whether local sockets were possible.
fn end_for_all(d: &Desc, goes_on: bool) -> bool {
    let Some((z, p)) = of(d).and_then(|z| Some((z, z.page()?))) else { return false };
    p.shut.store(1, Ordering::Release);
    if !z.is_shared() {
        // The local sockets are closed now, because their connections move to the global socket
        // and may have to end with it.
        z.leave_all();
        z.shut_others(p, goes_on);
    }
    !z.is_shared()
}

/// The program has set an option of a listener: the local sockets follow.
pub fn option_set(d: &Desc, level: i32, name: i32) {
    let Some(z) = of(d) else { return };
    // The kernel does not return the keys of a socket, so local sockets could not get them.
    const TCP_AO_ADD_KEY: i32 = 38;
    if level == libc::IPPROTO_TCP && matches!(name, libc::TCP_MD5SIG | TCP_AO_ADD_KEY) {
        z.off(Reason::ZoneOption);
    }
    if level == libc::SOL_SOCKET && name == libc::SO_REUSEPORT && (z.state() == state::PLAIN || z.is_shared()) {
        z.off(Reason::ZoneShared);
    }
    if let Some(p) = z.page() {
        p.kept.merge(d.options().kept());
    }
    z.changed();
}

/// Another process of the fork group may have set options of a listener: reads their present values.
pub fn follow_options(fd: i32, d: &Desc) {
    let Some(p) = of(d).and_then(|z| z.page()) else { return };
    let now = p.options.load(Ordering::Acquire);
    if d.listening().options_seen() != now {
        d.listening().set_options_seen(now);
        values::adopt(fd, d);
        d.options().kept().merge(&p.kept);
    }
}

/// Would `getsockopt` show the SO_REUSEPORT that the library has set?
pub fn hides(d: &Desc, level: i32, name: i32) -> bool {
    level == libc::SOL_SOCKET
        && name == libc::SO_REUSEPORT
        && of(d)
            .is_some_and(|z| z.state() == state::READY && !z.is_shared() || z.reservation.load(Ordering::Relaxed) >= 0)
}

/// Called before a fork: prepares listeners, because the child may become a worker.
pub fn prepare() {
    for z in used() {
        if z.state() == state::PLAIN {
            z.make_ready();
        }
    }
}

/// Has this process never had a listener with zones?
pub fn is_unused() -> bool {
    USED.load(Ordering::Acquire) == 0
}

/// Is there a listener that a forked child could work for?
pub fn any() -> bool {
    used().any(|z| z.state() == state::READY)
}

/// Has this process no listener that may have local listen sockets?
#[link_section = ".text.fsocket_start"]
pub fn none() -> bool {
    used().all(|z| matches!(z.state(), state::FREE | state::OFF))
}

/// Is any thread of this process a worker?
pub fn has_workers() -> bool {
    used().any(|z| z.is_active() || z.has_member())
}

/// Called at exit: closes the local sockets, so that waiting connections move to other workers.
pub fn at_exit() {
    used().for_each(Zoned::leave_all);
}

/// In a forked child: the local listen sockets belong to the parent.
pub fn become_child() {
    for z in used() {
        z.change.reset_after_fork();
        let n = (z.n.load(Ordering::Relaxed) as usize).min(LOCALS);
        z.n.put(0);
        for l in &z.locals[..n] {
            if l.thread.swap(0, Ordering::Relaxed) != 0 {
                process::close_own(l.fd.swap(-1, Ordering::Relaxed));
                l.shared.store(false, Ordering::Relaxed);
                l.peers_since.store(0, Ordering::Relaxed);
                l.lazy.store(-1, Ordering::Relaxed);
                close(&l.inner);
            }
        }
        z.peers.become_child();
        z.inherited.put(true);
        z.shared.become_child();
        z.group.put(0);
        z.left.put(0);
        z.unseen.put(false);
        z.dwell.reset();
        z.first.put(0);
        z.watches.clear();
    }
}

/// A descriptor of the library got another number.
pub fn renumbered(old: i32, new: i32) -> bool {
    let swap = |a: &Number| a.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    used().any(|z| {
        swap(&z.reservation)
            || z.handoff.iter().any(swap)
            || z.locals.iter().any(|l| swap(&l.fd) || swap(&l.inner))
            || z.peers.renumbered(&swap)
    })
}
