//! Several listeners on one port: the kernel's rule selects the one that a connection reaches,
//! even if that one has no library.

use fsocket_testkit::host::{Accel, Side, Stock};
use fsocket_testkit::{helper, need_hosts, net, stock_mode, Delta, Host, Proc, PYTHON};
use std::time::Duration;

const ASKED: i128 = 20;
/// Side, address and options of a listener.
type Listener<'a> = (Side, &'a str, &'a [&'a str]);

/// For each address, the index of the listener that answers.
#[track_caller]
fn who(listeners: &[Listener], side: Option<Side>, addresses: &[&str]) -> (String, Delta) {
    let host = Host::new();
    let app = helper("shadow/shadow.py").display().to_string();
    let port = net::free_port().to_string();
    let start = |(i, (of, address, options)): (usize, &Listener)| {
        let name = i.to_string();
        let args = [&[app.as_str(), "serve", &name, &port, address], *options].concat();
        let mut server = host.start(side.unwrap_or(*of), "server", PYTHON, &args);
        server.wait_stdout("listens", Duration::from_secs(60));
        server
    };
    let _servers: Vec<Proc> = listeners.iter().enumerate().map(start).collect();
    // Give the servers time to reach `accept`.
    std::thread::sleep(Duration::from_millis(200));
    let before = host.snapshot();
    let count = ASKED.to_string();
    let args = [&[app.as_str(), "ask", &port, &count], addresses].concat();
    let asked = host.run(side.unwrap_or(Accel), "client", 60, PYTHON, &args).success();
    (asked.stdout, host.snapshot().since(&before))
}

/// The answers must be those of the kernel. `shm`: number of addresses whose listener has the
/// library.
#[track_caller]
fn as_in_the_kernel(listeners: &[Listener], addresses: &[&str], shm: i128) {
    let (stock, _) = who(listeners, Some(Stock), addresses);
    let (ours, delta) = who(listeners, None, addresses);
    assert_eq!(ours, stock, "{listeners:?}\n{delta}");
    assert!(stock_mode() || delta.get("connect_shm") == shm * ASKED, "{listeners:?}\n{delta}");
}

#[test]
fn an_address_is_nearer_than_the_wildcard() {
    let two = ["127.0.0.1", "127.0.0.2"];
    as_in_the_kernel(&[(Accel, "0.0.0.0", &[]), (Stock, "127.0.0.1", &[])], &two, 1);
    as_in_the_kernel(&[(Stock, "127.0.0.1", &[]), (Accel, "0.0.0.0", &[])], &two, 1);
    as_in_the_kernel(&[(Accel, "0.0.0.0", &[]), (Accel, "127.0.0.1", &["timestamp"])], &two, 1);
    as_in_the_kernel(&[(Stock, "0.0.0.0", &[]), (Accel, "127.0.0.1", &[])], &two, 1);
    as_in_the_kernel(&[(Accel, "0.0.0.0", &[]), (Accel, "127.0.0.1", &[])], &two, 2);
    as_in_the_kernel(&[(Accel, "0.0.0.0", &[]), (Stock, "127.0.0.3", &[])], &two, 2);
}

#[test]
fn families_and_devices() {
    let both = ["127.0.0.1", "::1"];
    as_in_the_kernel(&[(Accel, "::", &[]), (Stock, "0.0.0.0", &[])], &both, 1);
    as_in_the_kernel(&[(Stock, "::", &[]), (Accel, "0.0.0.0", &[])], &both, 1);
    as_in_the_kernel(&[(Accel, "::", &[]), (Stock, "::1", &[])], &both, 1);
    as_in_the_kernel(&[(Accel, "::", &[]), (Stock, "::ffff:127.0.0.1", &[])], &both, 1);
    as_in_the_kernel(&[(Accel, "::ffff:127.0.0.1", &[]), (Accel, "127.0.0.1", &[])], &["127.0.0.1"], 1);
    as_in_the_kernel(&[(Accel, "0.0.0.0", &[]), (Stock, "::", &["v6only"])], &both, 1);
    as_in_the_kernel(&[(Accel, "127.0.0.1", &[]), (Accel, "127.0.0.1", &["lo"])], &["127.0.0.1"], 0);
    as_in_the_kernel(&[(Accel, "127.0.0.1", &[]), (Accel, "0.0.0.0", &["lo"])], &["127.0.0.1"], 1);
}

/// A nearer listener starts; `seconds` later all connections must reach it.
#[track_caller]
fn comes_later(host: &Host, how: &str, seconds: &str) {
    let app = helper("shadow/shadow.py").display().to_string();
    let port = net::free_port().to_string();
    let args = [app.as_str(), "later", &port, seconds, how];
    let said = host.run(Accel, "later", 60, PYTHON, &args).success().stdout;
    assert_eq!(said, "B\nA\n", "{how}");
}

/// A nearer listener with the library is noticed at once. One without it is noticed when the
/// library next asks for the route.
#[test]
fn a_nearer_one_comes_later() {
    comes_later(&Host::new(), "timestamp", "0");
    comes_later(&Host::new(), "lo", "0");
    comes_later(&Host::new(), "stock", "5.5");
}

/// The kernel informs the system monitor of every listener, so its clients notice also those
/// without the library.
#[test]
fn a_nearer_one_without_the_library_is_noticed_at_once() {
    need_hosts!();
    comes_later(&Host::for_all_users(""), "stock", "0");
}
