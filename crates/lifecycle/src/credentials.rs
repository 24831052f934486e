//! A process that gives up rights loses the memory that it shares with its fork group
//! who keep them.
//!
//! After `fork` a child has its parent's arenas and channels mapped. As long as
//! both may do the same that gives the child nothing: it could as well read the
//! parent's memory with ptrace. A child that becomes another user, or gives up
//! capabilities, must not touch its parent's connections any more. So, when such a call
//! has succeeded and before the program goes on: connections that the process holds
//! become the kernel's, everything that is mapped is replaced by empty memory, and the
//! monitor is told over a control socket that carries the new credentials
//! (`RENEW`). From then on the process is a fork group of its own. It is served like
//! any other: its listeners go on over shared memory.
//!
//! What counts is what the process can still become ([`rights::class`]). A server of root's that
//! changes its effective user for each request, and back, has given up nothing.

use crate::table::{self, Desc};
use crate::{channels, ctl, epoll, exec, identity, listen, path, process, rights, sealed, socks, upgrade, waker, zone};
use crate::{pool, pristine};
use core::sync::atomic::Ordering;
use fsocket_abi::channel::status;
use fsocket_sys as sys;

/// `call` may change the credentials of this process.
pub fn changing<R>(call: impl FnOnce() -> R) -> R {
    if process::nonce() == 0 {
        return call();
    }
    let before = rights::class();
    let r = call();
    // A placeholder that is kept belongs to who the process was.
    pool::drain();
    pristine::other_credentials();
    let _errno = sys::errno::Saved::errno();
    if rights::class() != before {
        lost();
    }
    r
}

/// The same for a call that changes groups, which are not asked for at each socket.
pub fn changing_groups<R>(call: impl FnOnce() -> R) -> R {
    let r = changing(call);
    identity::regrouped();
    r
}

/// The same for a call that changes one thread only, or what its files belong to.
pub fn changing_thread<R>(call: impl FnOnce() -> R) -> R {
    identity::set_apart();
    changing(call)
}

/// This process has entered a Landlock domain: what it may no longer do is not in its credentials.
pub fn entered_domain() {
    if process::nonce() != 0 {
        let _errno = sys::errno::Saved::errno();
        rights::note_domain();
        lost();
    }
}

/// It may do less than those it shares memory with.
#[cold]
fn lost() {
    let (on, sealed) = (process::enabled(), sealed::sealed());
    if sealed {
        return; // everything is gone already
    }
    // No new connection goes where memory is about to go.
    process::disable();
    upgrade::give_up_all();
    path::pass_on_used();
    let listened = listen::leave_channels();
    exec::hand_over_all();
    forget_memory();
    // (A child that has not met the monitor yet meets it as who it is then.)
    if ctl::unmet() || ctl::may_come() || ctl::renew() {
        if on {
            process::enable();
        }
        zone::watch::another_monitor();
        listen::join_those(&listened);
        epoll::another_control();
    } else if listen::any() {
        path::give_up_all();
    }
    waker::ring_everybody();
}

/// Arenas and channels are no longer mapped here.
pub fn forget_memory() {
    let stuck = || table::all().filter(|d| d.is_conn());
    channels::forget_all();
    socks::forget();
    // A connection that could not be switched: its memory is empty now, and says so.
    stuck().for_each(reset);
}

fn reset(d: &'static Desc) {
    d.conn().forget_channel();
    d.rx_dir().prod.status.fetch_or(status::RST | status::CLOSED, Ordering::Release);
}
