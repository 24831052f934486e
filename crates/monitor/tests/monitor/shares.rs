//! Tests that a process or user that does not read, or asks for too much, does no harm to others.

use crate::rights::{as_user, for_users};
use crate::support::*;
use fsocket_abi::arena::ARENA_SIZE;
use fsocket_abi::channel::{ring_off, CLIENT, RING_CAP};
use fsocket_monitor::memory::{memfd, memfd_of};
use fsocket_proto::operate::{Answer, Request, Target};
use fsocket_proto::raw::Packet;
use fsocket_proto::{notice, request, Payload};
use fsocket_sync::atomic::{AtomicU64, Ordering};
use rustix::fd::AsFd;
use rustix::fs::SealFlags;
use std::time::Duration;

/// The parent waits for its children and reads nothing. Each child listens and gets a connection.
#[test]
fn a_parent_that_does_not_read_can_fork_for_ever() {
    let d = Daemon::start();
    let mut parent = d.process_with_arena();
    let mut client = d.process();
    for i in 0..500 {
        // (The child's HELLO is answered only after the parent's message was read.)
        let mut child = parent.adopt();
        let (l, port) = listener();
        let id = child.listen(&l);
        child.work(id);
        let channel = client.connect(port);
        child.request(
            fsocket_proto::raw::Packet { id, seq: 0, ..fsocket_proto::raw::Packet::new(request::Unlisten::KIND) },
            None,
        );
        wait_until("the channel has ended", || channel.listener_closed());
        client.sync();
        client.unasked.clear();
        assert!(parent.unasked.is_empty(), "{i}");
    }
    parent.sync();
    assert!(parent.unasked.is_empty(), "it has nothing to do with those channels");
}

#[test]
fn a_worker_that_does_not_read_keeps_what_there_is() {
    let d = Daemon::start();
    let mut worker = d.process_with_arena();
    let (l, port) = listener();
    let id = worker.listen(&l);
    worker.work(id);
    for _ in 0..3000 {
        let mut client = d.process();
        client.connect(port);
    }
    // (This client stays: if it ended before the worker reads, the worker would not be told of its
    // channel.)
    let mut client = d.process();
    let last = client.connect(port).id;
    let told = |worker: &mut Proc| loop {
        let (m, _) = worker.wait_unasked();
        if (m.kind, m.id) == (notice::ChannelSrv::KIND, u64::from(last)) {
            return;
        }
    };
    worker.sync();
    assert!(worker.unasked.len() < 2000, "{}", worker.unasked.len());
    told(&mut worker);
}

/// Three users take all that they can get. A fourth user with nothing yet is still served, and so
/// is root.
#[test]
fn greedy_users_do_not_exhaust_the_monitor() {
    let name = "greedy_users_do_not_exhaust_the_monitor";
    let Some(d) = for_users(name, |config| config.descriptors = 600) else { return };
    let greet = |d: &Daemon| {
        let mut p = d.stranger();
        let hello = Packet { id: p.nonce, arg1: u64::from(fsocket_abi::VERSION), ..Packet::new(request::Hello::KIND) };
        p.try_request(hello, None).map(|_| p)
    };
    let mut greedy = Vec::new();
    for uid in [70_001, 70_002, 70_003] {
        let got: Vec<Proc> = as_user(uid, || (0..400).map_while(|_| greet(&d)).collect());
        assert!((5..200).contains(&got.len()), "{uid}: {}", got.len());
        greedy.push(got);
    }
    let listens = |p: &mut Proc| {
        let (socket, _) = listener();
        let (answer, _) = p.request(Packet::new(request::Listen::KIND), Some(socket.as_fd()));
        (answer.result == 0).then_some(socket)
    };
    // A user that has used up its share gets no more, but keeps what it has.
    let last = greedy[0].last_mut().unwrap();
    let sockets: Vec<_> = (0..400).map_while(|_| as_user(70_001, || listens(last))).collect();
    assert!(sockets.len() < 10, "{}", sockets.len());
    last.sync();
    assert!(as_user(70_004, || listens(&mut greet(&d).expect("a share is left"))).is_some());
    d.acquainted();
}

/// A user whose channels have as much memory as is left for others gets no further channel.
/// Another user does.
#[test]
fn memory_of_channels_is_shared_out() {
    const MEMORY: u64 = 8 << 20;
    let name = "memory_of_channels_is_shared_out";
    let Some(d) = for_users(name, |config| config.memory = MEMORY) else { return };
    let two_listeners = |uid| {
        as_user(uid, || {
            let mut server = d.process();
            let listeners = [(); 2].map(|()| {
                let (l, port) = listener();
                let id = server.listen(&l);
                server.work(id);
                (l, port)
            });
            (server, listeners)
        })
    };
    let (_server, of_greedy) = two_listeners(70_001);
    let (_other_server, of_other) = two_listeners(70_002);
    let mut greedy = as_user(70_001, || d.process());
    let ch = as_user(70_001, || greedy.connect(of_greedy[0].1));
    for page in (0..MEMORY as usize * 5 / 8).step_by(4096) {
        ch.map.at::<AtomicU64>(ring_off(page / RING_CAP, CLIENT) + page % RING_CAP).store(1, Ordering::Relaxed);
    }
    // (The monitor measures memory only once in a while.)
    std::thread::sleep(Duration::from_millis(100));
    let to = |port| v4([127, 0, 0, 1], port);
    let (answer, _) = as_user(70_001, || greedy.connect_to(to(of_greedy[1].1), 0));
    assert_eq!(answer.result, libc::ENOMEM);
    as_user(70_002, || d.process().connect(of_other[0].1));
    // When the process with the memory ends, the user may have memory again.
    drop((ch, greedy));
    d.acquainted();
    std::thread::sleep(Duration::from_millis(100));
    as_user(70_001, || d.process().connect(of_greedy[1].1));
}

