//! The path switch ([`fsocket_abi::path_switch`]): its production code, with loom's atomics and a membarrier of the model. In
//! place of the monitor and the kernel there is a list of bytes, the kernel socket of the side that reads them.

use super::pipe::{byte, Pipe};
use crate::*;
use fsocket_abi::channel::{status, Migrated};
use fsocket_abi::flags::Flags;
use fsocket_abi::path_switch::{
    claim, closes_beside_mover, followed, leave_at, resume_at, Event, Fenced, Follower, Looked, Next, Own, Party,
    PathState, PeerStatus, Skip, Step,
};
use fsocket_sync::model::{every_way, membarrier};
use loom::sync::{Arc, Mutex};

/// One direction of a connection, from the *sender* to the *reader*, and what they publish.
struct Connection {
    pipe: Pipe,
    /// From the reader to the sender. Only its status and its position are used.
    back: Dir,
    back_tx: Half,
    sender: Flags,
    reader: Flags,
    /// Where the reader has left the ring.
    left: Migrated,
    /// What the sender has carried.
    carried: Migrated,
    kernel: Mutex<Vec<u8>>,
    /// The sender has come for its end.
    poured: Mutex<bool>,
}

impl Connection {
    fn new() -> Self {
        Connection {
            pipe: Pipe::new(),
            back: Dir::default(),
            back_tx: Half::default(),
            sender: Flags::default(),
            reader: Flags::default(),
            left: Migrated::default(),
            carried: Migrated::default(),
            kernel: Mutex::new(Vec::new()),
            poured: Mutex::new(false),
        }
    }
    /// As the sender sees it.
    fn at_sender(&self) -> PathState {
        PathState::of(None, self.sender.look(), PeerStatus::look(&self.back.prod))
    }
    fn at_reader(&self) -> PathState {
        PathState::of(None, self.reader.look(), PeerStatus::look(&self.pipe.dir.prod))
    }

    /// Take what is in the ring from where `h` stands, into the kernel.
    fn pour(&self, dir: &Dir, h: &Half) {
        loop {
            let mut b = [0; 64];
            // SAFETY: `b` has 64 bytes; the other consumer is done, or `dir` and `h` are copies of its own.
            let n = unsafe { recv(self.pipe.ring(), dir, h, Some(b.as_mut_ptr()), b.len(), false) };
            match n.expect("an honest sender") {
                0 => return,
                n => self.kernel.lock().unwrap().extend_from_slice(&b[..n]),
            }
        }
    }

    /// The reader moves. `heavy`: its fence.
    fn reader_moves(&self, heavy: fn()) {
        let own = Own { group: &self.reader, dir: &self.back, tx: &self.back_tx };
        let stopped = own.stop().expect("no other process has this side");
        let looked = stopped.announce(&self.pipe.dir).look(&Fenced::after(heavy));
        let rx = &self.pipe.rx;
        looked.leave_at(&self.left, rx.base(), rx.limit());
        // The monitor does this.
        let h = resume_at(&self.pipe.dir, &self.left).expect("an honest reader");
        self.pour(&self.pipe.dir, &h);
        looked.leave_at(&self.left, h.base(), h.limit());
        let finished = looked.finish(false);
        finished.look_back(&Fenced::after(heavy));
        self.pour_late();
    }
    /// The monitor again, after the mover's last look. A sender that has come for its end sends itself.
    fn pour_late(&self) {
        let poured = self.poured.lock().unwrap();
        if !*poured {
            let h = resume_at(&self.pipe.dir, &self.left).expect("an honest reader");
            self.pour(&self.pipe.dir, &h);
            leave_at(&self.left, h.base(), h.limit());
        }
    }

