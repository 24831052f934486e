//! Bytes: send, receive, wait.

mod below;
mod news;
mod receive;
mod refuse;
mod restart;
mod transmit;
mod turn;
mod wait;

use crate::conn::{end, is_nonsense, low_water, poison, publish_cpu, ring_has, Hold};
pub use below::{has_failed_below, zerocopy};
pub use receive::{
    before_urgent, found_nothing, recv, recv_fast, recv_on_credit, recv_slow, rest, ELSEWHERE, WITH_CONTROL,
};
pub use refuse::{rather, refused};
pub use transmit::{blocks, plain_send, send, send_fast, send_part, send_slow, send_small, send_tiny, sent_tiny, Tiny};
pub use wait::{fd_detached, wake_late};

use crate::asleep::{self, Mark};
use crate::conn;
use crate::path;
use crate::stage;
use crate::stage::Path;
use crate::table::Desc;
use core::cell::Cell;
use fsocket_abi::flags::FlagSet;
use fsocket_sys::{Errno, Result};

#[inline(always)]
fn notify(d: &'static Desc, want: &fsocket_sync::doorbell::Want) {
    let mask = want.take();
    if mask != 0 {
        wake(d, want, mask);
    }
}

#[cold]
fn wake(d: &'static Desc, want: &fsocket_sync::doorbell::Want, mask: u64) {
    conn::wake(d, want, mask);
    path::after_send(d);
}

/// Wake whoever waits for our data, and whoever waits for space at the peer.
pub fn notify_all(d: &'static Desc) {
    notify(d, &d.tx().1.want_data);
    notify(d, &d.rx().1.want_space);
}

/// Is the path no longer the rings alone?
#[inline]
pub fn left_rings(d: &Desc) -> bool {
    !d.is_conn() || stage::of(d) != Path::Shm
}

/// Where the rest of an operation is to be done, if no longer in the rings.
/// The caller keeps `d` meanwhile ([`Hold`]). EAGAIN: the peer is about to say where, and the call,
/// with these `flags`, does not wait.
fn path_taken(d: &'static Desc, flags: i32) -> Option<Result<i32>> {
    if !d.is_conn() {
        return stage::went_to(d).map(Ok);
    }
    match stage::of(d) {
        Path::Shm => None,
        _ if d.sock().flags.get().is_poisoned() => None,
        _ if stage::is_moving(d)
            && (flags & libc::MSG_DONTWAIT != 0 || d.sock().flags.get().has(FlagSet::NONBLOCK)) =>
        {
            Some(Err(Errno::EAGAIN))
        }
        _ => match path::follow(d) {
            // Reset half-way: what remains is ours to report.
            Err(Errno::ECONNRESET) => None,
            r => Some(r),
        },
    }
}

/// A call that the kernel is asked as a whole if the connection has left the rings before it begins; `flags` as
/// of [`path_taken`].
pub fn whole(d: &'static Desc, flags: i32, call: impl FnOnce(i32) -> Result<usize>) -> Option<Result<usize>> {
    if !left_rings(d) {
        return None;
    }
    let _hold = Hold::on(d);
    path_taken(d, flags).map(|fd| call(fd?))
}

/// A call of several operations on one connection, of which each may sleep: the connection stays until
/// the last is done.
pub fn throughout<R>(d: &Desc, call: impl FnOnce(&Midway) -> R) -> R {
    let mark = Mark::new();
    let _hold = Hold::on(d);
    let held = asleep::holds(core::iter::once(d.index()), &mark);
    let r = call(&Midway { d, begun: Cell::new(false) });
    if let Some(held) = held {
        asleep::let_go(held);
    }
    r
}

/// Whether a call of several operations has done one of them.
pub struct Midway<'a> {
    d: &'a Desc,
    begun: Cell<bool>,
}

impl Midway<'_> {
    /// From now on it does not restart on its number, whatever that becomes.
    pub fn begun(&self) {
        if !self.begun.replace(true) {
            self.d.conn().begin_midway();
        }
    }
}

impl Drop for Midway<'_> {
    fn drop(&mut self) {
        if self.begun.get() {
            self.d.conn().end_midway();
        }
    }
}
