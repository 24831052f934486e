//! One direction of a connection: the real ring with the real want words, and a sender and a
//! receiver that sleep when they can do nothing else.

use crate::*;
use fsocket_abi::channel::status;
use fsocket_sync::doorbell::{Want, FUTEX_BIT};
use fsocket_sync::model::{every_way, is_light, membarrier, with_light, Futex};
use loom::sync::Arc;

pub struct Pipe {
    words: [AtomicU64; RING_CAP / 8],
    pub dir: Dir,
    pub tx: Half,
    pub rx: Half,
    data: Futex,
    space: Futex,
}

/// Words for the payload too: a relaxed load gives whatever a copy that races
/// with the other side could see.
#[derive(Clone, Copy)]
pub struct Words<'a>(&'a [AtomicU64; RING_CAP / 8]);

// SAFETY: headers and payload are the same array; no pointers are made from it.
unsafe impl Bytes for Words<'_> {
    fn header(&self, off: usize) -> &AtomicU64 {
        assert!(off % 8 == 0);
        &self.0[off / 8]
    }
    unsafe fn write(&self, off: usize, src: *const u8, n: usize) -> bool {
        assert!(off % 8 == 0 && off + n <= RING_CAP);
        // SAFETY: `write` is given `n` bytes at `src`.
        let src = unsafe { core::slice::from_raw_parts(src, n) };
        for (i, piece) in src.chunks(8).enumerate() {
            let mut w = [0; 8];
            w[..piece.len()].copy_from_slice(piece);
            self.0[off / 8 + i].store(u64::from_le_bytes(w), Ordering::Relaxed);
        }
        true
    }
    unsafe fn read(&self, off: usize, dst: *mut u8, n: usize) -> bool {
        assert!(off + n <= RING_CAP);
        // SAFETY: `read` is given `n` bytes at `dst`, which nobody else has.
        let dst = unsafe { core::slice::from_raw_parts_mut(dst, n) };
        let (mut at, mut got) = (off, 0);
        while got < n {
            let w = self.0[at / 8].load(Ordering::Relaxed).to_le_bytes();
            let piece = &w[at % 8..(at % 8 + n - got).min(8)];
            dst[got..got + piece.len()].copy_from_slice(piece);
            got += piece.len();
            at += piece.len();
        }
        true
    }
}

/// Byte `i` of the stream.
pub fn byte(i: usize) -> u8 {
    i as u8 | 0x80
}

impl Pipe {
    pub fn new() -> Self {
        let p = Pipe {
            words: core::array::from_fn(|_| AtomicU64::new(0)),
            dir: Dir::default(),
            tx: Half::default(),
            rx: Half::default(),
            data: Futex::default(),
            space: Futex::default(),
        };
        init_dir(p.ring(), &p.dir);
        init_half(&p.tx);
        init_half(&p.rx);
        p
    }
    pub fn ring(&self) -> Words<'_> {
        Words(&self.words)
    }

    /// Sends bytes `at..at + n` of the stream as far as they fit; it wakes nobody.
    pub fn offer(&self, at: usize, n: usize) -> usize {
        let data: Vec<u8> = (at..at + n).map(byte).collect();
        // SAFETY: `data` has n bytes; one thread sends.
        unsafe {
            if send_small(self.ring(), &self.dir, &self.tx, data.as_ptr(), n, 0) {
                return n;
            }
            send(self.ring(), &self.dir, &self.tx, data.as_ptr(), n, 0).expect("an honest receiver")
        }
    }
    /// Receives up to `max` bytes, which must be the stream's from `at` on; it wakes nobody.
    pub fn take(&self, at: usize, max: usize) -> usize {
        let mut b = vec![0; max];
        // SAFETY: `b` has `max` bytes; one thread receives.
        let n = unsafe { recv(self.ring(), &self.dir, &self.rx, Some(b.as_mut_ptr()), max, false) };
        let n = n.expect("an honest sender");
        assert!(b[..n].iter().copied().eq((at..at + n).map(byte)), "at {at}: {:x?}", &b[..n]);
        n
    }

    /// As `stream::notify` of the core crate.
    fn notify(want: &Want, futex: &Futex) {
        if want.take() & FUTEX_BIT != 0 {
            want.seq.fetch_add(1, Ordering::Release);
            futex.wake_all();
        }
    }
    /// As `stream::sleep` of the core crate.
    fn sleep(want: &Want, futex: &Futex, ready: impl Fn() -> bool) {
        loop {
            let seq = want.seq.load(Ordering::Acquire);
            want.arm_and_fence(FUTEX_BIT, membarrier);
            if ready() {
                return;
            }
            futex.wait(&want.seq, seq);
            if ready() {
                return;
            }
        }
    }

    /// As `stream::send` of the core crate, on a blocking socket.
    fn send_all(&self, mut at: usize, n: usize) {
        let end = at + n;
        while at < end {
            match self.offer(at, end - at) {
                0 => {
                    self.dir.prod.space_at.store(space_target(&self.dir, &self.tx), Ordering::Relaxed);
                    Self::sleep(&self.dir.want_space, &self.space, || writable(&self.dir, &self.tx));
                }
                n => {
                    at += n;
                    Self::notify(&self.dir.want_data, &self.data);
                }
            }
        }
    }
    fn fin(&self) {
        self.dir.prod.status.fetch_or(status::FIN, Ordering::Release);
        Self::notify(&self.dir.want_data, &self.data);
    }
    /// As `stream::recv` of the core crate on a blocking socket; 0: the end.
    fn recv_some(&self, at: usize, max: usize) -> usize {
        loop {
            let n = self.take(at, max);
            if n > 0 {
                if !self.dir.want_space.is_silent()
                    && self.dir.want_space.waiting() != 0
                    && self.rx.pos() >= self.dir.prod.space_at.load(Ordering::Relaxed)
                {
                    Self::notify(&self.dir.want_space, &self.space);
                }
                return n;
            }
            if self.dir.prod.status.load(Ordering::Acquire) & status::FIN != 0 {
                if readable(self.ring(), &self.dir, &self.rx) {
                    continue;
                }
                return 0;
            }
            Self::sleep(&self.dir.want_data, &self.data, || {
                readable(self.ring(), &self.dir, &self.rx) || self.dir.prod.status.load(Ordering::Acquire) != 0
            });
        }
    }
}

