//! Ends: of processes, listeners and channels.
//!
//! Long: all of them begin with the same scene.

use crate::support::*;
use fsocket_abi::arena::{Counter, SOCKS, SOCK_OFF};
use fsocket_abi::channel::{ring_off, slot_state, status, waker_key, CLIENT, POS_START, SERVER, SLOTS, SUMMARY_SYN};
use fsocket_proto::raw::Packet;
use fsocket_proto::{notice, request, Payload};
use fsocket_sync::atomic::{AtomicU64, Ordering};
use fsocket_sync::doorbell::FUTEX_BIT;
use fsocket_sync::token::Words as _;
use rustix::fd::OwnedFd;

/// A server that works on a listener, a client, and their channel.
struct Scene {
    server: Proc,
    client: Proc,
    listener: u64,
    port: u16,
    ch: ChannelView,
    _socket: OwnedFd,
    d: Daemon,
}

fn scene() -> Scene {
    let d = Daemon::start();
    let (mut server, client, Listener { socket, port, id: listener }, ch) =
        acquaint(d.process_with_arena(), d.process_with_arena());
    let (msg, _) = server.wait_unasked();
    assert_eq!(msg.kind, notice::ChannelSrv::KIND);
    Scene { server, client, listener, port, ch, _socket: socket.into(), d }
}

#[test]
fn a_dead_process_closes_its_connections_and_wakes_the_peer() {
    let s = scene();
    for slot in 0..3 {
        s.ch.set_state(slot, slot_state::ESTABLISHED);
        s.server.open_sock(slot, s.ch.id, slot, SERVER, &[s.server.nonce]);
    }
    // Slot 0: all read. Slot 1: a record waits. Slot 2: one is half read, and
    // the client wants space.
    let base = POS_START;
    for i in 0..3 {
        let rx = &s.server.sock(i).rx;
        rx.set_pos(base + 64);
        rx.set_base(base);
    }
    s.ch.map.at::<AtomicU64>(ring_off(1, CLIENT) + 64).store(5 | 1 << 32, Ordering::Relaxed);
    s.server.sock(2).rx.set_limit(9);
    s.ch.sleep(CLIENT, 3, waker_key(s.client.nonce, 5));
    let _ = s.ch.slot(0).dir[SERVER].want_data.arm(1 << 3);
    let _ = s.ch.slot(1).dir[SERVER].want_data.arm(FUTEX_BIT);
    let _ = s.ch.slot(2).dir[CLIENT].want_space.arm(FUTEX_BIT | 1 << 3);

    let Scene { server, ch, d: _d, mut client, .. } = s;
    let waiter = ch.waiter(CLIENT, 3);
    drop(server.fd);
    wait_until("the last one is closed", || ch.status(2, SERVER) != 0);
    assert_eq!(ch.status(0, SERVER), status::FIN | status::CLOSED);
    assert_eq!(ch.status(1, SERVER), status::RST | status::CLOSED);
    assert_eq!(ch.status(2, SERVER), status::RST | status::CLOSED);
    for slot in 0..3 {
        assert_eq!(ch.status(slot, CLIENT), 0);
    }
    wait_until("the client is woken", || client.is_woken(5));
    assert_eq!(waiter_ready(waiter) & 0b101, 0b101);
    assert_eq!(waiter.summary.load(Ordering::Acquire) & 1, 1);
    assert_eq!(waiter.sleeping.load(Ordering::Acquire), 0);
    assert_eq!(ch.slot(1).dir[SERVER].want_data.seq.load(Ordering::Acquire), 1);
    assert_eq!(ch.slot(2).dir[CLIENT].want_space.seq.load(Ordering::Acquire), 1);
}

fn waiter_ready(w: &fsocket_abi::channel::Waiter) -> u64 {
    w.ready[0].load(Ordering::Acquire)
}

