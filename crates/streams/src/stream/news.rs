//! Telling the peer that bytes were sent.

use super::{notify, publish_cpu};
use crate::table::Desc;

/// If both sides run on one CPU, a long message is handed over in pieces of this many bytes. Such
/// a piece is still in cache when the receiver copies it. It is so large that switching to the
/// receiver and back costs little in comparison.
pub(super) const SHARED_CPU: usize = 512 * 1024;

/// Bytes in the ring about which the peer was not told yet. If a receiver on this CPU were told
/// of each record, it would take the CPU each time, copy that record, and sleep again.
pub(super) struct News {
    pub d: &'static Desc,
    pub bytes: usize,
}

impl News {
    pub(super) fn tell(&mut self) {
        if core::mem::take(&mut self.bytes) != 0 {
            let (_, tx, h) = self.d.tx();
            notify(self.d, &tx.want_data);
            publish_cpu(h, &tx.prod.cpu);
        }
    }
}

impl Drop for News {
    fn drop(&mut self) {
        self.tell();
    }
}
