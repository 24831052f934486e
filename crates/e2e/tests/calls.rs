//! Calls and options that few programs use: the program sees what it would see on
//! kernel sockets, and what only the kernel can do makes it a kernel connection.

use fsocket_testkit::host::{Accel, Side, Stock};
use fsocket_testkit::{counters, script, stock_mode, Host, PYTHON};

fn transcript(host: &Host, side: Side, cases: &[&str]) -> String {
    let path = script("apps/calls.py").display().to_string();
    let mut args = vec![path.as_str()];
    args.extend_from_slice(cases);
    host.run(side, "calls", 160, PYTHON, &args).success().says("ok").stdout
}

/// The first difference, as transcripts of thousands of lines help nobody.
#[track_caller]
fn same(stock: &str, ours: &str) {
    let mut about = "";
    for (a, b) in stock.lines().zip(ours.lines()) {
        if a.starts_with('#') {
            about = a;
        }
        assert!(a == b, "transcripts differ, {about}; stock:\n{a}\nours:\n{b}");
    }
    assert!(stock == ours, "one transcript is longer\n{stock}\n{ours}");
}

/// Runs `cases` (none: all) and returns what was counted; None in stock mode.
#[track_caller]
fn run(cases: &[&str]) -> Option<counters::Delta> {
    let host = Host::new();
    let stock = transcript(&host, Stock, cases);
    let before = host.snapshot();
    let ours = transcript(&host, Accel, cases);
    same(&stock, &ours);
    if stock_mode() {
        eprintln!("PATH NOT ASSERTED: stock mode");
        return None;
    }
    let delta = host.snapshot().since(&before);
    assert!(delta.get("hostile_peer") == 0 && delta.get("fallback.switch") == 0, "{delta}");
    Some(delta)
}

#[test]
fn all_of_them() {
    let Some(delta) = run(&[]) else { return };
    assert!(delta.get("connect_shm") >= 30, "not over shared memory\n{delta}");
}

/// What is done in shared memory stays there.
#[test]
fn those_that_need_no_kernel() {
    let cases = [
        "every_option_ipv4",
        "every_option_ipv6",
        "options_of_a_listener_are_inherited",
        "values_out_of_range",
        "vectors_with_flags",
        "many_messages_with_a_limit",
        "files",
        "controls",
        "commands_that_get_none",
    ];
    let Some(delta) = run(&cases) else { return };
    assert!(delta.get("connect_shm") == 11 && delta.get("accept_shm") == 11, "not over shared memory\n{delta}");
    assert!(delta.get("path_switch") == 0 && delta.get("connect_kernel") == 0, "switched\n{delta}");
}

/// What only the kernel can do becomes the kernel's, both ends of it, with a reason.
#[test]
fn those_that_do() {
    let cases = [
        ("timestamps", 4),
        ("unread_by_control_message", 1),
        ("peeking_further", 1),
        ("zerocopy", 1),
        ("signal_by_o_async", 2),
        ("signal_of_choice", 2),
        ("signal_by_ioctl", 2),
        ("signal_for_urgent_data", 1),
    ];
    for (case, connections) in cases {
        let Some(delta) = run(&[case]) else { return };
        assert!(delta.get("fallback.option") >= connections, "{case}: no reason\n{delta}");
        assert!(delta.get("path_switch") >= connections, "{case}: not switched\n{delta}");
    }
}