#[test]
fn a_futex_sleeper_is_woken() {
    let s = scene();
    s.ch.set_state(0, slot_state::ESTABLISHED);
    s.client.open_sock(0, s.ch.id, 0, CLIENT, &[s.client.nonce]);
    let Scene { client, ch, d: _d, server: _server, .. } = s;
    let want = &ch.slot(0).dir[CLIENT].want_data;
    let _ = want.arm(FUTEX_BIT);
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            while want.seq.load(Ordering::Acquire) == 0 {
                let _ = rustix::thread::futex::wait(&want.seq, rustix::thread::futex::Flags::empty(), 0, None);
            }
        });
        std::thread::sleep(std::time::Duration::from_millis(20));
        drop(client.fd);
        sleeper.join().unwrap();
    });
    wait_until("the client is seen as gone", || ch.client_gone());
    assert_eq!(ch.status(0, CLIENT), status::FIN | status::CLOSED);
}

/// A process takes the bit of a sleeper before it wakes it, and may be killed in between.
#[test]
fn who_was_killed_before_a_wake_up_leaves_nobody_asleep() {
    let mut s = scene();
    let child = s.server.adopt();
    for (slot, holders) in [(0, vec![child.nonce]), (1, vec![s.server.nonce, child.nonce])] {
        s.ch.set_state(slot, slot_state::ESTABLISHED);
        s.server.open_sock(slot, s.ch.id, slot, SERVER, &holders);
    }
    let words = |slot: usize| [&s.ch.slot(slot).dir[SERVER].want_data, &s.ch.slot(slot).dir[CLIENT].want_space];
    for want in [0, 1].into_iter().flat_map(words) {
        let _ = want.arm(FUTEX_BIT);
        assert_eq!(want.take(), FUTEX_BIT);
    }
    drop(child.fd);
    for want in [0, 1].into_iter().flat_map(words) {
        wait_until("the sleeper is woken", || want.seq.load(Ordering::Acquire) != 0);
    }
    assert_eq!(s.ch.status(0, SERVER), status::FIN | status::CLOSED);
    assert_eq!(s.ch.status(1, SERVER), 0, "the other holder's still");
}

#[test]
fn a_shared_socket_outlives_one_of_its_holders() {
    let mut s = scene();
    let child = s.server.adopt();
    s.ch.set_state(0, slot_state::ESTABLISHED);
    s.server.open_sock(0, s.ch.id, 0, SERVER, &[s.server.nonce, child.nonce]);
    s.server.open_sock(1, s.ch.id, 1, SERVER, &[s.server.nonce]);
    s.ch.set_state(1, slot_state::ESTABLISHED);
    let Scene { server, ch, d: _d, client: _client, .. } = s;
    drop(server.fd);
    wait_until("the unshared one is closed", || ch.status(1, SERVER) != 0);
    assert_eq!(ch.status(0, SERVER), 0);
    drop(child);
    wait_until("the shared one is closed", || ch.status(0, SERVER) != 0);
    let map = server.arena.unwrap();
    let sock: &fsocket_abi::sock::Sock = map.at(fsocket_abi::arena::SOCK_OFF);
    wait_until("it is free", || sock.is_free());
}

#[test]
fn who_dies_inside_an_operation_does_not_block_relatives() {
    let mut s = scene();
    let child = s.server.adopt();
    for slot in 0..3 {
        s.ch.set_state(slot, slot_state::ESTABLISHED);
        s.server.open_sock(slot, s.ch.id, slot, SERVER, &[s.server.nonce, child.nonce]);
    }
    // Threads of both, as the library names them.
    let thread = |p: &Proc| 0x7f00_0000_1000 | (p.nonce >> 16) << 48;
    s.server.sock(0).tx.owner().store(thread(&child), Ordering::Relaxed);
    s.server.sock(0).tx.in_flight().store(1, Ordering::Relaxed);
    s.server.sock(1).rx.owner().store(1, Ordering::Relaxed);
    s.server.sock(1).rx.shared().store(thread(&child), Ordering::Relaxed);
    s.server.sock(2).tx.owner().store(thread(&s.server), Ordering::Relaxed);
    s.server.sock(2).tx.in_flight().store(1, Ordering::Relaxed);
    assert_ne!(thread(&child) >> 48, thread(&s.server) >> 48);
    drop(child);
    wait_until("both are reset", || (0..2).all(|slot| s.ch.status(slot, SERVER) == status::RST));
    wait_until("nobody is inside", || s.server.sock(1).rx.shared().load(Ordering::Acquire) == 0);
    assert_eq!(s.server.sock(0).tx.in_flight().load(Ordering::Acquire), 0);
    for slot in 0..2 {
        assert!(s.server.sock(slot).flags.look().is_poisoned());
        assert!(s.server.sock(slot).is_open(), "the relative's to close");
    }
    // The relative is inside this one itself.
    s.server.sync();
    assert_eq!(s.ch.status(2, SERVER), 0);
    assert_eq!(s.server.sock(2).tx.in_flight().load(Ordering::Acquire), 1);
}

