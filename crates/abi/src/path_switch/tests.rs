//! Every word that the two sides can have, and the tables of the documentation.

extern crate std;

use super::*;
use crate::channel::status::{CLOSED, FIN, FOR_NOW, MIGRATED, MIGRATING, RST, SHUT_BOTH};
use crate::channel::{Dir, Migrated, RING_CAP};
use crate::flags::{FlagSet, Flags};
use crate::half::Half;
use core::sync::atomic::{AtomicU32, Ordering};
use std::collections::BTreeSet;
use std::format;
use std::string::{String, ToString};
use std::vec::Vec;

use Party::{Group, Peer};

const STATES: [PathState; 12] = [
    PathState::Rings,
    PathState::Moving(Peer),
    PathState::Failed,
    PathState::Moved(Peer),
    PathState::Moving(Group),
    PathState::Moved(Group),
    PathState::Reset(None),
    PathState::Reset(Some(Peer)),
    PathState::Reset(Some(Group)),
    PathState::Draining(FD),
    PathState::Kernel(FD),
    PathState::Closed,
];
const FD: i32 = 7;

fn dir() -> Dir {
    // SAFETY: a Dir is atomics only; zero is valid.
    unsafe { core::mem::zeroed() }
}
fn at() -> Migrated {
    // SAFETY: atomics only; zero is valid.
    unsafe { core::mem::zeroed() }
}
fn word() -> Flags {
    // SAFETY: an atomic; zero is valid.
    unsafe { core::mem::zeroed() }
}

/// The values that the methods of a word can give it, in every order.
fn words() -> Vec<FlagSet> {
    let methods: [fn(&Flags); 5] = [
        |f| {
            f.begin_switch();
        },
        Flags::end_switch,
        Flags::follow,
        Flags::drain,
        |f| {
            f.poison();
        },
    ];
    let mut all = BTreeSet::from([0]);
    loop {
        let before = all.len();
        for bits in all.clone() {
            for method in methods {
                let f = word();
                f.set(FlagSet::from_bits(bits));
                method(&f);
                all.insert(f.get().bits());
            }
        }
        if all.len() == before {
            return all.into_iter().map(FlagSet::from_bits).collect();
        }
    }
}

/// Each word, each status, with and without a kernel socket.
fn every(mut f: impl FnMut(Option<i32>, FlagSet, PeerStatus)) {
    for end in [None, Some(FD)] {
        for group in words() {
            (0..=u8::MAX).for_each(|bits| f(end, group, PeerStatus::from_bits(bits.into())));
        }
    }
}

#[test]
fn every_word_has_one_state() {
    let mut seen = BTreeSet::new();
    every(|end, group, peer| {
        let state = PathState::of(end, group, peer);
        seen.insert(format!("{state:?}"));
        assert_eq!(in_rings(end, group, peer), state.in_rings());
        assert!(!(state.in_rings() && state.is_pending()));
        // The same by the words, one by one.
        let moving = peer.has(MIGRATING) && !peer.has(MIGRATED | CLOSED | RST);
        match state {
            PathState::Reset(_) => assert!(group.is_poisoned()),
            PathState::Draining(fd) => assert_eq!((end, group.is_poisoned()), (Some(fd), false)),
            PathState::Moving(Group) | PathState::Moved(Group) => assert!(group.has_left() && end.is_none()),
            PathState::Moving(Peer) => assert!(moving && !group.has_left()),
            PathState::Moved(Peer) => assert!(peer.has(MIGRATED) && !group.has_left()),
            PathState::Failed => assert!(peer.has(MIGRATING) && peer.has(CLOSED | RST) && !peer.has(MIGRATED)),
            PathState::Rings => assert!(!group.has_left() && !peer.has(MIGRATING | MIGRATED)),
            PathState::Kernel(_) | PathState::Closed => panic!("the words do not say this"),
        }
        // A side that sends or receives on credit looks at less: it never goes past a switch.
        if group.sends_plainly() && peer.sends_plainly() && end.is_none() {
            assert!(matches!(state, PathState::Rings | PathState::Moved(Peer)), "{state:?}: {group:?} {peer:?}");
        }
        if group.receives_plainly() {
            assert!(!matches!(state, PathState::Moving(Group) | PathState::Reset(_)), "{state:?}");
        }
    });
    let possible = STATES.iter().filter(|s| !matches!(s, PathState::Kernel(_) | PathState::Closed));
    assert_eq!(seen, possible.map(|s| format!("{s:?}")).collect());
}

