//! A worker with enough work of its own is not woken for connections of others until it has less
//! work.

use fsocket_e2e::busy::{patient, signal, stolen, Server};
use fsocket_e2e::need_two_cpus;
use fsocket_e2e::zones::{connect, pin};
use fsocket_testkit::{net, stock_mode, Host};
use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Number of other workers' sockets in the epoll instances of a process. The kernel shows them in
/// fdinfo, and the library's events are recognized by their mark.
fn watched_peers(pid: i32) -> usize {
    let infos = std::fs::read_dir(format!("/proc/{pid}/fdinfo")).into_iter().flatten().flatten();
    let texts = infos.filter_map(|f| std::fs::read_to_string(f.path()).ok());
    texts.map(|t| t.matches("data: f50c4e7be11a0003").count()).sum()
}

/// Sends many short connections from both CPUs, so that the workers are busy.
fn much_comes(server: &Server) {
    let until = Instant::now() + Duration::from_millis(400);
    std::thread::scope(|s| {
        for cpu in 0..2 {
            s.spawn(move || {
                pin(cpu);
                while Instant::now() < until {
                    let mut c = connect(([127, 0, 0, 1], server.port).into());
                    c.write_all(b"who").expect("send");
                    server.told(&c);
                }
            });
        }
    });
}

#[test]
fn who_has_enough_to_do_is_not_told_of_others() {
    need_two_cpus!();
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    for mode in ["epoll", "thread-epoll"] {
        let host = patient();
        let server = Server::start(&host, mode, 2048, &[]);
        let mut pids = [0, 1].map(|cpu| server.worker(cpu).0).to_vec();
        pids.dedup();
        let told = || pids.iter().map(|pid| watched_peers(*pid)).sum::<usize>();
        net::wait_until(Duration::from_secs(60), || told() == 2).expect("each is told of the other");
        let mut unsubscribed = 0;
        for _ in 0..20 {
            let all = |sent| pids.iter().for_each(|pid| signal(*pid, sent));
            all(libc::SIGSTOP);
            let waiting: Vec<TcpStream> = (0..600).map(|n| server.say(n % 2, "who")).collect();
            all(libc::SIGCONT);
            let until = Instant::now() + Duration::from_millis(500);
            while Instant::now() < until && unsubscribed < 2 {
                unsubscribed = unsubscribed.max(2 - told().min(2));
            }
            waiting.iter().for_each(|c| _ = server.told(c));
            // When no more connections come, each worker sleeps, and is again told of the other
            // one's connections.
            let again = net::wait_until(Duration::from_secs(60), || told() == 2);
            assert!(again.is_ok(), "{mode}: {} are told", told());
            if unsubscribed > 0 {
                break;
            }
        }
        assert!(unsubscribed > 0, "{mode}: workers with 300 connections each in their queues were told of others");
    }
}

/// A worker that is not told of the other worker's connections must look at that queue by itself
/// after it has slept a while.
#[test]
fn who_is_not_told_of_others_and_sleeps_looks_by_itself() {
    need_two_cpus!();
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    let host = Host::configured(None, "[balance]\nmigrate = false\n");
    let server = Server::start(&host, "epoll", 512, &[]);
    let (stops, goes_on) = (server.worker(0).0, server.worker(1).0);
    let mut unsubscribed = 0;
    for _ in 0..40 {
        much_comes(&server);
        signal(stops, libc::SIGSTOP);
        if watched_peers(goes_on) == 0 {
            unsubscribed += 1;
            let by = server.worker(0).0;
            assert_eq!(by, goes_on, "{:#}", host.zones());
        }
        signal(stops, libc::SIGCONT);
        if unsubscribed == 3 {
            break;
        }
    }
    assert!(unsubscribed > 0, "it was told of the other one each time");
    assert!(stolen(&host.zones()) >= unsubscribed, "{:#}", host.zones());
}

/// No message tells a worker that little comes: it notices that it has slept in vain.
#[test]
fn each_thread_is_told_of_the_other_again_when_little_comes() {
    need_two_cpus!();
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    let host = Host::configured(None, "[balance]\nmigrate = false\n");
    let server = Server::start(&host, "thread-epoll", 512, &[]);
    let pid = server.worker(0).0;
    let mut unsubscribed = 0;
    for round in 0..20 {
        much_comes(&server);
        unsubscribed += u32::from(watched_peers(pid) < 2);
        let again = net::wait_until(Duration::from_secs(60), || watched_peers(pid) == 2);
        assert!(again.is_ok(), "round {round}: {} of 2 are told: {:#}", watched_peers(pid), host.zones());
    }
    assert!(unsubscribed > 0, "they were told of each other all the time");
}
