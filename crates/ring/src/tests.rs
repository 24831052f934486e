//! The ring against `VecDeque`, and against a peer that writes anything.
extern crate std;
use super::*;
use proptest::prelude::*;
use std::alloc::{alloc_zeroed, dealloc, Layout};
use std::boxed::Box;
use std::collections::VecDeque;
use std::vec;
use std::vec::Vec;

struct Pair {
    mem: *mut u8,
    dir: Box<Dir>,
    tx: Box<Half>,
    rx: Box<Half>,
}
const LAYOUT: Layout = match Layout::from_size_align(RING_CAP + 4096, 4096) {
    Ok(l) => l,
    Err(_) => panic!(),
};
impl Pair {
    fn new() -> Self {
        // SAFETY: all-zero bytes are valid for these plain atomics.
        unsafe {
            let p = Pair {
                mem: alloc_zeroed(LAYOUT),
                dir: Box::new(core::mem::zeroed()),
                tx: Box::new(core::mem::zeroed()),
                rx: Box::new(core::mem::zeroed()),
            };
            // A canary behind the ring: nothing may be read from or written there.
            p.mem.add(RING_CAP).write_bytes(0xA5, 4096);
            init_dir(p.ring(), &p.dir);
            init_half(&p.tx);
            init_half(&p.rx);
            p
        }
    }
    fn ring(&self) -> Mapped {
        // SAFETY: the allocation lives as long as the pair.
        unsafe { Mapped::new(self.mem) }
    }
    fn send(&self, data: &[u8]) -> usize {
        let mut done = 0;
        while done < data.len() {
            let rest = &data[done..];
            // Now and then somebody who has turned here.
            let when = if rest.len().is_multiple_of(3) { record::stamp(rest.len() as u64 * 5000) } else { 0 };
            // SAFETY: `rest` is a slice; single-threaded test.
            unsafe {
                let slot = slot(&self.tx, rest.len());
                if small(rest.len()) && when == 0 && on_credit(&self.tx, slot) {
                    match tiny(rest.len()) {
                        true => send_tiny(self.ring(), &self.tx, slot, rest.as_ptr(), rest.len()),
                        false => send_on_credit(self.ring(), &self.tx, slot, rest.as_ptr(), rest.len()),
                    }
                    return data.len();
                }
                if send_small(self.ring(), &self.dir, &self.tx, rest.as_ptr(), rest.len(), when) {
                    return data.len();
                }
                match send(self.ring(), &self.dir, &self.tx, rest.as_ptr(), rest.len(), when).unwrap() {
                    0 => break,
                    n => done += n,
                }
                give_credit(&self.tx);
            }
        }
        done
    }
    fn recv(&self, max: usize, peek: bool) -> Vec<u8> {
        let mut v = vec![0; max];
        // SAFETY: `v` has `max` bytes.
        let n = unsafe { recv(self.ring(), &self.dir, &self.rx, v.as_mut_ptr(), max, peek) }.unwrap();
        v.truncate(n);
        v
    }
}
impl Drop for Pair {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `new`.
        unsafe {
            for i in 0..4096 {
                assert_eq!(*self.mem.add(RING_CAP + i), 0xA5, "wrote behind the ring");
            }
            dealloc(self.mem, LAYOUT)
        }
    }
}

#[derive(Debug, Clone)]
enum Op {
    Send(usize),
    Recv(usize),
    Peek(usize),
    Drain,
}
fn op() -> impl Strategy<Value = Op> {
    let size = prop_oneof![4 => 1usize..64, 2 => 1usize..5000, 1 => 1usize..400_000];
    prop_oneof![
        4 => size.clone().prop_map(Op::Send),
        3 => size.clone().prop_map(Op::Recv),
        1 => size.prop_map(Op::Peek),
        1 => Just(Op::Drain)
    ]
}