/// The cells of a table: the first column, and the others by the names in the head.
fn table(text: &str, first: &str) -> Vec<(String, Vec<(String, String)>)> {
    let cells = |line: &str| -> Vec<String> {
        let line = line.trim_start_matches('/').trim_start_matches('!').trim().trim_matches('|');
        line.split('|').map(|cell| cell.trim().to_string()).collect()
    };
    let mut lines = text.lines().skip_while(|line| !line.contains(first));
    let head = cells(lines.next().expect("the table"));
    let rows = lines.skip(1).take_while(|line| line.contains('|'));
    let row = |line: &str| {
        let row = cells(line);
        (row[0].clone(), head[1..].iter().cloned().zip(row[1..].iter().cloned()).collect())
    };
    rows.map(row).collect()
}

/// A state as the tables write it.
fn name(state: PathState) -> String {
    format!("`{state:?}`").replace(&format!("({FD})"), "(fd)")
}

#[test]
fn the_table_of_events_is_what_happens() {
    let rows = table(include_str!("../path_switch.rs"), "| state | Wait |");
    let mut seen = 0;
    for state in STATES {
        let shown = match state {
            PathState::Reset(Some(_)) => "`Reset(Some(_))`".to_string(),
            state => name(state),
        };
        let (_, row) = rows.iter().find(|(first, _)| *first == shown).unwrap_or_else(|| panic!("no row {shown}"));
        for (event, cell) in row {
            let event = match event.as_str() {
                "Wait" => Event::Call { waits: true },
                "Call" => Event::Call { waits: false },
                "Sent" => Event::Sent,
                "Look" => Event::Look,
                "Shutdown" => Event::Shutdown,
                "Close" => Event::Close,
                "Leave" => Event::Leave,
                other => panic!("{other}"),
            };
            let next = match state.next(event) {
                Next::Stay => "",
                Next::Follow => "Follow",
                Next::Later => "Later",
                Next::Move => "Move",
                Next::Both(FD) => "Both",
                Next::Kernel(FD) => "Kernel",
                other => panic!("{other:?}"),
            };
            assert_eq!(cell, next, "{shown} on {event:?}");
            seen += 1;
        }
    }
    assert_eq!(seen, STATES.len() * 7);
}

#[test]
fn the_table_of_a_follower_is_what_happens() {
    let rows = table(include_str!("follower.rs"), "| state | Begins |");
    let mut seen = 0;
    for (shown, row) in &rows {
        let state = STATES.into_iter().find(|s| name(*s) == *shown).unwrap_or_else(|| panic!("no state {shown}"));
        for (at, cell) in row {
            let at = match at.as_str() {
                "Begins" => Follower::Begins,
                "GroupIsLate" => Follower::GroupIsLate,
                "PeerIsLate" => Follower::PeerIsLate,
                "Refused" => Follower::Refused,
                "HasEnd" => Follower::HasEnd,
                other => panic!("{other}"),
            };
            let step = match cell.as_str() {
                "AwaitGroup" => Step::AwaitGroup,
                "AwaitPeer" => Step::AwaitPeer,
                "Claim" => Step::Claim { pours: false },
                "Pour" => Step::Claim { pours: true },
                "Resend" => Step::Resend,
                "Install" => Step::Install,
                "Drain" => Step::Drain(FD),
                "Done" => Step::Done(FD),
                "Lost" => Step::Lost,
                "Fail" => Step::Fail,
                other => panic!("{other}"),
            };
            assert_eq!(at.next(state), step, "{shown}, {at:?}");
            seen += 1;
        }
    }
    assert_eq!((rows.len(), seen), (STATES.len(), STATES.len() * 5));
}

