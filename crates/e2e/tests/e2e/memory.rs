//! The cost of the library's memory for the program: in core files, in locked memory, and under
//! limits.

use fsocket_e2e::{self as e2e, native};
use fsocket_testkit::host::{Accel, Side, Stock};
use fsocket_testkit::{stock_mode, Host, Proc};
use std::time::Duration;

/// Numbers that `memory.py` has printed.
fn numbers(text: &str) -> impl Fn(&str) -> i64 + '_ {
    move |name| {
        let mut words = text.split_whitespace().skip_while(|w| *w != name).skip(1);
        words.next().and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("no {name} in {text}"))
    }
}

/// A core file must contain no channels, arena or tables: for each mapping, the kernel would write
/// all of its size.
#[test]
fn a_core_file_holds_what_is_the_programs() {
    const MIB: i64 = 1024;
    for (clients, more) in [(0, MIB), (32, MIB)] {
        let host = Host::new();
        let before = host.snapshot();
        let dumped =
            |side: Side| numbers(&e2e::python(&host, side, 60, "memory/memory.py", &[&clients.to_string()]))("dumped");
        let (stock, ours) = (dumped(Stock), dumped(Accel));
        assert!(ours <= stock + more, "{clients} clients: {ours} KiB, on stock sockets {stock}");
        if !stock_mode() {
            host.snapshot().since(&before).assert_shm(clients);
        }
    }
}

const CURRENT: i32 = 1;
const FUTURE: i32 = 2;

/// `mlockall` must return what it returns on stock sockets, and lock little more. It moves
/// existing connections to the kernel. If a process locks its future memory, its later connections
/// begin in the kernel.
#[test]
fn locked_memory_is_the_programs() {
    const MORE: i64 = 3 << 10;
    for (flags, when, who) in [
        (CURRENT, "after", "main"),
        (CURRENT | FUTURE, "after", "thread"),
        (CURRENT | FUTURE, "after", "child"),
        (FUTURE, "before", "main"),
        (CURRENT | FUTURE, "before", "thread"),
    ] {
        let host = Host::new();
        let run = |side| e2e::python(&host, side, 90, "memory/locked.py", &["12", &flags.to_string(), when, who]);
        let (stock, before) = (run(Stock), host.snapshot());
        let (ours, delta) = (run(Accel), host.snapshot().since(&before));
        let what = format!("{flags} {when} {who}; stock: {stock}; ours: {ours}");
        assert_eq!(stock.lines().nth(1), ours.lines().nth(1), "{what}");
        // Python's allocator may have a MiB more or less by chance.
        let most = numbers(&stock)("locked") + MORE;
        let is_little = |ours: &str| numbers(ours)("locked") <= most;
        assert!(is_little(&ours) || (0..8).any(|_| is_little(&run(Accel))), "{what}");
        if stock_mode() {
            continue;
        }
        match when {
            // A connection after the limit uses the kernel.
            "after" => assert!(delta.get("connect_shm") == 12 && delta.get("path_switch") >= 12, "{what}\n{delta}"),
            _ => assert!(delta.get("connect_shm") == 0 && delta.get("fallback.disabled") > 0, "{what}\n{delta}"),
        }
        assert_eq!(delta.get("fallback.switch"), 0, "{what}\n{delta}");
    }
}

/// A process may lock only as much as its limit. With the library it must need little more of the
/// limit than on stock sockets.
#[test]
fn locked_memory_counts_for_the_limit() {
    let host = Host::new();
    let program = native::build(&host, "locked", &["memory/locked.c"], &[]);
    let run = |side| {
        let mut command = host.command(side, "setpriv");
        command.args(["--bounding-set=-ipc_lock", "prlimit", "--memlock=8388608:8388608"]).arg(&program).arg("10");
        Proc::spawn(host.logs(), "locked", command).finish(Duration::from_secs(60)).success().says("ok").stdout
    };
    let (stock, before) = (run(Stock), host.snapshot());
    let ours = run(Accel);
    let of = |name| [&stock, &ours].map(|text| numbers(text)(name));
    assert_eq!(of("mlockall"), [0, 0]);
    assert!(of("locked")[1] <= of("locked")[0] + (5 << 10), "stock: {stock}; ours: {ours}");
    if !stock_mode() {
        let delta = host.snapshot().since(&before);
        assert!(delta.get("connect_shm") == 10 && delta.get("path_switch") >= 10, "{delta}");
    }
}

/// Under limits that leave little memory, programs must start and use the kernel, and a reason
/// must be counted.
#[test]
fn little_memory_is_left_to_the_program() {
    let host = Host::new();
    let (_server, port) = e2e::echo_server(&host, Accel, "threaded", "127.0.0.1");
    let client = native::build(&host, "client", &["memory/client.c"], &[]);
    for limit in ["-v 16000", "-d 4000", "-l 64", "-s 256"] {
        let before = host.snapshot();
        let line = format!("ulimit {limit}; exec {} {port}", client.display());
        let done = host.run(Accel, "limited", 60, "/bin/sh", &["-c", &line]).success();
        done.says("ok");
        if stock_mode() {
            continue;
        }
        let delta = host.snapshot().since(&before);
        match &limit[..2] {
            "-v" | "-d" => {
                assert!(delta.get("connect_shm") == 0 && delta.get("fallback.disabled") == 1, "{limit}\n{delta}")
            }
            _ => assert_eq!(delta.get("connect_shm"), 1, "{limit}\n{delta}"),
        }
    }
}

/// Another library before or after ours has a clock that stands still, and functions that our
/// library must not call (`memory/interposer.c`). Waits must end as on stock sockets.
#[cfg(target_arch = "x86_64")]
#[test]
fn functions_of_other_libraries_are_the_programs() {
    let host = Host::new();
    let other =
        native::build(&host, "interposer.so", &["memory/interposer.c"], &["-shared", "-fPIC", "-fno-builtin", "-ldl"]);
    let program = native::build(&host, "timeouts", &["memory/timeouts.c"], &[]);
    let run = |side, list: &str| {
        let mut command = host.command(side, &program);
        command.env("LD_PRELOAD", list);
        Proc::spawn(host.logs(), "timeouts", command).finish(Duration::from_secs(60)).success().stdout
    };
    let stock = run(Stock, &other.display().to_string());
    assert!(stock.contains("bytes: 100000"), "{stock}");
    for list in [native::preload(&[&other], &[]), native::preload(&[], &[&other])] {
        let before = host.snapshot();
        assert_eq!(run(Accel, &list), stock, "{list}");
        host.snapshot().since(&before).assert_shm(1);
    }
}