/// Bytes of the sender's buffer; 0: the ring's.
fn buffer() -> impl Strategy<Value = u32> {
    prop_oneof![1 => Just(0u32), 2 => 1024u32..1 << 20]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn behaves_like_a_queue(ops in proptest::collection::vec(op(), 1..150), cap in buffer(), window in 0u32..200_000) {
        let p = Pair::new();
        p.tx.cap.store(cap, Ordering::Relaxed);
        p.dir.cons.window.store(window, Ordering::Relaxed);
        let mut model: VecDeque<u8> = VecDeque::new();
        let mut next = 0u32;
        for op in ops {
            match op {
                Op::Send(n) => {
                    let data: Vec<u8> = (0..n).map(|i| (next.wrapping_add(i as u32)).wrapping_mul(2654435761) as u8).collect();
                    let sent = p.send(&data);
                    // Small rings of unread data always have room.
                    if cap == 0 && model.len() + n * 2 < RING_CAP / 4 { prop_assert_eq!(sent, n) }
                    // However small the buffer, an empty one takes something.
                    prop_assert!(sent > 0 || !model.is_empty());
                    model.extend(&data[..sent]);
                    prop_assert!(cap == 0 || model.len() <= (cap + window) as usize);
                    if sent < n { prop_assert!(!writable(&p.dir, &p.tx)) }
                    next = next.wrapping_add(sent as u32);
                }
                Op::Recv(n) => {
                    let got = p.recv(n, false);
                    prop_assert_eq!(got.len(), n.min(model.len()));
                    let want: Vec<u8> = model.drain(..got.len()).collect();
                    prop_assert_eq!(got, want);
                }
                Op::Peek(n) => {
                    let got = p.recv(n, true);
                    prop_assert_eq!(got.len(), n.min(model.len()));
                    prop_assert!(got.iter().eq(model.iter().take(got.len())));
                }
                Op::Drain => {
                    let got = p.recv(RING_CAP * 2, false);
                    let want: Vec<u8> = model.drain(..).collect();
                    prop_assert_eq!(got, want);
                }
            }
            prop_assert_eq!(readable(p.ring(), &p.dir, &p.rx), !model.is_empty());
        }
    }

    #[test]
    fn hostile_headers_never_leave_the_ring(seed in proptest::collection::vec(any::<u64>(), 1..64), len in 1usize..200_000) {
        let p = Pair::new();
        for (i, w) in seed.iter().enumerate() {
            // Plausible kinds more often than random ones.
            let w = if w & 3 == 0 { *w } else { (w & 3) << 32 | (w >> 40) };
            p.ring().header(i * 8).store(w, Ordering::Relaxed);
        }
        let mut v = vec![0u8; len];
        for _ in 0..64 {
            // SAFETY: `v` has `len` bytes.
            match unsafe { recv(p.ring(), &p.dir, &p.rx, v.as_mut_ptr(), len, false) } {
                Ok(0) | Err(Hostile) => break,
                Ok(n) => prop_assert!(n <= len),
            }
            let _ = scan(p.ring(), &p.dir, &p.rx, seed[0]);
        }
    }

    #[test]
    fn hostile_head_gives_no_credit(head in any::<u64>(), warm in 0usize..50_000) {
        let p = Pair::new();
        p.send(&vec![1; warm]);
        p.dir.cons.head.store(head, Ordering::Relaxed);
        let pos = get(&p.tx.pos);
        let honest = (POS_START..=pos).contains(&head);
        prop_assert_eq!(look(&p.dir, &p.tx, 1).is_ok(), honest);
        prop_assert!(unread(&p.dir, &p.tx) <= CAP);
    }

    #[test]
    fn hostile_rewind_is_harmless(from in any::<u64>(), n in 1usize..9000) {
        let p = Pair::new();
        let data = vec![7u8; n];
        p.send(&data);
        prop_assert_eq!(p.recv(n, false), data);
        let at = if from & 1 == 0 { get(&p.rx.pos) } else { from };
        p.dir.prod.rewind_from.store(at, Ordering::Relaxed);
        let mut v = vec![0u8; 5000];
        // SAFETY: `v` has 5000 bytes.
        let _ = unsafe { recv(p.ring(), &p.dir, &p.rx, v.as_mut_ptr(), 5000, false) };
    }
}

