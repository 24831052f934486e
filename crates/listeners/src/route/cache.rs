//! Caches the monitor's answers about destinations. Readers take no lock and never wait: each
//! entry has a sequence number that is odd during a change, and a reader that sees a change treats
//! the entry as missing.

use crate::pieces::{Pieces, Zero};
use core::sync::atomic::{fence, AtomicU32, AtomicU64, Ordering};
use fsocket_abi::arena::Reason;
use fsocket_proto::Addr;

/// The most listeners that share one address (SO_REUSEPORT).
pub const FAN: usize = 16;
/// The number of sets in each level. If the set of a destination is full, the destination goes to
/// the next level. So a few destinations use few pages.
const LEVELS: [usize; 4] = [NEAR, 128, 512, 2048];
const SETS: usize = LEVELS[1] + LEVELS[2] + LEVELS[3];
/// The number of sets in the first level, which needs no allocation.
const NEAR: usize = 16;
const WAYS: usize = 4;
const HEAD: usize = 9;
const WORDS: usize = HEAD + FAN;

/// How often a reader tries to read an entry that other threads change.
const LOOKS: u32 = 4;

/// A channel: its index in this process's table, and its number, because another channel may take
/// the same index later.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Known {
    pub place: u32,
    pub id: u32,
}

/// The state for which an answer is valid.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Basis {
    /// `Registry::generation`.
    pub generation: u64,
    /// `Registry::touched`.
    pub touched: u64,
    /// The listeners that match best, as one number.
    pub listeners: u64,
    /// [`crate::registry::closings`] of the port, read by the monitor before it looked at the
    /// listeners.
    pub closings: u32,
    /// When the monitor answered, in ticks.
    pub asked: u64,
    /// The kernel's policy has allowed a connection from a socket with this identity.
    pub proved_for: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Route {
    pub dst: ([u8; 16], u16),
    pub chans: [Known; FAN],
    pub n: usize,
    /// The reason why the monitor has refused.
    pub refused: Option<Reason>,
    pub basis: Basis,
}

struct Entry {
    /// 0: empty; odd: a thread is writing the entry.
    seq: AtomicU32,
    /// Which of the channels is used next.
    turn: AtomicU32,
    words: [AtomicU64; WORDS],
}

type Set = [Entry; WAYS];
static NEAREST: [Set; NEAR] = [const {
    [const { Entry { seq: AtomicU32::new(0), turn: AtomicU32::new(0), words: [const { AtomicU64::new(0) }; WORDS] } };
        WAYS]
}; NEAR];
/// The sets of the other levels. (20 sets take four pages.)
static FARTHER: Pieces<Set, 20, { SETS.div_ceil(20) }> = Pieces::new();
// SAFETY: all fields are atomics of integers, for which zero bytes are valid.
unsafe impl Zero for Entry {}
/// Number of threads that are writing an entry.
#[link_section = ".data.fsocket_start"]
static WRITING: AtomicU32 = AtomicU32::new(0);
/// Entries of an earlier epoch count as missing.
#[link_section = ".data.fsocket_start"]
static EPOCH: AtomicU64 = AtomicU64::new(1);
static VICTIM: AtomicU32 = AtomicU32::new(0);

/// Forgets all entries.
pub fn clear() {
    EPOCH.fetch_add(1, Ordering::AcqRel);
}

/// In a forked child: other threads that were writing an entry do not exist.
pub fn reset_after_fork() {
    clear();
    if WRITING.load(Ordering::Relaxed) != 0 {
        WRITING.store(0, Ordering::Relaxed);
        for e in NEAREST.iter().chain(FARTHER.all()).flatten().filter(|e| e.seq.load(Ordering::Relaxed) & 1 != 0) {
            e.seq.store(0, Ordering::Relaxed);
        }
    }
}

