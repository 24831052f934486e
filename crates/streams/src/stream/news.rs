//! Telling the peer of what was sent.

use super::{notify, publish_cpu};
use crate::table::Desc;

/// With both sides on one CPU a long message is handed over in pieces of this
/// many bytes: so few that they are still in cache when the receiver copies them, and so
/// many that switching to it and back costs little.
pub(super) const SHARED_CPU: usize = 512 * 1024;

/// Bytes in the ring of which the peer has not been told. A receiver on this CPU that is woken for each
/// record takes the CPU each time, copies that record and sleeps again.
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
