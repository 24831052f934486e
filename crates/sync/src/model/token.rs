//! Tokens: mutual exclusion, and every thread gets in eventually.

use super::every_way;
use crate::atomic::{AtomicU64, Ordering};
use crate::token::{enter, enter_on_credit, on_credit, Env, Words};
use loom::cell::UnsafeCell;
use loom::sync::Arc;

#[derive(Default)]
struct Token {
    owner: AtomicU64,
    in_flight: AtomicU64,
    shared: AtomicU64,
    position: AtomicU64,
    credit: AtomicU64,
    /// An incorrect version: the owner keeps its credit when another thread takes over.
    kept: bool,
    /// The data that the token protects. Loom fails on two accesses at once, and on one that does
    /// not happen after the one before.
    protected: UnsafeCell<u32>,
}
impl Words for Token {
    fn owner(&self) -> &AtomicU64 {
        &self.owner
    }
    fn in_flight(&self) -> &AtomicU64 {
        &self.in_flight
    }
    fn shared(&self) -> &AtomicU64 {
        &self.shared
    }
    fn position(&self) -> &AtomicU64 {
        &self.position
    }
    fn withdraw(&self) {
        if !self.kept {
            self.credit.store(0, Ordering::Relaxed);
        }
    }
}

struct Sys;
impl Env for Sys {
    fn heavy_fence() {
        loom::sync::atomic::fence(loom::sync::atomic::Ordering::SeqCst);
    }
    fn pause(_: u32) {
        loom::thread::yield_now();
    }
}

/// A system without `membarrier`.
struct Unfenced;
impl Env for Unfenced {
    fn heavy_fence() {}
    fn pause(_: u32) {
        loom::thread::yield_now();
    }
}

impl Token {
    /// The operation of a thread that is inside.
    fn act(&self) {
        // SAFETY: the property under test; loom checks it.
        self.protected.with_mut(|p| unsafe { *p += 1 });
    }

    /// Moves the position, as the last step inside.
    fn go_on(&self) {
        self.position.store(self.position.load(Ordering::Relaxed) + 8, Ordering::Release);
    }

    fn operate<E: Env>(&self, me: u64) {
        let Ok(_inside) = enter::<E, _>(self, me) else { panic!("no signal handlers here") };
        self.act();
        self.go_on();
    }

    /// Called by thread 16, the first owner. It operates on credit if it has any; otherwise it
    /// enters normally and gives itself credit.
    fn operate_as_owner(&self, how: OnCredit) {
        let credit = || self.credit.load(Ordering::Relaxed) != 0;
        match how {
            OnCredit::Enter => {
                if let Some(_inside) = enter_on_credit(self) {
                    if credit() {
                        self.act();
                        self.go_on();
                        return;
                    }
                }
            }
            OnCredit::Move => {
                let from = self.position.load(Ordering::Relaxed);
                if let Some(inside) = on_credit(self, from, from + 8) {
                    if credit() {
                        inside.begin();
                        self.act();
                        self.position.store(from + 8, Ordering::Release);
                        return;
                    }
                }
            }
        }
        let Ok(_inside) = enter::<Sys, _>(self, 16) else { panic!("no signal handlers here") };
        if self.owner.load(Ordering::Relaxed) == 16 {
            self.credit.store(1, Ordering::Relaxed);
        }
        self.act();
        self.go_on();
    }
}

#[derive(Clone, Copy)]
enum OnCredit {
    Enter,
    Move,
}

/// The owner operates `times` more times while each of `others` threads operates once.
fn with_credit(how: OnCredit, kept: bool, times: u32, others: u64, preemptions: Option<usize>) {
    every_way(preemptions, move || {
        let t = Arc::new(Token { kept, ..Token::default() });
        t.operate_as_owner(how);
        let others: Vec<_> = (0..others)
            .map(|i| {
                let t = t.clone();
                loom::thread::spawn(move || t.operate::<Sys>(32 + 16 * i))
            })
            .collect();
        (0..times).for_each(|_| t.operate_as_owner(how));
        let all = 1 + times + others.len() as u32;
        others.into_iter().for_each(|o| o.join().unwrap());
        // SAFETY: all other threads have ended, so nothing writes the value.
        t.protected.with(|p| assert_eq!(unsafe { *p }, all));
    });
}

