//! Newly connected clients, by user. Each waits until it is its user's turn.

use crate::by_user::ByUser;
use crate::clients::Client;
use crate::rates::Rates;
use std::time::{Duration, Instant};

/// New processes of one user each second, for each CPU. A CPU cannot start that many.
const ARRIVALS: u32 = 4000;

/// Clients that have connected, and that the monitor does not serve yet.
pub struct Arrivals {
    /// The kernel's backlog has more of them.
    pub come: bool,
    pub waiting: ByUser<Client>,
    /// Limits how many new processes of each user are accepted.
    rates: Rates<u32>,
}

impl Default for Arrivals {
    fn default() -> Arrivals {
        let each = ARRIVALS * crate::cpus::possible_cpus() as u32;
        Arrivals { come: false, waiting: ByUser::default(), rates: Rates::new(each, Duration::from_secs(1) / each) }
    }
}

impl Arrivals {
    /// Whether the monitor may accept one more process of this user now.
    pub fn may_come(&mut self, uid: u32, now: Instant) -> bool {
        self.rates.take(uid, now)
    }
}