#[test]
fn an_heir_takes_what_it_claims_and_no_more() {
    let mut s = scene();
    let (second, other_port) = listener();
    let other = s.server.listen(&second);
    let mut next = s.server.successor(&[s.listener, other, 4711]);
    s.ch.set_state(0, slot_state::ESTABLISHED);
    s.server.open_sock(0, s.ch.id, 0, SERVER, &[s.server.nonce, next.nonce]);
    let ask = |kind, id, arg0| Packet { id, arg0, ..Packet::new(kind) };
    let nowhere = rustix::io::Errno::NOENT.raw_os_error();
    assert!(next.request(ask(request::InheritedArena::KIND, 0, 0), None).1.is_some());
    assert_eq!(next.request(ask(request::InheritedArena::KIND, 1, 0), None).0.result, nowhere);
    let (part, memory) = next.request(ask(request::ChannelHandle::KIND, s.ch.id.into(), SERVER as u64), None);
    assert_eq!((part.arg0, memory.is_some()), (s.listener, true));
    let no_message = rustix::io::Errno::INVAL.raw_os_error();
    for (channel, side, refusal) in
        [(s.ch.id.into(), CLIENT as u64, nowhere), (s.ch.id.into(), 2, no_message), (u64::MAX, 0, no_message)]
    {
        assert_eq!(next.request(ask(request::ChannelHandle::KIND, channel, side), None).0.result, refusal);
    }
    // The program before it ends first: its place waits for the successor.
    let Scene { server, ch, d, mut client, _socket, listener, port, .. } = s;
    drop(server.fd);
    wait_until("the old program is gone", || ch.workers() == 0);
    assert_eq!(ch.status(0, SERVER), 0);
    assert_eq!(next.listen(&_socket), listener);
    assert_eq!(next.request(Packet::new(request::Settled::KIND), None).0.result, 0);
    assert_eq!(next.work(listener), 0);
    let mut c = d.process();
    assert_eq!(c.connect_to(v4([127, 0, 0, 1], port), 0).0.result, 0);
    assert_eq!(c.connect_to(v4([127, 0, 0, 1], other_port), 0).0.result, nowhere, "nobody claimed it");
    client.sync();
    drop(next);
    wait_until("the connection ends with the successor", || ch.status(0, SERVER) != 0);
}

/// The monitor may read what the successor says before the last words of the program before it.
#[test]
fn an_heir_that_is_heard_first_loses_nothing() {
    let mut s = scene();
    let (second, other_port) = listener();
    let other = s.server.listen(&second);
    let mut next = s.server.announce(true);
    s.server.sync();
    next.hello();
    assert_eq!(next.listen(&s._socket), s.listener);
    for l in [s.listener, other] {
        s.server.tell(Packet { id: next.nonce, arg0: l, ..Packet::new(request::Keep::KIND) }, None);
    }
    s.server.sync();
    let Scene { server, ch: _ch, d, client: _client, listener, port, .. } = s;
    drop(server.fd);
    assert_eq!(next.request(Packet::new(request::Settled::KIND), None).0.result, 0);
    // (Not the second one, for which the next program has no descriptor.)
    let mut c = d.process();
    assert_eq!(c.connect_to(v4([127, 0, 0, 1], port), 0).0.result, 0);
    let nowhere = rustix::io::Errno::NOENT.raw_os_error();
    assert_eq!(c.connect_to(v4([127, 0, 0, 1], other_port), 0).0.result, nowhere, "nobody claimed it");
    next.work(listener);
}

