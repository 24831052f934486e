//! Workers in which one thread adds the listener to an epoll instance, and one or more other
//! threads wait there.

use fsocket_e2e::need_two_cpus;
use fsocket_e2e::zones::{accepted, Server, Start};
use fsocket_testkit::host::Accel;
use fsocket_testkit::{net, stock_mode, Host};
use std::time::Duration;

const BALANCED: &[(&str, &str)] = &[("FASTSOCKET_DISABLE", "shm")];

/// Starts two workers, both with a local listen socket.
#[track_caller]
fn start(host: &Host, options: &[&str], env: &[(&str, &str)]) -> Server {
    let server = Start { options, env, ..Start::default() }.run(host);
    server.wait_for_sockets(3);
    server
}

#[test]
fn the_queue_is_that_of_the_thread_that_waits() {
    need_two_cpus!();
    for options in [&["pin", "another"][..], &["pin", "another", "itself"]] {
        let host = Host::new();
        let server = start(&host, options, Start::default().env);
        // If a thread is pinned to another CPU, it changes its queue when it next begins to wait.
        for cpu in 0..2 {
            server.ask("127.0.0.1", cpu, 10);
        }
        let before: Vec<u64> = (0..2).map(|cpu| accepted(&host.zones(), cpu, "local")).collect();
        for cpu in 0..2u64 {
            for t in server.ask("127.0.0.1", cpu as usize, 50) {
                assert!(stock_mode() || t.cpu == cpu as i32, "{options:?}: from CPU {cpu}: {t:?}");
            }
        }
        if stock_mode() {
            return eprintln!("PATH NOT ASSERTED: stock mode");
        }
        for cpu in 0..2 {
            let zones = host.zones();
            assert_eq!(accepted(&zones, cpu, "local") - before[cpu as usize], 50, "{options:?}: {zones:#}");
        }
    }
}

/// A thread that only adds the listener to an epoll instance must not count as a worker. Otherwise
/// it would have a queue that no thread polls, and the thread in `accept` would ask the monitor
/// twice for each connection.
#[test]
fn a_thread_that_only_adds_a_listener_has_no_queue() {
    need_two_cpus!();
    let host = Host::new();
    let server = Start { mode: "fork-block", options: &["pin", "never"], env: BALANCED, ..Start::default() }.run(&host);
    let before = host.snapshot();
    for _ in 0..2 {
        for cpu in 0..2 {
            assert!(server.ask("127.0.0.1", cpu, 50).iter().all(|t| t.tid != t.pid), "the first thread accepted");
        }
    }
    if stock_mode() {
        return eprintln!("PATH NOT ASSERTED: stock mode");
    }
    let zones = host.zones();
    let remote = (0..2).map(|cpu| accepted(&zones, cpu, "remote")).sum::<u64>();
    assert_eq!((host.snapshot().since(&before).get("accept_kernel"), remote), (200, 0), "{zones:#}");
}

/// Whether a thread of the process is in `epoll_pwait` or `epoll_wait`.
fn waits_for_events(pid: i32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let calls = [libc::SYS_epoll_pwait, libc::SYS_epoll_wait].map(|n| format!("{n} "));
    let mut told = tasks.filter_map(|t| std::fs::read_to_string(t.path().join("syscall")).ok());
    told.any(|t| calls.iter().any(|n| t.starts_with(n.as_str())))
}

#[test]
fn a_listener_that_another_thread_takes_out_is_no_longer_served_there() {
    need_two_cpus!();
    for env in [Start::default().env, BALANCED] {
        let host = Host::new();
        let server = start(&host, &["pin", "another"], env);
        let gone = server.ask("127.0.0.1", 0, 1)[0].pid;
        net::wait_until(Duration::from_secs(60), || waits_for_events(gone)).expect("its second thread sleeps again");
        // SAFETY: `kill` takes no pointers, and the process belongs to this test.
        unsafe { libc::kill(gone, libc::SIGUSR1) };
        // Only the shared socket remains for the worker.
        server.wait_for_sockets(2);
        let refuses = || server.ask("127.0.0.1", 0, 1)[0].pid != gone;
        assert!(net::wait_until(Duration::from_secs(60), refuses).is_ok(), "{env:?}: it still serves");
        for cpu in 0..2 {
            assert!(server.ask("127.0.0.1", cpu, 50).iter().all(|t| t.pid != gone), "{env:?}: served by {gone}");
        }
    }
}

#[test]
fn what_waits_for_a_killed_worker_is_taken_by_whichever_thread_is_there() {
    need_two_cpus!();
    for option in ["another", "several"] {
        let host = Host::new();
        let server = start(&host, &["pin", "respawn", option], BALANCED);
        for round in 0..5 {
            for cpu in 0..2 {
                server.ask("127.0.0.1", cpu, 20);
            }
            server.kill_while_hundred_wait(round);
        }
    }
}

/// A process that can have no local listen socket must get the connections in the queue of a
/// relative that never polls.
#[test]
fn who_takes_turns_gets_what_nobody_else_takes() {
    let host = Host::new();
    for order in ["first", "last"] {
        let before = host.snapshot();
        assert_eq!(fsocket_e2e::python(&host, Accel, 90, "zones_threads/turns.py", &[order]).trim(), "ok", "{order}");
        if stock_mode() {
            return eprintln!("PATH NOT ASSERTED: stock mode");
        }
        let delta = host.snapshot().since(&before);
        assert!(delta.get("fallback.zone_turns") > 0 && delta.get("accept_kernel") >= 16, "{order}: {delta}");
    }
}
