//! Waiting for bytes or for space: spin, then sleep.

use crate::asleep;
use crate::spin::Memory;
use crate::table::Desc;
use crate::wait::teased::Teased;
use crate::wait::{self, Call, Restart, Sleep, Source, Word, LONG};
use crate::{ready, table, token};
use core::sync::atomic::Ordering;
use fsocket_abi::flags::FlagSet;
use fsocket_ring as ring;
use fsocket_sync::block::{self, block};
use fsocket_sync::doorbell::{Want, FUTEX_BIT};
use fsocket_sys::{self as sys, cpu, Errno, Result};

/// After so many waits without a send in between, a receiver collects for
/// `BATCH_NS` before it looks. Measured with 8-byte messages on two CPUs: see
/// docs/performance.md.
const ONE_WAY: u32 = 16;
const BATCH_NS: u64 = 4000;

/// The waits of one call.
#[derive(Default)]
pub(super) struct Wait {
    /// Until then, nanoseconds of the clock; None: no limit, or no wait yet.
    deadline: Option<u64>,
    /// It has done or slept something: whatever becomes of the number, the call goes on.
    pub(super) begun: bool,
    /// How often in a row it was told of what was not there, before it could sleep.
    in_vain: u32,
    teased: Teased,
}

impl Wait {
    /// Another thread may be faster now and then. A peer that shows something and takes it back, again
    /// and again, would keep this thread busy for ever.
    const MOST_IN_VAIN: u32 = 1 << 16;

    pub(super) fn was_in_vain(&mut self) -> bool {
        self.in_vain += 1;
        self.in_vain > Self::MOST_IN_VAIN
    }
    pub(super) fn was_not(&mut self) {
        self.in_vain = 0;
    }

    /// How long it may still wait, nanoseconds. None: for ever.
    fn left(&self) -> Option<u64> {
        self.deadline.map(|t| t.saturating_sub(sys::now_ns()))
    }
    fn is_over(&self) -> bool {
        self.left() == Some(0)
    }
}

/// Will no more data come, for whatever reason?
pub(super) fn ended(d: &Desc) -> bool {
    let s = d.sock();
    let f = s.flags.get();
    ready::state(d).eof || s.error() != 0 || f.has(FlagSet::SHUT_RD) || f.is_poisoned()
}

/// Is this a one-way stream: many waits for data, and nothing sent between?
fn streaming(d: &Desc) -> bool {
    d.conn().waits_without_send(d.sock().tx.bytes()) >= ONE_WAY
}

/// Block until there is something to receive (data, end or error).
pub(super) fn wait_data(d: &'static Desc, w: &mut Wait) -> Result<()> {
    let (_, rx, _) = d.rx();
    let peer = ready::peer_cpu(d);
    if streaming(d) && peer != cpu::current() && !crate::spin::contended(cpu::ticks()) {
        // Polling right behind a sender makes both fight for the cache line it
        // is filling. Let it get ahead.
        let end = cpu::ticks() + BATCH_NS * cpu::ticks_per_us() / 1000;
        while cpu::ticks() < end {
            core::hint::spin_loop();
        }
        if ready::can_recv(d) {
            return Ok(());
        }
    }
    let timeo = d.sock().receive_timeout();
    sleep(d, &rx.want_data, w, timeo, (d.spin_rx(), peer), || !d.is_conn() || ready::can_recv(d))
}

/// Block until a send can make progress or fails.
pub(super) fn wait_space(d: &'static Desc, w: &mut Wait) -> Result<()> {
    let (_, tx, h) = d.tx();
    tx.prod.space_at.store(ring::space_target(tx, h), Ordering::Relaxed);
    let timeo = d.sock().send_timeout();
    sleep(d, &tx.want_space, w, timeo, (d.spin_tx(), ready::peer_cpu(d)), || !d.is_conn() || ready::can_send(d))
}

/// MSG_PEEK that waits for more than what was there. As elsewhere, the sleeper is woken at the
/// low-water mark, also where it wants less.
pub(super) fn wait_more(d: &'static Desc, have: usize, w: &mut Wait) -> Result<()> {
    let (r, rx, h) = d.rx();
    let least = super::low_water(d).max(have + 1);
    let more = || {
        token::enter(h).map_or(true, |_t| ring::available(r, rx, h, least).map_or(true, |n| n >= least))
            || ended(d)
            || super::left_rings(d)
    };
    let timeo = d.sock().receive_timeout();
    sleep(d, &rx.want_data, w, timeo, (d.spin_rx(), 0), more)
}

/// For what a receive of no bytes waits: also a shutdown of its own side.
pub(super) fn wait_any(d: &'static Desc, w: &mut Wait) -> Result<()> {
    let (_, rx, _) = d.rx();
    let s = d.sock();
    let before = s.edges();
    let ready = || !d.is_conn() || ready::can_recv(d) || s.edges() != before;
    sleep(d, &rx.want_data, w, s.receive_timeout(), (d.spin_rx(), 0), ready)
}

/// A call that has something to return does so after any signal, also one that
/// restarts calls. A futex wait with a limit is never restarted.
pub(super) fn interruptible(w: &mut Wait, timeo: u64) {
    if timeo == 0 {
        w.deadline.get_or_insert(LONG);
    }
}

/// Is something there for who waits for data, but less than its low-water mark? After any signal
/// it gets that (`tcp_recvmsg_locked`).
fn is_less_than_wanted(d: &Desc, want: &Want) -> bool {
    super::low_water(d) > 1 && core::ptr::eq(want, &d.rx_dir().want_data) && super::ring_has(d)
}

