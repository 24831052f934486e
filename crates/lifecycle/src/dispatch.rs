//! The top of the library: provides the functions that lower layers call ([`crate::upcalls`]), and
//! dispatches the monitor's messages. A message that needs a lock is only noted. It is handled
//! later, where the thread holds no lock.

use crate::upcalls::{self, Upcalls, Watcher};
use crate::{
    again, chan, channels, close, epoll, leave, listen, operator, path, peers, pidfd_transfer, route, upgrade, waker,
    zone,
};
use fsocket_abi::arena::Reason;
use fsocket_abi::channel::CLIENT;
use fsocket_proto::Message;

static UPCALLS: Upcalls = Upcalls {
    message,
    settle,
    monitor_died,
    announce: again::announce,
    monitor_found: again::found,
    shares_nothing: chan::none,
    last_reference: close::last_reference,
    leave_everything: || leave::everything(Reason::Uring),
    used_below: leave::used_below,
    leave_to_instances: leave::to_instances,
    accepted: upgrade::accepted,
    sleep_limit: zone::balance::sleep_limit,
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

/// Called once, at the start.
#[link_section = ".text.fsocket_start"]
pub fn connect() {
    upcalls::connect(&UPCALLS);
}

/// Handles a message of the monitor. It can arrive in the middle of any operation, while the
/// thread holds locks.
fn message(m: Message, got: Option<i32>) -> bool {
    match m {
        Message::Connect(a) => came_late(a.channel, a.listener, a.first_port, got),
        Message::Meet(a) => came_late(a.channel, a.listener, a.first_port, got),
        Message::ChannelSrv(m) => got.into_iter().for_each(|fd| channels::serve(m.channel, m.listener, fd)),
        // No thread waits for this answer any more.
        Message::Worker(a) => listen::joined_late(a.listener, a.number.into()),
        Message::Woken(m) => channels::woken(m),
        Message::WakerRead(m) => return got.is_some_and(|fd| waker::hear(m, fd)),
        Message::WakerWrite(m) => return got.is_some_and(|fd| chan::pipe(m, fd)),
        Message::Peer(m) => {
            if let Some(fd) = got {
                zone::balance::came(m.group, m.place.into(), fd);
                return true;
            }
        }
        Message::PeerGone(m) => zone::balance::went(m.group, m.place.into()),
        Message::WakeHint(m) => zone::balance::wake_hint(m.group),
        Message::Look(m) => zone::watch::look(m.group),
        Message::Transfer(m) => pidfd_transfer::asked(m),
        Message::ToKernel(m) => operator::told(m.off),
        Message::Transferred(m) => pidfd_transfer::done(m.number),
        Message::Watched(m) => {
            chan::whole(m.channel);
            route::clear();
            peers::leave_to_monitor();
        }
        Message::ChannelGone(m) => channels::gone(m.channel, m.broken),
        Message::OtherRights(m) => listen::wanted_by_others(m.listener),
        Message::Untaken(m) => listen::untaken(m.listener),
        Message::UpgradeSrv(m) => return got.is_some_and(|fd| upgrade::asked(m, fd)),
        _ => {}
    }
    false
}

/// Maps the channel of a late answer: no thread waits for it any more, but the next connection can
/// use it.
fn came_late(channel: u32, listener: u64, first_port: u16, got: Option<i32>) {
    if let (None, Some(fd)) = (chan::by_id(channel, CLIENT), got) {
        if let Some(c) = chan::map(channel, listener, CLIENT, fd) {
            c.first_ports(first_port);
        }
    }
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
