//! How both sides of a connection agree on the moment of the move: the opener offers a slot, the
//! accepter takes it.

use super::calls::{missed, sooner, LOOKS, MISS};
use super::passed::{is_passed, let_go};
use super::rest::{ends_of, rest_of, still_rests, usual, Counts};
use super::worth;
use crate::chan::Taken;
use crate::establish::{establish, prepare_slot, End};
use crate::mailbox::Mailbox;
use crate::signals::Held;
use crate::table::{self, Desc, Kind, DESCS};
use crate::upcalls::watcher;
use crate::{chan, ctl, heartbeat, lately, route, socks, stats, values, waker};
use core::cell::Cell;
use core::sync::atomic::{fence, AtomicU32, Ordering};
use fsocket_abi::arena::{Counter, Reason};
use fsocket_abi::channel::{slot_state, CLIENT, SERVER, SLOTS};
use fsocket_proto::{notice, request, Addr};
use fsocket_sync::handover::{self, Steps};
use fsocket_sys::{self as sys, Errno, Result};

/// How long the opener waits for the other side, in nanoseconds. A side that sleeps in the
/// library, or is busy with calls, answers sooner.
const OFFER_NS: u64 = 2_000_000;
/// The same if the monitor has just told the opener that the other side has offered its end.
const MET_NS: u64 = 10_000_000;
/// How long the accepter waits for the opener, which waits at the same time.
const ANSWER_NS: u64 = 20_000_000;

/// Incremented when a connection has moved. A thread that has checked the kinds of its
/// descriptors must check again.
static EPOCH: AtomicU32 = AtomicU32::new(0);

pub fn epoch() -> u32 {
    EPOCH.load(Ordering::Acquire)
}

/// The name of a description for the monitor.
pub(super) fn key(d: &Desc) -> u64 {
    (d.generation() as u64) << 32 | d.index() as u64
}

/// The opener's part of the exchange. No other call on the connection can run meanwhile.
pub(super) fn open(fd: i32, d: &'static Desc) -> Result<()> {
    const NOT_NOW: Result<()> = Err(Errno::EAGAIN);
    let Some((me, dst)) = ends_of(fd, d) else { return NOT_NOW };
    let Some(counts) = rest_of(fd, d) else { return NOT_NOW };
    if let Some(chan) = d.kernel().is_across().then(|| route::met(&dst)).flatten() {
        let to = Whereto { chan, across: true, met: true };
        match offer(fd, d, (&me, &dst), counts, to) {
            // The other side got no message. The monitor's error is the reason.
            Err(Told::Not(e)) if e == Errno::EINVAL => route::several(&dst),
            Err(Told::Not(_)) => {}
            Err(Told::Late) => return NOT_NOW,
            Ok(()) => return Ok(()),
        }
    }
    let to = whereto(fd, d, &me, &dst)?;
    offer(fd, d, (&me, &dst), counts, to).map_err(|why| match why {
        Told::Not(e) => {
            missed(d, MISS);
            e
        }
        Told::Late => {
            again(d);
            Errno::EAGAIN
        }
    })
}

/// The other side was late. By now it knows that the opener asks, and waits for this in its next
/// calls. So after every other try, the next call tries again.
fn again(d: &Desc) {
    if d.kernel().tries() % 2 == 1 {
        d.kernel().set_next_try(d.kernel().calls().saturating_sub(LOOKS));
    }
}

/// The reason why a connection has not moved.
enum Told {
    /// The other side got no message about the offer: the monitor's error, or EAGAIN.
    Not(Errno),
    /// The other side got the message, but was late.
    Late,
}