#[test]
fn uncounted_holders_end_with_the_family() {
    let s = scene();
    s.ch.set_state(0, slot_state::ESTABLISHED);
    let sock = s.server.open_sock(0, s.ch.id, 0, SERVER, &[s.server.nonce]);
    (0..3).for_each(|_| sock.add_extra_holder());
    let Scene { server, ch, d: _d, client: _client, .. } = s;
    drop(server.fd);
    wait_until("it is closed", || ch.status(0, SERVER) != 0);
}

#[test]
fn a_socket_that_nobody_holds_is_closed_unless_a_relative_has_its_slot() {
    let d = Daemon::start();
    let (mut server, _client, _l, ch) = d.acquainted();
    // Forked before: it does not have the parent's arena.
    let mut child = server.adopt();
    server.make_arena();
    child.make_arena();
    for slot in 0..2 {
        ch.set_state(slot, slot_state::ESTABLISHED);
        server.open_sock(slot, ch.id, slot, SERVER, &[]);
    }
    child.open_sock(0, ch.id, 1, SERVER, &[child.nonce]);
    drop(server);
    wait_until("the one is closed", || ch.status(0, SERVER) == status::FIN | status::CLOSED);
    child.sync();
    assert_eq!(ch.status(1, SERVER), 0);
}

#[test]
fn the_end_of_a_listener_resets_what_nobody_accepted() {
    let mut s = scene();
    s.ch.syn(0, 4);
    s.ch.syn(1, 5);
    s.ch.set_state(6, slot_state::ESTABLISHED);
    s.server.open_sock(0, s.ch.id, 6, SERVER, &[s.server.nonce]);
    s.client.open_sock(0, s.ch.id, 4, CLIENT, &[s.client.nonce]);
    s.ch.sleep(CLIENT, 0, waker_key(s.client.nonce, 9));
    let _ = s.ch.slot(5).dir[SERVER].want_data.arm(1);
    let pending = s.client.pending();
    s.server.tell(Packet { id: s.listener, ..Packet::new(request::Unlisten::KIND) }, None);
    s.server.sync();
    assert!(s.ch.listener_closed());
    assert_eq!(s.ch.status(4, SERVER), status::RST | status::CLOSED);
    assert_eq!(s.ch.status(5, SERVER), status::RST | status::CLOSED);
    assert_eq!(s.ch.status(6, SERVER), 0, "an accepted connection goes on");
    assert!(s.client.is_woken(9));
    s.client.unasked.retain(|(m, _)| m.kind != notice::Woken::KIND);
    let (msg, _) = s.client.wait_unasked();
    assert_eq!((msg.kind, msg.id), (notice::ChannelGone::KIND, u64::from(s.ch.id)));
    assert!(s.client.pending() > pending);
    assert_ne!(s.client.connect_to(v4([127, 0, 0, 1], s.port), 0).0.result, 0);
    // The monitor still ends as it should.
    let Scene { server, ch, d: _d, client: _client, .. } = s;
    drop(server);
    wait_until("the accepted one is closed", || ch.status(6, SERVER) != 0);
}

#[test]
fn a_dead_workers_queue_is_left_to_the_others() {
    let mut s = scene();
    let mut child = s.server.adopt();
    let number = child.work(s.listener);
    assert_eq!(number, 1);
    s.ch.syn(2, 8);
    let waiter = s.ch.sleep(SERVER, 1, waker_key(s.server.nonce, 31));
    drop(child);
    wait_until("the other is woken", || s.server.is_woken(31));
    assert_eq!(waiter.summary.load(Ordering::Acquire) & SUMMARY_SYN, SUMMARY_SYN);
    assert_eq!(s.ch.workers(), 1);
    assert_eq!(s.ch.status(8, SERVER), 0);
}

