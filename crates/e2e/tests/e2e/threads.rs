//! Threads that leave a wait on a socket otherwise than by its end: cancelled, or
//! by siglongjmp out of a signal handler, or because another file takes the socket's place. What they
//! held is given back.

use fsocket_e2e as e2e;
use fsocket_testkit::host::{Accel, Stock};
use fsocket_testkit::{compile, need, stock_mode, Host};

/// The same on both sides; None: nothing was counted.
#[track_caller]
fn equal(what: &str) -> Option<fsocket_testkit::counters::Delta> {
    equal_of("cancel", what)
}

#[track_caller]
fn equal_of(name: &str, what: &str) -> Option<fsocket_testkit::counters::Delta> {
    let host = Host::new();
    let program = host.path().join(name);
    compile(&format!("apps/{name}.c"), &program, &[]);
    let stock = host.run(Stock, name, 60, &program, &[what]).success().says("ok").stdout;
    let before = host.snapshot();
    let ours = host.run(Accel, name, 60, &program, &[what]).success().says("ok").stdout;
    assert!(ours == stock, "transcripts differ; stock:\n{stock}\nours:\n{ours}");
    if stock_mode() {
        eprintln!("PATH NOT ASSERTED: stock mode");
        return None;
    }
    Some(host.snapshot().since(&before))
}

#[track_caller]
fn over_shared_memory(what: &str, connections: i128) {
    let Some(mut delta) = equal(what) else { return };
    // A jump out of the few instructions with which a wait takes hold of a connection keeps that open (docs/hooks.md). One
    // run of twenty has such a jump; a real fault shows in each run.
    for _ in 0..2 {
        if what == "jump" && !closed_all(&delta) {
            delta = equal(what).expect("it is counted");
        }
    }
    let shm = (delta.get("connect_shm"), delta.get("accept_shm"), delta.get("close_shm"));
    assert!(shm.0 >= connections && shm.1 == shm.0, "not over shared memory\n{delta}");
    // Each end was closed: nobody holds one of a thread that is gone.
    assert!(closed_all(&delta), "connections are left\n{delta}");
    assert!(delta.get("path_switch") == 0 && delta.get("hostile_peer") == 0, "{delta}");
}

fn closed_all(delta: &fsocket_testkit::counters::Delta) -> bool {
    delta.get("close_shm") == 2 * delta.get("connect_shm")
}

#[test]
fn cancelled_while_they_wait() {
    need!("cc");
    over_shared_memory("cancel", 46);
}

#[test]
fn left_by_siglongjmp() {
    need!("cc");
    over_shared_memory("jump", 17);
}

/// Another file is put in the socket's place, and a signal sent once, while a thread is on its way
/// to sleep on it.
#[test]
fn woken_by_what_replaces_their_socket() {
    need!("cc");
    for what in ["read", "recv", "write", "accept", "poll", "select"] {
        let Some(delta) = equal_of("replaced", what) else { continue };
        let shm = (delta.get("connect_shm"), delta.get("accept_shm"), delta.get("close_shm"));
        assert!(shm == (100, 100, 200), "{what}: not over shared memory, or left\n{delta}");
        assert!(delta.get("path_switch") == 0 && delta.get("hostile_peer") == 0, "{what}: {delta}");
    }
}

/// Another thread closes the number while they sleep, and it becomes another socket's: they go on to
/// their end.
#[test]
fn go_on_when_their_number_is_closed() {
    let host = Host::new();
    let stock = e2e::python(&host, Stock, 60, "closed.py", &[]);
    let before = host.snapshot();
    assert_eq!(e2e::python(&host, Accel, 60, "closed.py", &[]), stock);
    let delta = host.snapshot().since(&before);
    delta.assert_shm(8);
    assert!(stock_mode() || delta.get("close_shm") == 16, "connections are left\n{delta}");
}

/// A thread that shuts a connection down wakes those that sleep on it, and no others. (Each shutdown woke all forty
/// once: 3,087 sleeps.)
#[test]
fn a_shutdown_wakes_no_bystanders() {
    let host = Host::new();
    let Some(delta) = fsocket_e2e::same_transcripts(&host, 60, "bystanders.py", &[]) else { return };
    assert!(delta.get("accept_shm") == 140 && delta.get("path_switch") == 0, "{delta}");
    assert!(delta.get("sleeps") < 1000, "bystanders were woken\n{delta}");
}

/// More than a channel can have rung: the rest look themselves, which is counted, and does not spin. A thread that
/// waits for one connection needs nothing of the channel, however many there are.
#[test]
fn more_than_can_be_rung() {
    for (way, looks) in [("poll", false), ("select", false), ("poll-more", true), ("epoll", true)] {
        let host = Host::new();
        let Some(delta) = fsocket_e2e::same_transcripts(&host, 60, "many_waiters.py", &[way]) else { continue };
        assert!(delta.get("accept_shm") == 80 && delta.get("path_switch") == 0, "{way}: {delta}");
        assert_eq!(delta.get("sleeps_cut") > 0, looks, "{way}: threads that had to look themselves\n{delta}");
    }
}

/// Who is woken is seen from context switches in a tenth of a second, in which nothing else should happen.
mod alone {
    use super::*;

    /// As many threads wake for a connection as in the kernel: one of those in `accept`, all in `poll` and in epoll.
    #[test]
    fn a_connection_wakes_as_many_as_in_the_kernel() {
        for way in ["accept", "poll", "epoll"] {
            let host = Host::new();
            let Some(delta) = fsocket_e2e::same_transcripts(&host, 60, "herd.py", &[way]) else { continue };
            assert!(delta.get("accept_shm") == 25 && delta.get("path_switch") == 0, "{way}: {delta}");
        }
    }
}

/// Threads that all listen, connect and accept at once do not wait for the monitor one after the other:
/// most leave it to the kernel. (200 of them took more than a minute once.)
#[test]
fn two_hundred_that_connect_to_themselves() {
    need!("cc");
    let host = Host::new();
    let program = host.path().join("convoy");
    compile("apps/convoy.c", &program, &[]);
    let before = host.snapshot();
    host.run(Accel, "convoy", 60, &program, &["own", "200", "20"]).success().says("ok");
    let delta = host.snapshot().since(&before);
    assert!(stock_mode() || delta.get("fallback.resource") >= 1000, "they waited for the monitor\n{delta}");
}

/// Those that connect to one listener at once need one answer of the monitor.
#[test]
fn two_hundred_that_connect_to_one_listener() {
    need!("cc");
    let host = Host::new();
    let program = host.path().join("convoy");
    compile("apps/convoy.c", &program, &[]);
    for how in ["alike", "one", "epoll"] {
        let before = host.snapshot();
        host.run(Accel, "convoy", 60, &program, &[how, "200", "20"]).success().says("ok");
        let delta = host.snapshot().since(&before);
        assert!(stock_mode() || delta.get("connect_shm") == 4000, "{how}: not over shared memory\n{delta}");
    }
}

/// On kernel connections libc's functions are cancelled, below the hooks.
#[test]
fn cancelled_on_kernel_connections() {
    need!("cc");
    let Some(delta) = equal("kernel") else { return };
    assert!(delta.get("connect_kernel") >= 46 && delta.get("connect_shm") == 0, "{delta}");
}