/// A number does not refer to `d` any more, something else does. A thread that is on its way to
/// sleep must not arrive there: a program that puts another file in the socket's place sends the
/// thread a signal next, which ends a sleep, and the thread shall find that file. One that sleeps
/// already stays with the connection, as in the kernel. So the words move, and nobody is woken.
pub fn fd_detached(d: &'static Desc) {
    if d.is_conn() {
        for want in [&d.rx_dir().want_data, &d.tx_dir().want_space] {
            // Behind `detached`: a thread that has read the word before this, and sleeps by it,
            // finds it changed; one that reads it afterwards sees the number gone.
            want.seq.fetch_add(1, Ordering::AcqRel);
        }
    }
}

/// `d` is no connection any more, as its last reference is gone: a thread that came too late to
/// keep it must not sleep on it.
pub fn wake_late(d: &'static Desc) {
    for want in [&d.rx_dir().want_data, &d.tx_dir().want_space] {
        if !want.is_silent() && want.waiting() & FUTEX_BIT != 0 {
            want.seq.fetch_add(1, Ordering::AcqRel);
            sys::futex_wake(&want.seq, i32::MAX);
        }
    }
}

/// Spin, then sleep on a futex, until `ready`, a signal, or the deadline (set
/// on first use from `timeo`, nanoseconds; 0: none). EBADF: nothing of the program's
/// refers to `d` any more, and the call has not begun. (EINTR: it has, and something else is there.)
fn sleep(
    d: &'static Desc,
    want: &Want,
    w: &mut Wait,
    timeo: u64,
    spin: (&Memory, u32),
    mut ready: impl FnMut() -> bool,
) -> Result<()> {
    // The callers hold `d`; that is written down as soon as this CPU may be given up.
    let mark = asleep::Mark::new();
    let mut held = None;
    let (spin, peer_cpu) = spin;
    let hit = spin.spin_noting(peer_cpu, &mut ready, || {
        held = held.take().or_else(|| asleep::holds(core::iter::once(d.index()), &mark));
    });
    let r = if hit { Ok(()) } else { sleep_on(d, want, w, timeo, spin, ready) };
    if let Some(h) = held {
        asleep::let_go(h);
    }
    r
}

/// The second half of [`sleep`].
fn sleep_on(
    d: &'static Desc,
    want: &Want,
    w: &mut Wait,
    timeo: u64,
    spin: &Memory,
    ready: impl FnMut() -> bool,
) -> Result<()> {
    if timeo != 0 && w.deadline.is_none() {
        w.deadline = Some(sys::now_ns().saturating_add(timeo));
    }
    let t0 = cpu::ticks();
    block(&mut OnWord { d, want, w, ready, seq: 0, long: false })?;
    spin.slept(t0, want.notified_at.load(Ordering::Relaxed));
    Ok(())
}

/// A wait for what the peer does in one direction.
struct OnWord<'a, R> {
    d: &'static Desc,
    want: &'a Want,
    w: &'a mut Wait,
    ready: R,
    seq: u32,
    /// It has reached a limit of ours.
    long: bool,
}

impl<R: FnMut() -> bool> OnWord<'_, R> {
    /// The number refers to something else by now, if to anything.
    fn is_detached(&self) -> Option<Errno> {
        let detached = table::detached(self.d)?;
        match self.w.begun || self.d.conn().is_midway() {
            false => Some(Errno::EBADF),
            // The signal that follows may have come just now, while awake.
            true if detached.replaced => Some(Errno::EINTR),
            true => None,
        }
    }
}

impl<R: FnMut() -> bool> block::Wait for OnWord<'_, R> {
    type Woken = Result<usize>;
    type End = Result<()>;

    fn arm(&mut self) {
        self.seq = self.want.seq.load(Ordering::Acquire);
        // The caller holds `d`, so the word stays its own.
        self.want.arm_and_fence(FUTEX_BIT, sys::heavy_fence);
    }

    fn look(&mut self) -> Option<Result<()>> {
        if (self.ready)() {
            return Some(Ok(()));
        }
        crate::ctl::poll();
        crate::ctl::notice();
        crate::peers::look(self.d);
        if (self.ready)() {
            return Some(Ok(()));
        }
        if let Some(e) = self.is_detached() {
            return Some(Err(e));
        }
        self.w.is_over().then_some(Err(Errno::EAGAIN))
    }

    fn sleep(&mut self) -> Result<usize> {
        let OnWord { d, want, seq, .. } = *self;
        let left = self.w.left().or_else(|| is_less_than_wanted(d, want).then_some(LONG));
        let ends = || is_less_than_wanted(d, want);
        let restart = if self.w.deadline.is_none() { Restart::SocketUnless(&ends) } else { Restart::Never };
        let teased = self.w.teased.is();
        let word = Word { d, want, seq, teased, long: &mut self.long, look: &mut self.ready };
        wait::sleep(Source::Word(word), Sleep::of(Call::Stream, left).restart(restart))
    }

    fn on_wake(&mut self, woken: Result<usize>) -> Option<Result<()>> {
        self.w.begun |= woken != Err(Errno::EAGAIN);
        // What another thread is faster to take wakes this one in vain, too, but from a sleep.
        self.w.was_not();
        if (self.ready)() {
            return Some(Ok(()));
        }
        self.w.teased.woken_for_nothing(self.d, self.want);
        match woken {
            Err(Errno::EINTR) => Some(Err(Errno::EINTR)),
            Ok(0) if self.w.is_over() => Some(Err(Errno::EAGAIN)),
            _ => None,
        }
    }
}