    /// The sender moves, and carries what the reader has not read.
    fn sender_moves(&self) {
        let own = Own { group: &self.sender, dir: &self.pipe.dir, tx: &self.pipe.tx };
        let stopped = own.stop().expect("no other process has this side");
        let looked = stopped.announce(&self.back).look(&Fenced::after(membarrier));
        self.carry(&looked);
        let _ = looked.finish(false);
    }
    /// As `carry` of the crate `migrate`.
    fn carry(&self, looked: &Looked) {
        let (r, dir, h) = (self.pipe.ring(), &self.pipe.dir, &self.pipe.tx);
        let Some(unread) = unread_records(r, dir, h).filter(|u| u.bytes > 0) else { return };
        let (copy, from) = (Half::default(), Dir::default());
        copy.set_pos(unread.pos);
        copy.set_base(unread.base);
        copy.set_limit(unread.limit);
        self.pour(&from, &copy);
        looked.carried(&self.carried, h.bytes().wrapping_sub(unread.bytes), unread.bytes);
    }

    /// Steps of a follower until it has its end. `state`: as its side sees it.
    fn claims_end(&self, peer: &Dir, state: impl Fn() -> PathState) {
        let mut at = Follower::Begins;
        loop {
            match at.next(state()) {
                Step::AwaitPeer => {
                    while PeerStatus::look(&peer.prod).is_moving() {
                        loom::thread::yield_now();
                    }
                    at = Follower::PeerIsLate;
                }
                Step::Claim { pours } => {
                    assert!(pours);
                    assert_eq!(Follower::HasEnd.next(state()), Step::Resend);
                    return;
                }
                step => panic!("{step:?} in {:?}", state()),
            }
        }
    }
    /// The sender follows: it sends again what came too late.
    fn sender_follows(&self) {
        self.claims_end(&self.back, || self.at_sender());
        *self.poured.lock().unwrap() = true;
        let h = resume_at(&self.pipe.dir, &self.left).expect("an honest reader");
        self.pour(&self.pipe.dir, &h);
        followed(&self.sender);
    }
    /// The reader follows: it skips what it has read of what the sender has carried. True: the ring is read first.
    fn reader_follows(&self) -> bool {
        self.claims_end(&self.pipe.dir, || self.at_reader());
        let peer = PeerStatus::look(&self.pipe.dir.prod);
        let Skip::Bytes(read) = Skip::begin(&self.reader, peer, &self.carried, &self.pipe.rx) else {
            panic!("an honest sender")
        };
        self.kernel.lock().unwrap().drain(..read as usize);
        followed(&self.reader);
        !self.reader.get().is_drained()
    }

    fn send(&self, at: usize, n: usize) {
        // As `send_fast`: hints that may be old.
        if self.sender.get().sends_plainly() && PeerStatus::hint(&self.back.prod).sends_plainly() {
            assert_eq!(self.pipe.offer(at, n), n);
            if self.pipe.dir.want_data.take() != 0 && self.at_sender().next(Event::Sent) == Next::Follow {
                self.sender_follows();
            }
            return;
        }
        assert_eq!(self.at_sender().next(Event::Call { waits: true }), Next::Follow);
        if self.at_sender() != PathState::Moved(Party::Group) {
            self.sender_follows();
        }
        self.kernel.lock().unwrap().extend((at..at + n).map(byte));
    }
}

/// `before` lies in the ring and `read` bytes of it are consumed when the
/// reader begins to move and the other side sends `messages`.
fn check(before: &'static [usize], read: usize, messages: &'static [usize], heavy: fn()) {
    every_way(3, move || {
        let c = Arc::new(Connection::new());
        let sent = fill(&c, before);
        let mut got = 0;
        while got < read {
            got += c.pipe.take(got, read - got);
        }
        let sender = {
            let c = c.clone();
            loom::thread::spawn(move || {
                messages.iter().fold(sent, |sent, &n| {
                    c.send(sent, n);
                    sent + n
                })
            })
        };
        c.reader_moves(heavy);
        let sent = sender.join().unwrap();
        // (No call of the sender comes after these.)
        assert!(c.kernel.lock().unwrap().len() >= sent - read, "the last record waits for a call of the sender");
        let kernel = c.kernel.lock().unwrap();
        assert!(kernel.iter().copied().eq((read..sent).map(byte)), "{kernel:x?} instead of {read}..{sent}");
    });
}

