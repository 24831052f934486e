//! Notes that the monitor has not registered a worker, because it did not answer in time. Until
//! it does, this process gets no messages about new connections.

use core::sync::atomic::{AtomicBool, Ordering};

static UNJOINED: AtomicBool = AtomicBool::new(false);
/// How long such a process sleeps before it asks the monitor again, nanoseconds.
const AGAIN: u64 = 250_000_000;

pub fn note() {
    UNJOINED.store(true, Ordering::Release);
}

pub fn any() -> bool {
    UNJOINED.load(Ordering::Relaxed)
}

/// Is there such a worker? Clears the note, because the caller asks the monitor again.
pub fn take() -> bool {
    UNJOINED.load(Ordering::Relaxed) && UNJOINED.swap(false, Ordering::AcqRel)
}

/// The longest sleep that is allowed now.
#[inline]
pub fn sleep_limit() -> Option<u64> {
    UNJOINED.load(Ordering::Relaxed).then_some(AGAIN)
}
