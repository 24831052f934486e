//! The right to send, or to receive, on a stream: [`fsocket_sync::token`] with the threads and
//! system calls of this process. Each send and receive enters here. Only the holder of the token
//! uses the positions of the ring.

mod shared;

pub use shared::{enter, enter_on_credit, give_back, here, if_here, is_here, on_credit, owned, Entered, Here};

use crate::stats;
use fsocket_abi::arena::Counter;
use fsocket_abi::half::Half;
use fsocket_sync::token::{self, Env};
use fsocket_sys as sys;

use fsocket_sync::token::Reentered;

struct Linux;
impl Env for Linux {
    fn heavy_fence() {
        sys::heavy_fence();
    }
    fn pause(turn: u32) {
        match turn {
            0..=200 => core::hint::spin_loop(),
            201..=400 => sys::sched_yield(),
            _ => sys::nanosleep(50_000),
        }
    }
    fn took_over() {
        stats::count(Counter::TakeOvers);
    }
}

/// Resets the token of a recycled socket: no thread of this process has entered it yet.
pub fn reset(h: &Half) {
    token::reset(h);
}
