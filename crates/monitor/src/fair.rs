//! Picks the user whose turn is next: the one that has used the least of the event loop's time.
//!
//! A user with few requests is served before users with many requests, as soon as its request
//! comes. The number of the other users and of their requests does not change that.

use std::collections::HashMap;
use std::time::Duration;

/// Time that a user which asks for less than its share may save up. A program that starts gets its
/// first requests answered one after the other, without waiting for other users in between.
const SAVED: Duration = Duration::from_millis(2);
/// From this number of users on, users that have used no more than others are forgotten.
const MANY: usize = 64;

pub struct Fair {
    of: HashMap<u32, Had>,
    /// The least time that any user with a turn has had so far. Saved-up time does not lower it.
    least: Duration,
    /// Turns so far.
    turns: u64,
}

impl Default for Fair {
    fn default() -> Fair {
        Fair { of: HashMap::new(), least: SAVED, turns: 0 }
    }
}

/// Time and turns that a user has had so far.
#[derive(Clone, Copy, Default)]
struct Had {
    time: Duration,
    turns: u64,
    /// When its last turn was, counted in turns of all users.
    last: u64,
}

impl Fair {
    /// Picks the next one of the users that want a turn. If two users have had the same time, the
    /// longer wait since the last turn decides.
    pub fn next(&mut self, users: impl Iterator<Item = u32>) -> Option<u32> {
        let next = users.min_by_key(|uid| (self.time_of(*uid), self.of.get(uid).map_or(0, |had| had.last)))?;
        self.least = self.least.max(self.time_of(next));
        Some(next)
    }

    /// The time that counts for a user. A user that has sent no request for long has saved up
    /// [`SAVED`] at most.
    fn time_of(&self, uid: u32) -> Duration {
        let had = self.of.get(&uid).map_or(Duration::ZERO, |had| had.time);
        had.max(self.least.saturating_sub(SAVED))
    }

    /// Adds the duration of a turn to the time of a user.
    pub fn had(&mut self, uid: u32, took: Duration) {
        let (time, least) = (self.time_of(uid) + took, self.least);
        if self.of.len() >= MANY && !self.of.contains_key(&uid) {
            self.of.retain(|_, had| had.time > least);
        }
        self.turns += 1;
        let had = self.of.entry(uid).or_default();
        *had = Had { time, turns: had.turns + 1, last: self.turns };
    }

    /// How many turns this user has had.
    pub fn turns_of(&self, uid: u32) -> u64 {
        self.of.get(&uid).map_or(0, |had| had.turns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TURN: Duration = Duration::from_micros(200);

    /// Gives these users `n` turns of the same length.
    fn turns(f: &mut Fair, users: &[u32], n: usize) -> Vec<u32> {
        let one = |_| {
            let uid = f.next(users.iter().copied()).unwrap();
            f.had(uid, TURN);
            uid
        };
        (0..n).map(one).collect()
    }

    #[test]
    fn users_that_want_all_take_turns() {
        let mut f = Fair::default();
        assert_eq!(turns(&mut f, &[1, 2, 3], 6), [1, 2, 3, 1, 2, 3]);
        assert_eq!(f.next(std::iter::empty()), None);
    }

    #[test]
    fn one_that_comes_is_next_until_it_has_had_what_it_can_save() {
        let mut f = Fair::default();
        turns(&mut f, &[1, 2], 1000);
        let saved = SAVED.as_micros() / TURN.as_micros();
        let next = turns(&mut f, &[1, 2, 3], 1000);
        assert!(next.iter().take(saved as usize - 1).all(|uid| *uid == 3), "{next:?}");
        let had = next.iter().filter(|uid| **uid == 3).count();
        assert!(had < 1000 / 3 + 2 * saved as usize, "it has saved up no more: {had}");
    }

    #[test]
    fn one_that_asks_for_little_never_waits() {
        let mut f = Fair::default();
        turns(&mut f, &[1, 2], 1000);
        for _ in 0..1000 {
            assert_eq!(f.next([1, 2, 3].into_iter()), Some(3));
            f.had(3, TURN / 4);
            turns(&mut f, &[1, 2], 2);
        }
    }

    #[test]
    fn those_that_owe_nothing_are_forgotten() {
        let mut f = Fair::default();
        for uid in 0..10 * MANY as u32 {
            turns(&mut f, &[uid], 1);
        }
        assert!(f.of.len() <= MANY, "{}", f.of.len());
    }
}
