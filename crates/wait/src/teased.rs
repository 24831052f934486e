//! A peer that ends sleeps again and again, and has nothing to say, would keep a thread busy with its word alone. After
//! some times the thread sleeps where no peer can wake it, for a moment each time.

use fsocket_fdtable::table::Desc;
use fsocket_shm::asleep::{self, On};
use fsocket_sync::atomic::AtomicU32;
use fsocket_sync::doorbell::Want;
use fsocket_sys::{self as sys, Errno, Result};

/// How long such a sleep is, nanoseconds.
const NAP_NS: u64 = 500_000;

/// Sleeps of one call on one word that were ended for nothing.
#[derive(Default)]
pub struct Teased {
    /// In a row, while the direction stayed at this position.
    times: u32,
    at: u64,
}

impl Teased {
    const MOST: u32 = 64;

    /// A sleep on this word has ended, and there is nothing to do. (Another thread may have been faster: then the
    /// position, which no peer can write, is another one.)
    pub fn woken_for_nothing(&mut self, d: &Desc, want: &Want) {
        let s = d.sock();
        let half = if core::ptr::eq(want, &d.rx_dir().want_data) { &s.rx } else { &s.tx };
        let at = half.pos();
        self.times = if self.at == at { self.times.saturating_add(1) } else { 0 };
        self.at = at;
    }

    pub fn is(&self) -> bool {
        self.times > Self::MOST
    }
}

/// A sleep that no peer can end. Errors: EINTR.
pub(crate) fn pause(left: Option<u64>) -> Result<()> {
    static NOBODY_WAKES: AtomicU32 = AtomicU32::new(0);
    let ns = left.unwrap_or(NAP_NS).min(NAP_NS);
    let on = On { word: Some(&NOBODY_WAKES), ..On::default() };
    match asleep::sleep(&on, || sys::futex_wait(&NOBODY_WAKES, 0, Some(ns))) {
        Err(Errno::EINTR) => Err(Errno::EINTR),
        _ => Ok(()),
    }
}
