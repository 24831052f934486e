//! Which listeners have zones, and their life.

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
use fsocket_reuseport::listener::Shape;
use fsocket_reuseport::reservation::{self};
use fsocket_sys::{self as sys};

/// Called once, before `main`.
pub fn init(on: bool, pin: Pin) {
    cpu::set_pin(pin);
    ON.store(on, Ordering::Release);
}

/// The kernel's `listen` has succeeded.
pub fn listened(fd: i32) {
    // (The monitor's first answer says whether the program may.)
    if enabled() && (ctl::registry().is_none() || process::may_have_zones()) {
        listened_with(fd, None);
    }
}

/// `reservation`: it has one already, which the program before this one has made.
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
        // No SYN queues: the kernel's alone, but for us.
        (watcher().leave_to_kernel)(d);
        let mut t = [0u8; 16];
        if sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVTIMEO, &mut t) == Ok(16) {
            let half = |at: usize| t[at..].first_chunk().map_or(0, |v| i64::from_ne_bytes(*v)).max(0) as u64;
            d.options().set_receive_timeout(half(0).saturating_mul(1_000_000_000) + half(8) * 1000);
        }
        d.listen_in_kernel();
    }
    d.listening().set_zone(i as u32);
}

/// The last number of a listener is closed in this process, or `shutdown` ended
/// the listening: no local listen socket may outlive that.
pub fn closed(d: &Desc) {
    if let Some(z) = d.listening().take_zone().and_then(|place| ZONED.get(place as usize)) {
        z.end();
    }
}

/// From now on this process accepts from the global listen socket only. False: it was
/// the only one already.
pub fn leave(d: &Desc, why: Reason) -> bool {
    let Some(z) = of(d).filter(|z| z.state() != state::OFF) else { return false };
    z.off(why);
    true
}

/// `shutdown` of a listener: for all processes that share it.
pub fn shut(d: &Desc) {
    end_for_all(d, false);
    closed(d);
}

/// Somebody without the library is about to accept here, who sees the global listen socket only:
/// there are no others any more, in all processes that share it, and what waits is there.
pub fn pass_on(d: &Desc) {
    if end_for_all(d, true) {
        count(Reason::ZoneShared);
    }
}

/// `goes_on`: the global socket does. Whether there could be others.
fn end_for_all(d: &Desc, goes_on: bool) -> bool {
    let Some((z, p)) = of(d).and_then(|z| Some((z, z.page()?))) else { return false };
    p.shut.store(1, Ordering::Release);
    if !z.is_shared() {
        // Now: what waits there goes to the global one, and may end with it.
        z.leave_all();
        z.shut_others(p, goes_on);
    }
    !z.is_shared()
}

/// An option of a listener was set: the local ones follow.
pub fn option_set(d: &Desc, level: i32, name: i32) {
    let Some(z) = of(d) else { return };
    // Keys cannot be read back from a socket.
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

/// Where another process of the fork group may have set options of a listener: what they are as of now.
pub fn follow_options(fd: i32, d: &Desc) {
    let Some(p) = of(d).and_then(|z| z.page()) else { return };
    let now = p.options.load(Ordering::Acquire);
    if d.listening().options_seen() != now {
        d.listening().set_options_seen(now);
        values::adopt(fd, d);
        d.options().kept().merge(&p.kept);
    }
}

/// Would `getsockopt` tell of our SO_REUSEPORT?
pub fn hides(d: &Desc, level: i32, name: i32) -> bool {
    level == libc::SOL_SOCKET
        && name == libc::SO_REUSEPORT
        && of(d)
            .is_some_and(|z| z.state() == state::READY && !z.is_shared() || z.reservation.load(Ordering::Relaxed) >= 0)
}

/// Before a fork: the child may become a worker.
pub fn prepare() {
    for z in used() {
        if z.state() == state::PLAIN {
            z.make_ready();
        }
    }
}

/// Has no listener of this process been looked at for zones?
pub fn is_unused() -> bool {
    USED.load(Ordering::Acquire) == 0
}

/// Is there a listener that a forked child could work for?
pub fn any() -> bool {
    used().any(|z| z.state() == state::READY)
}

/// Is no listener of this process one that may have local listen sockets?
#[link_section = ".text.fsocket_start"]
pub fn none() -> bool {
    used().all(|z| matches!(z.state(), state::FREE | state::OFF))
}

/// Is any thread of this process a worker?
pub fn has_workers() -> bool {
    used().any(|z| z.is_active() || z.has_member())
}

/// The program ends: what waits for this worker is not lost with it.
pub fn at_exit() {
    used().for_each(Zoned::leave_all);
}

/// In a forked child: the parent's local listen sockets are not ours.
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

/// One of our descriptors got another number.
pub fn renumbered(old: i32, new: i32) -> bool {
    let swap = |a: &Number| a.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    used().any(|z| {
        swap(&z.reservation)
            || z.handoff.iter().any(swap)
            || z.locals.iter().any(|l| swap(&l.fd) || swap(&l.inner))
            || z.peers.renumbered(&swap)
    })
}