#[test]
fn a_child_keeps_the_listener() {
    let s = scene();
    let Scene { mut server, port, d, mut client, .. } = s;
    let child = server.adopt();
    drop(server);
    let to = v4([127, 0, 0, 1], port);
    let mut c = d.process();
    for _ in 0..10 {
        assert_eq!(c.connect_to(to, 0).0.result, 0);
        client.sync();
    }
    drop(child);
    wait_until("the last holder is gone", || c.connect_to(to, 0).0.result != 0);
}

#[test]
fn a_client_that_came_and_went_is_still_accepted() {
    let d = Daemon::start();
    let mut server = d.process();
    let (l, port) = listener();
    let id = server.listen(&l);
    let client = d.process_with_arena();
    let mut client = client;
    let ch = client.connect(port);
    ch.syn(0, 0);
    client.open_sock(0, ch.id, 0, CLIENT, &[client.nonce]);
    drop(client);
    wait_until("it has gone", || ch.client_gone());
    assert_eq!(ch.status(0, CLIENT), status::FIN | status::CLOSED);
    server.work(id);
    let (msg, fd) = server.unasked.remove(0);
    assert_eq!((msg.kind, msg.id), (notice::ChannelSrv::KIND, u64::from(ch.id)));
    assert!(fd.is_some());
    // The server takes it and closes it: then the channel goes.
    ch.queue(0).head.store(1, Ordering::Release);
    ch.set_state(0, slot_state::ESTABLISHED);
    ch.slot(0).dir[SERVER].prod.status.store(status::CLOSED | status::FIN, Ordering::Release);
    let (msg, _) = server.wait_unasked();
    assert_eq!((msg.kind, msg.id), (notice::ChannelGone::KIND, u64::from(ch.id)));
}

/// A worker has taken it out of the queue, and not looked at the slot yet, when its client ends.
#[test]
fn a_connection_that_is_being_accepted_outlives_its_client() {
    let d = Daemon::start();
    let mut server = d.process();
    let (l, port) = listener();
    let id = server.listen(&l);
    server.work(id);
    let mut client = d.process_with_arena();
    let ch = client.connect(port);
    ch.syn(0, 0);
    client.open_sock(0, ch.id, 0, CLIENT, &[client.nonce]);
    ch.queue(0).head.store(1, Ordering::Release);
    drop(client);
    wait_until("it has gone", || ch.client_gone());
    server.sync();
    let kinds: Vec<u32> = server.unasked.drain(..).map(|(msg, _)| msg.kind).collect();
    assert_eq!(kinds, [notice::ChannelSrv::KIND]);
    ch.set_state(0, slot_state::ESTABLISHED);
    ch.slot(0).dir[SERVER].prod.status.store(status::CLOSED | status::FIN, Ordering::Release);
    let (msg, _) = server.wait_unasked();
    assert_eq!((msg.kind, msg.id), (notice::ChannelGone::KIND, u64::from(ch.id)));
}

#[test]
fn waiters_of_the_dead_are_freed_but_not_those_of_relatives() {
    let mut s = scene();
    let mut child = s.server.adopt();
    let (fork_group, clients) = (waker_key(child.nonce, 2), waker_key(s.client.nonce, 3));
    s.ch.sleep(SERVER, 0, waker_key(s.server.nonce, 1));
    s.ch.sleep(SERVER, 1, fork_group);
    s.ch.sleep(CLIENT, 0, clients);
    let Scene { server, ch, d: _daemon, client: _client, .. } = s;
    drop(server.fd);
    wait_until("its waiter is free", || ch.waiter(SERVER, 0).waker.load(Ordering::Acquire) == 0);
    assert_eq!(ch.waiter(SERVER, 0).sleeping.load(Ordering::Acquire), 0);
    child.sync();
    assert_eq!(ch.waiter(SERVER, 1).waker.load(Ordering::Acquire), fork_group);
    assert_eq!(ch.waiter(CLIENT, 0).waker.load(Ordering::Acquire), clients);
}

