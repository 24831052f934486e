//! Switching a live connection from shared memory to kernel TCP.
//!
//! One side *moves* ([`materialize`]): it stops using the rings, gets both ends
//! of a kernel connection with the addresses of this one, puts what neither side has
//! read yet into the kernel connection, and says MIGRATED.
//! The other side *follows* ([`follow`]) when it next looks: it sends again, in
//! the kernel connection, what it put into its ring too late to be taken along,
//! passes over what it has read of the mover's ring meanwhile, and then goes on in the kernel. So each
//! direction changes its path at one offset of the stream, and nothing is lost
//! or reordered. Processes related to the mover by fork follow likewise.
//!
//! The race is between a sender that has just published a record and a mover
//! that takes its last look at the ring. The mover says MIGRATING, arms the want
//! word, fences heavily, and looks; the sender, after each publication, looks
//! at the want word. So either the mover sees the record, or the sender comes
//! to [`after_send`] and sees the mover.

mod carry;
mod pair;
mod patience;
mod queue;
mod settle;

use crate::stage::peer_status;
use crate::stage::{can_follow, is_moving, of, went_to, Path};
use carry::{carry, pass_over, pour_all};
use patience::{await_peer, patiently, PATIENCE_NS};
pub use queue::{
    abandon, answer, cannot_map, give_up, give_up_all, leave_to_kernel, pass_on, pass_on_exec_prepared, pass_on_used,
    requeue, share,
};
pub use settle::{apply_options, close_draining, gone, Beside};

use crate::table::{self, Desc};
use crate::upcalls::watcher;
use crate::{conn, process, short_lived, stats, token};
use core::sync::atomic::{fence, Ordering};
use fsocket_abi::arena::{Counter, Reason};
use fsocket_abi::channel::{status, RING_CAP};
use fsocket_abi::flags::FlagSet;
use fsocket_abi::half::Half;
use fsocket_proto::switch::act;
use fsocket_ring as ring;
use fsocket_sync::doorbell::FUTEX_BIT;
use fsocket_sync::token::Words as _;
use fsocket_sys::{self as sys, Errno, Result};

/// For calls that are rare: go after a path that was switched, and say whether
/// the connection still is one of ours. Bytes in the ring keep it one, and so does a mover that is not done: [`follow`]
/// repeats in the kernel what the program sets meanwhile.
pub fn still_ours(d: &'static Desc) -> bool {
    if d.is_conn() && of(d) != Path::Shm && !is_moving(d) {
        let _ = follow(d);
    }
    d.is_conn()
}

/// Connections switched in one go at most.
pub const BATCH: usize = 32;

