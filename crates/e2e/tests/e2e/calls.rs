//! Rarely used calls and options: the program must see what it would see on kernel sockets. If
//! only the kernel can do a thing, the connection moves to the kernel.

use fsocket_e2e::{self as e2e, need_two_cpus};
use fsocket_hooktable::hook::AfterSignal;
use fsocket_hooktable::Hook;
use fsocket_testkit::host::{Accel, Stock};
use fsocket_testkit::{stock_mode, Delta, Host};

/// Runs `cases` (empty: all) and returns the changes of the counters; `None` in stock mode.
#[track_caller]
fn run(cases: &[&str]) -> Option<Delta> {
    let delta = e2e::same_transcripts(&Host::new(), 160, "calls/calls.py", cases)?;
    assert!(delta.get("hostile_peer") == 0 && delta.get("fallback.switch") == 0, "{delta}");
    Some(delta)
}

/// A closed placeholder socket may be used for the next socket, but not if the program has changed
/// it in any way.
#[test]
fn a_recycled_socket_is_as_new() {
    let Some(delta) = e2e::same_transcripts(&Host::new(), 120, "calls/recycled.py", &[]) else { return };
    assert!(delta.get("connect_shm") >= 50 && delta.get("accept_shm") >= 50, "not over shared memory\n{delta}");
    assert!(delta.get("pool_hits") >= 20, "no socket was recycled\n{delta}");
}

/// The table of hooks states for each call what happens when a handler with SA_RESTART interrupts
/// its sleep.
#[test]
fn interrupted_calls_go_on_or_fail_as_the_table_says() {
    // `connect` sleeps only in the kernel, so it is left out.
    let asleep = |h: &&Hook| h.after_signal() != AfterSignal::NoSleep && h.name != "connect";
    let hooks: Vec<&Hook> = fsocket_hooktable::hooks().filter(asleep).collect();
    let names: Vec<&str> = hooks.iter().map(|h| h.name).collect();
    let rule = |h: &&Hook| match h.after_signal() {
        AfterSignal::Fails => format!("{} EINTR", h.name),
        _ => format!("{} restarts", h.name),
    };
    let expected: Vec<String> = hooks.iter().map(rule).chain(["ok".into()]).collect();
    let host = Host::new();
    let says = |side| {
        e2e::python(&host, side, 120, "calls/interrupted.py", &names).lines().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(says(Stock), expected);
    let before = host.snapshot();
    assert_eq!(says(Accel), expected);
    let delta = host.snapshot().since(&before);
    assert!(stock_mode() || delta.get("connect_shm") >= names.len() as i128, "not over shared memory\n{delta}");
}

/// These tests keep a CPU for a while.
mod alone {
    use super::*;

    /// A signal ends a call although the thread was woken just before by a limit of the library's own.
    #[test]
    fn a_signal_that_comes_when_a_limit_of_the_library_is_over_ends_the_call() {
        need_two_cpus!();
        const NAMES: [&str; 9] =
            ["recv", "recvmsg", "send", "accept", "poll", "ppoll", "select", "epoll_wait", "epoll_pwait"];
        let args = [&["late"], &NAMES[..]].concat();
        let host = Host::new();
        let expected: Vec<String> = NAMES.iter().map(|n| format!("{n} EINTR")).chain(["ok".into()]).collect();
        let says = |side| {
            e2e::python(&host, side, 120, "calls/interrupted.py", &args).lines().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(says(Stock), expected);
        let before = host.snapshot();
        assert_eq!(says(Accel), expected);
        let delta = host.snapshot().since(&before);
        assert!(stock_mode() || delta.get("connect_shm") >= 8, "not over shared memory\n{delta}");
    }
}

/// A system call by number must act like the hook of the same name, and the number of a closed
/// descriptor must be closed.
#[test]
fn system_calls_by_number() {
    let Some(delta) = e2e::same_transcripts(&Host::new(), 120, "calls/by_number.py", &[]) else { return };
    assert!(delta.get("connect_shm") >= 100 && delta.get("accept_shm") >= 100, "not over shared memory\n{delta}");
    assert!(delta.get("hostile_peer") == 0 && delta.get("fallback.switch") == 0, "{delta}");
    // Two connections are passed, and io_submit reads one. Each end of a connection changes its
    // path on its own.
    assert!(delta.get("path_switch") >= 3, "not switched\n{delta}");
}

#[test]
fn all_of_them() {
    let Some(delta) = run(&[]) else { return };
    assert!(delta.get("connect_shm") >= 30, "not over shared memory\n{delta}");
}

/// Calls that need no kernel leave the connection in shared memory.
#[test]
fn those_that_need_no_kernel() {
    let cases = [
        "every_option_ipv4",
        "every_option_ipv6",
        "options_of_a_listener_are_inherited",
        "values_out_of_range",
        "unread_by_control_message",
        "vectors_with_flags",
        "many_messages_with_a_limit",
        "pipes",
        "files",
        "controls",
        "commands_that_get_none",
        "is_it_still_open",
        "numbers_that_are_closed",
        "waits_for_numbers_that_are_closed",
    ];
    let Some(delta) = run(&cases) else { return };
    assert!(delta.get("connect_shm") == 41 && delta.get("accept_shm") == 41, "not over shared memory\n{delta}");
    assert!(delta.get("path_switch") == 0 && delta.get("connect_kernel") == 0, "switched\n{delta}");
}

/// If only the kernel can serve a call, both ends move to the kernel, and a reason is counted.
#[test]
fn those_that_do() {
    let cases = [
        ("timestamps", 4),
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

/// Options must have the same effect on stock sockets and on ours, whatever `getsockopt` returns.
#[test]
fn options_act() {
    let act = |cases: &[&str]| e2e::same_transcripts(&Host::new(), 110, "calls/acting.py", cases);
    let Some(delta) = act(&["lowat", "user_timeout", "waiting"]) else { return };
    assert!(delta.get("connect_shm") == 36 && delta.get("path_switch") == 0, "not over shared memory\n{delta}");
    assert!(delta.get("hostile_peer") == 0, "{delta}");
    // Four sockets have a rate limit, one has a port range, and three listeners defer `accept`.
    let Some(delta) = act(&["pacing", "ports", "defer"]) else { return };
    assert!(delta.get("fallback.option") >= 8 && delta.get("connect_shm") > 0, "{delta}");
}
