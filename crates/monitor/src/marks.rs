//! How often a process may mark a listener ([`fsocket_proto::request::Brief`]): each change has all libraries look
//! through the registry.

use std::time::{Duration, Instant};

/// So many at once. A server of short and of long connections in turn marks less often (ADR 53).
const AT_ONCE: u32 = 16;
/// And one more after each such time.
const EACH: Duration = Duration::from_millis(250);

pub struct Marks {
    left: u32,
    since: Instant,
}

impl Marks {
    pub fn new(now: Instant) -> Marks {
        Marks { left: AT_ONCE, since: now }
    }

    /// Once more?
    pub fn take(&mut self, now: Instant) -> bool {
        let more = now.saturating_duration_since(self.since).as_millis() / EACH.as_millis();
        if more > 0 {
            self.left = self.left.saturating_add(more.min(AT_ONCE.into()) as u32).min(AT_ONCE);
            self.since = now;
        }
        let may = self.left > 0;
        self.left -= u32::from(may);
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_at_once_and_few_after_that() {
        let start = Instant::now();
        let mut marks = Marks::new(start);
        let mut took = |now| (0..100).filter(|_| marks.take(now)).count() as u32;
        assert_eq!(took(start), AT_ONCE);
        assert_eq!(took(start + EACH / 2), 0);
        assert_eq!(took(start + 3 * EACH), 3);
        assert_eq!(took(start + 1000 * EACH), AT_ONCE);
        assert_eq!(took(start), 0, "time goes back");
    }
}
