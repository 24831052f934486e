//! The time at which a connection between network namespaces tries to move. A try costs both ends and the
//! monitor. So each side learns how many requests its connections have.

use super::calls::CALLS;
use super::rest::{own_of, peer_of};
use crate::table::Desc;
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use fsocket_ring as ring;
use fsocket_sys as sys;

/// Calls credited to a connection for each request/response turn.
pub(super) const TURN: u32 = CALLS / 2;
/// Numbers of requests after which a connection may try: the smallest number that can be seen, and
/// larger ones.
const AFTER: [u32; 6] = [2, 16, 32, 64, 128, 256];
/// Index in [`AFTER`] as long as nothing is known.
const USUAL: usize = 1;
/// The opener tries this much later, so that the accepter has offered its end by then.
const BEHIND: u32 = 2;
/// So many requests in shared memory save the cost of a change of path, which is some 200 us of both processes and the
/// monitor, and a little more. So do this many bytes.
const PAYS: i32 = 20;
const PAYS_BYTES: u64 = 1 << 20;
/// Requests above this number do not count: one connection outweighs so many short ones, and no more.
const MOST: u32 = 256;
/// A score is better only if it exceeds the other by this, about one connection.
const MARGIN: i32 = 16;
/// A hundred times the cost of an early try for one side, in nanoseconds.
const PAUSE_NS: u64 = 10_000_000;
/// After so many connections, a side that has met no peer shortens its wait again.
const PROBE_EVERY: u32 = 64;

/// Facts that a process has learned from connections that it has opened, or accepted.
struct Learned {
    /// For each entry of [`AFTER`]: requests that would have been saved lately, if each connection had tried
    /// after that many requests.
    saved: [AtomicI32; AFTER.len()],
    /// The lowest index in [`AFTER`]. It grows with each try that did not find the other side, and returns to 0 with
    /// each that has. It shrinks now and then, so that two waiting sides find each other again.
    unmet: Doubled,
    seen: AtomicU32,
    /// The time of the next early try, and how often [`PAUSE_NS`] is doubled.
    again: AtomicU64,
    pause: Doubled,
}

static LEARNED: [Learned; 2] = [const { Learned::new() }; 2];

fn learned(opener: bool) -> &'static Learned {
    &LEARNED[usize::from(!opener)]
}

/// A counter up to the given limit: one more for each try in vain, one less for each that has paid.
struct Doubled(AtomicU32, u32);

impl Doubled {
    const fn new(most: u32) -> Doubled {
        Doubled(AtomicU32::new(0), most)
    }
    fn get(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
    /// `then`: its value at the try. Simultaneous tries in vain count once, because only the first one brings news.
    fn learn(&self, paid: bool, then: u32) {
        let now = self.get();
        let next = match paid {
            true => now.saturating_sub(1),
            false if now == then => (now + 1).min(self.1),
            false => return,
        };
        self.0.store(next, Ordering::Relaxed);
    }
}

impl Learned {
    const fn new() -> Learned {
        let saved = [const { AtomicI32::new(0) }; AFTER.len()];
        let (again, seen) = (AtomicU64::new(0), AtomicU32::new(1));
        Learned { saved, unmet: Doubled::new(AFTER.len() as u32 - 1), seen, again, pause: Doubled::new(8) }
    }

    /// A connection with so many requests has ended, on any path.
    fn note(&self, requests: u32) {
        for (i, saved) in self.saved.iter().enumerate() {
            let at = AFTER[i] + if i == 0 { 0 } else { BEHIND };
            let this = requests.min(MOST).checked_sub(at).map_or(0, |left| left as i32 - PAYS);
            let before = saved.load(Ordering::Relaxed);
            saved.store(before - before / 16 + this, Ordering::Relaxed);
        }
        if self.unmet.get() != 0 && self.seen.fetch_add(1, Ordering::Relaxed).is_multiple_of(PROBE_EVERY) {
            self.unmet.learn(true, 0);
        }
    }

    /// A try has found the other side.
    fn met(&self) {
        self.unmet.0.store(0, Ordering::Relaxed);
    }

