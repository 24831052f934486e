//! The top: what the lower layers' calls upwards do ([`crate::upcalls`]), and which message of the
//! monitor's goes where.

use crate::upcalls::{self, Upcalls, Watcher};
use crate::{
    again, chan, channels, close, epoll, leave, listen, operator, path, peers, pidfd_transfer, route, upgrade, uring,
    waker, zone,
};
use fsocket_abi::channel::CLIENT;
use fsocket_proto::{kind, Msg};

static UPCALLS: Upcalls = Upcalls {
    message,
    settle,
    monitor_died,
    announce: again::announce,
    monitor_found: again::found,
    shares_nothing: chan::none,
    last_reference: close::last_reference,
    leave_everything: uring::leave_everything,
    leave_to_instances: leave::to_instances,
    accepted: upgrade::accepted,
    kernel_for_now: operator::kernel_for_now,
    watcher: Watcher {
        changed: epoll::changed,
        also_kernel: epoll::also_kernel,
        migrated_to_kernel: epoll::migrated_to_kernel,
        leave_to_kernel: epoll::leave_to_kernel,
        became_conn: epoll::became_conn,
        became_listener: epoll::became_listener,
        listener_changed: epoll::listener_changed,
        readable: epoll::readable,
        sleep_abandoned: epoll::sleep_abandoned,
    },
};

/// Once, at the start.
#[link_section = ".text.fsocket_start"]
pub fn connect() {
    upcalls::connect(&UPCALLS);
}

/// From the monitor. It may come in the middle of anything, with locks held.
fn message(m: &Msg, got: Option<i32>) -> bool {
    match m.kind {
        // Too late for the connection that asked, but not for the next one.
        kind::CONNECT | kind::MEET if m.result == 0 && chan::by_id(m.id as u32, CLIENT).is_none() => {
            if let Some(c) = got.and_then(|fd| chan::map(m.id as u32, m.arg0, CLIENT, fd)) {
                c.first_ports(m.addr.port);
            }
        }
        kind::CHANNEL_SRV => {
            if let Some(fd) = got {
                channels::serve(m.id as u32, m.arg0, fd);
            }
        }
        // The answer came too late for whoever waited for it.
        kind::WORKER if m.result == 0 => listen::joined_late(m.id, m.arg0),
        kind::WOKEN => channels::woken(m),
        kind::WAKER_READ => return got.is_some_and(|fd| waker::hear(m, fd)),
        kind::WAKER_WRITE => return got.is_some_and(|fd| chan::pipe(m, fd)),
        kind::PEER => {
            if let Some(fd) = got {
                zone::balance::came(m.id, m.arg0, fd);
                return true;
            }
        }
        kind::PEER_GONE => zone::balance::went(m.id, m.arg0),
        kind::WAKE_HINT => zone::balance::wake_hint(m.id),
        kind::LOOK => zone::watch::look(m.id),
        kind::TRANSFER => pidfd_transfer::asked(m),
        kind::TO_KERNEL => operator::told(m.arg0 == 1),
        kind::TRANSFERRED => pidfd_transfer::done(m.id),
        kind::WATCHED => {
            chan::whole(m.id as u32);
            route::clear();
            peers::leave_to_monitor();
        }
        kind::CHANNEL_GONE => channels::gone(m.id as u32, m.arg0 != 0),
        kind::OTHER_RIGHTS => listen::wanted_by_others(m.id),
        kind::UNTAKEN => listen::untaken(m.id),
        kind::UPGRADE_SRV => return got.is_some_and(|fd| upgrade::asked(m, fd)),
        _ => {}
    }
    false
}

fn settle() {
    channels::end_broken();
    channels::give_up_halves();
    upgrade::answer();
    pidfd_transfer::answer();
    operator::answer();
    path::answer();
    listen::join_again();
}

fn monitor_died() -> bool {
    zone::balance::alone();
    chan::halve_all();
    zone::watch::look_before_sleep();
    true
}
