//! SYN queues, and the choice among the queues.

use crate::input::Input;
use fsocket_abi::channel::{SynQueue, SLOTS, SYN_CAP, WORKERS};
use fsocket_ring::dispatch::{choose, wake, Busy, Workers};
use fsocket_ring::syn;
use fsocket_sync::atomic::Ordering::Relaxed;

/// A queue returns only valid slots, whatever it contains, and each call ends.
pub fn syn(data: &[u8]) {
    let mut input = Input::new(data);
    // SAFETY: the type consists of atomics and padding, for which zero is valid.
    let queues: Vec<SynQueue> = (0..WORKERS).map(|_| unsafe { std::mem::zeroed() }).collect();
    let mut busy = Busy::new();
    let mut rounds = 0;
    while !input.is_empty() && rounds < 4096 {
        rounds += 1;
        let (what, which) = (input.u8(), usize::from(input.u8()) % WORKERS);
        let q = &queues[which];
        match what % 10 {
            0 => {
                syn::push(q, usize::from(input.u16()) % SLOTS);
            }
            1 => assert!(!matches!(syn::pop(q), Ok(Some(SLOTS..)))),
            2 => assert!(syn::len(q) <= SYN_CAP as u32),
            3 => q.tail.store(input.u32(), Relaxed),
            4 => q.head.store(input.u32(), Relaxed),
            5 => q.entry[usize::from(input.u8()) % SYN_CAP].store(input.u32(), Relaxed),
            6 => _ = q.want.arm(1 << (input.u8() % 64)),
            7 => busy.added(which as u32, |w| syn::len(&queues[w as usize])),
            kind => {
                let workers = Workers {
                    all: input.u64(),
                    busy: busy.mask(),
                    avoid: u64::from(input.u8()),
                    turns: input.u8() & 1 == 1,
                };
                let of = |w: u32| &queues[w as usize];
                let asleep = input.u64();
                let chosen = choose(workers, input.u32(), of, |want| want & asleep != 0);
                assert!(chosen.is_none_or(|w| workers.all >> w & 1 == 1));
                if let (8, Some(w)) = (kind, chosen) {
                    wake(w, workers, of, |want| want.armed() & asleep != 0);
                }
            }
        }
    }
}
