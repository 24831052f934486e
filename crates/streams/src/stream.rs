//! Bytes: send, receive, wait.

mod below;
mod news;
mod receive;
mod refuse;
mod restart;
mod splice;
mod transmit;
mod turn;
mod wait;

use crate::conn::{end, is_nonsense, low_water, poison, publish_cpu, ring_has, Hold};
pub use below::{has_failed, zerocopy};
pub use receive::{
    behind, found_nothing, recv, recv_fast, recv_on_credit, recv_part, recv_slow, rest, Part, ELSEWHERE, WITH_CONTROL,
};
pub use refuse::{rather, refused};
pub use splice::{splice_from, splice_to};
pub use transmit::{blocks, plain_send, send, send_fast, send_part, send_slow, send_small, send_tiny, sent_tiny, Tiny};
pub use wait::{fd_detached, wake_late};

use crate::asleep::{self, Mark};
use crate::conn;
use crate::path;
use crate::table::Desc;
use core::cell::Cell;
use fsocket_abi::flags::FlagSet;
use fsocket_abi::path_switch::{Event, Next};
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

/// Wakes the waiters for this side's data, and those for space at the peer.
pub fn notify_all(d: &'static Desc) {
    notify(d, &d.tx().1.want_data);
    notify(d, &d.rx().1.want_space);
}

/// Is the path no longer the rings alone?
#[inline]
pub fn left_rings(d: &Desc) -> bool {
    !d.is_in_rings()
}

/// The kernel socket in which the rest of an operation has to be done, if the connection has left
/// the rings. The caller keeps `d` meanwhile ([`Hold`]). EAGAIN: the peer is about to name the
/// place, and the call, with these `flags`, does not wait.
fn path_taken(d: &'static Desc, flags: i32) -> Option<Result<i32>> {
    let waits = flags & libc::MSG_DONTWAIT == 0 && !(d.is_conn() && d.sock().flags.get().has(FlagSet::NONBLOCK));
    match d.path_state().next(Event::Call { waits }) {
        Next::Stay | Next::Move => None,
        Next::Later => Some(Err(Errno::EAGAIN)),
        Next::Kernel(fd) | Next::Both(fd) => Some(Ok(fd)),
        Next::Follow => match path::follow(d) {
            // Reset half-way: what remains is ours to report.
            Err(Errno::ECONNRESET) => None,
            r => Some(r),
        },
    }
}

/// A call that goes to the kernel as a whole if the connection has left the rings before it begins; `flags` as
/// for [`path_taken`].
pub fn whole(d: &'static Desc, flags: i32, call: impl FnOnce(i32) -> Result<usize>) -> Option<Result<usize>> {
    if !left_rings(d) {
        return None;
    }
    let _hold = Hold::on(d);
    path_taken(d, flags).map(|fd| call(fd?))
}

/// Runs a call of several operations on one connection, each of which may sleep. The connection stays
/// until the last one is done.
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
    /// From now on the call does not restart on its number, whatever that number becomes.
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
