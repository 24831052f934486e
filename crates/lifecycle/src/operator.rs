//! `fastsocket off`: an operator wants the connections of this process to use the kernel for some
//! time.
//!
//! The monitor refuses new connections. Existing ones change their path (ADR 8). Each side keeps
//! its end as a candidate for shared memory (ADR 27), to which it returns after `fastsocket on`. A
//! connection that several processes hold, or that has several descriptors, does not return.

use crate::cow::Sparing;
use crate::signals::Held;
use crate::table::{self, Desc};
use crate::{ctl, epoll, listen, path, process, upgrade};
use core::sync::atomic::{AtomicBool, Ordering};

/// Connections must move as soon as a thread holds no lock.
#[link_section = ".data.fsocket_start"]
static ASKED: AtomicBool = AtomicBool::new(false);

/// The monitor reports that the operator has switched shared memory off or on.
pub fn told(off: bool) {
    process::set_off(off);
    ASKED.store(off, Ordering::Release);
    ctl::defer();
}

/// Moves the connections, if requested. Called where the thread holds no lock.
#[inline]
pub fn answer() {
    if ASKED.load(Ordering::Relaxed) && ASKED.swap(false, Ordering::AcqRel) {
        to_kernel();
    }
}

#[cold]
fn to_kernel() {
    let mut conns = table::all().filter(|d| d.is_conn());
    loop {
        let mut batch = [None; path::BATCH];
        batch.iter_mut().zip(&mut conns).for_each(|(place, d)| *place = Some(d));
        if batch[0].is_none() {
            break;
        }
        batch.iter().flatten().for_each(|d| d.path().set_comes_back(true));
        // A signal handler that interrupts the move would find the connections in use.
        let _held = Held::all();
        path::materialize(&batch);
    }
    // Also moves connections that are not accepted yet.
    let accepts = |d: &&'static Desc| d.listening().accepts() && listen::of(d).is_some();
    table::all().filter(accepts).for_each(path::requeue);
}

/// Called when a connection has moved to the kernel and may return. `also`: an epoll instance that
/// also watches this number, as the kernel socket of the connection.
pub fn kernel_for_now(d: &'static Desc, also: Option<i32>) -> Option<&'static Desc> {
    if d.sock().is_shared() {
        return None;
    }
    let next = upgrade::candidate(d)?;
    epoll::watched_in_kernel(d, next, also);
    Some(next)
}

/// In a forked child: the message was for the parent.
#[link_section = ".text.fsocket_start"]
pub fn become_child() {
    ASKED.put(false);
}
