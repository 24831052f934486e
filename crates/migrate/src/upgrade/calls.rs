//! After how many calls a kernel connection is tried.

use crate::process;
use crate::table::Desc;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Calls before the first try; each further one waits four times as long, or [`sooner`].
pub(super) const CALLS: u32 = 32;
/// A look costs some system calls: so many calls of a stream that does not rest look.
pub(super) const LOOKS: u32 = 32;
/// A connection with so many tries is given up. One that finds nobody at the other end counts as several ([`MISS`]).
const TRIES: u32 = 8;
/// The opener has found that the monitor knows nothing of the other end; or the accepter has offered its own, for which the
/// opener has time until the next try.
pub(super) const MISS: u32 = 2;
pub(super) const OFFERED: u32 = 4;
/// Nor is it given up before so many calls.
const LEAST: u32 = 256;
#[link_section = ".data.fsocket_start"]
static FIRST: AtomicU32 = AtomicU32::new(CALLS);
#[link_section = ".data.fsocket_start"]
static UNIX: AtomicBool = AtomicBool::new(true);

/// `calls`: before the first try, 0: never (FASTSOCKET_UPGRADE). `unix`: Unix sockets as well.
pub fn init(calls: Option<u32>, unix: bool) {
    UNIX.store(unix, Ordering::Relaxed);
    FIRST.store(calls.unwrap_or(CALLS), Ordering::Relaxed);
}

pub(super) fn with_unix() -> bool {
    wanted() && UNIX.load(Ordering::Relaxed)
}

/// The number of the call that tries first; 0: none does.
pub(super) fn first() -> u32 {
    FIRST.load(Ordering::Relaxed)
}

/// Has the program not switched it off?
pub(super) fn is_on() -> bool {
    first() != 0
}

pub(super) fn wanted() -> bool {
    is_on() && process::enabled()
}

/// The first try of an end whose peer is known to be there: a quarter of [`first`].
pub(super) fn at_once(d: &Desc) {
    d.kernel().set_next_try((first() / 4).max(1));
}

/// The next try comes after twice the calls.
pub(super) fn sooner(d: &Desc) {
    d.kernel().set_next_try(d.kernel().calls().saturating_mul(2));
}

/// From here on the calls are counted.
pub(super) fn begin(d: &Desc, side: usize) {
    d.begin_in_kernel(side, first());
}

/// Its partner does not show up: a call on it is to cost nothing from now on. `tries`: before this one.
pub(super) fn is_too_often(tries: u32, calls: u32) -> bool {
    tries >= TRIES && calls >= LEAST
}

/// A try that counts as several. (Between network namespaces both ends learn when they try.)
pub(super) fn missed(d: &Desc, as_many: u32) {
    if !d.kernel().is_across() {
        d.kernel().count_tries(as_many - 1);
    }
}
