//! Stealing on the kernel's path (ADR 26): no connection waits for a worker that has
//! stopped while another one sleeps, whoever was woken for it.
//!
//! The kernel is what `eventpoll.c` does under its locks, here one; the rest is as in the core
//! crate (`zone::balance`), the monitor (`zones::balance`) and the BPF program (`balance.h`).
//! Time is left out: patience is over when a worker has not looked between two looks of
//! another one's. A connection that nobody takes is a worker that sleeps for ever, which loom
//! reports as a deadlock.

use super::every_way;
use crate::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::idle;
use loom::sync::{Condvar, Mutex, MutexGuard};
use loom::thread::yield_now;
use std::sync::Arc;

/// Workers, their listen sockets, their epoll instances.
const IDLE: usize = 0;
const STOPS: usize = 1;

#[derive(Default)]
struct State {
    /// Connections that wait at each listen socket.
    queue: [u32; 2],
    /// Ready list of each instance: its own socket, and the peer's.
    ready: [[bool; 2]; 2],
    asleep: [bool; 2],
    /// The peer's socket is not in it: its worker had enough to do (`zone::balance::unsubscribed`).
    unsubscribed: [bool; 2],
    /// Something of the monitor's to be read.
    told: [bool; 2],
}

/// What `epoll_wait` reports.
#[derive(Clone, Copy, Default)]
struct Events {
    own: bool,
    peer: bool,
    told: bool,
}

#[derive(Default)]
struct Kernel {
    state: Mutex<State>,
    woken: [Condvar; 2],
}

impl Kernel {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// `ep_poll_callback` of an entry: true if somebody slept there, who then is awake.
    fn wake(&self, k: &mut State, ep: usize) -> bool {
        if k.asleep[ep] {
            self.woken[ep].notify_all();
        }
        std::mem::take(&mut k.asleep[ep])
    }

    /// A handshake ends at a socket: all entries are EPOLLEXCLUSIVE, the own worker's first.
    fn arrives(&self, socket: usize) {
        let mut k = self.lock();
        k.queue[socket] += 1;
        for ep in [socket, 1 - socket] {
            if ep != socket && k.unsubscribed[ep] {
                continue;
            }
            k.ready[ep][socket] = true;
            if self.wake(&mut k, ep) {
                break;
            }
        }
    }

    /// The own socket is level-triggered, the peer's edge-triggered.
    fn epoll_wait(&self, ep: usize, sleep: bool) -> Events {
        let mut k = self.lock();
        loop {
            let is_ready = |k: &mut State, socket: usize, level: bool| {
                let ready = k.ready[ep][socket] && k.queue[socket] > 0;
                k.ready[ep][socket] = ready && level;
                ready
            };
            let own = is_ready(&mut k, ep, true);
            let peer = is_ready(&mut k, 1 - ep, false);
            let told = std::mem::take(&mut k.told[ep]);
            if own || peer || told || !sleep {
                return Events { own, peer, told };
            }
            k.asleep[ep] = true;
            while k.asleep[ep] {
                k = self.woken[ep].wait(k).unwrap();
            }
        }
    }

    /// EPOLL_CTL_DEL of the peer's socket.
    fn turn_from_peer(&self, ep: usize) {
        let mut k = self.lock();
        k.unsubscribed[ep] = true;
        k.ready[ep][1 - ep] = false;
    }

    /// EPOLL_CTL_ADD, which `looks` whether the socket is ready.
    fn turn_to_peer(&self, ep: usize, looks: bool) {
        let mut k = self.lock();
        k.unsubscribed[ep] = false;
        k.ready[ep][1 - ep] = looks && k.queue[1 - ep] > 0;
    }

    fn accept(&self, socket: usize) -> bool {
        let mut k = self.lock();
        let some = k.queue[socket] > 0;
        k.queue[socket] -= u32::from(some);
        some
    }

    fn length(&self, socket: usize) -> u32 {
        self.lock().queue[socket]
    }
}

#[derive(Default)]
struct Group {
    connections: u32,
    kernel: Kernel,
    /// SYNs and accepts.
    added: AtomicU32,
    taken: AtomicU32,
    /// How often the worker that stops has looked.
    looked: AtomicU64,
    /// The idle one's queue was long.
    busy: AtomicBool,
    idle: AtomicU32,
    waker: Mutex<bool>,
    rung: Condvar,
    over: AtomicBool,
}

impl Group {
    fn ring(&self) {
        *self.waker.lock().unwrap() = true;
        self.rung.notify_all();
    }