fn fill(c: &Connection, messages: &[usize]) -> usize {
    messages.iter().fold(0, |sent, &n| {
        assert_eq!(c.pipe.offer(sent, n), n);
        sent + n
    })
}

#[test]
fn empty_before() {
    check(&[], 0, &[8, 8], membarrier);
}

/// The mover stops in the middle of a record.
#[test]
fn half_a_record() {
    check(&[16], 5, &[8], membarrier);
}

/// Meanwhile the sender goes back to the start of the ring.
#[test]
fn rewind() {
    check(&[8, 8, 8], 24, &[8, 8], membarrier);
}

/// The mover's fence is needed.
#[test]
#[should_panic(expected = "the last record waits for a call of the sender")]
fn without_the_fence() {
    check(&[], 0, &[8], || ());
}

#[test]
fn unread_and_more() {
    check(&[8, 8], 8, &[12, 8], membarrier);
}

/// The sender carries what is unread while the reader reads up to `most` bytes, and follows at its next look.
fn check_carried(before: &'static [usize], most: usize) {
    every_way(3, move || {
        let c = Arc::new(Connection::new());
        let sent = fill(&c, before);
        let reader = {
            let c = c.clone();
            loom::thread::spawn(move || {
                let (mut read, mut follows) = (0, false);
                while read < most && !follows {
                    // As `recv_slow`: the ring first, whatever the path is.
                    read += c.pipe.take(read, most - read);
                    follows = c.at_reader().next(Event::Look) == Next::Follow;
                }
                (read, follows)
            })
        };
        c.sender_moves();
        let (mut read, _) = reader.join().unwrap();
        if c.reader_follows() {
            read += c.pipe.take(read, sent - read);
        }
        let kernel = c.kernel.lock().unwrap();
        assert!(kernel.iter().copied().eq((read..sent).map(byte)), "{kernel:x?} instead of {read}..{sent}");
    });
}

#[test]
fn carried() {
    check_carried(&[8, 8], 16);
}

#[test]
fn carried_from_the_middle_of_a_record() {
    check_carried(&[12, 8], 7);
}

/// Of a mover and a peer that closes at the same time, one sees the other.
#[test]
fn a_close_beside_a_mover() {
    every_way(None, || {
        let c = Arc::new(Connection::new());
        let closes = {
            let c = c.clone();
            loom::thread::spawn(move || {
                c.pipe.dir.prod.status.fetch_or(status::FIN | status::CLOSED, Ordering::Release);
                closes_beside_mover(&c.back.prod)
            })
        };
        let own = Own { group: &c.reader, dir: &c.back, tx: &c.back_tx };
        let looked = own.stop().unwrap().announce(&c.pipe.dir).look(&Fenced::after(membarrier));
        let is_gone = looked.peer().is_gone();
        let _ = looked.finish(false);
        assert!(closes.join().unwrap() || is_gone, "the peer's end waits at the monitor for ever");
    });
}

/// Two processes of one fork group move: one does. Both sides want to: one claims.
#[test]
fn one_mover() {
    every_way(None, || {
        let c = Arc::new(Connection::new());
        let word = Arc::new(fsocket_sync::atomic::AtomicU32::new(0));
        let begin = |c: &Connection, word: &fsocket_sync::atomic::AtomicU32| {
            let own = Own { group: &c.reader, dir: &c.back, tx: &c.back_tx };
            (claim(word, false), own.stop().is_some())
        };
        let other = {
            let (c, word) = (c.clone(), word.clone());
            loom::thread::spawn(move || begin(&c, &word))
        };
        let (one, two) = (begin(&c, &word), other.join().unwrap());
        assert!(one.0 != two.0 && one.1 != two.1, "{one:?} {two:?}");
    });
}