/// Put kernel sockets behind connections of ours, at most [`BATCH`], with
/// nothing lost. False: at least one could not be switched and stays as it is.
pub fn materialize(ds: &[Option<&'static Desc>]) -> bool {
    let conns = || ds.iter().flatten().filter(|d| d.is_conn()).take(BATCH);
    let mut ends = [const { None }; BATCH];
    // All stop before any of them looks at what is left to read: both ends of a
    // connection may be among them.
    for (d, e) in conns().zip(&mut ends) {
        short_lived::leaves(d, false);
        *e = start(d, pair::make);
    }
    sys::heavy_fence();
    let mut gone = [false; BATCH];
    for ((d, e), gone) in conns().zip(&ends).zip(&mut gone) {
        *gone = e.as_ref().is_some_and(|e| take_along(d, e));
    }
    // When one of them releases the end of a peer that is gone, the monitor closes that peer's ends of all: not before
    // everything is in them.
    for ((d, e), gone) in conns().zip(&ends).zip(gone) {
        if e.is_some() {
            moved_out(d, gone);
        }
    }
    for (d, e) in conns().zip(&ends) {
        let Some(e) = e else { continue };
        settle::shut(d, e.0, !d.is_unix());
        settle::replay_reset(d, peer_status(d), e.0);
        e.close();
    }
    let mut all = true;
    for d in ds.iter().flatten().filter(|d| d.is_conn()) {
        let reported = settle::error_is_reported(d);
        let end = if of(d) == Path::Shm { Err(Errno::EIO) } else { follow(d) };
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
    let Some(own) = start(d, pair::make_alone) else { return };
    sys::heavy_fence();
    let (r, rx, rxh) = d.rx();
    if let Ok(_t) = token::enter(rxh) {
        // SAFETY: nothing is written; the mover is the ring's only consumer.
        while matches!(unsafe { ring::recv(r, rx, rxh, None, RING_CAP, false) }, Ok(1..)) {}
    }
    settle::apply_options(d, own.0);
    migrated_out(d);
    own.close();
    let _ = follow(d);
}

/// The mover stops using the rings. None: it is not the mover, or there can be
/// none.
fn start(d: &'static Desc, make: impl FnOnce(&Desc) -> Option<pair::Own>) -> Option<pair::Own> {
    let s = d.sock();
    if s.flags.get().has_left() || peer_status(d) & status::MIGRATED != 0 {
        return None;
    }
    if !claim(d) {
        return None;
    }
    let ready = make(d).map(|own| (own, token::enter(&s.tx), token::enter(&s.rx)));
    let Some((own, Ok(t1), Ok(t2))) = ready else {
        if let Some((own, ..)) = ready {
            own.close();
        }
        d.slot().switching.store(0, Ordering::Release);
        return None;
    };
    if !s.flags.begin_switch() {
        own.close(); // another process of the fork group was faster
        return None;
    }
    // From here on whoever gets a token sees the flags, or finds no room, and
    // keeps off the rings.
    s.tx.limit.store(0, Ordering::Relaxed);
    s.tx.withdraw();
    drop((t1, t2));
    d.tx().1.prod.status.fetch_or(status::MIGRATING, Ordering::Release);
    // Release: who sees the want word armed sees MIGRATING.
    fence(Ordering::Release);
    d.rx().1.want_data.hint(FUTEX_BIT); // the caller runs a heavy fence
    Some(own)
}

/// One side moves, and the other one follows. False: the other one does, or another process of the fork group,
/// and is on its way.
fn claim(d: &Desc) -> bool {
    let word = &d.slot().switching;
    // Nobody goes on with it, not even one that had claimed it.
    let over = || d.sock().flags.get().is_poisoned() || peer_status(d) & (status::CLOSED | status::RST) != 0;
    let mut mine = false;
    patiently(PATIENCE_NS, || {
        mine = word.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire).is_ok() || over();
        !mine && of(d) == Path::Shm
    });
    mine
}

/// After the heavy fence: take along what is left to read, on both sides. True: the peer is gone.
fn take_along(d: &'static Desc, own: &pair::Own) -> bool {
    let s = d.sock();
    let rxh = d.rx().2;
    let theirs = peer_status(d);
    let gone = theirs & status::CLOSED != 0 && theirs & status::MIGRATED == 0;
    // A reset behind a FIN is a broken pipe; one also answers what we have sent to
    // a peer that was gone.
    let answered = theirs & status::RST != 0 || s.flags.get().has(FlagSet::SENT_AFTER_CLOSE);
    let mut what = act::POUR;
    if theirs & status::FIN != 0 && (answered || !gone) {
        what |= act::FIN;
    }
    if gone && answered {
        what |= act::RESET;
    }
    // What does not fit stays for the peer to send again. The flags keep all others off; the token
    // is for the position, which the monitor moves meanwhile.
    if let Ok(_t) = token::enter(rxh) {
        let m = &d.slot().migrated[(1 - d.side()) & 1];
        m.base.store(rxh.base.load(Ordering::Relaxed), Ordering::Relaxed);
        m.limit.store(rxh.limit.load(Ordering::Relaxed), Ordering::Release);
        pair::act(d, what);
    }
    if own.0 >= 0 && theirs & status::CLOSED == 0 {
        carry(d, own.0);
    }
    settle::apply_options(d, own.0);
    gone
}

/// After [`take_along`], which has said whether the peer is gone.
fn moved_out(d: &'static Desc, gone: bool) {
    if gone {
        pair::release(d, 1 - d.side());
    }
    migrated_out(d);
}

/// The last word of a mover.
fn migrated_out(d: &'static Desc) {
    // Release: all that came before.
    let how = if d.path().comes_back() { status::FOR_NOW } else { 0 };
    d.tx().1.prod.status.fetch_or(status::MIGRATED | how, Ordering::Release);
    d.sock().flags.end_switch();
    stats::count(Counter::PathSwitch);
    conn::notify_all(d);
    conn::wake_own(d);
}

/// After a publication that somebody had asked to hear of.
#[cold]
pub fn after_send(d: &'static Desc) {
    if d.is_conn() && !d.sock().flags.get().has_left() && can_follow(d) {
        let _ = follow(d);
    }
}

/// Go on where the other side, or another process of the fork group, has gone. Returns a number of the
/// kernel connection in this process: behind the program's own descriptors if
/// nothing is left to read in the ring, else one of ours.
pub fn follow(d: &'static Desc) -> Result<i32> {
    let _hold = conn::Hold::on(d);
    if let Path::Draining(fd) = of(d) {
        return if conn::ring_has(d) { Ok(fd) } else { settle::complete(d, fd) };
    }
    let s = d.sock();
    let (ring_tx, tx, txh) = d.tx();
    // Another process of the fork group or another thread that moves is not done yet.
    patiently(PATIENCE_NS, || s.flags.look().is_switching());
    if !s.flags.look().has_left() {
        await_peer(d);
        if peer_status(d) & status::MIGRATED == 0 {
            // It died half-way, or never meant to. Nobody waits for it twice.
            conn::poison(d);
            return Err(Errno::ECONNRESET);
        }
    }
    let pours = !s.flags.look().has_left();
    if pours && peer_status(d) & status::FOR_NOW != 0 {
        d.path().set_comes_back(true);
    }
    let Some(fd) = pair::claim(d, d.side(), pours) else {
        if !d.is_conn() {
            // Another thread was faster, and needed the monitor's copy no more.
            return went_to(d).ok_or(Errno::EBADF);
        }
        stats::fall_back(Reason::Switch);
        conn::poison(d);
        return Err(Errno::ECONNRESET);
    };
    {
        let Ok(_t) = token::enter(txh) else {
            let _ = sys::close(fd);
            return Err(Errno::EAGAIN);
        };
        if !s.flags.look().has_left() {
            // A consumer in the state in which the mover left the ring.
            let at = &d.slot().migrated[d.side()];
            let h = half_at(tx.cons.head.load(Ordering::Acquire), at);
            settle::apply_options(d, fd);
            if !(h.is_some_and(|h| pour_all(ring_tx, tx, &h, fd)) && pass_over(d, fd)) {
                stats::fall_back(Reason::Switch);
                conn::poison(d);
                let _ = sys::close(fd);
                return Err(Errno::ECONNRESET);
            }
            settle::shut(d, fd, true);
            if d.is_unix() && peer_status(d) & status::SHUT_BOTH != 0 {
                // It receives no more, and left saying so to this side: what it had not read had to come first.
                let _ = sys::shutdown(fd, libc::SHUT_WR);
            }
            if settle::error_is_reported(d) {
                settle::forget_error(fd);
            }
            s.flags.follow();
        }
    }
    stats::count(Counter::PathSwitch);
    let fd = process::high_fd(fd);
    if conn::ring_has(d) && !s.flags.get().is_poisoned() {
        // Another thread may have been faster.
        if table::set_end(d, fd) {
            (watcher().also_kernel)(d, fd);
        } else {
            process::close_own(fd);
        }
        return Ok(d.path().kernel_end().unwrap_or(-1));
    }
    settle::complete(d, fd)
}

/// None: nonsense, from which a read would leave the ring.
fn half_at(head: u64, at: &fsocket_abi::channel::Migrated) -> Option<Half> {
    let (base, limit) = (at.base.load(Ordering::Relaxed), at.limit.load(Ordering::Relaxed));
    let off = head.wrapping_sub(base) & (RING_CAP as u64 - 1);
    if base > head || limit > RING_CAP as u64 - off {
        stats::count(Counter::HostilePeer);
        return None;
    }
    // SAFETY: a Half is atomics only; zero is valid.
    let h: Half = unsafe { core::mem::zeroed() };
    h.pos.store(head, Ordering::Relaxed);
    h.base.store(base, Ordering::Relaxed);
    h.limit.store(limit, Ordering::Relaxed);
    Some(h)
}
