//! Pointers to unmapped memory, and programs with fault handlers of their own: the results must be
//! those of stock sockets.

use fsocket_e2e as e2e;
use fsocket_testkit::host::{Accel, Stock};
use fsocket_testkit::{compile, need, Host};

#[test]
fn bad_pointers_in_every_call() {
    need!("cc");
    let host = Host::new();
    let program = host.path().join("efault");
    compile("efault/efault.c", &program, &["-w"]);
    let run = |side| host.run(side, "efault", 240, &program, &[]).success().says("ok").stdout.clone();
    let Some(delta) = e2e::same_output(&host, run) else { return };
    assert!(delta.get("connect_shm") >= 1000, "not over shared memory\n{delta}");
}

#[test]
fn bad_pointers_without_a_monitor() {
    need!("cc");
    let host = Host::stopped();
    let program = host.path().join("efault");
    compile("efault/efault.c", &program, &["-w"]);
    let run = |side| host.run(side, "efault", 240, &program, &[]).success().says("ok").stdout.clone();
    assert_eq!(run(Accel), run(Stock));
}

#[test]
fn lengths_at_every_edge() {
    need!("cc");
    let host = Host::new();
    let program = host.path().join("lengths");
    compile("efault/lengths.c", &program, &["-w", "-O1", "-lpthread"]);
    let run = |side| host.run(side, "lengths", 240, &program, &[]).success().says("ok").stdout.clone();
    let Some(delta) = e2e::same_output(&host, run) else { return };
    assert!(delta.get("connect_shm") >= 10_000 && delta.get("path_switch") == 0, "not over shared memory\n{delta}");
}

#[test]
fn handlers_of_the_program() {
    need!("cc");
    let host = Host::new();
    let program = host.path().join("handlers");
    compile("efault/fault_handlers.c", &program, &["-w"]);
    for when in [&["early"][..], &[]] {
        let run = |side| host.run(side, "handlers", 90, &program, when).success().says("ok").stdout.clone();
        let Some(delta) = e2e::same_output(&host, run) else { return };
        assert!(delta.get("connect_shm") == 1 && delta.get("path_switch") == 0, "{delta}");
    }
}