/// No state makes a follower wait twice for the same party, ask the monitor twice, or go on for ever.
#[test]
fn a_follower_comes_to_an_end() {
    for state in STATES {
        let (mut at, mut steps) = (Follower::Begins, 0);
        loop {
            at = match at.next(state) {
                Step::AwaitGroup => Follower::GroupIsLate,
                Step::AwaitPeer => Follower::PeerIsLate,
                Step::Claim { .. } => Follower::Refused,
                _ => break,
            };
            steps += 1;
            assert!(steps <= 3, "{state:?}");
        }
    }
}

/// The two sides of a connection.
struct Both {
    dirs: [Dir; 2],
    groups: [Flags; 2],
    halves: [Half; 2],
    switching: AtomicU32,
}

impl Both {
    fn new() -> Both {
        Both {
            dirs: [dir(), dir()],
            groups: [word(), word()],
            halves: Default::default(),
            switching: AtomicU32::new(0),
        }
    }
    fn state(&self, side: usize) -> PathState {
        PathState::of(None, self.groups[side].look(), PeerStatus::look(&self.dirs[1 - side].prod))
    }
    fn own(&self, side: usize) -> Own<'_> {
        Own { group: &self.groups[side], dir: &self.dirs[side], tx: &self.halves[side] }
    }
    fn end(&self, side: usize, how: u32) {
        self.dirs[side].prod.status.fetch_or(how, Ordering::Release);
    }
}

/// The arrows of the diagram.
#[test]
fn steps_lead_to_the_states_drawn() {
    let b = Both::new();
    b.halves[0].set_limit(99);
    b.halves[0].set_credit(91);
    assert!(claim(&b.switching, false) && !claim(&b.switching, false) && claim(&b.switching, true));
    let stopped = b.own(0).stop().expect("the first");
    assert!(b.own(0).stop().is_none(), "another process of the fork group");
    assert_eq!((b.state(0), b.state(1)), (PathState::Moving(Group), PathState::Rings));
    let room = (b.halves[0].limit(), b.halves[0].credit());
    assert_eq!(room, (0, 0), "no thread sends without a look");
    let announced = stopped.announce(&b.dirs[1]);
    assert_eq!((b.state(0), b.state(1)), (PathState::Moving(Group), PathState::Moving(Peer)));
    assert_ne!(b.dirs[1].want_data.armed(), 0);
    let finished = announced.look(&Fenced::after(|| ())).finish(true);
    assert_eq!((b.state(0), b.state(1)), (PathState::Moved(Group), PathState::Moved(Peer)));
    assert!(b.groups[0].get().is_drained() && PeerStatus::look(&b.dirs[0].prod).comes_back());
    b.end(1, FIN);
    let (before, now) = finished.look_back(&Fenced::after(|| ()));
    assert!(!before.has(FIN) && now.has(FIN), "an end that came meanwhile");
    followed(&b.groups[1]);
    assert_eq!(b.state(1), PathState::Moved(Group));
    assert!(!b.groups[1].get().is_drained(), "it reads the ring first");
    b.groups[1].poison();
    assert_eq!(b.state(1), PathState::Reset(Some(Group)));
}

#[test]
fn a_mover_that_ends_is_not_waited_for() {
    for how in [FIN | CLOSED, RST] {
        let b = Both::new();
        let _announced = b.own(0).stop().unwrap().announce(&b.dirs[1]);
        b.end(0, how);
        assert_eq!(b.state(1), PathState::Failed);
        assert_eq!(Follower::Begins.next(b.state(1)), Step::Fail);
    }
    // A side that closes when it is done is followed.
    let b = Both::new();
    let _ = b.own(0).stop().unwrap().announce(&b.dirs[1]).look(&Fenced::after(|| ())).finish(false);
    leave(&b.dirs[0].prod, true);
    assert_eq!(b.state(1), PathState::Moved(Peer));
    assert!(!PeerStatus::look(&b.dirs[0].prod).is_gone());
    let b = Both::new();
    let _ = announce(&b.dirs[0], &b.dirs[1]).look(&Fenced::after(|| ())).finish(false);
    assert_eq!(b.state(1), PathState::Moved(Peer));
}

