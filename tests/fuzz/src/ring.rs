//! The byte ring with a peer that writes anything at any moment: between two calls, and at each
//! access of a call to the ring's memory.

use crate::input::Input;
use fsocket_abi::channel::{record, Dir, POS_START, RING_CAP};
use fsocket_abi::half::Half;
use fsocket_ring::{self as ring, Bytes};
use fsocket_sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::alloc::{alloc_zeroed, dealloc, Layout};
use std::cell::{Cell, RefCell};

const CANARY: usize = 4096;
const LAYOUT: Layout = match Layout::from_size_align(CANARY + RING_CAP + CANARY, 4096) {
    Ok(l) => l,
    Err(_) => panic!(),
};
const MARK: u8 = 0xA5;

/// The peer's writable memory, and the source of its bytes.
struct Peer<'a> {
    mem: *mut u8,
    dir: &'a Dir,
    own: &'a Half,
    input: RefCell<Input<'a>>,
    /// The peer writes at accesses only while a call under test runs.
    inside: Cell<bool>,
}

impl Peer<'_> {
    /// A value that is nearly right, or any value.
    fn value(&self, input: &mut Input) -> u64 {
        let pos = self.own.pos();
        match input.u8() % 8 {
            0 => pos,
            1 => pos.wrapping_add(u64::from(input.u16())),
            2 => pos.wrapping_sub(u64::from(input.u16())),
            3 => POS_START + u64::from(input.u8()) * 8,
            4 => self.own.base(),
            5 => record::pack(u64::from(input.u8() % 4), u64::from(input.u32()), 0),
            6 => 0,
            _ => input.u64(),
        }
    }

    fn writes(&self) {
        let Ok(mut input) = self.input.try_borrow_mut() else { return };
        let what = input.u8();
        if what < 200 {
            return;
        }
        let value = self.value(&mut input);
        match what % 8 {
            0 => self.dir.cons.head.store(value, Relaxed),
            1 => self.dir.prod.rewind_from.store(value, Relaxed),
            2 => self.dir.prod.status.store(value as u32, Relaxed),
            3 => self.dir.cons.window.store(value as u32, Relaxed),
            4 => self.dir.prod.space_at.store(value, Relaxed),
            5 => self.word(self.own.pos().wrapping_sub(self.own.base())).store(value, Relaxed),
            _ => self.word(u64::from(input.u32())).store(value, Relaxed),
        }
    }

    fn word(&self, off: u64) -> &AtomicU64 {
        let off = off as usize & (RING_CAP - 1) & !7;
        // SAFETY: the offset is inside the ring and a multiple of 8.
        unsafe { &*(self.mem.add(off) as *const AtomicU64) }
    }
}

/// The ring's memory. The peer writes at each access.
#[derive(Clone, Copy)]
struct Watched<'a>(&'a Peer<'a>);

// SAFETY: the memory lives as long as the peer, and each method asserts that its offset is inside.
unsafe impl Bytes for Watched<'_> {
    fn header(&self, off: usize) -> &AtomicU64 {
        assert!(off.is_multiple_of(8) && off < RING_CAP, "a header at {off}");
        if self.0.inside.get() {
            self.0.writes();
        }
        self.0.word(off as u64)
    }
    unsafe fn write(&self, off: usize, src: *const u8, n: usize) -> bool {
        assert!(off <= RING_CAP && n <= RING_CAP - off, "{n} bytes written at {off}");
        // SAFETY: `src` has `n` readable bytes, and the bounds are asserted.
        unsafe { self.0.mem.add(off).copy_from(src, n) };
        self.0.writes();
        true
    }
    unsafe fn read(&self, off: usize, dst: *mut u8, n: usize) -> bool {
        assert!(off <= RING_CAP && n <= RING_CAP - off, "{n} bytes read at {off}");
        self.0.writes();
        // SAFETY: `dst` has `n` writable bytes, and the bounds are asserted.
        unsafe { dst.copy_from(self.0.mem.add(off), n) };
        true
    }
}

/// A sender and a receiver whose peer is the input. They must not touch memory outside of the ring
/// or receive more than they asked for, and every call must end.
pub fn ring(data: &[u8]) {
    // SAFETY: the layout has a positive size, and zeroes are valid for Dir and Half.
    let (mem, dir, tx, rx) = unsafe {
        let zeroed = |_| Box::<Half>::new(std::mem::zeroed());
        (alloc_zeroed(LAYOUT), Box::<Dir>::new(std::mem::zeroed()), zeroed(()), zeroed(()))
    };
    assert!(!mem.is_null());
    // SAFETY: both ranges are within the layout.
    let base = unsafe {
        mem.write_bytes(MARK, CANARY);
        mem.add(CANARY + RING_CAP).write_bytes(MARK, CANARY);
        mem.add(CANARY)
    };
    let mut input = Input::new(data);
    let sender = input.u8() & 1 == 0;
    let own = if sender { &tx } else { &rx };
    let peer = Peer { mem: base, dir: &dir, own, input: RefCell::new(input), inside: Cell::new(false) };
    let b = Watched(&peer);
    ring::init_dir(b, &dir);
    ring::init_half(&tx);
    ring::init_half(&rx);
    let mut buffer = vec![0u8; 70_000 + 8];
    let mut rounds = 0;
    while !peer.input.borrow().is_empty() && rounds < 512 {
        rounds += 1;
        peer.writes();
        let (what, len) = {
            let mut input = peer.input.borrow_mut();
            let what = input.u8();
            let len = match what >> 4 & 3 {
                0 => usize::from(input.u8() % 40),
                1 => usize::from(input.u16() % 4096),
                2 => usize::from(input.u16()) + 4000,
                _ => 8,
            };
            (what, len)
        };
        peer.inside.set(true);
        // SAFETY: the buffer has more than `len` bytes, and this is the only thread.
        let ended = unsafe {
            match (sender, what % 4) {
                (true, 0) => {
                    ring::send_small(b, &dir, own, buffer.as_ptr(), len, 0);
                    Ok(0)
                }
                (true, 1) => ring::look(&dir, own, len as u64).map(|_| 0).map_err(ring::Failed::from),
                (true, 2) => {
                    own.set_cap(u32::from(what) << 4);
                    ring::send(b, &dir, own, buffer.as_ptr(), len, 0)
                }
                (true, _) => ring::send(b, &dir, own, buffer.as_ptr(), len, record::stamp(len as u64 * 5000)),
                (false, 0) => {
                    ring::readable(b, &dir, own);
                    Ok(0)
                }
                (false, 1) => ring::recv(b, &dir, own, Some(buffer.as_mut_ptr()), len, true),
                (false, 2) => ring::recv(b, &dir, own, None, len, false),
                (false, _) => ring::recv(b, &dir, own, Some(buffer.as_mut_ptr()), len, false),
            }
        };
        peer.inside.set(false);
        match ended {
            Ok(n) => assert!(n <= len, "{n} bytes of {len}"),
            // The library closes such a connection.
            Err(e) => {
                assert_eq!(e, ring::Failed::Hostile);
                break;
            }
        }
    }
    // SAFETY: both ranges are within the layout, and the memory was allocated with this layout.
    unsafe {
        for at in [mem, mem.add(CANARY + RING_CAP)] {
            assert!(std::slice::from_raw_parts(at, CANARY).iter().all(|c| *c == MARK), "written outside");
        }
        dealloc(mem, LAYOUT);
    }
}
