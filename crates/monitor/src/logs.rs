//! Limits what is written to the log: users can cause log lines at any rate.

use crate::rates::Rates;
use std::cell::Cell;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tracing::callsite::Identifier;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

/// Lines of one kind, caused by one user, that may be written without a pause.
const AT_ONCE: u32 = 20;
/// Beyond that, one line may be written for each interval of this length.
const EACH: Duration = Duration::from_secs(1);
/// The same limits for all kinds and users together.
const AT_ONCE_ALL: u32 = 500;
const EACH_ALL: Duration = Duration::from_millis(20);

thread_local! {
    /// The user whose request this thread handles.
    static USER: Cell<Option<u32>> = const { Cell::new(None) };
}

/// Sets the user for whose request this thread works from here on.
pub fn for_user(uid: Option<u32>) {
    USER.set(uid);
}

struct State {
    kinds: Rates<(Identifier, Option<u32>)>,
    all: Rates<()>,
    left_out: u64,
}

/// Leaves out lines of the log that come too often. Lines that an operator has asked for (debug,
/// trace) are not limited.
pub struct Limit(Mutex<State>);

impl Default for Limit {
    fn default() -> Limit {
        let (kinds, all) = (Rates::new(AT_ONCE, EACH), Rates::new(AT_ONCE_ALL, EACH_ALL));
        Limit(Mutex::new(State { kinds, all, left_out: 0 }))
    }
}

impl Limit {
    /// Whether a line of this kind is written now, and how many were left out before it.
    fn admits(&self, kind: Identifier, now: Instant) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.kinds.take((kind, USER.get()), now) && state.all.take((), now) {
            return Some(std::mem::take(&mut state.left_out));
        }
        state.left_out += 1;
        None
    }
}

impl<S: Subscriber> Layer<S> for Limit {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        if *event.metadata().level() > Level::INFO {
            return true;
        }
        let left_out = self.admits(event.metadata().callsite(), Instant::now());
        if left_out.is_some_and(|n| n > 0) {
            // (This warning passes through the same limit.)
            tracing::warn!(lines = left_out, "lines were left out of the log: too many of one kind");
        }
        left_out.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::Arc;
    use tracing_subscriber::prelude::*;

    struct Counting(Arc<AtomicU64>);

    impl<S: Subscriber> Layer<S> for Counting {
        fn on_event(&self, _: &Event<'_>, _: Context<'_, S>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_user_has_few_lines_of_a_kind_and_others_have_theirs() {
        let written = Arc::new(AtomicU64::new(0));
        let all = tracing_subscriber::registry().with(Limit::default()).with(Counting(written.clone()));
        tracing::subscriber::with_default(all, || {
            let say = |uid| {
                for_user(uid);
                (0..1000).for_each(|_| tracing::warn!("too many processes"));
                for_user(None);
                written.swap(0, Ordering::Relaxed)
            };
            let burst = u64::from(AT_ONCE);
            assert!((burst..burst + 3).contains(&say(Some(1))));
            assert!((burst..burst + 3).contains(&say(Some(2))));
            // Lines of another kind are still written for this user.
            for_user(Some(1));
            tracing::info!("another kind");
            for_user(None);
            assert!((1..3).contains(&written.swap(0, Ordering::Relaxed)));
            (0..100).for_each(|_| tracing::debug!("asked for"));
            assert_eq!(written.load(Ordering::Relaxed), 100);
        });
    }
}
