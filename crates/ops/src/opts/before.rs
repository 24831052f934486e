//! Options of listeners as they were: a connection has those of the moment at which it
//! came, also if it is accepted later.
//!
//! Before a listener's options change, the monitor marks what waits in its queues, and
//! what they are is kept here under that mark. Another process of the fork group that is forked later has it,
//! too; one that lives already takes the listener's options as they are.

use crate::lock::{Guard, Lock};
use crate::options::COUNT;
use crate::table::Desc;
use crate::{ctl, listen, zone};
use core::sync::atomic::{AtomicBool, Ordering};
use fsocket_proto::request;
use fsocket_sys as sys;

/// Changes that are remembered: each while something waits.
const CHANGES: usize = 32;

#[derive(Clone, Copy)]
pub struct Options {
    pub opt: [i32; COUNT],
    pub rcvtimeo: u64,
    pub sndtimeo: u64,
}

struct Kept {
    /// By mark; 0: free.
    change: [(u32, Options); CHANGES],
    next: usize,
}

const NONE: (u32, Options) = (0, Options { opt: [0; COUNT], rcvtimeo: 0, sndtimeo: 0 });
static KEPT: Lock<Kept> = Lock::new(Kept { change: [NONE; CHANGES], next: 0 });
/// Was it ever locked? (Each fork asks: else it would map another page.)
#[link_section = ".data.fsocket_start"]
static USED: AtomicBool = AtomicBool::new(false);

fn kept() -> Option<Guard<'static, Kept>> {
    USED.store(true, Ordering::Relaxed);
    KEPT.lock().ok()
}

/// An option of a listener is about to be set.
pub fn changes(fd: i32, d: &Desc) {
    let Some(l) = listen::of(d) else { return };
    let mark = sys::getrandom_u64() as u32 | 1;
    let ask = request::Options { listener: l.id.load(Ordering::Relaxed), mark };
    if !ctl::request(ask, None).is_ok_and(|(answer, _)| answer.marked > 0) {
        return;
    }
    // Processes of the fork group may have set some.
    zone::follow_options(fd, d);
    let Some(mut k) = kept() else { return };
    let i = k.next % CHANGES;
    k.next += 1;
    k.change[i] = (mark, of(d));
}

/// Those that a listener has now.
pub fn of(d: &Desc) -> Options {
    Options { opt: d.options().values(), rcvtimeo: d.options().receive_timeout(), sndtimeo: d.options().send_timeout() }
}

/// Those for a connection with this mark, of a listener of this process.
pub fn at(mark: u32, d: &Desc) -> Options {
    let kept = || kept()?.change.iter().find(|(m, _)| *m == mark).map(|(_, o)| *o);
    (mark != 0).then(kept).flatten().unwrap_or_else(|| of(d))
}

/// In a forked child.
pub fn become_child() {
    if USED.load(Ordering::Relaxed) {
        KEPT.reset_after_fork();
    }
}
