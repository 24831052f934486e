//! Connections that move to the kernel while they are in use: no byte may be lost, and the program
//! must not notice.

use fsocket_e2e as e2e;
use fsocket_testkit::host::{Accel, Stock};
use fsocket_testkit::{artifacts, helper, stock_mode, Host, PYTHON};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

#[test]
fn exec_passing_and_urgent_data() {
    let others = ["-in_full_flow", "-passed_one_after_the_other"];
    let Some(delta) = e2e::same_transcripts(&Host::new(), 120, "switch/switch.py", &others) else { return };
    // After a connection was passed, the process accepts new ones over the kernel; one case shows
    // that with one connection. All other connections begin in shared memory.
    assert!(delta.get("connect_shm") >= 20 && delta.get("accept_shm") >= 20, "not over shared memory\n{delta}");
    // If a listener is handed over, connections that wait there are accepted from the kernel's
    // queue (ADR 70).
    let moved = delta.get("fallback.untaken");
    assert!(delta.get("connect_kernel") <= 1 && delta.get("accept_kernel") <= 1 + moved, "over kernel TCP\n{delta}");
    assert!(delta.get("hostile_peer") == 0, "a peer was called hostile\n{delta}");
    assert!(delta.get("path_switch") >= 60, "too few connections were switched\n{delta}");
    assert!(delta.get("fallback.switch") == 0, "a path could not be switched\n{delta}");
}

/// The second end moves to the kernel with the unread bytes of its ring (ADR 8).
#[test]
fn passed_one_after_the_other() {
    let Some(delta) = e2e::same_transcripts(&Host::new(), 60, "switch/switch.py", &["passed_one_after_the_other"])
    else {
        return;
    };
    assert!(delta.get("connect_shm") == 1 && delta.get("path_switch") == 3, "{delta}");
    assert!(delta.get("fallback.switch") == 0 && delta.get("hostile_peer") == 0, "{delta}");
}

/// Forty connections whose bytes are compared. For every fourth one, both ends must move at once.
/// If the ring was never empty for a whole lap, unread bytes stay in it, and such an end cannot be
/// handed over (ADR 8).
#[test]
fn in_full_flow() {
    let Some(delta) = e2e::same_transcripts(&Host::new(), 120, "switch/switch.py", &["in_full_flow"]) else { return };
    assert!(delta.get("connect_shm") == 40 && delta.get("accept_shm") == 40, "not over shared memory\n{delta}");
    assert!(delta.get("path_switch") >= 40 && delta.get("hostile_peer") == 0, "{delta}");
    assert!(delta.get("fallback.switch") <= 10, "a path could not be switched\n{delta}");
}

/// Descriptors that another process takes by `pidfd_getfd`: from an unrelated process, from a
/// child, from itself.
#[test]
fn taken_by_another_process() {
    let Some(delta) = e2e::same_transcripts(&Host::new(), 120, "switch/pidfd.py", &[]) else { return };
    // Five ways to wait, two kinds of holders, both ends. One more connection is the process's
    // own, and stays. Two go to the listener that was taken, which its new holder serves (ADR 52).
    assert!(delta.get("connect_shm") == 13 && delta.get("accept_shm") == 13, "not over shared memory\n{delta}");
    assert!(delta.get("path_switch") >= 20, "not switched\n{delta}");
    assert!(delta.get("fallback.switch") == 0 && delta.get("hostile_peer") == 0, "{delta}");
}

/// The monitor of an ordinary user cannot make the kernel connection with the same port numbers.
/// Everything else must be the same.
#[test]
fn without_privilege() {
    if stock_mode() {
        eprintln!("PATH NOT ASSERTED: stock mode");
        return;
    }
    let cases = ["unread_bytes_behind_an_exec", "waiting_for_it", "shut_down_before", "closed_before", "in_full_flow"];
    let host = Host::new();
    let stock = e2e::python(&host, Stock, 120, "switch/switch.py", &cases);
    let program = helper("switch/switch.py").display().to_string();
    let cli = artifacts::cli().display().to_string();
    let both = format!("{PYTHON} {program} {} && {cli} stat --json", cases.join(" "));
    let runtime = host.path().join("runtime");
    std::fs::create_dir(&runtime).expect("directory");
    std::os::unix::fs::chown(&runtime, Some(65534), Some(65534)).expect("chown");
    std::fs::set_permissions(&runtime, std::os::unix::fs::PermissionsExt::from_mode(0o700)).expect("mode");
    let runtime = format!("XDG_RUNTIME_DIR={}", runtime.display());
    let user = ["--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/env", &runtime];
    let args = [&user[..], &[&cli, "run", "--", "/bin/sh", "-c", &both]].concat();
    let run = host.run(Stock, "setpriv", 120, "/usr/bin/setpriv", &args).success();
    let (ours, report) = run.stdout.split_once("ok\n").expect("transcript and report");
    assert!(format!("{ours}ok\n") == stock, "transcripts differ; stock:\n{stock}\nours:\n{ours}");
    let report: serde_json::Value = serde_json::from_str(report).expect("report");
    let total = |name: &str| report["totals"][name].as_u64().unwrap_or(0);
    assert!(total("connect_shm") >= 40, "not over shared memory: {report:#}");
    assert!(total("path_switch") >= 60 && total("fallback.switch") == 0, "not switched: {report:#}");
}

