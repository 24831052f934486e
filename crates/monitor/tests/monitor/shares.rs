//! What one process or user leaves undone, or does too much, costs others nothing.

use crate::rights::{as_user, for_users};
use crate::support::*;
use fsocket_proto::{kind, Msg};
use rustix::fd::AsFd;

/// A parent that waits for its children and reads nothing; each of them listens and is connected to.
#[test]
fn a_parent_that_does_not_read_can_fork_for_ever() {
    let d = Daemon::start();
    let mut parent = d.process_with_arena();
    let mut client = d.process();
    for i in 0..500 {
        // (Its HELLO is answered only if the parent's message has been read.)
        let mut child = parent.adopt();
        let (l, port) = listener();
        let id = child.listen(&l);
        child.work(id);
        let channel = client.connect(port);
        child.request(fsocket_proto::Msg { id, seq: 0, ..fsocket_proto::Msg::new(kind::UNLISTEN) }, None);
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
    // (It stays: of one that has ended before the worker reads, the worker need not know.)
    let mut client = d.process();
    let last = client.connect(port).id;
    let told = |worker: &mut Proc| loop {
        let (m, _) = worker.wait_unasked();
        if (m.kind, m.id) == (kind::CHANNEL_SRV, u64::from(last)) {
            return;
        }
    };
    worker.sync();
    assert!(worker.unasked.len() < 2000, "{}", worker.unasked.len());
    told(&mut worker);
}

/// Three users take all that they can get. A fourth one, who has nothing yet, is served; so is root.
#[test]
fn greedy_users_do_not_exhaust_the_monitor() {
    let name = "greedy_users_do_not_exhaust_the_monitor";
    let Some(d) = for_users(name, |config| config.descriptors = 600) else { return };
    let greet = |d: &Daemon| {
        let mut p = d.stranger();
        let hello = Msg { id: p.nonce, arg1: u64::from(fsocket_abi::VERSION), ..Msg::new(kind::HELLO) };
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
        let (answer, _) = p.request(Msg::new(kind::LISTEN), Some(socket.as_fd()));
        (answer.result == 0).then_some(socket)
    };
    // A user that has its whole share is refused more, and keeps what it has.
    let last = greedy[0].last_mut().unwrap();
    let sockets: Vec<_> = (0..400).map_while(|_| as_user(70_001, || listens(last))).collect();
    assert!(sockets.len() < 10, "{}", sockets.len());
    last.sync();
    assert!(as_user(70_004, || listens(&mut greet(&d).expect("a share is left"))).is_some());
    d.acquainted();
}
