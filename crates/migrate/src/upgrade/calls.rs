//! The number of calls after which a kernel connection tries to move.

use crate::process;
use crate::table::Desc;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Number of calls before the first try. The pause before each further try is four times as long,
/// or [`sooner`].
pub(super) const CALLS: u32 = 32;
/// To look whether a stream is at rest costs some system calls. This many calls look, if it is
/// not.
pub(super) const LOOKS: u32 = 32;
/// A connection gives up after this many tries. A try without a partner at the other end counts
/// as several ([`MISS`]).
const TRIES: u32 = 8;
/// One try counts as this many: MISS if the opener has found that the monitor does not know the
/// other end; OFFERED if the accepter has offered its own end (the opener has time until the next
/// try).
pub(super) const MISS: u32 = 2;
pub(super) const OFFERED: u32 = 4;
/// A connection does not give up before this many calls.
const LEAST: u32 = 256;
#[link_section = ".data.fsocket_start"]
static FIRST: AtomicU32 = AtomicU32::new(CALLS);
#[link_section = ".data.fsocket_start"]
static UNIX: AtomicBool = AtomicBool::new(true);

/// `calls`: calls before the first try; 0: never (FASTSOCKET_UPGRADE). `unix`: also Unix sockets.
pub fn init(calls: Option<u32>, unix: bool) {
    UNIX.store(unix, Ordering::Relaxed);
    FIRST.store(calls.unwrap_or(CALLS), Ordering::Relaxed);
}

pub(super) fn with_unix() -> bool {
    wanted() && UNIX.load(Ordering::Relaxed)
}

/// The number of the call that tries first; 0: no call tries.
pub(super) fn first() -> u32 {
    FIRST.load(Ordering::Relaxed)
}

/// Is the move switched on for this program?
pub(super) fn is_on() -> bool {
    first() != 0
}

pub(super) fn wanted() -> bool {
    is_on() && process::enabled()
}

/// Lets an end whose peer is known to exist try early: after a quarter of [`first`].
pub(super) fn at_once(d: &Desc) {
    d.kernel().set_next_try((first() / 4).max(1));
}

/// The next try comes when the number of calls has doubled.
pub(super) fn sooner(d: &Desc) {
    d.kernel().set_next_try(d.kernel().calls().saturating_mul(2));
}

/// From now on the calls of this connection are counted.
pub(super) fn begin(d: &Desc, side: usize) {
    d.begin_in_kernel(side, first());
}

/// Has the other end not come in so many tries that further calls should cost nothing? `tries`:
/// earlier ones.
pub(super) fn is_too_often(tries: u32, calls: u32) -> bool {
    tries >= TRIES && calls >= LEAST
}

/// Counts a try as `as_many`. (Not between network namespaces, where both ends learn when to
/// try.)
pub(super) fn missed(d: &Desc, as_many: u32) {
    if !d.kernel().is_across() {
        d.kernel().count_tries(as_many - 1);
    }
}
