//! The second word of a sleep on a word that a peer can write.
//!
//! A peer maps the word of a direction: it can change it, wake nobody, or move its sleepers to another word
//! (`FUTEX_CMP_REQUEUE`) and die. So a sleep without a limit also waits for a word that only its own process and the
//! monitor map. The monitor changes that one when it closes a connection in the name of a peer.
//!
//! An odd word has sleepers. The sleeper makes the word odd, and then looks at the connection; the monitor changes the
//! connection, and then looks at the word. Each has a fence in between, so at least one sees the other (Dekker).

use crate::atomic::{fence, AtomicU32, Ordering};

/// Zero is valid.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct News(AtomicU32);

impl News {
    const SLEEPS: u32 = 1;

    /// Sleeper, before its last look: sleep while [`News::word`] has this value.
    pub fn arm(&self) -> u32 {
        let armed = self.0.fetch_or(Self::SLEEPS, Ordering::AcqRel) | Self::SLEEPS;
        fence(Ordering::SeqCst);
        armed
    }

    /// Monitor, after it has changed something. True: all that sleep on [`News::word`] are to be woken.
    pub fn tell(&self) -> bool {
        fence(Ordering::SeqCst);
        let mut seen = self.0.load(Ordering::Acquire);
        while seen & Self::SLEEPS != 0 {
            match self.0.compare_exchange(seen, seen.wrapping_add(1), Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return true,
                Err(now) => seen = now,
            }
        }
        false
    }

    /// The futex.
    pub fn word(&self) -> &AtomicU32 {
        &self.0
    }
}
