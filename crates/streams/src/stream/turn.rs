//! To which connection a thread has sent last. A thread that turns to another one writes the time into the record:
//! then a receiver that has found several connections ready without having asked to be told
//! knows which was first ([`crate::epoll`]). To say it with every message would cost more
//! than the smallest ones take.

use crate::table::{Desc, DESCS};
use crate::token;
use core::sync::atomic::{AtomicU32, Ordering};
use fsocket_abi::channel::record;
use fsocket_sys::cpu;

/// Index of a descriptor + 1, of a thread or of some that share it: then more is said than needed.
#[repr(align(64))]
struct Last(AtomicU32);

/// Power of two.
const PLACES: usize = 64;
static LAST: [Last; PLACES] = [const { Last(AtomicU32::new(0)) }; PLACES];

fn last() -> &'static AtomicU32 {
    // Thread pointers differ above the page.
    let spread = (cpu::thread_id() >> 12).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    &LAST[(spread >> (64 - PLACES.ilog2())) as usize].0
}

/// The calling thread is about to send on `d`. [`record::stamp`] if it has sent to another
/// connection before; else 0.
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
        // The sender there does not ask. Without its entry it comes here before it sends next.
        d.set_sender(0);
    }
    record::stamp(cpu::ticks())
}

/// It has not sent: the next one turns.
#[cold]
pub fn back(d: &Desc) {
    d.set_sender(0);
    last().store(0, Ordering::Relaxed);
}