#[test]
fn bytes_of_the_dead_are_counted() {
    let s = scene();
    let sock = s.client.open_sock(0, s.ch.id, 0, CLIENT, &[s.client.nonce]);
    sock.tx.set_bytes(1000);
    let map = s.client.arena.as_ref().unwrap();
    let stats: &fsocket_abi::arena::Stats = map.at(fsocket_abi::arena::STATS_OFF);
    stats.counter[Counter::ConnectShm as usize].store(4, Ordering::Relaxed);
    stats.counter[Counter::TxBytes as usize].store(11, Ordering::Relaxed);
    let total = |d: &Daemon, name: &str| crate::reporting::report(d).totals[name];
    assert_eq!((total(&s.d, "tx_bytes"), total(&s.d, "connect_shm")), (1011, 4));
    let Scene { client, d, .. } = s;
    drop(client);
    wait_until("it is gone", || crate::reporting::report(&d).connections.is_empty());
    assert_eq!((total(&d, "tx_bytes"), total(&d, "connect_shm")), (1011, 4));
}

/// A process ends with all the sockets that there can be, each of which somebody sleeps on. Others are answered
/// meanwhile.
#[test]
fn others_are_answered_while_a_process_with_much_ends() {
    let s = scene();
    for i in 0..SOCKS {
        s.client.open_sock(i, s.ch.id, i % SLOTS, CLIENT, &[s.client.nonce]);
    }
    let Scene { mut server, client, ch, d, .. } = s;
    // No process holds these: others might have what they name.
    let other = d.process_with_arena();
    for i in 0..SOCKS {
        other.open_sock(i, ch.id, i % SLOTS, CLIENT, &[]);
    }
    for ended in [client, other] {
        let Proc { fd, arena, .. } = ended;
        let map = arena.unwrap();
        let sock = |i: usize| map.at::<fsocket_abi::sock::Sock>(SOCK_OFF + i * size_of::<fsocket_abi::sock::Sock>());
        let open = || (0..SOCKS).filter(|i| sock(*i).is_open()).count();
        drop(fd);
        let mut answered = 0;
        while open() > 0 {
            server.sync();
            answered += 1;
        }
        // (Counting takes longer than an answer.)
        assert!(answered > 2, "{answered} answers meanwhile");
    }
    for slot in 0..SLOTS {
        assert_eq!(ch.status(slot, CLIENT) & status::CLOSED, status::CLOSED, "{slot}");
    }
}

#[test]
fn a_channel_at_rest_ends_and_one_in_use_does_not() {
    let mut s = scene();
    let rest = |p: &mut Proc, id: u32| {
        p.tell(Packet { id: id.into(), ..Packet::new(request::Rest::KIND) }, None);
        p.sync();
    };
    // Not for another process, nor with a connection that is open, waits, or has become the kernel's.
    rest(&mut s.server, s.ch.id);
    s.ch.set_state(0, slot_state::ESTABLISHED);
    rest(&mut s.client, s.ch.id);
    s.ch.set_state(0, slot_state::FREE);
    s.ch.syn(0, 1);
    rest(&mut s.client, s.ch.id);
    s.ch.queue(0).head.store(1, Ordering::Relaxed);
    rest(&mut s.client, s.ch.id);
    s.ch.set_state(1, slot_state::FREE);
    s.ch.slot(1).switching.store(1, Ordering::Relaxed);
    rest(&mut s.client, s.ch.id);
    s.ch.slot(1).switching.store(0, Ordering::Relaxed);
    assert!(!s.ch.listener_closed() && s.client.unasked.is_empty() && s.server.unasked.is_empty());

    rest(&mut s.client, s.ch.id);
    assert!(s.ch.listener_closed());
    for p in [&mut s.client, &mut s.server] {
        assert_eq!(p.wait_unasked().0, Packet { id: s.ch.id.into(), ..Packet::new(notice::ChannelGone::KIND) });
    }
    assert_ne!(s.client.connect(s.port).id, s.ch.id);
}
