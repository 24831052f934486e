//! Moving a live connection from shared memory to kernel TCP. [`fsocket_abi::path_switch`] has the protocol; this module and
//! those below it execute its steps.
//!
//! One side *moves* ([`materialize`]), and the other one *follows* ([`follow`]). Processes related to the mover by fork follow
//! likewise.

mod carry;
mod pair;
mod patience;
mod queue;
mod settle;

use carry::{carry, pass_over, pour_all};
pub use pair::keep_end;
use patience::{await_group, await_peer, patiently, PATIENCE_NS};
pub use queue::{
    abandon, answer, cannot_map, give_up, give_up_all, leave_to_kernel, pass_on, pass_on_exec_prepared, pass_on_used,
    requeue, share,
};
pub use settle::{apply_options, close_draining, gone, Beside};

use crate::table::{self, Desc};
use crate::upcalls::watcher;
use crate::{conn, process, short_lived, stats, token};
use fsocket_abi::arena::{Counter, Reason};
use fsocket_abi::channel::{status, RING_CAP};
use fsocket_abi::flags::FlagSet;
use fsocket_abi::path_switch::{self, Announced, Event, Fenced, Finished, Follower, Looked, Next, Remains, Step};
use fsocket_proto::switch::act;
use fsocket_ring as ring;
use fsocket_sys::{self as sys, Errno, Result};

/// For calls that are rare: go after a path that was switched, and say whether
/// the connection still is one of ours. Bytes in the ring keep it one, and so does a mover that is not done: [`follow`]
/// repeats in the kernel what the program sets meanwhile.
pub fn still_ours(d: &'static Desc) -> bool {
    if d.path_state().next(Event::Call { waits: false }) == Next::Follow {
        let _ = follow(d);
    }
    d.is_conn()
}

/// Connections switched in one go at most.
pub const BATCH: usize = 32;

