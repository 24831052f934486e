//! Requests of the monitor's that come while anything may be locked: they are noted, and answered
//! where nothing is.

use crate::lock::Lock;
use core::sync::atomic::{AtomicU32, Ordering};

pub struct Mailbox<T, const ROOM: usize> {
    requests: Lock<[Option<T>; ROOM]>,
    /// How many there are; changed under the lock.
    waiting: AtomicU32,
}

impl<T: Copy, const ROOM: usize> Mailbox<T, ROOM> {
    #[allow(clippy::new_without_default)] // only ever in statics
    pub const fn new() -> Self {
        Mailbox { requests: Lock::new([None; ROOM]), waiting: AtomicU32::new(0) }
    }

    /// False: there is no room, or this is a signal handler on top of a look into the mailbox.
    pub fn note(&self, request: T) -> bool {
        let Ok(mut requests) = self.requests.lock() else { return false };
        let Some(free) = requests.iter_mut().find(|r| r.is_none()) else { return false };
        *free = Some(request);
        // Release: with the acquire in `answer`, who sees the number finds the request.
        self.waiting.fetch_add(1, Ordering::Release);
        true
    }

    /// Takes out what was noted, one after the other. Not more than there is room for: a
    /// thread that is asked all the time has other things to do, too.
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

    /// In a forked child: what was asked was the parent. `each` drops what came with a request.
    pub fn become_child(&self, each: impl FnMut(T)) {
        if self.waiting.load(Ordering::Relaxed) == 0 && !self.requests.is_held() {
            return;
        }
        if self.requests.reset_after_fork() {
            // A request may have been written half.
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
            // The thread that answers may be asked meanwhile.
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
