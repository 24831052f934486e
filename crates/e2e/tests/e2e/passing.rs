//! Listeners and connections that one process passes to another in a message (SCM_RIGHTS).

use fsocket_e2e as e2e;
use fsocket_testkit::host::{Accel, Stock};
use fsocket_testkit::{helper, need, net, stock_mode, Host, Proc, Side, PYTHON};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

/// Passes a listener. Returns the process that listened, the one that receives the listener, and
/// the port.
fn hand_over(host: &Host, serves: &str, end: &str, to: Side, n: &str, late: bool) -> (Proc, Proc, u16) {
    let script = helper("passing/passing.py").display().to_string();
    let path = host.path().join("meeting").display().to_string();
    let port = net::free_port();
    let mut giver = host.start(Accel, "giver", PYTHON, &[&script, "give", &port.to_string(), &path, serves, end]);
    giver.wait_stdout("listens", LIMIT);
    if serves == "serves" {
        ask(host, port, 1);
    }
    let take = [script.as_str(), "take", &path, n, "late"];
    let mut taker = host.start(to, "taker", PYTHON, &take[..if late { 5 } else { 4 }]);
    taker.wait_stdout("taken", LIMIT);
    (giver, taker, port)
}

fn ask(host: &Host, port: u16, n: u32) {
    let said = e2e::python(host, Accel, 60, "passing/passing.py", &["ask", &port.to_string(), &n.to_string()]);
    assert!(said.ends_with(&format!("ok {n}\n")), "{said}");
}

#[test]
fn a_process_that_takes_a_listener_serves_it_over_shared_memory() {
    for serves in ["watches", "serves"] {
        let host = Host::new();
        let (giver, taker, port) = hand_over(&host, serves, "close", Accel, "21", false);
        // When the client is answered, the receiver is accepting.
        ask(&host, port, 1);
        let before = host.snapshot();
        ask(&host, port, 20);
        host.snapshot().since(&before).assert_shm(20);
        taker.finish(LIMIT).success();
        giver.finish(LIMIT).success();
    }
}

#[test]
fn a_process_without_the_library_takes_a_listener() {
    let host = Host::new();
    let (giver, taker, port) = hand_over(&host, "watches", "close", Stock, "5", false);
    let before = host.snapshot();
    ask(&host, port, 5);
    if !stock_mode() {
        assert_eq!(host.snapshot().since(&before).get("connect_shm"), 0);
    }
    taker.finish(LIMIT).success();
    giver.finish(LIMIT).success();
}

/// A connection that the sender has not accepted must reach the receiver.
#[test]
fn what_waits_is_accepted_by_the_taker() {
    for (end, to) in [("close", Stock), ("exit", Stock), ("close", Accel), ("exit", Accel)] {
        let host = Host::new();
        let (giver, taker, port) = hand_over(&host, "serves", end, to, "2", true);
        let before = host.snapshot();
        let script = helper("passing/passing.py").display().to_string();
        let mut client = host.start(Accel, "client", PYTHON, &[&script, "ask", &port.to_string(), "1"]);
        client.wait_stdout("sent", LIMIT);
        host.file("meeting.go", "");
        client.finish(LIMIT).success().says("ok 1");
        let delta = host.snapshot().since(&before);
        if !stock_mode() {
            assert_eq!(delta.get("connect_shm"), 1, "{end}: {delta}");
            // A receiver with the library may be fast enough to accept it over shared memory.
            let (switched, taken) = (delta.get("path_switch") > 0, delta.get("accept_shm") == 1);
            assert!(switched || to == Accel && taken, "{end}: {delta}");
        }
        ask(&host, port, 1);
        taker.finish(LIMIT).success();
        giver.finish(LIMIT).success();
    }
}

/// One process accepts `n` connections and passes them to a process on `side`. A client sends
/// `each` messages on each. `keep`: both processes use each connection, in turn.
fn pass_connections(side: Side, n: u32, each: u32, keep: &[&str]) -> fsocket_testkit::Delta {
    let host = Host::new();
    let script = helper("passing/passing.py").display().to_string();
    let path = host.path().join("meeting").display().to_string();
    let (port, n, each) = (net::free_port().to_string(), n.to_string(), each.to_string());
    let before = host.snapshot();
    let pass = [&[script.as_str(), "pass", &port, &path, &n], keep].concat();
    let mut giver = host.start(Accel, "giver", PYTHON, &pass);
    giver.wait_stdout("listens", LIMIT);
    let server = host.start(side, "server", PYTHON, &[&[script.as_str(), "serve", &path, &n], keep].concat());
    let said = e2e::python(&host, Accel, 60, "passing/passing.py", &["ask", &port, &n, &each]);
    assert!(said.ends_with(&format!("ok {n}\n")), "{said}");
    server.finish(LIMIT).success();
    giver.finish(LIMIT).success();
    host.snapshot().since(&before)
}

/// The first connection begins over shared memory. Later ones begin in the kernel and move while
/// they are used; the last one does not, because its listener has ended.
#[test]
fn a_connection_that_is_passed_on_goes_over_to_shared_memory() {
    let delta = pass_connections(Accel, 8, 600, &[]);
    if !stock_mode() {
        assert_eq!((delta.get("connect_shm"), delta.get("connect_kernel")), (1, 7), "{delta}");
        // Both sides count. On a busy machine one of them may be too late.
        assert!(delta.get("path_upgrade") >= 2 * 4, "{delta}");
        assert_eq!(delta.get("hostile_peer"), 0, "{delta}");
    }
}

#[test]
fn a_connection_that_two_processes_have_stays_where_both_find_it() {
    for side in [Accel, Stock] {
        let delta = pass_connections(side, 4, 300, &["keep"]);
        assert_eq!(delta.get("path_upgrade"), 0, "{delta}");
    }
    let delta = pass_connections(Stock, 4, 300, &[]);
    assert_eq!(delta.get("path_upgrade"), 0, "{delta}");
}

/// haproxy's seamless reload: the next process receives the listeners of the one before.
#[test]
fn haproxy_reloaded_goes_on_over_shared_memory() {
    let haproxy = need!("haproxy");
    let ab = need!("ab");
    let host = Host::new();
    let port = net::free_port();
    let config = format!(
        "global\n  maxconn 500\n  nbthread 2\n  stats socket {}/stats expose-fd listeners\ndefaults\n  mode http\n  timeout \
         connect 5s\n  timeout client 20s\n  timeout server 20s\nfrontend f\n  bind 127.0.0.1:{port}\n  http-request return \
         status 200 content-type text/plain string hello\n",
        host.path().display()
    );
    let config = host.file("haproxy.cfg", config).display().to_string();
    let server = host.server(Accel, "haproxy", port, &haproxy, &["-W", "-f", &config]);
    let url = format!("http://127.0.0.1:{port}/");
    for _ in 0..2 {
        let load = host.start(Accel, "ab", &ab, &["-q", "-t", "2", "-n", "1000000", "-c", "8", &url]);
        std::thread::sleep(Duration::from_millis(500));
        server.signal(libc::SIGUSR2);
        e2e::ab_clean(&load.finish(LIMIT).success().stdout);
    }
    let before = host.snapshot();
    let done = host.run(Accel, "ab", 60, &ab, &["-q", "-n", "1000", "-c", "8", &url]).success();
    e2e::ab_clean(&done.stdout);
    host.snapshot().since(&before).assert_shm(1000);
}