/// Put kernel sockets behind connections of ours, at most [`BATCH`], with
/// nothing lost. False: at least one could not be switched and stays as it is.
pub fn materialize(ds: &[Option<&'static Desc>]) -> bool {
    // (One array, whose elements are replaced: a hook takes less than 16 KiB of stack.)
    let mut moving = [const { Moving::No }; BATCH];
    // All stop before any of them looks at what is left to read: both ends of a
    // connection may be among them.
    for (d, m) in ds.iter().flatten().filter(|d| d.is_conn()).zip(&mut moving) {
        short_lived::leaves(d, false);
        *m = start(d, pair::make).map_or(Moving::No, Moving::Begun);
    }
    let fenced = Fenced::after(sys::heavy_fence);
    moving.iter_mut().for_each(|m| m.take_along(&fenced));
    // When one of them releases the end of a peer that is gone, the monitor closes that peer's ends of all: not before
    // everything is in them.
    moving.iter_mut().for_each(Moving::finish);
    if moving.iter().any(|m| matches!(m, Moving::Done(_))) {
        let fenced = Fenced::after(sys::heavy_fence);
        moving.iter_mut().for_each(|m| m.look_back(&fenced));
    }
    let mut all = true;
    for d in ds.iter().flatten().filter(|d| d.is_conn()) {
        let reported = settle::error_is_reported(d);
        let end = if d.is_in_rings() { Err(Errno::EIO) } else { follow(d) };
        all &= end.is_ok() && !d.is_conn();
        if let (true, Ok(fd)) = (reported, end) {
            // The kernel's socket has just met the reset that the program knows of.
            settle::forget_error(fd);
        }
    }
    if !all {
        stats::fall_back(Reason::Switch);
    }
    all
}

/// One connection, where it is needed as a kernel socket because of `why`.
pub fn materialize_one(d: &'static Desc, why: Reason) -> bool {
    stats::fall_back(why);
    materialize(&[Some(d)])
}

/// The connection is over, the program goes on with its socket as an unconnected one, and
/// so do processes of the fork group that have it: what they find in its place is a new one.
pub fn restart(d: &'static Desc) {
    let Some(begun) = start(d, pair::make_alone) else { return };
    let looked = begun.words.look(&Fenced::after(sys::heavy_fence));
    let (r, rx, rxh) = d.rx();
    if let Ok(_t) = token::enter(rxh) {
        // SAFETY: nothing is written; the mover is the ring's only consumer.
        while matches!(unsafe { ring::recv(r, rx, rxh, None, RING_CAP, false) }, Ok(1..)) {}
    }
    settle::apply_options(d, begun.own.0);
    Taken { d, own: begun.own, words: looked, gone: false, late: begun.late }.finish().own.close();
    let _ = follow(d);
}

/// One of a batch: how far its mover is.
enum Moving {
    /// It is not moved by this process.
    No,
    Begun(Begun),
    Taken(Taken),
    Done(Done),
}

impl Moving {
    fn take_along(&mut self, fenced: &Fenced) {
        if let Moving::Begun(begun) = core::mem::replace(self, Moving::No) {
            *self = Moving::Taken(begun.take_along(fenced));
        }
    }
    fn finish(&mut self) {
        if let Moving::Taken(taken) = core::mem::replace(self, Moving::No) {
            *self = Moving::Done(taken.finish());
        }
    }
    fn look_back(&mut self, fenced: &Fenced) {
        if let Moving::Done(done) = core::mem::replace(self, Moving::No) {
            let d = done.d;
            let (own, _hold) = done.look_back(fenced);
            settle::repeat_ends(d, own.0);
            own.close();
        }
    }
}

/// A connection that this process moves, and whose peer can know that.
struct Begun {
    d: &'static Desc,
    own: pair::Own,
    words: Announced<'static>,
    late: pair::Late,
}

/// The mover stops using the rings. None: it is not the mover, or there can be
/// none.
fn start(d: &'static Desc, make: impl FnOnce(&Desc) -> Option<pair::Own>) -> Option<Begun> {
    if d.path_state().next(Event::Leave) != Next::Move || !claim(d) {
        return None;
    }
    let s = d.sock();
    let ready = make(d).map(|own| (own, token::enter(&s.tx), token::enter(&s.rx)));
    let Some((own, Ok(t1), Ok(t2))) = ready else {
        if let Some((own, ..)) = ready {
            own.close();
        }
        path_switch::unclaim(&d.slot().switching);
        return None;
    };
    let Some(stopped) = (path_switch::Own { group: &s.flags, dir: d.tx_dir(), tx: &s.tx }).stop() else {
        own.close(); // another process of the fork group was faster
        return None;
    };
    drop((t1, t2));
    let late = pair::Late::of(d);
    Some(Begun { d, own, words: stopped.announce(d.rx_dir()), late })
}

/// One side moves, and the other one follows. False: the other one does, or another process of the fork group,
/// and is on its way.
fn claim(d: &Desc) -> bool {
    let over = || d.sock().flags.get().is_poisoned() || d.peer_status().has_ended();
    let mut mine = false;
    patiently(PATIENCE_NS, || {
        mine = path_switch::claim(&d.slot().switching, over());
        !mine && d.is_in_rings()
    });
    mine
}

/// A connection whose mover has taken along what is left to read.
struct Taken {
    d: &'static Desc,
    own: pair::Own,
    words: Looked<'static>,
    /// The peer is.
    gone: bool,
    late: pair::Late,
}

impl Begun {
    /// Take along what is left to read, on both sides.
    fn take_along(self, fenced: &Fenced) -> Taken {
        let Begun { d, own, words, late } = self;
        let words = words.look(fenced);
        let s = d.sock();
        let rxh = d.rx().2;
        let remains = Remains::of(words.peer(), s.flags.get().has(FlagSet::SENT_AFTER_CLOSE));
        let mut what = act::POUR;
        // The end of a Unix socket whose process is gone comes when the monitor closes it, and so does a reset.
        let closes = d.is_unix() && remains.gone;
        if remains.fin && !closes {
            what |= act::FIN;
        }
        if remains.reset && !d.is_unix() {
            what |= act::RESET;
        }
        // What does not fit stays for the peer to send again. The flags keep all others off; the token
        // is for the position, which the monitor moves meanwhile.
        if let Ok(_t) = token::enter(rxh) {
            let at = &d.slot().migrated[(1 - d.side()) & 1];
            words.leave_at(at, rxh.base(), rxh.limit());
            pair::act(d, what);
        }
        if own.0 >= 0 && !words.peer().has(status::CLOSED) {
            carry(d, own.0, &words);
        }
        if closes {
            settle::leave_unread(d, words.peer(), own.0);
        }
        settle::apply_options(d, own.0);
        Taken { d, own, words, gone: remains.gone, late }
    }
}

impl Taken {
    /// The others can follow.
    fn finish(self) -> Done {
        let Taken { d, own, words, gone, late } = self;
        let hold = conn::Hold::unless_gone(d);
        if gone {
            pair::release(d, 1 - d.side());
        }
        let words = words.finish(d.path().comes_back());
        stats::count(Counter::PathSwitch);
        conn::notify_all(d);
        conn::wake_own(d);
        Done { d, own, words, gone, late, hold }
    }
}

/// A connection that has moved.
struct Done {
    d: &'static Desc,
    own: pair::Own,
    words: Finished<'static>,
    gone: bool,
    late: pair::Late,
    hold: Option<conn::Hold>,
}

impl Done {
    /// Take along what the peer did since this side's look, as its program need not make another call.
    fn look_back(self, fenced: &Fenced) -> (pair::Own, Option<conn::Hold>) {
        let Done { d, own, words, gone, late, hold } = self;
        let (before, now) = words.look_back(fenced);
        if gone || !late.is_of(d) {
            return (own, hold);
        }
        let at = &d.slot().migrated[(1 - d.side()) & 1];
        let (r, rx, _) = d.rx();
        let left = path_switch::resume_at(rx, at).is_some_and(|h| ring::available(r, rx, &h, 1) != Ok(0));
        let mut what = if left { act::POUR } else { 0 };
        let remains = Remains::of(now, d.sock().flags.get().has(FlagSet::SENT_AFTER_CLOSE));
        if remains.fin && !before.has(status::FIN) && !(d.is_unix() && remains.gone) {
            what |= act::FIN;
        }
        if remains.reset && !d.is_unix() {
            what |= act::RESET;
        }
        if d.is_unix() && !remains.gone {
            // While the monitor has its copy, the peer's close ends nothing.
            what |= act::LEAVE;
        }
        late.act(d, what);
        if remains.gone {
            settle::leave_unread(d, now, own.0);
            late.release(d, !now.has(status::RST));
        }
        (own, hold)
    }
}

/// After a publication that somebody had asked to hear of.
#[cold]
pub fn after_send(d: &'static Desc) {
    if d.path_state().next(Event::Sent) == Next::Follow {
        let _ = follow(d);
    }
}

/// Go on where the other side, or another process of the fork group, has gone. Returns a number of the
/// kernel connection in this process: behind the program's own descriptors if
/// nothing is left to read in the ring, else one of ours.
pub fn follow(d: &'static Desc) -> Result<i32> {
    let _hold = conn::Hold::on(d);
    let mut at = Follower::Begins;
    loop {
        at = match at.next(d.path_state()) {
            Step::AwaitGroup => {
                await_group(d);
                Follower::GroupIsLate
            }
            Step::AwaitPeer => {
                await_peer(d);
                Follower::PeerIsLate
            }
            Step::Claim { pours } => {
                if pours && d.peer_status().comes_back() {
                    d.path().set_comes_back(true);
                }
                match pair::claim(d, d.side(), pours) {
                    Some(fd) => return install(d, fd),
                    None => Follower::Refused,
                }
            }
            Step::Drain(fd) if conn::ring_has(d) => return Ok(fd),
            Step::Drain(fd) => return settle::complete(d, fd),
            Step::Done(fd) => return Ok(fd),
            Step::Lost => return Err(Errno::EBADF),
            Step::Fail | Step::Resend | Step::Install => {
                if at == Follower::Refused {
                    stats::fall_back(Reason::Switch);
                }
                conn::poison(d);
                return Err(Errno::ECONNRESET);
            }
        }
    }
}

/// The end of this side, `fd`, takes over.
fn install(d: &'static Desc, fd: i32) -> Result<i32> {
    {
        let Ok(_t) = token::enter(d.tx().2) else {
            let _ = sys::close(fd);
            return Err(Errno::EAGAIN);
        };
        let step = Follower::HasEnd.next(d.path_state());
        let here = match step {
            Step::Install => {
                if !path_switch::group_moves(&d.sock().flags) {
                    // What a signal handler has noted behind the mover's back. (A second shutdown does no harm.)
                    settle::shut(d, fd, !d.is_unix());
                }
                Ok(())
            }
            Step::Resend if resend(d, fd) => Ok(()),
            Step::Done(there) => Err(Ok(there)),
            Step::Lost => Err(Err(Errno::EBADF)),
            _ => {
                stats::fall_back(Reason::Switch);
                conn::poison(d);
                Err(Err(Errno::ECONNRESET))
            }
        };
        if let Err(end) = here {
            let _ = sys::close(fd);
            return end;
        }
    }
    stats::count(Counter::PathSwitch);
    let fd = process::high_fd(fd);
    if conn::ring_has(d) && !d.sock().flags.get().is_poisoned() {
        // Another thread may have been faster.
        if table::set_end(d, fd) {
            (watcher().also_kernel)(d, fd);
        } else {
            process::close_own(fd);
        }
        return Ok(table::end_of(d).unwrap_or(-1));
    }
    settle::complete(d, fd)
}

/// Send again what the mover did not take along, and skip what it has carried. The caller has the token of the sending
/// direction. False: bytes are lost.
fn resend(d: &'static Desc, fd: i32) -> bool {
    let (r, tx, _) = d.tx();
    settle::apply_options(d, fd);
    let Some(h) = path_switch::resume_at(tx, &d.slot().migrated[d.side()]) else {
        stats::count(Counter::HostilePeer);
        return false;
    };
    if !(pour_all(r, tx, &h, fd) && pass_over(d, fd)) {
        return false;
    }
    settle::shut(d, fd, true);
    if d.is_unix() && d.peer_status().has(status::SHUT_BOTH) {
        // It receives no more, and left saying so to this side: what it had not read had to come first.
        let _ = sys::shutdown(fd, libc::SHUT_WR);
    }
    if settle::error_is_reported(d) {
        settle::forget_error(fd);
    }
    path_switch::followed(&d.sock().flags);
    true
}
