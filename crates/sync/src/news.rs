//! The second word of a sleep, for the case that a peer can write the first.
//!
//! A peer maps the futex word of a direction. It can change the word without waking the sleepers,
//! or move them to another word (`FUTEX_CMP_REQUEUE`), and then die. So a sleep without a time
//! limit also waits on a second word that only its own process and the monitor map. The monitor
//! changes the second word when it closes a connection on behalf of a dead peer.
//!
//! An odd word has sleepers. The sleeper makes the word odd, and then looks at the connection; the
//! monitor changes the connection, and then looks at the word. Both run a fence in between, so at
//! least one of them sees what the other did (Dekker).

use crate::atomic::{fence, AtomicU32, Ordering};

/// The word. Zero is a valid value.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct News(AtomicU32);

impl News {
    const SLEEPS: u32 = 1;

    /// Called by the sleeper, before its last look. The thread sleeps while [`News::word`] has the
    /// returned value.
    pub fn arm(&self) -> u32 {
        let armed = self.0.fetch_or(Self::SLEEPS, Ordering::AcqRel) | Self::SLEEPS;
        fence(Ordering::SeqCst);
        armed
    }

    /// Called by the monitor, after a change. True: the caller must wake all sleepers on
    /// [`News::word`].
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