    /// The selection program, at a SYN.
    fn syn(&self) {
        self.added.fetch_add(1, Ordering::SeqCst);
        if idle::must_ring(&self.idle) {
            self.ring();
        }
    }

    fn take(&self, socket: usize) {
        if self.kernel.accept(socket) && self.taken.fetch_add(1, Ordering::SeqCst) + 1 == self.connections {
            // All are served: nobody waits for more.
            self.over.store(true, Ordering::Release);
            self.tell_idle();
            self.ring();
        }
    }

    /// A message of the monitor's.
    fn tell_idle(&self) {
        let mut k = self.kernel.lock();
        k.told[IDLE] = true;
        self.kernel.wake(&mut k, IDLE);
    }
}

/// What differs between what is right and what is not enough.
#[derive(Clone, Copy)]
struct Rules {
    /// There is a monitor.
    monitor: bool,
    /// It stays awake for handshakes that have not ended.
    open_handshakes: bool,
    /// A worker that is busy goes on looking at its peers.
    busy_looks: bool,
    /// What is put into an instance is looked at.
    putting_looks: bool,
    /// A worker that was unsubscribed attends to its peers before it sleeps.
    attends: bool,
}

const RIGHT: Rules =
    Rules { monitor: true, open_handshakes: true, busy_looks: true, putting_looks: true, attends: true };

/// The worker that goes on.
fn idle_worker(g: &Group, rules: Rules) {
    // `peers_since`, and how often the other had looked then; None: patience is over.
    let mut since: Option<Option<u64>> = None;
    let mut unsubscribed = g.kernel.lock().unsubscribed[IDLE];
    while !g.over.load(Ordering::Acquire) {
        // Unsubscribed, it sleeps for a moment only.
        let e = g.kernel.epoll_wait(IDLE, since.is_none() && !(unsubscribed && rules.attends));
        if unsubscribed && rules.attends && !e.own {
            g.kernel.turn_to_peer(IDLE, rules.putting_looks);
            unsubscribed = false;
        }
        if e.own {
            g.take(IDLE);
        }
        if e.peer && since.is_none() {
            // Acquire pairs with the release of the other's look: as if the clock told it.
            since = Some(Some(g.looked.load(Ordering::Acquire)));
        }
        if e.told {
            since = Some(None);
        }
        let Some(then) = since else { continue };
        let may = !g.busy.load(Ordering::Relaxed);
        let now = g.looked.load(Ordering::Acquire);
        if g.kernel.length(STOPS) == 0 {
            since = None;
        } else if may && then.is_none_or(|then| then == now) {
            g.take(STOPS);
        } else if may || rules.busy_looks {
            since = Some(then.map(|_| now));
        } else {
            since = None;
        }
        // Sleeps are cut to the patience: the others' time.
        yield_now();
    }
}

/// One that stops for good after some turns of its loop: it is asleep then, and woken for a
/// connection that it never comes to accept; or it is at its work.
fn stopping_worker(g: &Group, turns: u32, asleep: bool) {
    for _ in 0..turns {
        g.looked.fetch_add(1, Ordering::Release);
        if g.kernel.epoll_wait(STOPS, false).own {
            g.take(STOPS);
        }
    }
    g.looked.fetch_add(1, Ordering::Release);
    g.kernel.lock().asleep[STOPS] = asleep;
}

fn monitor(g: &Group, rules: Rules) {
    let mut seen = 0;
    let mut before = (0, u64::MAX);
    while !g.over.load(Ordering::Acquire) {
        let (added, taken) = (g.added.load(Ordering::SeqCst), g.taken.load(Ordering::SeqCst));
        let (length, looked) = (g.kernel.length(STOPS), g.looked.load(Ordering::Acquire));
        if length > 0 && before == (1, looked) {
            g.tell_idle();
        }
        before = (u32::from(length > 0), looked);
        let open = rules.open_handshakes && added != taken + length;
        let quiet = added == seen && length == 0 && !open;
        seen = added;
        if quiet && idle::park(&g.idle, || g.added.load(Ordering::SeqCst) != seen) {
            let mut rung = g.waker.lock().unwrap();
            while !std::mem::take(&mut *rung) {
                rung = g.rung.wait(rung).unwrap();
            }
            g.idle.store(0, Ordering::SeqCst);
        }
        // A tenth of a second.
        yield_now();
    }
}

struct Case {
    connections: u32,
    /// Of the worker that stops.
    turns: u32,
    asleep: bool,
    /// The idle worker's queue was long at first.
    busy: bool,
    /// It had so much to do that it did not attend to its peers.
    unsubscribed: bool,
    rules: Rules,
}

