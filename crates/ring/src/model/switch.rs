//! A direction goes over to another path while its sender sends: the receiver
//! is the mover (`path::start` and `move_out` of the core crate), the sender
//! follows (`path::follow`). Every byte arrives once and in order.

use super::pipe::{byte, Pipe};
use crate::*;
use fsocket_abi::channel::status;
use fsocket_sync::atomic::{fence, AtomicU32};
use fsocket_sync::doorbell::FUTEX_BIT;
use fsocket_sync::model::{every_way, membarrier};
use loom::sync::{Arc, Mutex};

struct Switch {
    pipe: Pipe,
    /// Status of the mover, on the line that it writes.
    mover: AtomicU32,
    base: AtomicU64,
    limit: AtomicU64,
    /// What went into the kernel connection.
    kernel: Mutex<Vec<u8>>,
}

impl Switch {
    /// Take what is in the ring from where `h` stands, into the kernel.
    fn pour(&self, h: &Half) {
        loop {
            let mut b = [0; 64];
            // SAFETY: `b` has 64 bytes; the other consumer is done.
            let n = unsafe { recv(self.pipe.ring(), &self.pipe.dir, h, Some(b.as_mut_ptr()), b.len(), false) };
            match n.expect("an honest sender") {
                0 => return,
                n => self.kernel.lock().unwrap().extend_from_slice(&b[..n]),
            }
        }
    }

    fn move_out(&self) {
        self.mover.fetch_or(status::MIGRATING, Ordering::Release);
        fence(Ordering::Release);
        self.pipe.dir.want_data.hint(FUTEX_BIT);
        membarrier();
        self.pour(&self.pipe.rx);
        self.base.store(self.pipe.rx.base.load(Ordering::Relaxed), Ordering::Relaxed);
        self.limit.store(self.pipe.rx.limit.load(Ordering::Relaxed), Ordering::Relaxed);
        self.mover.fetch_or(status::MIGRATED, Ordering::Release);
    }

    /// The sender's side of it: send again what came too late.
    fn follow(&self) {
        while self.mover.load(Ordering::Acquire) & status::MIGRATED == 0 {
            loom::thread::yield_now();
        }
        let h = Half::default();
        h.pos.store(self.pipe.dir.cons.head.load(Ordering::Acquire), Ordering::Relaxed);
        h.base.store(self.base.load(Ordering::Relaxed), Ordering::Relaxed);
        h.limit.store(self.limit.load(Ordering::Relaxed), Ordering::Relaxed);
        self.pour(&h);
    }

    fn send(&self, at: usize, n: usize, followed: &mut bool) {
        // As `send_fast`: a hint that may be old.
        if !*followed && self.mover.load(Ordering::Relaxed) & status::MIGRATING != 0 {
            self.follow();
            *followed = true;
        }
        if *followed {
            self.kernel.lock().unwrap().extend((at..at + n).map(byte));
            return;
        }
        assert_eq!(self.pipe.offer(at, n), n);
        if self.pipe.dir.want_data.take() != 0 && self.mover.load(Ordering::Acquire) & status::MIGRATING != 0 {
            self.follow();
            *followed = true;
        }
    }
}

/// `before` lies in the ring and `read` bytes of it are consumed when the
/// mover begins and the other side sends `messages`.
fn check(before: &'static [usize], read: usize, messages: &'static [usize]) {
    every_way(3, move || {
        let s = Arc::new(Switch {
            pipe: Pipe::new(),
            mover: AtomicU32::new(0),
            base: AtomicU64::new(0),
            limit: AtomicU64::new(0),
            kernel: Mutex::new(Vec::new()),
        });
        let mut sent = 0;
        for &n in before {
            assert_eq!(s.pipe.offer(sent, n), n);
            sent += n;
        }
        let mut got = 0;
        while got < read {
            got += s.pipe.take(got, read - got);
        }
        let sender = {
            let s = s.clone();
            loom::thread::spawn(move || {
                let mut followed = false;
                for &n in messages {
                    s.send(sent, n, &mut followed);
                    sent += n;
                }
                (sent, followed)
            })
        };
        s.move_out();
        let (sent, followed) = sender.join().unwrap();
        if !followed {
            // It follows when it next looks.
            s.follow();
        }
        let kernel = s.kernel.lock().unwrap();
        assert!(kernel.iter().copied().eq((read..sent).map(byte)), "{kernel:x?} instead of {read}..{sent}");
    });
}

#[test]
fn empty_before() {
    check(&[], 0, &[8, 8]);
}

/// The mover stands in the middle of a record.
#[test]
fn half_a_record() {
    check(&[16], 5, &[8]);
}

/// The sender goes back to the start of the ring meanwhile.
#[test]
fn rewind() {
    check(&[8, 8, 8], 24, &[8, 8]);
}

#[test]
fn unread_and_more() {
    check(&[8, 8], 8, &[12, 8]);
}