/// Before the threads exist, messages of `before` bytes go through, the
/// receiver `behind` messages late. Then one thread sends `messages` and FIN,
/// the other receives at most `max` bytes at a time until the end.
struct Run {
    before: &'static [usize],
    behind: usize,
    messages: &'static [usize],
    max: usize,
    preemptions: usize,
}

/// Threads whose light fence is modelled exactly ([`fsocket_sync::model`]): it costs so much that only small runs
/// can have it.
#[derive(Clone, Copy, PartialEq)]
enum Light {
    Exact,
    Fence,
}

impl Run {
    fn check(&'static self) {
        self.check_with(Light::Fence);
    }

    fn check_with(&'static self, light: Light) {
        let say = move |n| {
            if light == Light::Exact {
                is_light(n)
            }
        };
        with_light(if light == Light::Exact { 2 } else { 0 }, || {
            every_way(self.preemptions, move || {
                let p = Arc::new(Pipe::new());
                let (mut sent, mut received) = (0, 0);
                for (i, &n) in self.before.iter().enumerate() {
                    assert_eq!(p.offer(sent, n), n, "does not fit before the threads start");
                    sent += n;
                    if i >= self.behind {
                        received += p.take(received, self.before[i - self.behind]);
                    }
                }
                let sender = {
                    let p = p.clone();
                    loom::thread::spawn(move || {
                        say(0);
                        for &n in self.messages {
                            p.send_all(sent, n);
                            sent += n;
                        }
                        p.fin();
                        sent
                    })
                };
                say(1);
                loop {
                    match p.recv_some(received, self.max) {
                        0 => break,
                        n => received += n,
                    }
                }
                assert_eq!(received, sender.join().unwrap(), "bytes behind the end");
            })
        });
    }
}

#[test]
fn fresh() {
    const R: Run = Run { before: &[], behind: 0, messages: &[8, 8], max: 64, preemptions: 3 };
    R.check();
}

/// Messages are read in pieces that end within records.
#[test]
fn pieces() {
    const R: Run = Run { before: &[], behind: 0, messages: &[12], max: 5, preemptions: 3 };
    R.check();
}

/// The ring is empty behind its first step: the sender goes back to the start.
#[test]
fn rewind() {
    const R: Run = Run { before: &[8, 8, 8], behind: 0, messages: &[8, 8], max: 64, preemptions: 3 };
    R.check();
}

/// Whether the sender can go back depends on how far the receiver is.
#[test]
fn rewind_or_not() {
    const R: Run = Run { before: &[8, 8, 8], behind: 1, messages: &[8, 8], max: 64, preemptions: 3 };
    R.check();
}

/// After going back the sender steps over the header that a slow receiver may
/// still poll.
#[test]
fn fence() {
    // The third would lie over that header.
    const R: Run = Run { before: &[8, 8, 8], behind: 0, messages: &[8, 8, 16], max: 64, preemptions: 2 };
    R.check();
}

/// Eight bytes are left at the end of the ring: padding, and a second lap.
#[test]
fn wrap() {
    const R: Run = Run { before: &[16, 16, 16, 16, 16], behind: 1, messages: &[8, 8], max: 64, preemptions: 3 };
    R.check();
}

/// The ring is full: the sender sleeps until a third is free.
#[test]
fn full() {
    const R: Run = Run { before: &[24, 24, 24], behind: 3, messages: &[24, 24], max: 64, preemptions: 2 };
    R.check();
}

/// The sender sleeps for room while the receiver sees its word by a light fence alone.
#[test]
fn full_with_light_fences() {
    const R: Run = Run { before: &[24, 24, 24], behind: 3, messages: &[40], max: 64, preemptions: 1 };
    R.check_with(Light::Exact);
}

/// As `full`, and a message at a time is taken out.
#[test]
fn full_and_slow() {
    const R: Run = Run { before: &[24, 24, 24], behind: 3, messages: &[40], max: 24, preemptions: 2 };
    R.check();
}

/// A receiver that sees FIN finds all bytes. There is no doorbell here: its fence, which is a real
/// one only in the model, would hide a missing release.
#[test]
fn the_end_comes_last() {
    every_way(None, || {
        let p = Arc::new(Pipe::new());
        let sender = {
            let p = p.clone();
            loom::thread::spawn(move || {
                assert_eq!(p.offer(0, 8), 8);
                p.dir.prod.status.fetch_or(status::FIN, Ordering::Release);
            })
        };
        let ended = p.dir.prod.status.load(Ordering::Acquire) & status::FIN != 0;
        let n = p.take(0, 64);
        assert!(!ended || n == 8, "FIN without the bytes before it");
        sender.join().unwrap();
        assert_eq!(n + p.take(n, 64), 8);
    });
}
