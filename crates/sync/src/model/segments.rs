//! Segments: each mapping is unmapped once, either by the thread that lost the race or by the
//! thread that closes. No thread gets a mapping of another memory.

use super::every_way;
use crate::atomic::{AtomicUsize, Ordering};
use crate::segments::{Missing, Segments};
use loom::sync::Arc;

const SECOND: usize = 1;
/// Addresses of the first segments of two memories, and the offset of each mapping of the second
/// segment.
const FIRST: [usize; 2] = [0x1000, 0x2000];
const STEP: usize = 0x10;

struct Memory {
    segments: Segments<2>,
    mapped: AtomicUsize,
    unmapped: AtomicUsize,
}

impl Memory {
    fn new() -> Arc<Memory> {
        let m = Memory { segments: Segments::new(), mapped: AtomicUsize::new(0), unmapped: AtomicUsize::new(0) };
        m.segments.open(FIRST[0]);
        Arc::new(m)
    }

    /// Like a channel: the thread uses the first segment to map the second one.
    fn second(&self, mapper: usize) -> Result<usize, Missing> {
        let map = || {
            let first = self.segments.get(0)?;
            self.mapped.fetch_add(1, Ordering::Relaxed);
            Some(first + STEP * (1 + mapper))
        };
        let unmap = |_| {
            self.unmapped.fetch_add(1, Ordering::Relaxed);
        };
        self.segments.get_or_map(SECOND, map, unmap)
    }

    /// The number of second segments that were mapped at the close.
    fn close(&self) -> usize {
        let mut n = 0;
        self.segments.close(|i, _| n += usize::from(i == SECOND));
        n
    }

    fn left(&self) -> usize {
        self.mapped.load(Ordering::Relaxed) - self.unmapped.load(Ordering::Relaxed)
    }
}

#[test]
fn two_that_map_at_once_get_the_same() {
    every_way(None, || {
        let m = Memory::new();
        let other = m.clone();
        let t = loom::thread::spawn(move || other.second(1).unwrap());
        let mine = m.second(0).unwrap();
        assert_eq!(t.join().unwrap(), mine);
        assert_eq!(m.segments.get(SECOND), Some(mine));
        assert_eq!((m.left(), m.close()), (1, 1));
    });
}

#[test]
fn a_memory_that_goes_meanwhile_leaves_nothing() {
    every_way(None, || {
        let m = Memory::new();
        let other = m.clone();
        let t = loom::thread::spawn(move || other.second(0).is_ok());
        let closed = m.close();
        let _ = t.join().unwrap();
        assert_eq!(m.left(), closed);
        assert_eq!(m.second(0), Err(Missing::Closed));
    });
}

/// The thread maps so late that another memory has taken the place already.
#[test]
fn a_late_mapping_is_not_the_next_memorys() {
    every_way(Some(3), || {
        let m = Memory::new();
        let other = m.clone();
        let t = loom::thread::spawn(move || other.second(0).is_ok());
        let closed = m.close();
        m.segments.open(FIRST[1]);
        let _ = t.join().unwrap();
        let second = m.segments.get(SECOND);
        assert!(second.is_none_or(|at| at & !0xfff == FIRST[1]), "{second:x?}");
        assert_eq!(m.left(), closed + usize::from(second.is_some()));
    });
}
