//! The ring against `VecDeque`, and against a peer that writes anything.
//!
//! Long: the same few helpers serve all of them.
extern crate std;
use super::producer::STEP;
use super::*;
use proptest::prelude::*;
use std::alloc::{alloc_zeroed, dealloc, Layout};
use std::boxed::Box;
use std::collections::VecDeque;
use std::vec;
use std::vec::Vec;

/// The ring of a program whose memory is not there.
#[derive(Clone, Copy)]
struct Nowhere(Mapped);
// SAFETY: the headers are the ring's; nothing is copied.
unsafe impl Bytes for Nowhere {
    fn header(&self, off: usize) -> &AtomicU64 {
        self.0.header(off)
    }
    unsafe fn write(&self, _: usize, _: *const u8, _: usize) -> bool {
        false
    }
    unsafe fn read(&self, _: usize, _: *mut u8, _: usize) -> bool {
        false
    }
}

struct Pair {
    mem: *mut u8,
    dir: Box<Dir>,
    tx: Box<Half>,
    rx: Box<Half>,
    /// Another process of the fork group has written into the halves: only then may anything get into the slack.
    hostile: bool,
}
/// A ring, its slack, and a page that nobody may touch.
const LAYOUT: Layout = match Layout::from_size_align(RING_CAP + RING_SLACK + 4096, 4096) {
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
                hostile: false,
            };
            // A canary behind the ring: nothing may be read from or written there.
            p.mem.add(RING_CAP).write_bytes(0xA5, RING_SLACK + 4096);
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
            // Now and then the sender has just turned here.
            let when = if rest.len().is_multiple_of(3) { record::stamp(rest.len() as u64 * 5000) } else { 0 };
            // SAFETY: `rest` is a slice; single-threaded test.
            unsafe {
                let slot = slot(&self.tx, rest.len());
                if small(rest.len()) && when == 0 && on_credit(&self.tx, slot) {
                    match tiny(rest.len()) {
                        true => send_tiny(self.ring(), &self.tx, slot, rest.as_ptr(), rest.len()),
                        false => send_on_credit(self.ring(), &self.tx, slot, rest.as_ptr(), rest.len()),
                    };
                    return data.len();
                }
                if send_small(self.ring(), &self.dir, &self.tx, rest.as_ptr(), rest.len(), when) {
                    return data.len();
                }
                let failed = send(Nowhere(self.ring()), &self.dir, &self.tx, rest.as_ptr(), rest.len(), when);
                assert!(matches!(failed, Ok(0) | Err(Failed::Fault)), "{failed:?}");
                let sent = match rest.len() % 5 {
                    // From a source that has less than it said.
                    0 => send_by(self.ring(), &self.dir, &self.tx, rest.len(), when, |off, n| {
                        let n = n.min(rest.len() / 5);
                        self.mem.add(off).copy_from_nonoverlapping(rest.as_ptr(), n);
                        n
                    }),
                    _ => send(self.ring(), &self.dir, &self.tx, rest.as_ptr(), rest.len(), when),
                };
                match sent.unwrap() {
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
        // SAFETY: nothing is written.
        let failed = unsafe { recv(Nowhere(self.ring()), &self.dir, &self.rx, Some(v.as_mut_ptr()), max, peek) };
        assert!(matches!(failed, Ok(0) | Err(Failed::Fault)), "{failed:?}");
        // SAFETY: `v` has `max` bytes.
        let n = unsafe { recv(self.ring(), &self.dir, &self.rx, Some(v.as_mut_ptr()), max, peek) }.unwrap();
        v.truncate(n);
        if peek {
            let listed = self.listed(max);
            assert!(v.starts_with(&listed) && (listed.len() == n || self.segments(max) == segments::MOST));
        }
        v
    }
    fn segments(&self, max: usize) -> usize {
        // SAFETY: single-threaded test.
        unsafe { Segments::unread(self.ring(), &self.dir, &self.rx, max) }.unwrap().map_or(0, |all| all.len())
    }
    /// What a list of segments leads to.
    fn listed(&self, max: usize) -> Vec<u8> {
        // SAFETY: single-threaded test.
        let all = unsafe { Segments::unread(self.ring(), &self.dir, &self.rx, max) }.unwrap();
        let Some(all) = all else { return Vec::new() };
        // SAFETY: the list has as many segments, and each has as many bytes in the ring.
        let segments = unsafe { std::slice::from_raw_parts(all.first(), all.len()) };
        // SAFETY: nobody writes the ring while the test reads it.
        segments.iter().flat_map(|s| unsafe { std::slice::from_raw_parts(s.at, s.len) }.to_vec()).collect()
    }
}
impl Drop for Pair {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `new`.
        unsafe {
            let from = if self.hostile { RING_SLACK } else { 0 };
            for i in from..RING_SLACK + 4096 {
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

/// Values that a hostile process of the fork group writes: any number, and numbers that are almost
/// right.
fn word() -> impl Strategy<Value = u64> {
    let ring = RING_CAP as u64;
    prop_oneof![
        any::<u64>(),
        0..4 * ring,
        ring - 64..ring + 64,
        2 * ring - 4096..2 * ring + 64,
        Just(u64::MAX),
        u64::MAX - 64..u64::MAX
    ]
}

fn scribble(h: &Half, word: usize, v: u64) {
    match word {
        0 => h.set_pos(v),
        1 => h.set_base(v),
        2 => h.set_limit(v),
        3 => h.set_credit(v),
        4 => h.set_fence(v),
        5 => h.set_populated(v),
        6 => h.set_bytes(v),
        _ => h.set_cap(v as u32),
    }
}

/// All operations on a ring, whatever their result.
fn anything(p: &Pair, op: &Op, to: &mut [u8]) {
    let (n, peek) = match op {
        Op::Send(n) => {
            let from = &to[..*n];
            let (b, len) = (from.as_ptr(), from.len());
            let slot = slot(&p.tx, len);
            // SAFETY: `len` readable bytes; slots are asked for before they are used.
            unsafe {
                match () {
                    () if tiny(len) && on_credit(&p.tx, slot) => send_tiny(p.ring(), &p.tx, slot, b, len),
                    () if small(len) && on_credit(&p.tx, slot) => send_on_credit(p.ring(), &p.tx, slot, b, len),
                    () if send_small(p.ring(), &p.dir, &p.tx, b, len, 0) => true,
                    () => send(p.ring(), &p.dir, &p.tx, b, len, 0).is_ok(),
                };
            }
            give_credit(&p.tx);
            return;
        }
        Op::Recv(n) => (*n, false),
        Op::Peek(n) => (*n, true),
        Op::Drain => (to.len(), false),
    };
    // SAFETY: `n` writable bytes.
    let _ = unsafe { recv(p.ring(), &p.dir, &p.rx, Some(to[..n].as_mut_ptr()), n, peek) };
    let _ = (scan(p.ring(), &p.dir, &p.rx, n as u64), turned(p.ring(), &p.dir, &p.rx, 0));
    let _ = (readable(p.ring(), &p.dir, &p.rx), writable(&p.dir, &p.tx), space_target(&p.dir, &p.tx));
    let _ = unread_records(p.ring(), &p.dir, &p.tx);
    let _ = (offset(&p.tx), unacknowledged(&p.dir, &p.tx), available(p.ring(), &p.dir, &p.rx, n));
}

/// The bytes that another reader finds, which begins where the sender says that the reader is.
fn again(p: &Pair, unread: &Unread) -> Vec<u8> {
    // SAFETY: all-zero bytes are valid for these plain atomics.
    let (dir, rx): (Dir, Half) = unsafe { (core::mem::zeroed(), core::mem::zeroed()) };
    rx.set_pos(unread.pos);
    rx.set_base(unread.base);
    rx.set_limit(unread.limit);
    let mut v = vec![0; unread.bytes as usize + 1];
    // SAFETY: `v` has that many bytes.
    let n = unsafe { recv(p.ring(), &dir, &rx, Some(v.as_mut_ptr()), v.len(), false) }.unwrap();
    assert_eq!(n as u64, unread.bytes);
    v.truncate(n);
    v
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
        p.tx.set_cap(cap);
        p.dir.cons.window.store(window, Ordering::Relaxed);
        let mut model: VecDeque<u8> = VecDeque::new();
        let mut next = 0u32;
        for op in ops {
            let looks = matches!(op, Op::Peek(_));
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
            match unread_records(p.ring(), &p.dir, &p.tx) {
                Some(unread) if looks => prop_assert!(again(&p, &unread).iter().eq(&model)),
                Some(unread) => prop_assert_eq!(unread.bytes as usize, model.len()),
                None => prop_assert!(p.tx.pos() - p.tx.base() >= CAP),
            }
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
            match unsafe { recv(p.ring(), &p.dir, &p.rx, Some(v.as_mut_ptr()), len, false) } {
                Ok(0) | Err(_) => break,
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
        let pos = p.tx.pos();
        let honest = (POS_START..=pos).contains(&head);
        prop_assert_eq!(look(&p.dir, &p.tx, 1).is_ok(), honest);
        prop_assert!(unread(&p.dir, &p.tx) <= CAP);
    }

    #[test]
    fn a_hostile_relative_breaks_this_ring_only(
        steps in proptest::collection::vec((op(), any::<bool>(), 0usize..8, word()), 1..200)
    ) {
        let mut p = Pair::new();
        p.hostile = true;
        let mut to = vec![0u8; 400_000];
        for (op, tx, i, v) in steps {
            scribble(if tx { &p.tx } else { &p.rx }, i, v);
            anything(&p, &op, &mut to);
        }
    }

    #[test]
    fn hostile_rewind_is_harmless(from in any::<u64>(), n in 1usize..9000) {
        let p = Pair::new();
        let data = vec![7u8; n];
        p.send(&data);
        prop_assert_eq!(p.recv(n, false), data);
        let at = if from & 1 == 0 { p.rx.pos() } else { from };
        p.dir.prod.rewind_from.store(at, Ordering::Relaxed);
        let mut v = vec![0u8; 5000];
        // SAFETY: `v` has 5000 bytes.
        let _ = unsafe { recv(p.ring(), &p.dir, &p.rx, Some(v.as_mut_ptr()), 5000, false) };
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
fn a_record_has_a_byte_and_at_most_so_many() {
    let got = |kind, len| {
        let p = Pair::new();
        p.ring().header(0).store(record::pack(kind, len, 0), Ordering::Relaxed);
        let mut v = vec![0u8; 2 * record::MAX as usize];
        // SAFETY: `v` has room for two records.
        unsafe { recv(p.ring(), &p.dir, &p.rx, Some(v.as_mut_ptr()), v.len(), false) }
    };
    assert_eq!(got(record::DATA, record::MAX), Ok(record::MAX as usize));
    assert_eq!(got(record::DATA, 1), Ok(1));
    for nonsense in [(record::DATA, 0), (record::DATA, record::MAX + 1), (record::PAD, 4), (record::PAD, CAP), (3, 1)] {
        assert_eq!(got(nonsense.0, nonsense.1), Err(Failed::Hostile), "{nonsense:?}");
    }
}

#[test]
fn records_are_counted_by_their_headers() {
    for size in [1usize, 5, 100] {
        let p = Pair::new();
        for _ in 0..100 {
            p.send(&vec![0; size]);
            p.recv(size, false);
        }
        let counted = super::records(&p.tx);
        assert!((72..=137).contains(&counted), "{counted} of 100 records of {size} bytes");
    }
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
        assert_eq!(unsafe { recv(p.ring(), &p.dir, &p.rx, Some(to.as_mut_ptr()), n, false) }, Ok(n));
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

mod syn_queue {
    use crate::syn::{len, pop, push};
    use crate::Hostile;
    use fsocket_abi::channel::{SynQueue, SLOTS, SYN_CAP};
    use fsocket_sync::atomic::Ordering::Relaxed;

    fn queue() -> SynQueue {
        // SAFETY: atomics and padding, for which zero is valid.
        unsafe { core::mem::zeroed() }
    }

    #[test]
    fn positions_that_no_client_has_are_found_at_once() {
        for ahead in [SYN_CAP as u32 + 1, 1 << 31, u32::MAX] {
            let q = queue();
            for slot in 0..3 {
                assert!(push(&q, slot));
            }
            q.tail.store(ahead, Relaxed);
            assert_eq!(pop(&q), Err(Hostile), "{ahead}");
        }
    }

    #[test]
    fn a_full_queue_is_none_of_them() {
        let q = queue();
        for at in [q.head.load(Relaxed), u32::MAX - 7] {
            q.head.store(at, Relaxed);
            q.tail.store(at, Relaxed);
            assert_eq!((0..SLOTS).take_while(|slot| push(&q, *slot)).count(), SYN_CAP);
            assert_eq!(len(&q), SYN_CAP as u32);
            for slot in 0..SYN_CAP {
                assert_eq!(pop(&q), Ok(Some(slot)));
            }
            assert_eq!(pop(&q), Ok(None));
        }
    }

    #[test]
    fn an_entry_that_is_no_slot() {
        for entry in [0, SLOTS as u32 + 1, u32::MAX] {
            let q = queue();
            q.entry[0].store(entry, Relaxed);
            q.tail.store(1, Relaxed);
            assert_eq!(pop(&q), Err(Hostile));
        }
    }
}

/// The same at any moment: between two looks at a word.
#[test]
fn a_hostile_relative_that_runs_beside() {
    use std::sync::atomic::AtomicBool;
    let mut p = Pair::new();
    p.hostile = true;
    let over = AtomicBool::new(false);
    let (tx, rx) = (&*p.tx, &*p.rx);
    let mut to = vec![0u8; 400_000];
    std::thread::scope(|s| {
        s.spawn(|| {
            let mut seed = 1u64;
            while !over.load(Ordering::Relaxed) {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let v = match seed >> 61 {
                    0 => seed,
                    1 => u64::MAX - (seed >> 50),
                    _ => (seed >> 33) % (4 * RING_CAP as u64),
                };
                scribble(if seed & 1 << 40 == 0 { tx } else { rx }, (seed >> 41) as usize & 7, v);
            }
        });
        let mut seed = 7u64;
        let until = std::time::Instant::now() + std::time::Duration::from_millis(500);
        while std::time::Instant::now() < until {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let n = match seed >> 62 {
                0 => 8 + (seed >> 40) as usize % 9,
                1 => 1 + (seed >> 40) as usize % 2048,
                _ => 1 + (seed >> 40) as usize % to.len(),
            };
            let op = match seed >> 20 & 3 {
                0 => Op::Recv(n),
                1 => Op::Peek(n),
                _ => Op::Send(n),
            };
            anything(&p, &op, &mut to);
        }
        over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_list_has_the_unread_bytes_in_order_and_leaves_them() {
    let p = Pair::new();
    for message in [&b"first"[..], b"second", b"third one"] {
        assert_eq!(p.send(message), message.len());
    }
    assert_eq!(p.listed(8), b"firstsec");
    assert_eq!(p.listed(100), b"firstsecondthird one");
    assert_eq!(p.recv(3, false), b"fir");
    assert_eq!(p.listed(100), b"stsecondthird one");
    assert_eq!(p.recv(100, false).len(), 17);
    assert_eq!(p.segments(100), 0);
}

#[test]
fn a_list_ends_where_it_is_full() {
    let p = Pair::new();
    (0..=segments::MOST).for_each(|_| assert_eq!(p.send(b"x"), 1));
    assert_eq!(p.listed(1000).len(), segments::MOST);
    assert_eq!(p.recv(1000, false).len(), segments::MOST + 1);
}

/// Notes at each copy out of the ring how far the producer believes the consumer to be.
#[derive(Clone, Copy)]
struct Watched<'a>(Mapped, &'a Dir, &'a core::cell::Cell<u64>);
// SAFETY: as that of the ring's own.
unsafe impl Bytes for Watched<'_> {
    fn header(&self, off: usize) -> &AtomicU64 {
        self.0.header(off)
    }
    unsafe fn write(&self, off: usize, src: *const u8, n: usize) -> bool {
        // SAFETY: the arguments of `write`, for the ring inside.
        unsafe { self.0.write(off, src, n) }
    }
    unsafe fn read(&self, off: usize, dst: *mut u8, n: usize) -> bool {
        self.2.set(self.1.cons.head.load(Ordering::Relaxed));
        // SAFETY: the arguments of `read`, for the ring inside.
        unsafe { self.0.read(off, dst, n) }
    }
}

#[test]
fn a_long_receive_gives_space_back_meanwhile() {
    let p = Pair::new();
    let data: Vec<u8> = (0..RING_CAP / 2).map(|i| (i * 7 + i / 256) as u8).collect();
    assert_eq!(p.send(&data), data.len());
    let (seen, mut got) = (core::cell::Cell::new(0), vec![0u8; RING_CAP]);
    // SAFETY: the buffer's.
    let n = unsafe { recv(Watched(p.ring(), &p.dir, &seen), &p.dir, &p.rx, Some(got.as_mut_ptr()), RING_CAP, false) };
    assert_eq!((n, &got[..data.len()]), (Ok(data.len()), &data[..]));
    assert!(seen.get() > POS_START + RING_CAP as u64 / 4, "{}", seen.get());
    assert_eq!(p.rx.bytes(), data.len() as u64);
    assert!(p.send(&data) > 0 && p.recv(RING_CAP, false) == data);
}
