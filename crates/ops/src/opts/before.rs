//! Earlier options of listeners. A connection gets the options that its listener had when the
//! connection came, even if it is accepted later.
//!
//! Before a listener's options change, the monitor puts a mark on the connections in its queues,
//! and this module stores the old options under that mark. A child that is forked later has them,
//! too. An existing process of the fork group uses the listener's current options instead.

use crate::lock::{Guard, Lock};
use crate::options::COUNT;
use crate::table::Desc;
use crate::{ctl, listen, zone};
use core::sync::atomic::{AtomicBool, Ordering};
use fsocket_proto::request;
use fsocket_sys as sys;

/// Number of stored changes. A change is stored only if connections wait.
const CHANGES: usize = 32;

#[derive(Clone, Copy)]
pub struct Options {
    pub opt: [i32; COUNT],
    pub rcvtimeo: u64,
    pub sndtimeo: u64,
}

struct Kept {
    /// The old options by mark; mark 0: free.
    change: [(u32, Options); CHANGES],
    next: usize,
}

const NONE: (u32, Options) = (0, Options { opt: [0; COUNT], rcvtimeo: 0, sndtimeo: 0 });
static KEPT: Lock<Kept> = Lock::new(Kept { change: [NONE; CHANGES], next: 0 });
/// Was the lock ever taken? (Each fork asks this; reading the lock itself would map another
/// page.)
#[link_section = ".data.fsocket_start"]
static USED: AtomicBool = AtomicBool::new(false);

fn kept() -> Option<Guard<'static, Kept>> {
    USED.store(true, Ordering::Relaxed);
    KEPT.lock().ok()
}

/// Called before an option of a listener is set.
pub fn changes(fd: i32, d: &Desc) {
    let Some(l) = listen::of(d) else { return };
    let mark = sys::getrandom_u64() as u32 | 1;
    let ask = request::Options { listener: l.id.load(Ordering::Relaxed), mark };
    if !ctl::request(ask, None).is_ok_and(|(answer, _)| answer.marked > 0) {
        return;
    }
    // (Other processes of the fork group may have set options.)
    zone::follow_options(fd, d);
    let Some(mut k) = kept() else { return };
    let i = k.next % CHANGES;
    k.next += 1;
    k.change[i] = (mark, of(d));
}

/// The present options of a listener.
pub fn of(d: &Desc) -> Options {
    Options { opt: d.options().values(), rcvtimeo: d.options().receive_timeout(), sndtimeo: d.options().send_timeout() }
}

/// The options for a connection that has this mark, of the listener `d`.
pub fn at(mark: u32, d: &Desc) -> Options {
    let kept = || kept()?.change.iter().find(|(m, _)| *m == mark).map(|(_, o)| *o);
    (mark != 0).then(kept).flatten().unwrap_or_else(|| of(d))
}

/// In a forked child: resets the lock.
pub fn become_child() {
    if USED.load(Ordering::Relaxed) {
        KEPT.reset_after_fork();
    }
}
