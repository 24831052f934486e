//! A monitor has died, and another one has come. This process announces to it what it shares with others
//! (ADR 48).
//!
//! The new monitor believes no words: each arena, channel and listener is shown as a descriptor. First come
//! the arenas, which say which processes are of one fork group; then the channels of which this process is
//! the client; then the listeners, and the channels that belong to them.

use crate::chan::{self, Chan};
use crate::{arena, ctl, epoll, listen, peers, process, route, zone};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::{ARENA_SIZE, FUTEX_OWNER_DIED};
use fsocket_abi::channel::{CLIENT, SERVER};
use fsocket_proto::request;
use fsocket_proto::values::Side;

/// The monitor is this process's from now on. It knows the arenas, and the channels of which this process is
/// the client; listeners and their channels follow.
pub fn found() {
    if process::enabled() {
        listen::announce_again();
        of_side(SERVER).for_each(|c| {
            attach(c);
        });
        of_side(CLIENT).filter(|c| opens(c)).for_each(Chan::lease_again);
        listen::work_again();
    }
    route::clear();
    peers::leave_to_monitor();
    zone::watch::another_monitor();
    epoll::another_control();
}

fn of_side(side: usize) -> impl Iterator<Item = &'static Chan> {
    chan::all().filter(move |c| c.my_side() == side)
}

/// Does this process open connections in the channel? (A forked child does not in its parent's.)
fn opens(c: &Chan) -> bool {
    !c.retired.load(Ordering::Relaxed)
}

/// Shows the arenas and the channels of which this process is the client. False: there is no monitor any more, or
/// this process has an arena that it cannot show, and nobody could clean up after it.
pub fn announce() -> bool {
    if let Some(h) = arena::header() {
        let held = h.monitor.load(Ordering::Acquire);
        if held & FUTEX_OWNER_DIED != 0 {
            // A thread that sleeps would take the old monitor's mark for the new one's.
            let _ = h.monitor.compare_exchange(held, 0, Ordering::AcqRel, Ordering::Relaxed);
        }
    }
    let mut known = true;
    for (fd, own) in arena::shown() {
        let arena = request::Arena { size: ARENA_SIZE as u64, inherited: !own };
        known &= fd.is_some_and(|fd| ctl::show(arena, fd)) || !own;
    }
    known && of_side(CLIENT).all(attach)
}

/// Shows a channel. False: there is no monitor any more.
fn attach(c: &Chan) -> bool {
    let Some(fd) = c.kept.fd() else { return true };
    let side = c.my_side();
    let attach = request::Attach {
        channel: c.id.load(Ordering::Relaxed),
        side: Side(side),
        listener: c.listener.load(Ordering::Relaxed),
        opens: side == CLIENT && opens(c),
    };
    ctl::show(attach, fd)
}