    /// The number of calls after which a try is not early.
    fn after(&self, opener: bool) -> u32 {
        let saved = |i: usize| self.saved[i].load(Ordering::Relaxed);
        let best = (USUAL..AFTER.len()).fold(USUAL, |best, i| if saved(i) > saved(best) + MARGIN { i } else { best });
        let unmet = self.unmet.get() as usize;
        if unmet == 0 && saved(0) > saved(best).max(0) + MARGIN {
            return 0;
        }
        let requests = AFTER[best.max(unmet).min(AFTER.len() - 1)];
        (requests + if opener { BEHIND } else { 0 }) * TURN
    }
}

/// [`Desc::tried`]; 0: nothing is learned from the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Tried {
    Not,
    Early { pause: u32 },
    Usually { unmet: u32 },
}

impl Tried {
    fn to_u8(self) -> u8 {
        match self {
            Tried::Not => 1,
            Tried::Early { pause } => 2 | (pause as u8) << 2,
            Tried::Usually { unmet } => 3 | (unmet as u8) << 2,
        }
    }
    fn of(kept: u8) -> Option<Tried> {
        let then = u32::from(kept >> 2);
        match kept & 3 {
            1 => Some(Tried::Not),
            2 => Some(Tried::Early { pause: then }),
            3 => Some(Tried::Usually { unmet: then }),
            _ => None,
        }
    }
}

fn is_opener(d: &Desc) -> bool {
    !d.is_server()
}

/// A connection begins whose other end may be in another network namespace.
pub(super) fn begins(d: &Desc) {
    d.kernel().set_tried(Tried::Not.to_u8());
}

/// The opener has asked for the accepter's end.
pub(super) fn asked(d: &Desc) {
    if d.kernel().tried() != 0 {
        begins(d);
    }
}

/// The other end is on another host, from which nothing is learned.
pub(super) fn is_stranger(d: &Desc) {
    d.kernel().set_across(false);
    d.kernel().set_tried(0);
}

/// Is a try after so many calls an early one? Err: an early try does not pay; the next one comes
/// after that many calls.
pub(super) fn first_try(d: &Desc, opener: bool, calls: u32) -> Result<bool, u32> {
    let side = learned(opener);
    let after = side.after(opener);
    if !d.kernel().is_across() || calls >= after {
        return Ok(false);
    }
    match sys::now_ns() < side.again.load(Ordering::Relaxed) {
        true => Err(after),
        false => Ok(true),
    }
}

/// The connection tries now: the opener by its wish, the accepter by its offer.
pub(super) fn tried(fd: i32, d: &Desc, is_early: bool) {
    if d.kernel().tried() == 0 {
        return;
    }
    // A connection from the same address stays within this namespace. (An agent's stand-ins do, and wait for
    // the first offer.)
    if own_of(fd).zip(peer_of(fd)).is_some_and(|(own, peer)| own.ip == peer.ip) {
        return d.kernel().set_tried(0);
    }
    let side = learned(is_opener(d));
    let pause = side.pause.get();
    let what = if is_early { Tried::Early { pause } } else { Tried::Usually { unmet: side.unmet.get() } };
    d.kernel().set_tried(what.to_u8());
    if is_early {
        side.again.store(sys::now_ns() + (PAUSE_NS << pause), Ordering::Relaxed);
    }
}

/// The opener has tried, and its peer had offered nothing. So the opener waits longer.
pub(super) fn unmet(d: &Desc) {
    if let Some(tried) = Tried::of(d.kernel().tried()) {
        begins(d);
        learn(learned(true), tried, false, false);
    }
    d.kernel().put_off_to((AFTER[USUAL] + BEHIND) * TURN);
}

fn learn(side: &Learned, tried: Tried, over: bool, paid: bool) {
    match tried {
        Tried::Not => {}
        Tried::Early { pause } => {
            side.pause.learn(paid, pause);
            // (The two sides may have picked different connections.)
            if over {
                side.met();
            }
        }
        Tried::Usually { .. } if over => side.met(),
        Tried::Usually { unmet } => side.unmet.learn(false, unmet),
    }
}

