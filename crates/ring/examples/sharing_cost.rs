//! The cost of shareable sockets for a single owner: a send and a receive of 8 bytes, with
//! tokens and without tokens by turns.
//!
//!     cargo run --release -p fsocket-ring --example sharing_cost

// Under loom the ring is a small model without memory of its own.
#[cfg(loom)]
fn main() {}

#[cfg(not(loom))]
fn main() {
    with_memory::main();
}

#[cfg(not(loom))]
mod with_memory {
    use fsocket_abi::channel::{Dir, RING_CAP, RING_SLACK};
    use fsocket_abi::half::Half;
    use fsocket_ring::{init_dir, init_half, recv, send, send_small, Mapped};
    use fsocket_sync::token::{self, Env};
    use std::hint::black_box;
    use std::time::Instant;

    const OPS: u32 = 4_000_000;
    const REPS: usize = 15;
    const ME: u64 = 2;

    /// The environment of tokens that no other thread uses.
    struct Alone;
    impl Env for Alone {
        fn heavy_fence() {}
        fn pause(_: u32) {
            panic!("somebody else has the token");
        }
    }

    struct Stream {
        ring: Mapped,
        dir: Box<Dir>,
        tx: Box<Half>,
        rx: Box<Half>,
    }

    impl Stream {
        fn new() -> Stream {
            let memory: &'static mut [u64] = vec![0u64; (RING_CAP + RING_SLACK) / 8].leak();
            // SAFETY: a ring and its slack, 8-aligned, never freed; zero is a valid Dir and a
            // valid Half.
            let (ring, dir, tx, rx): (_, Box<Dir>, Box<Half>, Box<Half>) = unsafe {
                let zeroed = (core::mem::zeroed(), core::mem::zeroed(), core::mem::zeroed());
                (Mapped::new(memory.as_mut_ptr().cast()), Box::new(zeroed.0), Box::new(zeroed.1), Box::new(zeroed.2))
            };
            init_dir(ring, &dir);
            init_half(&tx);
            init_half(&rx);
            Stream { ring, dir, tx, rx }
        }

        #[inline(always)]
        fn put(&self, from: u64) {
            let p = (&raw const from).cast();
            // SAFETY: 8 readable bytes; this thread is the only producer.
            unsafe {
                if !send_small(self.ring, &self.dir, &self.tx, p, 8, 0) {
                    assert_eq!(send(self.ring, &self.dir, &self.tx, p, 8, 0).ok(), Some(8));
                }
            }
        }

        #[inline(always)]
        fn take(&self) -> u64 {
            let mut to = 0u64;
            // SAFETY: 8 writable bytes; this thread is the only consumer.
            let got = unsafe { recv(self.ring, &self.dir, &self.rx, Some((&raw mut to).cast()), 8, false) };
            assert_eq!(got.ok(), Some(8));
            to
        }

        /// Nanoseconds for one send and one receive.
        fn time(&self, tokens: bool) -> f64 {
            let started = Instant::now();
            for i in 0..u64::from(OPS) {
                let i = black_box(i);
                if tokens {
                    {
                        let _t = token::enter::<Alone, _>(&*self.tx, ME).expect("mine");
                        self.put(i);
                    }
                    let _t = token::enter::<Alone, _>(&*self.rx, ME).expect("mine");
                    assert_eq!(self.take(), i);
                } else {
                    self.put(i);
                    assert_eq!(self.take(), i);
                }
            }
            started.elapsed().as_secs_f64() * 1e9 / f64::from(OPS)
        }
    }

    pub fn main() {
        let stream = Stream::new();
        let (mut with, mut without) = (Vec::new(), Vec::new());
        for _ in 0..REPS {
            without.push(stream.time(false));
            with.push(stream.time(true));
        }
        let median = |v: &mut Vec<f64>| {
            v.sort_by(f64::total_cmp);
            v[v.len() / 2]
        };
        let (with, without) = (median(&mut with), median(&mut without));
        println!(
            "8-byte send and receive, one owner, medians of {REPS}: without tokens {without:.2} ns, with {with:.2} ns"
        );
        println!("sharing support costs {:.2} ns a call", (with - without) / 2.0);
    }
}
