//! If a socket is used on an io_uring, it must move to the kernel without loss. A ring that only
//! reads files must not affect sockets.

use fsocket_testkit::host::{Accel, Side, Stock};
use fsocket_testkit::{compile, need, stock_mode, Host};
use std::path::Path;

/// Whether the kernel lets any user make a ring.
fn allowed() -> bool {
    let off = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").is_ok_and(|v| v.trim() == "2");
    if off {
        assert!(std::env::var_os("FASTSOCKET_TEST_STRICT").is_none(), "kernel.io_uring_disabled is 2");
        eprintln!("SKIPPED: kernel.io_uring_disabled is 2");
    }
    !off
}

fn transcript(host: &Host, side: Side, program: &Path, args: &[&str]) -> String {
    host.run(side, "uring", 60, program, args).success().says("ok").stdout
}

/// The output must be equal on both sides. Returns the changes of the counters.
#[track_caller]
fn equal(host: &Host, how: &[&str], args: &[&str]) -> fsocket_testkit::counters::Delta {
    let program = host.path().join("uring");
    compile("uring/uring.c", &program, how);
    let stock = transcript(host, Stock, &program, args);
    let before = host.snapshot();
    let ours = transcript(host, Accel, &program, args);
    assert!(ours == stock, "transcripts differ; stock:\n{stock}\nours:\n{ours}");
    host.snapshot().since(&before)
}

#[track_caller]
fn switched(delta: &fsocket_testkit::counters::Delta) {
    if stock_mode() {
        eprintln!("PATH NOT ASSERTED: stock mode");
        return;
    }
    // Five connections begin in shared memory; one of them waits to be accepted. From then on the
    // listener uses the kernel.
    assert!(delta.get("connect_shm") == 5 && delta.get("accept_shm") == 4, "not over shared memory\n{delta}");
    // One connection is only in an epoll instance.
    assert!(delta.get("path_switch") >= 8, "not switched\n{delta}");
    assert!(delta.get("fallback.io_uring") >= 4, "no reason\n{delta}");
    assert!(delta.get("fallback.switch") == 0 && delta.get("hostile_peer") == 0, "{delta}");
}

#[test]
fn liburing() {
    need!("cc");
    if !allowed() {
        return;
    }
    switched(&equal(&Host::new(), &["-luring"], &[]));
}

#[test]
fn rings_by_syscall() {
    need!("cc");
    if !allowed() {
        return;
    }
    switched(&equal(&Host::new(), &["-DRAW"], &[]));
}

/// libuv fills epoll instances by a ring. Connections in the instance must stay in shared memory,
/// even if such a call fails because the connection is in the instance already, or is not.
#[test]
fn instances_that_are_filled_on_a_ring() {
    need!("cc");
    if !allowed() {
        return;
    }
    for how in ["-luring", "-DRAW"] {
        for args in [&["epoll"][..], &["epoll", "failing"]] {
            let delta = equal(&Host::new(), &[how], args);
            if stock_mode() {
                eprintln!("PATH NOT ASSERTED: stock mode");
                continue;
            }
            assert!(delta.get("connect_shm") == 2 && delta.get("accept_shm") == 2, "{how}\n{delta}");
            assert_eq!((delta.get("path_switch"), delta.get("fallback.io_uring")), (0, 0), "{how}\n{delta}");
        }
    }
}

/// The process that listens never accepts; others accept by rings. The kernel's queue must serve
/// the clients that waited in shared memory, even if they are more than the backlog allows.
#[test]
fn workers_of_one_listener() {
    need!("cc");
    if !allowed() {
        return;
    }
    for how in ["-luring", "-DRAW"] {
        let delta = equal(&Host::new(), &[how], &["workers"]);
        if stock_mode() {
            eprintln!("PATH NOT ASSERTED: stock mode");
            continue;
        }
        assert!(delta.get("connect_shm") >= 12 && delta.get("fallback.io_uring") >= 1, "{how}\n{delta}");
        assert!(delta.get("connect_shm") + delta.get("connect_kernel") == 20, "{how}\n{delta}");
        assert!(delta.get("path_switch") >= 12 && delta.get("fallback.switch") == 0, "{how}\n{delta}");
    }
}

#[test]
fn files_only() {
    need!("cc");
    if !allowed() {
        return;
    }
    for how in ["-luring", "-DRAW"] {
        let delta = equal(&Host::new(), &[how], &["files"]);
        if stock_mode() {
            eprintln!("PATH NOT ASSERTED: stock mode");
            continue;
        }
        assert!(delta.get("connect_shm") == 20 && delta.get("accept_shm") == 20, "{how}\n{delta}");
        assert!(delta.get("path_switch") == 0 && delta.get("fallback.io_uring") == 0, "{how}\n{delta}");
    }
}

#[track_caller]
fn left_to_the_kernel(how: &[&str]) {
    let delta = equal(&Host::new(), how, &[]);
    if stock_mode() {
        eprintln!("PATH NOT ASSERTED: stock mode");
        return;
    }
    assert!(delta.get("fallback.io_uring") == 1, "no reason\n{delta}");
    assert!(delta.get("connect_shm") == 0 && delta.get("accept_shm") == 0, "{delta}");
}

/// A kernel thread polls the ring, so the library sees no call for its entries.
#[test]
fn a_ring_that_a_kernel_thread_polls() {
    need!("cc");
    if allowed() {
        left_to_the_kernel(&["-DRAW", "-DPOLLED"]);
    }
}

/// The program makes a ring by its own system call instruction, without a hook. The library must
/// find the ring.
#[cfg(target_arch = "x86_64")]
#[test]
fn rings_by_system_calls_of_its_own() {
    need!("cc");
    if allowed() {
        left_to_the_kernel(&["-DINLINE"]);
    }
}

/// A forked child may rely on what its parent found about descriptors, except for those that the
/// child has closed.
#[cfg(target_arch = "x86_64")]
#[test]
fn rings_that_forked_children_make() {
    need!("cc");
    if !allowed() {
        return;
    }
    let delta = equal(&Host::new(), &["-DINLINE"], &["children"]);
    if stock_mode() {
        eprintln!("PATH NOT ASSERTED: stock mode");
        return;
    }
    // If the ring is found before the child connects, the child uses the kernel for all
    // connections, and counts none.
    assert!(delta.get("connect_shm") == 0 && delta.get("accept_kernel") == 3, "{delta}");
    // The first child leaves the listener to the kernel.
    assert!(delta.get("fallback.io_uring") >= 1, "no reason\n{delta}");
}