fn run(c: Case) {
    every_way(Some(2), move || {
        let g = Arc::new(Group { connections: c.connections, ..Group::default() });
        g.busy.store(c.busy, Ordering::Relaxed);
        if c.unsubscribed {
            g.kernel.turn_from_peer(IDLE);
        }
        let mut threads = Vec::new();
        if c.rules.monitor {
            let (g, rules) = (g.clone(), c.rules);
            threads.push(loom::thread::spawn(move || monitor(&g, rules)));
        }
        let (of, busy) = (g.clone(), c.busy);
        threads.push(loom::thread::spawn(move || {
            for _ in 0..of.connections {
                of.syn();
                of.kernel.arrives(STOPS);
            }
            if busy {
                of.busy.store(false, Ordering::Relaxed);
            }
        }));
        if c.turns == 0 {
            // It has stopped before anything comes.
            stopping_worker(&g, 0, c.asleep);
        } else {
            let (g, turns, asleep) = (g.clone(), c.turns, c.asleep);
            threads.push(loom::thread::spawn(move || stopping_worker(&g, turns, asleep)));
        }
        idle_worker(&g, c.rules);
        threads.into_iter().for_each(|t| t.join().unwrap());
    });
}

const ALONE: Rules = Rules { monitor: false, ..RIGHT };

#[test]
fn the_kernel_wakes_another_while_the_own_worker_does_not_sleep() {
    run(Case { connections: 2, turns: 0, asleep: false, busy: false, unsubscribed: false, rules: ALONE });
}

#[test]
fn patience_ends_however_the_own_worker_stops() {
    run(Case { connections: 1, turns: 1, asleep: false, busy: false, unsubscribed: false, rules: ALONE });
    run(Case { connections: 2, turns: 1, asleep: false, busy: false, unsubscribed: false, rules: ALONE });
}

#[test]
fn the_monitor_sees_who_was_woken_and_does_not_come() {
    run(Case { connections: 1, turns: 0, asleep: true, busy: false, unsubscribed: false, rules: RIGHT });
}

#[test]
fn also_if_it_looked_meanwhile() {
    run(Case { connections: 1, turns: 1, asleep: true, busy: false, unsubscribed: false, rules: RIGHT });
}

#[test]
#[should_panic(expected = "deadlock")]
fn the_kernel_alone_is_not_enough() {
    run(Case { connections: 1, turns: 0, asleep: true, busy: false, unsubscribed: false, rules: ALONE });
}

/// The SYN keeps the monitor awake, and it lies down before the handshake has ended.
#[test]
#[should_panic(expected = "deadlock")]
fn napping_while_a_handshake_is_open_loses_it() {
    let rules = Rules { open_handshakes: false, ..RIGHT };
    run(Case { connections: 1, turns: 0, asleep: true, busy: false, unsubscribed: false, rules });
}

#[test]
fn who_was_busy_when_it_was_told_remembers() {
    run(Case { connections: 1, turns: 0, asleep: false, busy: true, unsubscribed: false, rules: ALONE });
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_busy_worker_that_forgets_is_not_told_again() {
    let rules = Rules { busy_looks: false, ..ALONE };
    run(Case { connections: 1, turns: 0, asleep: false, busy: true, unsubscribed: false, rules });
}

#[test]
fn an_unsubscribed_worker_looks_before_it_sleeps() {
    run(Case { connections: 2, turns: 0, asleep: false, busy: false, unsubscribed: true, rules: ALONE });
    run(Case { connections: 1, turns: 1, asleep: false, busy: false, unsubscribed: true, rules: ALONE });
    run(Case { connections: 1, turns: 1, asleep: true, busy: false, unsubscribed: true, rules: RIGHT });
}

#[test]
#[should_panic(expected = "deadlock")]
fn putting_in_without_a_look_misses_what_came_before() {
    let rules = Rules { putting_looks: false, ..ALONE };
    run(Case { connections: 1, turns: 0, asleep: false, busy: false, unsubscribed: true, rules });
}

#[test]
#[should_panic(expected = "deadlock")]
fn an_unsubscribed_worker_that_sleeps_is_not_told() {
    let rules = Rules { attends: false, ..ALONE };
    run(Case { connections: 1, turns: 0, asleep: false, busy: false, unsubscribed: true, rules });
}

/// Also one that sleeps for longer than it should.
#[test]
fn the_monitor_tells_an_unsubscribed_worker_that_sleeps() {
    let rules = Rules { attends: false, ..RIGHT };
    run(Case { connections: 1, turns: 0, asleep: false, busy: false, unsubscribed: true, rules });
    run(Case { connections: 1, turns: 1, asleep: true, busy: false, unsubscribed: true, rules });
}
