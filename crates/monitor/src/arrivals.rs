//! Clients that have come, by user: each waits for a turn of its user's.

use crate::clients::Client;
use crate::rates::Rates;
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// Processes of one user that may come in a second, for each CPU: more than can be started there.
const ARRIVALS: u32 = 4000;

/// Clients that have come and are not known yet.
pub struct Arrivals {
    /// Some wait in the kernel's queue.
    pub come: bool,
    waiting: BTreeMap<u32, VecDeque<Client>>,
    /// How many processes each user may begin.
    rates: Rates<u32>,
}

impl Default for Arrivals {
    fn default() -> Arrivals {
        let each = ARRIVALS * crate::cpus::possible_cpus() as u32;
        Arrivals { come: false, waiting: BTreeMap::new(), rates: Rates::new(each, Duration::from_secs(1) / each) }
    }
}

impl Arrivals {
    /// Users whose clients wait.
    pub fn users(&self) -> impl Iterator<Item = u32> + '_ {
        self.waiting.keys().copied()
    }

    pub fn waiting(&self, uid: u32) -> usize {
        self.waiting.get(&uid).map_or(0, VecDeque::len)
    }

    pub fn take(&mut self, uid: u32) -> Option<Client> {
        let waiting = self.waiting.get_mut(&uid)?;
        let first = waiting.pop_front();
        if waiting.is_empty() {
            self.waiting.remove(&uid);
        }
        first
    }

    /// Whether one more process of this user may come now.
    pub fn may_come(&mut self, uid: u32, now: Instant) -> bool {
        self.rates.take(uid, now)
    }

    /// A client of this user waits from now on.
    pub fn add(&mut self, uid: u32, client: Client) {
        self.waiting.entry(uid).or_default().push_back(client);
    }
}