/// Thread `i` operates `times[i]` times. If `owned`, thread 0 becomes the owner before the others
/// exist.
fn run<E: Env>(owned: bool, times: &'static [u32], preemptions: Option<usize>) {
    every_way(preemptions, move || {
        let t = Arc::new(Token::default());
        if owned {
            t.operate::<E>(16);
        }
        let others: Vec<_> = (1..times.len())
            .map(|i| {
                let t = t.clone();
                loom::thread::spawn(move || (0..times[i]).for_each(|_| t.operate::<E>(16 * (i as u64 + 1))))
            })
            .collect();
        (0..times[0]).for_each(|_| t.operate::<E>(16));
        others.into_iter().for_each(|o| o.join().unwrap());
        let all = times.iter().sum::<u32>() + owned as u32;
        // SAFETY: all other threads have ended, so nothing writes the value.
        t.protected.with(|p| assert_eq!(unsafe { *p }, all));
    });
}

#[test]
fn owner_and_one_that_takes_over() {
    run::<Sys>(true, &[2, 2], Some(4));
}

#[test]
fn owner_on_credit_and_one_that_takes_over() {
    with_credit(OnCredit::Enter, false, 3, 1, Some(4));
}

#[test]
fn owner_on_credit_and_two_that_take_over() {
    with_credit(OnCredit::Enter, false, 2, 2, Some(1));
}

#[test]
fn owner_that_moves_and_one_that_takes_over() {
    with_credit(OnCredit::Move, false, 3, 1, Some(4));
}

#[test]
fn owner_that_moves_and_two_that_take_over() {
    with_credit(OnCredit::Move, false, 2, 2, Some(1));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn credit_must_be_withdrawn() {
    with_credit(OnCredit::Enter, true, 1, 1, None);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn credit_must_be_withdrawn_from_who_moves() {
    with_credit(OnCredit::Move, true, 1, 1, None);
}

/// The first owner gives the token back while the others operate `times` times each.
fn given_back(others: u64, times: u32, preemptions: Option<usize>) {
    every_way(preemptions, move || {
        let t = Arc::new(Token::default());
        t.operate_as_owner(OnCredit::Enter);
        let others: Vec<_> = (0..others)
            .map(|i| {
                let t = t.clone();
                loom::thread::spawn(move || (0..times).for_each(|_| t.operate::<Sys>(32 + 16 * i)))
            })
            .collect();
        let Ok(inside) = enter::<Sys, _>(&*t, 16) else { panic!("no signal handlers here") };
        t.withdraw();
        t.act();
        t.go_on();
        inside.give_back(16);
        let all = 2 + times * others.len() as u32;
        others.into_iter().for_each(|o| o.join().unwrap());
        // SAFETY: all other threads have ended, so nothing writes the value.
        t.protected.with(|p| assert_eq!(unsafe { *p }, all));
    });
}

#[test]
fn given_back_while_one_comes() {
    given_back(1, 1, None);
}

#[test]
fn given_back_while_one_comes_twice() {
    given_back(1, 2, Some(3));
}

#[test]
fn given_back_while_two_come() {
    given_back(2, 1, Some(1));
}

#[test]
fn two_come_first() {
    run::<Sys>(false, &[2, 1], Some(4));
}

#[test]
fn two_take_over_at_once() {
    run::<Sys>(true, &[1, 1, 1], Some(1));
}

#[test]
fn three_come_first() {
    run::<Sys>(false, &[1, 1, 1], Some(1));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn needs_the_heavy_fence() {
    run::<Unfenced>(true, &[1, 1], None);
}
