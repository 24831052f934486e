//! Announces this process's shared memory to a new monitor after the former one has died (ADR 48).
//!
//! The new monitor does not trust messages, so the process proves each arena, channel and listener
//! by showing its descriptor. First come the arenas, which show which processes form a fork group.
//! Then come the channels in which this process is the client, and last the listeners with their
//! channels.

use crate::chan::{self, Chan};
use crate::{arena, ctl, epoll, listen, peers, process, route, zone};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::{ARENA_SIZE, FUTEX_OWNER_DIED};
use fsocket_abi::channel::{CLIENT, SERVER};
use fsocket_proto::request;
use fsocket_proto::values::Side;

/// Called when the new monitor has accepted this process. It knows the arenas already, and the
/// channels in which this process is the client. This shows the listeners and their channels.
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

/// Does this process open new connections in the channel? (A forked child does not in the channels
/// of its parent.)
/// channels.)
fn opens(c: &Chan) -> bool {
    !c.retired.load(Ordering::Relaxed)
}

/// Shows the arenas, and the channels in which this process is the client. False: the monitor has
/// died again, or this process has an arena that it cannot show. In the second case no monitor
/// could clean up after the process.
pub fn announce() -> bool {
    if let Some(h) = arena::header() {
        let held = h.monitor.load(Ordering::Acquire);
        if held & FUTEX_OWNER_DIED != 0 {
            // Otherwise a sleeping thread would take the death mark of the former monitor for one
            // of the new monitor.
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

/// Shows one channel. False: the monitor has died.
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