#[test]
fn what_remains_is_what_tcp_would_send() {
    let of = |bits, refused| {
        let r = Remains::of(PeerStatus::from_bits(bits), refused);
        (r.gone, r.fin, r.reset)
    };
    assert_eq!(of(0, false), (false, false, false));
    assert_eq!(of(FIN, false), (false, true, false));
    // Its end is closed, which sends the FIN.
    assert_eq!(of(FIN | CLOSED, false), (true, false, false));
    // The broken pipe.
    assert_eq!(of(FIN | CLOSED, true), (true, true, true));
    assert_eq!(of(RST | CLOSED, false), (true, false, true));
    assert_eq!(of(FIN | RST | CLOSED, false), (true, true, true));
    assert_eq!(of(FIN | SHUT_BOTH | RST, false), (false, true, false));
    assert_eq!(of(FIN | CLOSED | MIGRATING | MIGRATED, false), (false, true, false));
}

#[test]
fn a_position_outside_of_the_ring_is_refused() {
    let (d, a) = (dir(), at());
    let resume = |head, base, limit| {
        d.cons.head.store(head, Ordering::Relaxed);
        leave_at(&a, base, limit);
        resume_at(&d, &a).map(|h| h.pos())
    };
    let cap = RING_CAP as u64;
    assert_eq!(resume(cap, cap, 0), Some(cap));
    assert_eq!(resume(cap + 24, cap, 16), Some(cap + 24));
    assert_eq!(resume(cap, cap + 8, 0), None);
    assert_eq!(resume(cap + 24, cap, cap), None);
    assert_eq!(resume(cap, cap, cap), Some(cap));
    assert_eq!(resume(0, u64::MAX, 0), None);
}

#[test]
fn a_follower_skips_what_it_has_read() {
    let (group, a, rx) = (word(), at(), Half::default());
    let b = Both::new();
    rx.set_bytes(110);
    let skip = |first, bytes, carries: bool| {
        let looked = b.own(0).stop().map(|s| s.announce(&b.dirs[1]).look(&Fenced::after(|| ())));
        let looked = looked.unwrap_or_else(|| announce(&b.dirs[0], &b.dirs[1]).look(&Fenced::after(|| ())));
        if carries {
            looked.carried(&a, first, bytes);
        }
        let _ = looked.finish(false);
        Skip::begin(&group, PeerStatus::look(&b.dirs[0].prod), &a, &rx)
    };
    assert_eq!(skip(100, 20, false), Skip::Bytes(0));
    assert!(!group.get().is_drained());
    assert_eq!(skip(120, 20, true), Skip::Hostile, "more than it has read");
    assert_eq!(skip(100, 5, true), Skip::Hostile, "less than it has read");
    assert_eq!(skip(100, RING_CAP as u64 + 1, true), Skip::Hostile);
    assert!(!group.get().is_drained());
    assert_eq!(skip(100, 20, true), Skip::Bytes(10));
    assert!(group.get().is_drained());
    assert_eq!(skip(100, 10, true), Skip::Bytes(10), "all of it");
    assert_eq!(skip(100, RING_CAP as u64, true), Skip::Bytes(10), "a full ring");
}

#[test]
fn what_a_side_publishes_is_not_nonsense() {
    let b = Both::new();
    let check = |what: &str| {
        let peer = PeerStatus::look(&b.dirs[0].prod);
        assert!(!peer.is_nonsense(false) && !peer.is_nonsense(true), "{what}: {peer:?}");
    };
    check("new");
    let looked = b.own(0).stop().unwrap().announce(&b.dirs[1]).look(&Fenced::after(|| ()));
    check("announced");
    looked.carried(&at(), 0, 8);
    check("carried");
    let _ = looked.finish(true);
    check("finished");
    leave(&b.dirs[0].prod, true);
    check("left");
    for bits in [1 << 8, 1 << 31, CLOSED, CLOSED | SHUT_BOTH, CLOSED | MIGRATING] {
        assert!(PeerStatus::from_bits(bits).is_nonsense(false), "{bits}");
    }
    let shut = PeerStatus::from_bits(SHUT_BOTH);
    assert!(shut.is_nonsense(false) && !shut.is_nonsense(true));
    assert!(!PeerStatus::from_bits(FOR_NOW | MIGRATING | MIGRATED).is_nonsense(false));
}
