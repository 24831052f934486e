//! Requests of the monitor that arrive while locks may be held. The receiver only notes them. A
//! thread that holds no lock answers them later.

use crate::lock::Lock;
use core::sync::atomic::{AtomicU32, Ordering};

pub struct Mailbox<T, const ROOM: usize> {
    requests: Lock<[Option<T>; ROOM]>,
    /// The number of noted requests. Changed under the lock.
    waiting: AtomicU32,
}

impl<T: Copy, const ROOM: usize> Mailbox<T, ROOM> {
    #[allow(clippy::new_without_default)] // only ever in statics
    pub const fn new() -> Self {
        Mailbox { requests: Lock::new([None; ROOM]), waiting: AtomicU32::new(0) }
    }

    /// Notes a request. False: there is no room, or this is a signal handler that has interrupted
    /// a use of the mailbox.
    pub fn note(&self, request: T) -> bool {
        let Ok(mut requests) = self.requests.lock() else { return false };
        let Some(free) = requests.iter_mut().find(|r| r.is_none()) else { return false };
        *free = Some(request);
        // Release: with the acquire in `answer`, a thread that sees the number finds the request.
        self.waiting.fetch_add(1, Ordering::Release);
        true
    }

    /// Takes the noted requests out, one after the other, and passes them to `each`. Takes at most
    /// `ROOM` of them, so that a stream of requests cannot keep a thread from its own work.
    #[inline]
    pub fn answer(&self, each: impl FnMut(T)) {
        if self.waiting.load(Ordering::Acquire) != 0 {
            self.answer_all(each);
        }
    }

    #[cold]
    fn answer_all(&self, each: impl FnMut(T)) {
        (0..ROOM).map_while(|_| self.take()).for_each(each);
    }

    fn take(&self) -> Option<T> {
        let mut requests = self.requests.lock().ok()?;
        let request = requests.iter_mut().find_map(Option::take)?;
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        Some(request)
    }

    /// In a forked child: removes all requests, which were for the parent. `each` releases what
    /// came with a request.
    pub fn become_child(&self, each: impl FnMut(T)) {
        if self.waiting.load(Ordering::Relaxed) == 0 && !self.requests.is_held() {
            return;
        }
        if self.requests.reset_after_fork() {
            // A request may be written only partly.
            if let Ok(mut requests) = self.requests.lock() {
                requests.fill(None);
            }
        }
        core::iter::from_fn(|| self.take()).for_each(each);
        self.waiting.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_request_is_handed_out_once_and_none_beyond_the_room() {
        let m: Mailbox<u32, 3> = Mailbox::new();
        m.answer(|r| panic!("{r} was never noted"));
        assert!([1, 2, 3].iter().all(|r| m.note(*r)));
        assert!(!m.note(4), "no room");
        let (mut sum, mut n) = (0, 0);
        m.answer(|r| {
            sum += r;
            n += 1;
            // A new request may come while this thread answers.
            assert!(n > 1 || m.note(5));
        });
        assert_eq!(n, 3, "as many as there is room for, then the rest another time");
        m.answer(|r| sum += r);
        m.answer(|r| panic!("{r} twice"));
        assert_eq!(sum, 11);
    }

    #[test]
    fn a_child_answers_nothing_also_if_somebody_was_at_it() {
        let m: Mailbox<u32, 3> = Mailbox::new();
        assert!(m.note(1) && m.note(2));
        let mut dropped = 0;
        m.become_child(|r| dropped += r);
        assert_eq!(dropped, 3);
        assert!(m.note(3));
        core::mem::forget(m.requests.lock());
        m.become_child(|r| panic!("{r} may be half of one"));
        m.answer(|r| panic!("{r} was the parent's"));
        assert!(m.note(4));
    }

    #[test]
    fn a_handler_on_top_of_a_look_is_turned_away() {
        let m: Mailbox<u32, 3> = Mailbox::new();
        let look = m.requests.lock();
        assert!(!m.note(1));
        drop(look);
        assert!(m.note(1));
    }
}
