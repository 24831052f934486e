//! Whether the monitor does not know of a worker because it did not answer in time. Until it does, nobody
//! tells this process of the connections that come.

use core::sync::atomic::{AtomicBool, Ordering};

static UNJOINED: AtomicBool = AtomicBool::new(false);
/// How long such a process sleeps before it asks again, nanoseconds.
const AGAIN: u64 = 250_000_000;

pub fn note() {
    UNJOINED.store(true, Ordering::Release);
}

pub fn any() -> bool {
    UNJOINED.load(Ordering::Relaxed)
}

/// Is there one? The caller asks for it again.
pub fn take() -> bool {
    UNJOINED.load(Ordering::Relaxed) && UNJOINED.swap(false, Ordering::AcqRel)
}

/// A sleep of `limit` (None: for ever): how long it may be now.
#[inline]
pub fn cut(limit: Option<u64>) -> Option<u64> {
    match UNJOINED.load(Ordering::Relaxed) {
        true => Some(limit.map_or(AGAIN, |l| l.min(AGAIN))),
        false => limit,
    }
}