/// A process shows arenas that other processes have made. They count for its user.
#[test]
fn inherited_arenas_are_shared_out() {
    let name = "inherited_arenas_are_shared_out";
    let Some(d) = for_users(name, |config| config.descriptors = 400) else { return };
    let held = || std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let arenas = || {
        let names = held().filter_map(|fd| std::fs::read_link(fd.path()).ok());
        names.filter(|name| name.to_string_lossy().starts_with("/memfd:much")).count()
    };
    let mut greedy = as_user(70_001, || d.process());
    as_user(70_001, || {
        for _ in 0..400 {
            let fd = memfd("much", ARENA_SIZE, SealFlags::SHRINK | SealFlags::GROW).unwrap();
            label_arena(&fd);
            greedy.tell(Packet { arg1: 1, ..Packet::new(request::Arena::KIND) }, Some(fd.as_fd()));
            greedy.sync();
        }
    });
    // (The monitor is a thread of this process, so its descriptors are visible here.)
    assert!((10..150).contains(&arenas()), "{}", arenas());
    as_user(70_002, || d.process().sync());
    drop(greedy);
    wait_until("they are given back", || arenas() == 0);
}

/// A process reports that a listener fits an address better. This makes all libraries ask again
/// about all destinations, so the monitor limits it.
#[test]
fn a_user_that_has_all_ask_again_is_heard_now_and_then() {
    let name = "a_user_that_has_all_ask_again_is_heard_now_and_then";
    let Some(d) = for_users(name, |_| {}) else { return };
    let mut stranger = as_user(70_001, || d.stranger());
    let registry = stranger.hello();
    let touched = || {
        let mut word = [0; 8];
        let at = std::mem::offset_of!(fsocket_proto::registry::Registry, touched) as u64;
        assert_eq!(rustix::io::pread(&registry, &mut word, at), Ok(8));
        u64::from_ne_bytes(word)
    };
    let (socket, port) = listener();
    stranger.listen(&socket);
    let (before, begin) = (touched(), std::time::Instant::now());
    for _ in 0..2000 {
        stranger.tell(Packet { addr: v4([127, 0, 0, 1], port), ..Packet::new(request::Nearer::KIND) }, None);
        stranger.sync();
    }
    wait_until("the last one is heard, too", || touched() - before > 1);
    let heard = touched() - before;
    // (Two reactions in each pause: one at its beginning, and one at its end for reports that came
    // meanwhile.)
    let most = 2 + begin.elapsed().as_millis() as u64 / 50;
    assert!(heard <= most, "{heard} of {most}");
}

/// A process tells its own number if the monitor cannot see it. A process of another user may
/// claim the same number. That must not prevent the first process from being switched off.
#[test]
fn off_concerns_the_processes_of_its_user() {
    let name = "off_concerns_the_processes_of_its_user";
    let Some(d) = for_users(name, |_| {}) else { return };
    // (All these processes have the number of this test's process.)
    let _played = [70_001, 70_001, 70_002].map(|uid| as_user(uid, || d.process()));
    let ask = |uid, target| {
        let text = serde_json::to_vec(&Request { target, off: true }).unwrap();
        let fd = memfd_of("request", &text).unwrap();
        let msg = Packet { arg0: text.len() as u64, ..Packet::new(request::Operate::KIND) };
        let (answer, fd) = as_user(uid, || d.stranger().request(msg, Some(fd.as_fd())));
        let mut text = vec![0; answer.arg0 as usize];
        let told = fd.map(|fd| {
            rustix::io::pread(&fd, &mut text, 0).unwrap();
            serde_json::from_slice::<Answer>(&text).unwrap().processes.len()
        });
        told.ok_or(answer.result)
    };
    let this = std::process::id();
    assert_eq!(ask(70_001, Target::Process(this)), Ok(2));
    assert_eq!(ask(70_003, Target::Process(this)), Err(libc::EPERM));
    assert_eq!(ask(70_001, Target::Process(1)), Err(libc::ENOENT));
    assert_eq!(ask(70_001, Target::Unit("a.service".into())), Err(libc::EPERM));
    assert_eq!(ask(0, Target::Process(this)), Ok(3));
}