/// Offers a slot of the channel to the other side. No other call on the connection can run
/// meanwhile.
fn offer(
    fd: i32,
    d: &'static Desc,
    (me, dst): (&Addr, &Addr),
    counts: Counts,
    to: Whereto,
) -> core::result::Result<(), Told> {
    const NOT_NOW: core::result::Result<(), Told> = Err(Told::Not(Errno::EAGAIN));
    let Whereto { chan, across, met } = to;
    let Some(sock) = socks::alloc_sock() else { return NOT_NOW };
    let taken = chan.client().filter(|_| route::usable(chan)).and_then(|mut c| chan.take_slot(&mut c).ok());
    let Some(Taken { slot, rings, .. }) = taken else {
        socks::free_sock(sock);
        return NOT_NOW;
    };
    let s = chan.slot(slot);
    // (The kernel's connection has the same address.)
    prepare_slot(chan, slot, &rings, dst, me.port, 0);
    // The slot has a new generation. It is read only once, because the other side may write it.
    let generation = s.generation.load(Ordering::Relaxed);
    let steps = steps(generation);
    // These fields have no other use unless the slot is switched back to the kernel later.
    s.migrated[0].base.store(counts.sent, Ordering::Relaxed);
    s.migrated[0].limit.store(counts.received, Ordering::Relaxed);
    let channel = chan.id.load(Ordering::Relaxed);
    let ask = request::Upgrade { channel, slot, generation, met: across, received: is_passed(d) };
    let mut asked = Ok(());
    let patience = Patience(Cell::new(if met { MET_NS } else { OFFER_NS }));
    let mut remote = false;
    let tell = || {
        asked = ctl::request(ask, Some(fd)).map(|(a, _)| {
            // (The monitor knows whether the other side is on another host.)
            remote = a.patience != 0;
            patience.0.set(patience.0.get().max(a.patience.min(1000) * 1_000_000));
        });
        asked.is_ok()
    };
    let done = handover::open(&s.state, steps, &patience, tell, || still_rests(fd, d, counts));
    if !done {
        socks::free_sock(sock);
        if let Some(mut c) = chan.client() {
            chan.give_back(&mut c, slot);
        }
        if met {
            // The other side exists, but was late.
            sooner(d);
        }
        return Err(asked.map_or_else(Told::Not, |()| Told::Late));
    }
    if met && !across {
        lately::PASSED_ON.note(&dst.ip, dst.port);
    }
    learn(fd, d);
    let family = d.family() as u16;
    let (src, dst, client_port, server_port) = (me.ip, dst.ip, me.port, dst.port);
    establish(d, sock, &End { chan, slot, rings, side: CLIENT, family, src, dst, client_port, server_port, across });
    // Between hosts the network may fail for longer than the heartbeat's probes wait, while TCP
    // would go on afterwards.
    if across && !remote && !d.is_unix() {
        heartbeat::begin(fd);
    }
    crate::path::keep_end(d, fd);
    went_over(d);
    Ok(())
}

/// The channel to the other side; `across`: that side may be in another network namespace; `met`:
/// the monitor knows this very connection.
struct Whereto {
    chan: &'static chan::Chan,
    across: bool,
    met: bool,
}

/// Finds the channel. EXDEV: there is none, and there will be none.
fn whereto(fd: i32, d: &Desc, me: &Addr, dst: &Addr) -> Result<Whereto> {
    let usual = usual(me, dst);
    if let Some(chan) = usual.then(|| route::find(dst, fd, route::For::Upgrade).ok()).flatten() {
        return Ok(Whereto { chan, across: false, met: false });
    }
    if !d.kernel().is_across() {
        if !usual {
            return Err(Errno::EXDEV);
        }
        // The accepting process may have passed the connection on, and may accept no other
        // connections over shared memory.
        let met = |chan| Whereto { chan, across: false, met: true };
        return route::meet(fd, dst, true).map(met).map_err(|_| {
            // The socket may still be on its way to another process.
            sooner(d);
            missed(d, MISS);
            Errno::EAGAIN
        });
    }
    match route::meet(fd, dst, false) {
        Ok(chan) => Ok(Whereto { chan, across: true, met: true }),
        Err(Errno::EXDEV) => {
            lately::STRANGERS.note(&dst.ip, dst.port);
            worth::is_stranger(d);
            Err(if usual { Errno::EAGAIN } else { Errno::EXDEV })
        }
        Err(Errno::EPERM) => {
            stats::fall_back(Reason::OtherUser);
            Err(Errno::EXDEV)
        }
        Err(Errno::EACCES) => {
            stats::fall_back(Reason::Policy);
            Err(Errno::EXDEV)
        }
        Err(e) => {
            if e == Errno::ENOENT {
                worth::unmet(d);
                // After several requests the other side is not just late, so the reason is
                // counted and the opener asks again.
                if d.kernel().tries() == 2 {
                    stats::fall_back(Reason::Namespace);
                }
            }
            Err(Errno::EAGAIN)
        }
    }
}

/// Reads the options and O_NONBLOCK that the program has set on the kernel's socket.
fn learn(fd: i32, d: &Desc) {
    values::adopt(fd, d);
    let nonblock = sys::fcntl(fd, libc::F_GETFL, 0).is_ok_and(|f| f & libc::O_NONBLOCK != 0);
    d.unconnected().set_nonblock(nonblock);
    d.placeholder().set_nonblock(nonblock);
}

fn went_over(d: &'static Desc) {
    stats::count(Counter::PathUpgrade);
    let_go(d);
    (watcher().became_conn)(d);
    EPOCH.fetch_add(1, Ordering::AcqRel);
    fence(Ordering::SeqCst);
    waker::ring_sleepers();
}

/// The slot's states in this exchange, each with the slot's generation.
fn steps(generation: u32) -> Steps {
    let of = |state| slot_state::of(state, generation);
    Steps {
        offered: of(slot_state::OFFERED),
        taken: of(slot_state::TAKEN),
        over: slot_state::ESTABLISHED,
        refused: of(slot_state::REFUSED),
    }
}

