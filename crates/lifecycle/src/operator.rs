//! `fastsocket off`: an operator wants the connections of this process to be the kernel's for some time.
//!
//! New ones are the monitor's to refuse. Those that there are change their path (ADR 8), and each side keeps
//! its end as one that may go over to shared memory (ADR 27); after `fastsocket on` it does. Not one that
//! several processes have, or several numbers refer to.

use crate::cow::Sparing;
use crate::signals::Held;
use crate::table::{self, Desc};
use crate::{ctl, epoll, listen, path, process, upgrade};
use core::sync::atomic::{AtomicBool, Ordering};

/// Connections are to be switched, where nothing is locked.
#[link_section = ".data.fsocket_start"]
static ASKED: AtomicBool = AtomicBool::new(false);

/// By the monitor.
pub fn told(off: bool) {
    process::set_off(off);
    ASKED.store(off, Ordering::Release);
    ctl::defer();
}

/// Where nothing is locked.
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
        // A handler in the middle of this would find the connections in use.
        let _held = Held::all();
        path::materialize(&batch);
    }
    // What nobody has accepted yet.
    let accepts = |d: &&'static Desc| d.listening().accepts() && listen::of(d).is_some();
    table::all().filter(accepts).for_each(path::requeue);
}

/// A connection has become the kernel's, and may come back.
pub fn kernel_for_now(d: &'static Desc) -> Option<&'static Desc> {
    if d.sock().is_shared() {
        return None;
    }
    let next = upgrade::candidate(d)?;
    epoll::watched_in_kernel(d, next);
    Some(next)
}

/// In a forked child: its parent was told.
#[link_section = ".text.fsocket_start"]
pub fn become_child() {
    ASKED.put(false);
}