/// The indices of the sets for a destination, one in each level.
fn sets_of(dst: &Addr) -> impl Iterator<Item = usize> + Clone {
    let [a, b] = halves(&dst.ip);
    let mixed = (a ^ b.rotate_left(17) ^ u64::from(dst.port) << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut first = 0;
    LEVELS.iter().map(move |sets| {
        let set = first + (mixed >> 53) as usize % sets;
        first += sets;
        set
    })
}

/// The set with this index. None: no entry was ever written there.
fn known(set: usize) -> Option<&'static Set> {
    NEAREST.get(set).or_else(|| FARTHER.get(set - NEAR))
}

/// The set with this index, for writing. None: there is no memory for it.
fn made(set: usize) -> Option<&'static Set> {
    NEAREST.get(set).or_else(|| FARTHER.make(set - NEAR))
}

/// The entry of a destination. Entries never become empty again. So if a destination is in a later
/// level, its sets in the earlier levels are full.
fn own(dst: &Addr) -> Option<&'static Entry> {
    for set in sets_of(dst).map_while(known) {
        if let Some(own) = set.iter().find(|e| e.is_of(dst)) {
            return Some(own);
        }
        if set.iter().any(|e| e.seq.load(Ordering::Relaxed) == 0) {
            break;
        }
    }
    None
}

fn halves(ip: &[u8; 16]) -> [u64; 2] {
    let word = |at: usize| u64::from_ne_bytes(core::array::from_fn(|i| ip[at + i]));
    [word(0), word(8)]
}

/// The known route to `dst`, and a number that grows with each call.
pub fn get(dst: &Addr) -> Option<(Route, u32)> {
    let entry = own(dst)?;
    let route = (0..LOOKS).find_map(|_| entry.read())?;
    let turn = if route.n > 1 { entry.turn.fetch_add(1, Ordering::Relaxed) } else { 0 };
    ((route.dst.0, route.dst.1) == (dst.ip, dst.port)).then_some((route, turn))
}