/// Waits for the other side, this many nanoseconds at most.
struct Patience(Cell<u64>);

impl handover::Env for Patience {
    fn wait_while(&self, word: &AtomicU32, value: u32) {
        let until = sys::now_ns() + self.0.get();
        while word.load(Ordering::Acquire) == value {
            let left = until.saturating_sub(sys::now_ns());
            if left == 0 {
                return;
            }
            let _ = sys::futex_wait(word, value, Some(left));
        }
    }
    fn wake(&self, word: &AtomicU32) {
        sys::futex_wake(word, 1);
    }
}

/// The request of an opener to move a connection that this process has accepted.
#[derive(Clone, Copy)]
struct Asked {
    channel: u32,
    listener: u64,
    slot: usize,
    generation: u32,
    key: u64,
    /// The other end may be in another network namespace.
    across: bool,
    /// The channel's memory.
    fd: i32,
}
static ASKED: Mailbox<Asked, 32> = Mailbox::new();

/// Notes a message of the monitor. It may come in the middle of any operation, so it is handled
/// later. False: the descriptor was not taken.
pub fn asked(m: notice::UpgradeSrv, fd: i32) -> bool {
    let notice::UpgradeSrv { channel, listener, slot, generation, name, met } = m;
    let a = Asked { channel, listener, slot, generation, key: name, across: met, fd };
    let noted = ASKED.note(a);
    ctl::defer();
    noted
}

/// Handles the noted messages. Called where no lock is held.
#[inline]
pub fn answer() {
    ASKED.answer(|a| {
        let _held = Held::all();
        take(&a);
        let _ = sys::close(a.fd);
    });
}

/// In a forked child: drops the messages, because the parent handles them.
#[link_section = ".text.fsocket_start"]
pub fn become_child() {
    ASKED.become_child(|a| {
        let _ = sys::close(a.fd);
    });
}

fn take(a: &Asked) {
    if a.slot >= SLOTS {
        return;
    }
    let known = chan::by_id(a.channel, SERVER);
    let c = known.or_else(|| {
        let c = chan::map(a.channel, a.listener, SERVER, a.fd)?;
        // The channel ends with its last connection, unless this process starts to work for the
        // listener. (For Unix connections the listener stands for this fork group, and the
        // channel belongs to its clients as long as they live.)
        let is_unix = DESCS.get(a.key as u32).is_some_and(Desc::is_unix);
        c.retired.store(!is_unix, Ordering::Relaxed);
        Some(c)
    });
    let Some(c) = c else { return };
    if !accept(c, a) {
        offer_again(a.key);
        handover::refuse(&c.slot(a.slot).state, steps(a.generation), &Patience(Cell::new(0)));
        c.unmap_if_unused();
    }
}

/// Offers the end again: the monitor has forgotten the offer when it passed on the opener's
/// request.
fn offer_again(name: u64) {
    if let Some(d) = DESCS.get(name as u32).filter(|d| d.kind() == Kind::Kernel && key(d) == name) {
        worth::asked(d);
        d.kernel().forget_tries();
        d.kernel().set_next_try(d.kernel().calls());
    }
}

/// The accepter's part of the exchange.
fn accept(c: &'static chan::Chan, a: &Asked) -> bool {
    let mine = |d: &&Desc| d.kind() == Kind::Kernel && key(d) == a.key && d.is_used();
    let Some(d) = DESCS.get(a.key as u32).filter(mine) else { return false };
    let Some(fd) = table::fd_of(d) else { return false };
    if !d.kernel().decide() {
        return false;
    }
    let done = accept_at_rest(c, a, fd, d);
    d.kernel().decided(false);
    done
}

fn accept_at_rest(c: &'static chan::Chan, a: &Asked, fd: i32, d: &'static Desc) -> bool {
    let Some((me, peer)) = ends_of(fd, d) else { return false };
    let said = &c.slot(a.slot).migrated[0];
    let theirs = || Counts { sent: said.limit.load(Ordering::Relaxed), received: said.base.load(Ordering::Relaxed) };
    let across = a.across;
    if !(across || usual(&peer, &me)) || c.desc(a.slot).is_some() || rest_of(fd, d) != Some(theirs()) {
        return false;
    }
    let Ok(rings) = c.rings(a.slot) else { return false };
    let Some(sock) = socks::alloc_sock() else { return false };
    if !handover::take(&c.slot(a.slot).state, steps(a.generation), &Patience(Cell::new(ANSWER_NS))) {
        socks::free_sock(sock);
        return false;
    }
    learn(fd, d);
    let family = d.family() as u16;
    let (src, dst, client_port, server_port) = (peer.ip, me.ip, peer.port, me.port);
    let e = End { chan: c, slot: a.slot, rings, side: SERVER, family, src, dst, client_port, server_port, across };
    establish(d, sock, &e);
    crate::path::keep_end(d, fd);
    went_over(d);
    true
}
