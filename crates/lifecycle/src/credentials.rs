//! When a process gives up rights, it loses the memory that it shares with processes of its fork
//! group that keep these rights.
//!
//! After `fork` a child has its parent's arenas and channels mapped. While both have the same
//! rights, that gives the child nothing: it could also read the parent's memory with ptrace. But a
//! child that becomes another user, or gives up capabilities, must not reach its parent's
//! connections any more. So three steps follow such a call before the program continues:
//!
//! 1. All connections of the process move to the kernel.
//! 2. Empty memory replaces all shared memory in the process.
//! 3. The process tells the monitor over a control socket that carries the new credentials
//!    (`RENEW`).
//!
//! From then on the process is a fork group of its own, and its listeners use shared memory again.
//!
//! Only the rights that the process can still get count ([`rights::class`]). A server of root that
//! changes its effective user for each request, and back, has given up nothing.

use crate::table::{self, Desc};
use crate::{channels, ctl, epoll, exec, identity, listen, path, process, rights, sealed, socks, upgrade, waker, zone};
use crate::{pool, pristine};
use core::sync::atomic::Ordering;
use fsocket_abi::channel::status;
use fsocket_sys as sys;

/// Runs `call`, which may change the credentials of this process.
pub fn changing<R>(call: impl FnOnce() -> R) -> R {
    if process::nonce() == 0 {
        return call();
    }
    let before = rights::class();
    let r = call();
    // Spare placeholders have the old credentials.
    pool::drain();
    pristine::other_credentials();
    let _errno = sys::errno::Saved::errno();
    if rights::class() != before {
        lost();
    }
    r
}

/// Like [`changing`], for calls that change groups: they are not part of the check at each socket.
pub fn changing_groups<R>(call: impl FnOnce() -> R) -> R {
    let r = changing(call);
    identity::regrouped();
    r
}

/// Like [`changing`], for calls that concern only one thread, or only the owner of its files.
pub fn changing_thread<R>(call: impl FnOnce() -> R) -> R {
    identity::set_apart();
    changing(call)
}

/// Called after this process has entered a Landlock domain, which its credentials do not show.
pub fn entered_domain() {
    if process::nonce() != 0 {
        let _errno = sys::errno::Saved::errno();
        rights::note_domain();
        lost();
    }
}

/// Called when the process has fewer rights than the processes with which it shares memory.
#[cold]
fn lost() {
    let (on, sealed) = (process::enabled(), sealed::sealed());
    if sealed {
        return; // everything has moved already
    }
    // New connections must not use memory that is about to be unmapped.
    process::disable();
    upgrade::give_up_all();
    path::pass_on_used();
    let listened = listen::leave_channels();
    exec::hand_over_all();
    forget_memory();
    // A child that has not met the monitor yet will do so with its new credentials.
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

/// Unmaps arenas and channels.
pub fn forget_memory() {
    let stuck = || table::all().filter(|d| d.is_conn());
    channels::forget_all();
    socks::forget();
    // A connection that could not move has empty memory now, so it is reset.
    stuck().for_each(reset);
}

fn reset(d: &'static Desc) {
    d.conn().forget_channel();
    d.rx_dir().prod.status.fetch_or(status::RST | status::CLOSED, Ordering::Release);
}
