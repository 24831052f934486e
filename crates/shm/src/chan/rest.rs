//! A client gives back a channel in which it has had no connection for a while: memory, a
//! descriptor and ports. The next connection to that listener gets another channel.
//!
//! The client only makes an offer. The monitor closes the channel to new connections, and ends it
//! if no connection exists. A connect call in progress finds the channel closed, as when a
//! listener ends. The memory is unmapped under the same lock under which connections are made.

use super::{all, Chan};
use crate::ctl;
use core::sync::atomic::{AtomicU64, Ordering};
use fsocket_abi::channel::CLIENT;
use fsocket_proto::request;
use fsocket_sys::cpu;

const LOOK_US: u64 = 5_000_000;
const REST_US: u64 = 20_000_000;

/// When all channels are looked at next, in ticks.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// Called before a sleep. (A process that shares memory with others wakes at least every two
/// seconds.)
#[inline]
pub fn look_if_due() {
    let (now, next) = (cpu::ticks(), NEXT.load(Ordering::Relaxed));
    if now >= next {
        look(now, next);
    }
}

#[cold]
fn look(now: u64, next: u64) {
    let then = now + LOOK_US * cpu::ticks_per_us();
    let mine = NEXT.compare_exchange(next, then, Ordering::Relaxed, Ordering::Relaxed).is_ok();
    if mine && !ctl::dead() {
        all()
            .filter(|c| c.my_side() == CLIENT && !c.retired.load(Ordering::Relaxed))
            .for_each(|c| c.offer_if_at_rest(now));
    }
}

impl Chan {
    fn offer_if_at_rest(&self, now: u64) {
        let Some(opened) = self.client.try_lock().map(|c| c.next_worker) else { return };
        let rests = self.opened.swap(opened, Ordering::Relaxed) == opened && !self.is_used() && !self.is_half();
        if !rests {
            self.rests_since.store(now, Ordering::Relaxed);
        } else if now.wrapping_sub(self.rests_since.load(Ordering::Relaxed)) > REST_US * cpu::ticks_per_us() {
            self.rests_since.store(now, Ordering::Relaxed);
            let _ = ctl::tell(request::Rest { channel: self.id.load(Ordering::Relaxed) }, None);
        }
    }
}