/// The connection ends.
pub fn ended(d: &Desc) {
    let Some(tried) = Tried::of(d.kernel().tried()) else { return };
    d.kernel().set_tried(0);
    if !d.is_conn() && d.kernel().stays() {
        return; // its calls were not counted
    }
    let mut requests = d.kernel().calls() / (TURN + 2);
    let mut since = 0;
    if d.is_conn() {
        let s = d.sock();
        let bytes = s.tx.bytes().saturating_add(s.rx.bytes());
        let many = if bytes >= PAYS_BYTES { MOST } else { 0 };
        since = u32::try_from(ring::records(&s.tx)).unwrap_or(MOST).min(MOST).max(many);
        requests += since;
    }
    let opener = is_opener(d);
    let side = learned(opener);
    side.note(requests);
    match tried {
        // The peers have met, and one of the two was late.
        Tried::Usually { .. } if opener && !d.is_conn() => {}
        _ => learn(side, tried, d.is_conn(), since >= PAYS as u32),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the request after which the next connections try, after connections with these numbers of
    /// requests.
    fn after(of: &[u32]) -> (u32, u32) {
        let side = Learned::new();
        for _ in 0..100 {
            of.iter().for_each(|requests| side.note(*requests));
        }
        (side.after(true) / TURN, side.after(false) / TURN)
    }

    #[test]
    fn tries_where_it_pays() {
        assert_eq!(after(&[]), (18, 16));
        assert_eq!(after(&[1]), (18, 16));
        assert_eq!(after(&[10]), (18, 16), "they do not get there");
        assert_eq!(after(&[20]), (34, 32), "it would not pay at any time");
        assert_eq!(after(&[25]), (0, 0), "from the beginning");
        assert_eq!(after(&[1000]), (0, 0));
        assert_eq!(after(&[10, 40, 40]), (0, 0), "those that last pay for the others");
        assert_eq!(after(&[3, 3, 3, 100]), (18, 16), "the others are over by then");
    }

    #[test]
    fn what_was_learned_is_forgotten() {
        let side = Learned::new();
        (0..1000).for_each(|_| side.note(20));
        assert_eq!(side.after(false), 32 * TURN);
        (0..20).for_each(|_| side.note(60));
        assert_eq!(side.after(false), 0);
        (0..40).for_each(|_| side.note(3));
        assert_eq!(side.after(false), 16 * TURN);
    }

    #[test]
    fn an_end_that_is_not_met_waits_longer() {
        let side = Learned::new();
        (0..9).for_each(|_| side.note(100));
        let tries = [(false, 0), (false, 0), (false, 1), (false, 2), (false, 3), (false, 4), (true, 0)];
        let waits = tries.map(|(over, unmet)| {
            learn(&side, Tried::Usually { unmet }, over, over);
            side.after(false) / TURN
        });
        assert_eq!(waits, [16, 16, 32, 64, 128, 256, 0], "many at once double once");
        (0..5).for_each(|unmet| learn(&side, Tried::Usually { unmet }, false, false));
        (0..3 * PROBE_EVERY).for_each(|_| side.note(100));
        assert_eq!(side.after(false) / TURN, 32, "less and less");
    }

    #[test]
    fn doubled_within_bounds() {
        let often = Doubled(AtomicU32::new(1), 3);
        let seen = [false, false, false, false, true, true, true, true, true].map(|paid| {
            often.learn(paid, often.get());
            often.get()
        });
        assert_eq!(seen, [2, 3, 3, 3, 2, 1, 0, 0, 0]);
    }

    #[test]
    fn a_try_is_kept_in_eight_bits() {
        let all = (0..=8).flat_map(|n| [Tried::Early { pause: n }, Tried::Usually { unmet: n }]);
        for tried in all.chain([Tried::Not]) {
            assert_eq!(Tried::of(tried.to_u8()), Some(tried));
        }
        assert_eq!(Tried::of(0), None);
    }
}
