//! Two processes on each side of a connection take the steps of the protocol in random orders, with the real words and the
//! real decisions. In each order all four come to the kernel, and none resets the connection. (What the memory model adds, the
//! models of the crate `ring` check.)

extern crate std;

use super::*;
use crate::channel::Dir;
use crate::flags::Flags;
use crate::half::Half;
use core::sync::atomic::AtomicU32;
use std::vec::Vec;

/// Orders that are tried.
const WALKS: u64 = 20_000;
/// Steps after which a walk hangs.
const STEPS: u32 = 20_000;

struct Words {
    dirs: [Dir; 2],
    groups: [Flags; 2],
    halves: [Half; 2],
    switching: AtomicU32,
}

enum At<'a> {
    Idle,
    Claimed,
    Stopped(Stopped<'a>),
    Announced(Announced<'a>),
    Looked(Looked<'a>),
    Follows(Follower),
    HasEnd,
    InKernel,
}

struct Process<'a> {
    words: &'a Words,
    side: usize,
    at: At<'a>,
}

/// Numbers below `n`, evenly enough.
fn random(seed: &mut u64, n: u64) -> u64 {
    *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    (*seed >> 33) % n
}

impl<'a> Process<'a> {
    fn state(&self) -> PathState {
        let peer = PeerStatus::look(&self.words.dirs[1 - self.side].prod);
        PathState::of(None, self.words.groups[self.side].look(), peer)
    }

    fn idle(&mut self, seed: &mut u64) -> At<'a> {
        let leaves = random(seed, 4) == 0;
        let event = if leaves { Event::Leave } else { Event::Call { waits: random(seed, 2) == 0 } };
        match self.state().next(event) {
            Next::Move if claim(&self.words.switching, false) => At::Claimed,
            Next::Follow => At::Follows(Follower::Begins),
            Next::Stay | Next::Later | Next::Move => At::Idle,
            next => panic!("{next:?}"),
        }
    }

    fn follows(&mut self, at: Follower) -> At<'a> {
        let (own, peer) = (&self.words.groups[self.side], &self.words.dirs[1 - self.side]);
        match at.next(self.state()) {
            Step::AwaitGroup if group_moves(own) => At::Follows(at),
            Step::AwaitGroup => At::Follows(Follower::GroupIsLate),
            Step::AwaitPeer if PeerStatus::look(&peer.prod).is_moving() => At::Follows(at),
            Step::AwaitPeer => At::Follows(Follower::PeerIsLate),
            Step::Claim { .. } => At::HasEnd,
            step => panic!("{step:?} in {:?}", self.state()),
        }
    }

    fn step(&mut self, seed: &mut u64) {
        let (words, side) = (self.words, self.side);
        self.at = match core::mem::replace(&mut self.at, At::Idle) {
            At::Idle => self.idle(seed),
            // The monitor cannot make the ends.
            At::Claimed if random(seed, 4) == 0 => {
                unclaim(&words.switching);
                At::Idle
            }
            At::Claimed => {
                let own = Own { group: &words.groups[side], dir: &words.dirs[side], tx: &words.halves[side] };
                own.stop().map_or(At::Idle, At::Stopped)
            }
            At::Stopped(stopped) => At::Announced(stopped.announce(&words.dirs[1 - side])),
            At::Announced(announced) => At::Looked(announced.look(&Fenced::after(|| ()))),
            At::Looked(looked) => {
                let _ = looked.finish(random(seed, 2) == 0);
                At::Idle
            }
            At::Follows(at) => self.follows(at),
            At::HasEnd => {
                match Follower::HasEnd.next(self.state()) {
                    Step::Install => {}
                    Step::Resend => followed(&words.groups[side]),
                    step => panic!("{step:?} in {:?}", self.state()),
                }
                At::InKernel
            }
            At::InKernel => At::InKernel,
        };
    }
}

#[test]
fn every_process_comes_to_the_kernel() {
    for walk in 0..WALKS {
        let mut seed = walk;
        // SAFETY: atomics only; zero is valid.
        let words: Words = unsafe { core::mem::zeroed() };
        let mut processes: Vec<_> = (0..4).map(|n| Process { words: &words, side: n % 2, at: At::Idle }).collect();
        let mut steps = 0;
        while processes.iter().any(|p| !matches!(p.at, At::InKernel)) {
            let n = random(&mut seed, 4) as usize;
            processes[n].step(&mut seed);
            steps += 1;
            assert!(steps < STEPS, "walk {walk} does not end");
        }
        let moved = words.dirs.iter().filter(|dir| PeerStatus::look(&dir.prod).has_moved()).count();
        assert_eq!(moved, 1, "walk {walk}: one side moves, the other one follows");
    }
}
