//! Makes libraries ask again where connections lead. Each time all libraries ask about all
//! destinations, and a user could cause that at any rate. So the monitor reacts to each user only
//! once in a while; further requests of the user wait until then.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The shortest time between two reactions to one user.
const PAUSE: Duration = Duration::from_millis(100);

#[derive(Default)]
pub struct Touches {
    heard: HashMap<u32, Instant>,
    due: Option<Instant>,
}

impl Touches {
    /// Whether to react to this user now. False: a later call of [`Self::is_due`] reacts.
    pub fn hears(&mut self, uid: u32, now: Instant) -> bool {
        self.heard.retain(|_, at| *at + PAUSE > now);
        match self.heard.get(&uid) {
            Some(at) => {
                self.due.get_or_insert(*at + PAUSE);
                false
            }
            None => {
                self.heard.insert(uid, now);
                true
            }
        }
    }

    pub fn due(&self) -> Option<Instant> {
        self.due
    }

    pub fn is_due(&mut self, now: Instant) -> bool {
        self.due.take_if(|at| *at <= now).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_that_says_it_all_the_time_is_heard_now_and_then() {
        let (mut n, begin) = (Touches::default(), Instant::now());
        let mut heard = 0;
        for ms in 0..1000 {
            let now = begin + Duration::from_millis(ms);
            heard += u32::from(n.is_due(now)) + u32::from(n.hears(7, now));
        }
        assert!((10..=20).contains(&heard), "{heard}");
        let now = begin + Duration::from_secs(1);
        assert!(n.hears(8, now), "another user does not wait for him");
        assert!(n.due().is_some_and(|at| at <= now + PAUSE) && n.is_due(now + PAUSE), "nothing is forgotten");
    }
}
