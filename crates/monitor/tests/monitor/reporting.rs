//! The report.

use crate::rights::{as_user, for_users};
use crate::support::*;
use fsocket_abi::arena::{Counter, SOCKS};
use fsocket_abi::channel::{slot_state, status, CLIENT, SERVER, SLOTS};
use fsocket_proto::raw::Packet;
use fsocket_proto::report::Report;
use fsocket_proto::values::Counted;
use fsocket_proto::{request, Msg, Payload};
use fsocket_sync::atomic::Ordering;
use std::io::Read;
use std::os::unix::fs::MetadataExt;

/// As the command line asks for it.
pub fn report(d: &Daemon) -> Report {
    let (answer, fd) = d.stranger().request(Packet::new(request::Report::KIND), None);
    assert_eq!(answer.result, 0);
    let mut text = String::new();
    std::fs::File::from(fd.unwrap()).read_to_string(&mut text).unwrap();
    assert_eq!(text.len() as u64, answer.arg0);
    serde_json::from_str(&text).unwrap()
}

#[test]
fn shows_who_talks_to_whom() {
    let d = Daemon::start();
    let (mut s, mut c) = (d.process_with_arena(), d.process_with_arena());
    let (l, port) = listener();
    let id = s.listen(&l);
    s.work(id);
    let ch = c.connect(port);
    ch.set_state(0, slot_state::ESTABLISHED);
    let a = s.open_sock(0, ch.id, 0, SERVER, &[s.nonce]);
    let b = c.open_sock(0, ch.id, 0, CLIENT, &[c.nonce]);
    b.set_names(libc::AF_INET as u16, &Default::default(), &(v4([127, 0, 0, 1], 0).ip, port));
    b.tx.set_bytes(100);
    a.rx.set_bytes(30);
    ch.syn(0, 1);

    let r = report(&d);
    assert_eq!(r.monitor_pid, std::process::id());
    assert_eq!(r.processes.len(), 2, "the one who asks does not count");
    assert_eq!(r.listeners.len(), 1);
    assert_eq!((r.listeners[0].id, r.listeners[0].queued), (id, 1));
    assert_eq!(r.listeners[0].local, format!("127.0.0.1:{port}"));
    assert_eq!(r.listeners[0].workers, [std::process::id()]);
    let of = |r: &Report, peer: &str| r.connections.iter().find(|c| c.peer.contains(peer)).cloned();
    let client = of(&r, &format!("127.0.0.1:{port}")).unwrap();
    assert_eq!((client.state.as_str(), client.send_q, client.recv_q), ("ESTAB", 70, 0));
    assert_eq!(client.pids, [std::process::id()]);
    let server = r.connections.iter().find(|c| c.peer != client.peer).unwrap();
    assert_eq!((server.recv_q, server.rx_bytes), (70, 30));
    assert_eq!((r.totals["tx_bytes"], r.totals["rx_bytes"]), (100, 30));
    assert_eq!(r.channels.len(), 1);
    assert_eq!(r.channels[0].connections, 2);
    assert!(r.channels[0].resident > 0);
    assert_eq!(r.processes.iter().map(|p| (p.open.shm, p.open.idle_kernel)).collect::<Vec<_>>(), [(1, 0), (1, 0)]);

    ch.slot(0).dir[CLIENT].prod.status.store(status::FIN, Ordering::Release);
    let r = report(&d);
    assert_eq!(of(&r, &format!("127.0.0.1:{port}")).unwrap().state, "FIN-WAIT-2");
    assert!(r.connections.iter().any(|c| c.state == "CLOSE-WAIT"));
}

/// As the kernel does it: other users see who listens in their network namespace only. Root sees all.
#[test]
fn listeners_are_shown_where_they_are() {
    let Some(d) = for_users("listeners_are_shown_where_they_are", |_| {}) else { return };
    let (_server, _client, here, _ch) = d.acquainted();
    let shown = |d: &Daemon| report(d).listeners.iter().map(|l| l.id).collect::<Vec<_>>();
    std::thread::scope(|scope| {
        let there = scope.spawn(|| {
            // SAFETY: no memory is involved; it changes this thread alone.
            if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
                return eprintln!("SKIPPED: listeners_are_shown_where_they_are: no namespaces");
            }
            let up = std::process::Command::new("ip").args(["link", "set", "lo", "up"]).status();
            assert!(up.is_ok_and(|s| s.success()), "ip link");
            let mut server = d.process();
            let (socket, _) = listener();
            let there = server.listen(&socket);
            server.work(there);
            assert_eq!(as_user(70_001, || shown(&d)), [there]);
            let all = shown(&d);
            assert!(all.contains(&here.id) && all.contains(&there), "{all:?}");
        });
        there.join().unwrap();
    });
    assert_eq!(as_user(70_001, || shown(&d)), [here.id]);
}

/// A process without an arena sends what it counts, and each message takes a turn. A report does not wait for that.
#[test]
fn counts_that_wait_for_their_turns_are_in_the_report() {
    let d = Daemon::start();
    let mut p = d.process();
    let mut sent = 0;
    for _ in 0..50 {
        for _ in 0..16 {
            let one = Counted { counter: Counter::ConnectKernel as usize, n: 1 };
            p.tell(Msg::from(request::Counts { counts: [Some(one), None, None, None] }).into(), None);
            sent += 1;
        }
        assert_eq!(report(&d).totals["connect_kernel"], sent);
    }
    // With many connections it has an arena.
    p.show_arena();
    p.count(Counter::ConnectKernel, 5);
    assert_eq!(report(&d).totals["connect_kernel"], sent + 5);
}

#[test]
fn a_forked_child_belongs_to_its_family() {
    let d = Daemon::start();
    let mut p = d.process_with_arena();
    let child = p.adopt();
    let r = report(&d);
    assert_eq!(r.processes.len(), 2);
    assert_eq!(r.processes[0].family, r.processes[1].family);
    drop(child);
}

/// A client lets the monitor read 65,536 sockets, and asks for it again and again.
#[test]
fn a_report_that_takes_long_is_made_once_for_a_while() {
    let d = Daemon::start();
    let p = d.process_with_arena();
    for i in 0..SOCKS {
        p.open_sock(i, 1, i % SLOTS, CLIENT, &[p.nonce]);
    }
    let mut asks = d.stranger();
    let mut files = Vec::new();
    for _ in 0..16 {
        let (answer, fd) = asks.request(Packet::new(request::Report::KIND), None);
        let mut file = std::fs::File::from(fd.unwrap());
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text.len() as u64, answer.arg0);
        files.push(file.metadata().unwrap().ino());
    }
    files.dedup();
    assert!(files.len() < 3, "{} reports were made", files.len());
}
