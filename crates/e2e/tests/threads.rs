//! Threads that leave a wait on a socket otherwise than by its end: cancelled, or
//! by siglongjmp out of a signal handler. What they held is given back.

use fsocket_testkit::host::{Accel, Stock};
use fsocket_testkit::{compile, need, stock_mode, Host};

#[track_caller]
fn equal(what: &str, connections: i128) {
    let host = Host::new();
    let program = host.path().join("cancel");
    compile("apps/cancel.c", &program, &[]);
    let stock = host.run(Stock, "cancel", 60, &program, &[what]).success().says("ok").stdout;
    let before = host.snapshot();
    let ours = host.run(Accel, "cancel", 60, &program, &[what]).success().says("ok").stdout;
    assert!(ours == stock, "transcripts differ; stock:\n{stock}\nours:\n{ours}");
    let delta = host.snapshot().since(&before);
    if stock_mode() {
        eprintln!("PATH NOT ASSERTED: stock mode");
        return;
    }
    let shm = (delta.get("connect_shm"), delta.get("accept_shm"), delta.get("close_shm"));
    assert!(shm.0 >= connections && shm.1 == shm.0, "not over shared memory\n{delta}");
    // Each end was closed: nobody holds one of a thread that is gone.
    assert!(shm.2 == 2 * shm.0, "connections are left\n{delta}");
    assert!(delta.get("path_switch") == 0 && delta.get("hostile_peer") == 0, "{delta}");
}

#[test]
fn cancelled_while_they_wait() {
    need!("cc");
    equal("cancel", 46);
}

#[test]
fn left_by_siglongjmp() {
    need!("cc");
    equal("jump", 17);
}