/// The opposite direction: long-lived connections that began in the kernel move to shared memory.
#[test]
fn from_the_kernel_to_shared_memory() {
    let Some(delta) = e2e::same_transcripts(&Host::new(), 120, "switch/upgrade.py", &[]) else { return };
    // Both ends count. One connection is used by two processes and stays in the kernel. On a
    // loaded machine another one may fail to move.
    let (began, over) = (delta.get("connect_kernel"), delta.get("path_upgrade"));
    assert!(began >= 30 && delta.get("connect_shm") == 0, "they were to begin in the kernel\n{delta}");
    assert!(over >= 2 * began - 6, "{over} ends of {began} connections went over\n{delta}");
    assert!(delta.get("hostile_peer") == 0 && delta.get("fallback.switch") == 0, "{delta}");
}

/// The client has no library, so the connection stays in the kernel, although it might move. A
/// wait for it must be one `epoll_wait` of the kernel, without the steps that shared memory needs.
#[test]
fn a_kernel_connection_is_waited_for_in_the_kernel_alone() {
    if stock_mode() {
        eprintln!("SKIPPED: stock mode has no library");
        return;
    }
    for trigger in ["level", "edge"] {
        let (host, port) = (Host::new(), fsocket_testkit::net::free_port());
        let before = host.snapshot();
        let path = helper("switch/kernel_epoll.py").display().to_string();
        let server = host.server(Accel, "kernel-epoll", port, PYTHON, &[&path, &port.to_string(), trigger]);
        let mut client = TcpStream::connect(("127.0.0.1", port)).expect("connect");
        client.set_nodelay(true).expect("TCP_NODELAY");
        for _ in 0..2000 {
            let mut byte = [0];
            client.write_all(b"x").and_then(|()| client.read_exact(&mut byte)).expect("an echo");
        }
        drop(client);
        server.finish(Duration::from_secs(60)).success().says("ok");
        let counters = host.snapshot().since(&before);
        assert!(counters.get("accept_kernel") == 1 && counters.get("accept_shm") == 0, "{counters}");
        // A few sleeps happen at the start, and while an end is shown to the monitor.
        assert!(counters.get("sleeps") <= 40, "{trigger}: threads slept for shared memory as well\n{counters}");
    }
}

/// While an end is shown to the monitor, the monitor has a copy of the descriptor. Nevertheless,
/// the program's close must end the connection at once.
#[test]
fn an_end_that_was_just_offered_closes_at_once() {
    let host = Host::new();
    let path = helper("switch/prompt_end.py").display().to_string();
    let args = ["FASTSOCKET_UPGRADE=1", PYTHON, &path];
    let run = |side| host.run(side, "prompt_end", 60, "/usr/bin/env", &args).success().says("ok").stdout;
    let Some(delta) = e2e::same_output(&host, run) else { return };
    let began = (delta.get("connect_kernel"), delta.get("accept_kernel"));
    assert!(began.0 >= 1800 && began.1 >= 1800, "they were to begin in the kernel\n{delta}");
}

/// A bug that this test found: the mover had checked the ring for the last time, and then the
/// client published more bytes. The client must send these bytes again, but the mover took them
/// for its own and lost them with its `exec`.
#[test]
fn cat_gets_everything_while_the_path_is_switched() {
    let host = Host::new();
    let Some(delta) = e2e::same_transcripts(&host, 120, "switch/cat_server.py", &["300", "300000"]) else { return };
    assert!(delta.get("connect_shm") == 600 && delta.get("path_switch") >= 300, "{delta}");
    assert!(delta.get("fallback.switch") == 0 && delta.get("hostile_peer") == 0, "{delta}");
}

/// A peer's port must be one that the monitor has leased to it, whatever the peer writes.
#[test]
fn a_forged_port_is_reset_and_counted() {
    if stock_mode() {
        eprintln!("SKIPPED: stock mode has no library");
        return;
    }
    let host = Host::new();
    let (_server, port) = e2e::echo_server(&host, Accel, "threaded", "127.0.0.1");
    let before = host.snapshot();
    let said = e2e::python(
        &host,
        Stock,
        60,
        "switch/forged_port.py",
        &[&host.socket().display().to_string(), &port.to_string()],
    );
    let lines: Vec<&str> = said.lines().collect();
    let all = |name: &str, end: &str| lines.iter().filter(|l| l.starts_with(name)).all(|l| l.ends_with(end));
    assert_eq!(lines.len(), 8, "{said}");
    assert!(all("leased", "taken lives"), "{said}");
    for name in ["another", "below", "privileged", "none", "the server's"] {
        assert!(all(name, "taken reset"), "{said}");
    }
    let delta = host.snapshot().since(&before);
    assert!(delta.get("hostile_peer") == 5 && delta.get("accept_shm") == 2, "{delta}");
}