#[test]
fn fills_up_and_drains() {
    let p = Pair::new();
    let data = vec![3u8; 3 * RING_CAP];
    let sent = p.send(&data);
    assert!(sent > RING_CAP * 9 / 10 && sent < RING_CAP, "{sent}");
    assert!(!writable(&p.dir, &p.tx));
    assert_eq!(p.recv(sent / 2, false).len(), sent / 2);
    assert!(writable(&p.dir, &p.tx));
    assert!(p.send(&data) > 0);
}

#[test]
fn small_traffic_stays_on_two_pages() {
    let p = Pair::new();
    for i in 0..100_000u32 {
        assert_eq!(p.send(&i.to_le_bytes()), 4);
        assert_eq!(p.recv(64, false), i.to_le_bytes());
        assert!(offset(&p.tx) <= 2 * STEP, "at {}", offset(&p.tx));
    }
}

#[test]
fn every_edge_is_seen_once() {
    let p = Pair::new();
    let (e, at) = scan(p.ring(), &p.dir, &p.rx, 0);
    assert!(!e);
    p.send(b"one");
    let (e, at) = scan(p.ring(), &p.dir, &p.rx, at);
    assert!(e);
    let (e, at) = scan(p.ring(), &p.dir, &p.rx, at);
    assert!(!e, "the same bytes give no second edge");
    p.send(b"two");
    let (e, at) = scan(p.ring(), &p.dir, &p.rx, at);
    assert!(e, "new bytes behind unread ones do");
    assert_eq!(p.recv(100, false), b"onetwo");
    let (e, mut at) = scan(p.ring(), &p.dir, &p.rx, at);
    assert!(!e);
    p.send(b"three");
    p.recv(100, false);
    let (e, n) = scan(p.ring(), &p.dir, &p.rx, at);
    assert!(e, "also if they have been read since");
    at = n;
    for _ in 0..10_000 {
        p.send(&[9; 100]);
        let (e, n) = scan(p.ring(), &p.dir, &p.rx, at);
        assert!(e);
        at = n;
        p.recv(1000, false);
        assert!(!scan(p.ring(), &p.dir, &p.rx, at).0);
    }
}

#[test]
fn who_turns_to_a_ring_says_when() {
    let p = Pair::new();
    let turned = |scan| turned(p.ring(), &p.dir, &p.rx, scan);
    let put = |n: usize, when| {
        // SAFETY: `n` readable bytes; one thread.
        let sent = unsafe { send(p.ring(), &p.dir, &p.tx, vec![7; n].as_ptr(), n, when) };
        assert_eq!(sent, Ok(n));
    };
    let take = |n: usize| {
        let mut to = vec![0; n];
        // SAFETY: `n` writable bytes; one thread.
        assert_eq!(unsafe { recv(p.ring(), &p.dir, &p.rx, to.as_mut_ptr(), n, false) }, Ok(n));
    };
    let (first, second) = (record::stamp(1 << 20), record::stamp(1 << 21));
    assert_eq!(turned(0), None);
    put(8, first);
    let (new, seen) = scan(p.ring(), &p.dir, &p.rx, 0);
    assert!(new && turned(0) == Some(first) && turned(seen).is_none());
    put(8, second);
    assert_eq!((turned(0), turned(seen)), (Some(first), Some(second)), "what is new since a look");
    take(4);
    assert_eq!(turned(0), Some(0), "the rest of a record");
    take(12);
    put(8, 0);
    assert_eq!(turned(0), Some(0), "by who was here");
    take(8);
    // Over rewinds and the ring's end.
    for i in 1..2000u64 {
        let (n, when) = (if i.is_multiple_of(7) { 20_000 } else { 3000 }, record::stamp(i << 12));
        put(n, when);
        assert_eq!(turned(0), Some(when), "{i}");
        take(n);
        assert_eq!(turned(0), None, "{i}");
    }
}
