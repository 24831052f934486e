//! Remembers to which connection a thread has sent last. If the thread turns to another
//! connection, it writes the time into the record. A receiver that finds several connections
//! ready, without having asked for a ring, then knows which was ready first ([`crate::epoll`]). A
//! time in every message would cost more than sending the smallest messages.

use crate::table::{Desc, DESCS};
use crate::token;
use core::sync::atomic::{AtomicU32, Ordering};
use fsocket_abi::channel::record;
use fsocket_sys::cpu;

/// Index of a description + 1. Several threads may share the place; this only causes additional
/// times in records.
#[repr(align(64))]
struct Last(AtomicU32);

/// Power of two.
const PLACES: usize = 64;
static LAST: [Last; PLACES] = [const { Last(AtomicU32::new(0)) }; PLACES];

fn last() -> &'static AtomicU32 {
    // Thread pointers of different threads differ in the bits above the page offset.
    let spread = (cpu::thread_id() >> 12).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    &LAST[(spread >> (64 - PLACES.ilog2())) as usize].0
}

/// Called before the calling thread sends on `d`. If it has sent to another connection before,
/// returns [`record::stamp`]; else 0.
#[inline(always)]
pub fn to(d: &Desc) -> u64 {
    if token::is_here(d.sender()) {
        return 0;
    }
    from_another(d)
}

#[inline(never)]
fn from_another(d: &Desc) -> u64 {
    let (last, me) = (last(), d.index() + 1);
    let was = last.load(Ordering::Relaxed);
    if was == me {
        if token::owned(&d.sock().tx) {
            d.set_sender(token::here());
        }
        return 0;
    }
    last.store(me, Ordering::Relaxed);
    if let Some(d) = DESCS.get(was.wrapping_sub(1)) {
        // Without an entry as sender, the thread of that connection comes here before its next
        // send. (With one, it would skip the check.)
        d.set_sender(0);
    }
    record::stamp(cpu::ticks())
}

/// The thread has not sent after all, so its next send counts as a turn.
#[cold]
pub fn back(d: &Desc) {
    d.set_sender(0);
    last().store(0, Ordering::Relaxed);
}