/// Stores a route. If another thread is just writing the entry, the route is not stored, and the
/// monitor is asked again.
pub fn put(r: &Route) {
    let dst = Addr { ip: r.dst.0, port: r.dst.1, ..Addr::default() };
    let free = || sets_of(&dst).map_while(made).flatten().find(|e| e.read().is_none());
    let next = || {
        sets_of(&dst).map_while(known).last().map(|set| &set[VICTIM.fetch_add(1, Ordering::Relaxed) as usize % WAYS])
    };
    if let Some(entry) = own(&dst).or_else(free).or_else(next) {
        WRITING.fetch_add(1, Ordering::Relaxed);
        entry.write(r);
        WRITING.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Entry {
    /// Is this the entry of `dst`? (A moment later it may belong to another destination.)
    fn is_of(&self, dst: &Addr) -> bool {
        let word = |i: usize| self.words[i].load(Ordering::Relaxed);
        self.seq.load(Ordering::Relaxed) != 0 && [word(0), word(1)] == halves(&dst.ip) && word(2) as u16 == dst.port
    }

    fn read(&self) -> Option<Route> {
        // Acquire: pairs with the release at the end of `write`.
        let before = self.seq.load(Ordering::Acquire);
        let words: [u64; WORDS] = core::array::from_fn(|i| self.words[i].load(Ordering::Relaxed));
        // Pairs with the fence in `write`: a reader that sees a word of a later change also sees
        // the changed sequence number.
        fence(Ordering::Acquire);
        let whole = before & 1 == 0 && before != 0 && self.seq.load(Ordering::Relaxed) == before;
        whole.then(|| decode(&words)).flatten()
    }

    fn write(&self, r: &Route) {
        let before = self.seq.load(Ordering::Relaxed);
        let odd = before | 1;
        if before & 1 != 0 || self.seq.compare_exchange(before, odd, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return;
        }
        fence(Ordering::Release);
        for (to, word) in self.words.iter().zip(encode(r)) {
            to.store(word, Ordering::Relaxed);
        }
        self.seq.store(before.wrapping_add(2).max(2), Ordering::Release);
    }
}

fn encode(r: &Route) -> [u64; WORDS] {
    let refused = match r.refused {
        None => 0,
        Some(Reason::OtherUser) => 1,
        Some(Reason::KernelFirst) => 3,
        Some(_) => 2,
    };
    let [a, b] = halves(&r.dst.0);
    let (n, v) = (r.n.min(FAN), &r.basis);
    let mut words = [0; WORDS];
    words[..HEAD].copy_from_slice(&[
        a,
        b,
        u64::from(r.dst.1) | (n as u64) << 16 | refused << 24 | u64::from(v.closings) << 32,
        v.generation,
        v.touched,
        v.listeners,
        v.asked,
        EPOCH.load(Ordering::Relaxed),
        // An identity is never 0.
        v.proved_for.unwrap_or(0),
    ]);
    for (word, c) in words[HEAD..].iter_mut().zip(&r.chans[..n]) {
        *word = u64::from(c.place) << 32 | u64::from(c.id);
    }
    words
}

/// Converts the words to a route. None: the entry is from an earlier epoch.
fn decode(words: &[u64; WORDS]) -> Option<Route> {
    let &[a, b, rest, generation, touched, listeners, asked, epoch, proved_for, ..] = words;
    if epoch != EPOCH.load(Ordering::Acquire) {
        return None;
    }
    let mut ip = [0; 16];
    ip[..8].copy_from_slice(&a.to_ne_bytes());
    ip[8..].copy_from_slice(&b.to_ne_bytes());
    Some(Route {
        dst: (ip, rest as u16),
        chans: core::array::from_fn(|i| Known { place: (words[HEAD + i] >> 32) as u32, id: words[HEAD + i] as u32 }),
        n: ((rest >> 16) as u8 as usize).min(FAN),
        refused: match (rest >> 24) as u8 {
            0 => None,
            1 => Some(Reason::OtherUser),
            3 => Some(Reason::KernelFirst),
            _ => Some(Reason::Policy),
        },
        basis: Basis {
            generation,
            touched,
            listeners,
            closings: (rest >> 32) as u32,
            asked,
            proved_for: (proved_for != 0).then_some(proved_for),
        },
    })
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;

    fn route(port: u16, id: u32) -> Route {
        let mut chans = [Known { place: 0, id: 0 }; FAN];
        chans[0] = Known { place: id + 1, id };
        let of = u64::from(id);
        let basis = Basis { generation: of, closings: id, asked: of, proved_for: Some(of + 2), ..Basis::default() };
        Route { dst: ([7; 16], port), chans, n: 1, refused: None, basis }
    }

    fn at(port: u16) -> Addr {
        Addr { ip: [7; 16], port, ..Addr::default() }
    }

    /// All tests use the table of this process, so they run one after the other.
    static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());

    #[test]
    fn what_was_put_is_found_until_it_is_cleared() {
        let _turn = TURN.lock();
        clear();
        put(&Route { refused: Some(Reason::Policy), ..route(1, 9) });
        put(&route(2, 3));
        assert_eq!(get(&at(1)).map(|r| r.0), Some(Route { refused: Some(Reason::Policy), ..route(1, 9) }));
        put(&route(1, 10));
        assert_eq!(get(&at(1)).map(|r| r.0), Some(route(1, 10)));
        assert_eq!(get(&at(2)).map(|r| r.0), Some(route(2, 3)));
        assert!(get(&at(3)).is_none());
        clear();
        assert!(get(&at(1)).is_none() && get(&at(2)).is_none());
    }

    #[test]
    fn thousands_of_destinations_are_kept() {
        let _turn = TURN.lock();
        (1..=4000).for_each(|port| put(&route(port, u32::from(port))));
        let kept = (1..=4000).filter(|port| get(&at(*port)).is_some()).count();
        assert!(kept > 3950, "{kept}");
    }

    /// A reader sees one of the two routes, never a mixture.
    #[test]
    fn readers_see_no_half_of_a_change() {
        let _turn = TURN.lock();
        std::thread::scope(|s| {
            s.spawn(|| (0..100_000).for_each(|i| put(&route(500, i))));
            for _ in 0..100_000 {
                if let Some((r, _)) = get(&at(500)) {
                    assert_eq!(r, route(500, r.chans[0].id));
                }
            }
        });
    }
}
