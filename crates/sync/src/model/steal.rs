//! Stealing on the kernel's path (ADR 26): no connection waits for a worker that has stopped while
//! another worker sleeps, whichever of them the kernel woke.
//!
//! The model of the kernel follows `eventpoll.c`, with one lock instead of several. The rest
//! follows the library (`zone::balance`), the monitor (`zones::balance`) and the BPF program
//! (`balance.h`). The model has no time: a worker's patience is over when another worker has not
//! looked between two of its own looks. If nobody takes a connection, a worker sleeps for ever,
//! which loom reports as a deadlock.

use super::every_way;
use crate::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::idle;
use loom::sync::{Condvar, Mutex, MutexGuard};
use loom::thread::yield_now;
use std::sync::Arc;

/// The two workers. Each number also names the worker's listen socket and epoll instance.
const IDLE: usize = 0;
const STOPS: usize = 1;

#[derive(Default)]
struct State {
    /// Connections that wait at each listen socket.
    queue: [u32; 2],
    /// Ready list of each instance, by listen socket.
    ready: [[bool; 2]; 2],
    asleep: [bool; 2],
    /// The peer's socket is not in the worker's instance, because the worker was busy
    /// (`zone::balance::unsubscribed`).
    unsubscribed: [bool; 2],
    /// A message of the monitor is to be read.
    told: [bool; 2],
}

/// The events that `epoll_wait` reports.
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

    /// `ep_poll_callback` of an entry. True: a thread slept there, and is awake now.
    fn wake(&self, k: &mut State, ep: usize) -> bool {
        if k.asleep[ep] {
            self.woken[ep].notify_all();
        }
        std::mem::take(&mut k.asleep[ep])
    }

    /// A handshake ends at a socket. All entries are EPOLLEXCLUSIVE, and the socket's own worker
    /// comes first.
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

    /// The worker's own socket is level-triggered, the peer's is edge-triggered.
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

    /// EPOLL_CTL_ADD of the peer's socket. `looks`: it checks whether the socket is ready.
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
    /// Numbers of SYNs and of accepted connections.
    added: AtomicU32,
    taken: AtomicU32,
    /// How often the worker that stops has looked at its own socket.
    looked: AtomicU64,
    /// The idle worker is busy: its own queue was long.
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

    /// The BPF selection program, at a SYN.
    fn syn(&self) {
        self.added.fetch_add(1, Ordering::SeqCst);
        if idle::must_ring(&self.idle) {
            self.ring();
        }
    }

    fn take(&self, socket: usize) {
        if self.kernel.accept(socket) && self.taken.fetch_add(1, Ordering::SeqCst) + 1 == self.connections {
            // All connections are accepted, so all threads may end.
            self.over.store(true, Ordering::Release);
            self.tell_idle();
            self.ring();
        }
    }

    /// The monitor sends a message to the idle worker.
    fn tell_idle(&self) {
        let mut k = self.kernel.lock();
        k.told[IDLE] = true;
        self.kernel.wake(&mut k, IDLE);
    }
}

/// The rules that make a protocol correct or insufficient.
#[derive(Clone, Copy)]
struct Rules {
    /// A monitor runs.
    monitor: bool,
    /// The monitor stays awake while handshakes are open.
    open_handshakes: bool,
    /// A worker that is too busy to steal keeps looking at its peers.
    busy_looks: bool,
    /// EPOLL_CTL_ADD checks whether the socket is ready.
    putting_looks: bool,
    /// An unsubscribed worker subscribes to its peers again before it sleeps.
    attends: bool,
}

const RIGHT: Rules =
    Rules { monitor: true, open_handshakes: true, busy_looks: true, putting_looks: true, attends: true };

/// The worker that does not stop.
fn idle_worker(g: &Group, rules: Rules) {
    // Outer None: the peer needs no help. Otherwise how often the peer had looked; inner None: the
    // worker's patience is over.
    let mut since: Option<Option<u64>> = None;
    let mut unsubscribed = g.kernel.lock().unsubscribed[IDLE];
    while !g.over.load(Ordering::Acquire) {
        // An unsubscribed worker sleeps only for a moment.
        let e = g.kernel.epoll_wait(IDLE, since.is_none() && !(unsubscribed && rules.attends));
        if unsubscribed && rules.attends && !e.own {
            g.kernel.turn_to_peer(IDLE, rules.putting_looks);
            unsubscribed = false;
        }
        if e.own {
            g.take(IDLE);
        }
        if e.peer && since.is_none() {
            // Acquire pairs with the release of the peer's look, in place of a clock.
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
        // Stands for a sleep that ends when the patience does, so that the others run.
        yield_now();
    }
}

/// A worker that stops for good after some turns of its loop. It either sleeps in `epoll_wait`
/// (`asleep`), so the kernel wakes it for a connection that it never accepts, or it is busy.
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
        // Stands for a sleep of a tenth of a second.
        yield_now();
    }
}

struct Case {
    connections: u32,
    /// Turns of the worker that stops.
    turns: u32,
    asleep: bool,
    /// The idle worker was busy at first: its own queue was long.
    busy: bool,
    /// The idle worker had unsubscribed from its peers, because it was busy.
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
            // The worker has stopped before any connection comes.
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

/// The SYN wakes the monitor, which parks again before the handshake has ended.
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

/// This also covers a worker that sleeps for longer than it should.
#[test]
fn the_monitor_tells_an_unsubscribed_worker_that_sleeps() {
    let rules = Rules { attends: false, ..RIGHT };
    run(Case { connections: 1, turns: 0, asleep: false, busy: false, unsubscribed: true, rules });
    run(Case { connections: 1, turns: 1, asleep: true, busy: false, unsubscribed: true, rules });
}
