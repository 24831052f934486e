//! How much memory the channels and arenas of each user take.
//!
//! The monitor must ask the kernel about each of them, and there may be thousands. So each request
//! for a channel measures only some of them. The known value is that of the last complete round,
//! or of the present round if that is more.

use crate::arenas::Arena;
use crate::shm::channels::Channel;
use crate::ChannelId;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Channels or arenas that are measured for one request.
const EACH: usize = 32;
/// A new round begins at least this long after the last one began.
const MOMENT: Duration = Duration::from_millis(50);

/// Where the round goes on.
#[derive(Clone, Copy)]
enum At {
    Channel(ChannelId),
    /// Index among all arenas.
    Arena(usize),
}

#[derive(Default)]
pub struct Resident {
    /// Bytes by user, from the last complete round.
    before: HashMap<u32, u64>,
    /// Bytes by user, so far in the present round.
    now: HashMap<u32, u64>,
    at: Option<At>,
    began: Option<Instant>,
}

impl Resident {
    /// Goes on with a round, or begins one if it is time. `channels` and `arenas` return those
    /// from a number on.
    pub fn look<'a, C, A>(&mut self, channels: impl FnOnce(ChannelId) -> C, arenas: impl FnOnce(usize) -> A)
    where
        C: Iterator<Item = &'a Channel>,
        A: Iterator<Item = &'a Arena>,
    {
        let at = match self.at {
            None if self.began.is_some_and(|at| at.elapsed() < MOMENT) => return,
            None => {
                self.began = Some(Instant::now());
                At::Channel(0)
            }
            Some(at) => at,
        };
        let mut left = EACH;
        let mut arena = 0;
        match at {
            At::Channel(first) => {
                let mut all = channels(first);
                for ch in all.by_ref().take(left) {
                    self.add(ch.client_uid, ch.mem.resident());
                    left -= 1;
                }
                if let Some(next) = all.next() {
                    self.at = Some(At::Channel(next.id));
                    return;
                }
            }
            At::Arena(first) => arena = first,
        }
        let mut all = arenas(arena);
        for a in all.by_ref().take(left) {
            self.add(a.uid, a.mem.resident());
            arena += 1;
        }
        self.at = all.next().map(|_| At::Arena(arena));
        if self.at.is_none() {
            self.before = std::mem::take(&mut self.now);
        }
    }

    fn add(&mut self, uid: u32, bytes: u64) {
        *self.now.entry(uid).or_default() += bytes;
    }

    /// Bytes of this user.
    pub fn of(&self, uid: u32) -> u64 {
        let of = |all: &HashMap<u32, u64>| all.get(&uid).copied().unwrap_or_default();
        of(&self.before).max(of(&self.now))
    }

    /// Bytes of all users.
    pub fn all(&self) -> u64 {
        self.before.values().sum::<u64>().max(self.now.values().sum())
    }
}
