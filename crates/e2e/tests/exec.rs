//! Programs that load the library inherit connections and listeners through
//! `exec` and `posix_spawn` as they are: over shared memory before and after.

use fsocket_e2e as e2e;
use fsocket_testkit::{Host, Proc};
use std::time::Duration;

#[test]
fn what_is_inherited_stays_fast() {
    let host = Host::new();
    let Some(delta) = e2e::same_transcripts(&host, 120, "exec.py", &[]) else { return };
    assert!(delta.get("connect_shm") >= 25 && delta.get("accept_shm") >= 25, "not over shared memory\n{delta}");
    assert!(delta.get("connect_kernel") == 0 && delta.get("accept_kernel") == 0, "over kernel TCP\n{delta}");
    assert!(delta.get("path_switch") == 0, "went over to the kernel\n{delta}");
    assert!(delta.get("hostile_peer") == 0 && delta.get("fallback.switch") == 0, "{delta}");
    // Nothing is left of the programs that were replaced.
    let report = host.snapshot();
    assert!(report.resident() == 0, "something is left: {}", report.resident());
}

/// Where the services' binary is put.
fn place(host: &Host) -> String {
    let place = host.path().join("services");
    std::fs::create_dir(&place).expect("a directory");
    place.to_str().expect("text").to_owned()
}

/// The master watches over shared memory and in a zone of its own, its services know only the
/// kernel's queue of the one listen socket: what waits goes there, and everything after it.
#[test]
fn services_of_another_environment_accept() {
    let host = Host::new();
    let place = place(&host);
    let Some(delta) = e2e::same_transcripts(&host, 120, "services.py", &[&place]) else { return };
    // One of two each; and four connections that the master accepts and hands over.
    assert!(
        delta.get("connect_shm") == 8 + 4 && delta.get("connect_kernel") == 8 + 1,
        "a listener is handed over\n{delta}"
    );
    assert!(delta.get("path_switch") >= 8 + 4 && delta.get("accept_shm") == 4, "nobody accepts there\n{delta}");
    assert!(delta.get("hostile_peer") == 0 && delta.get("fallback.switch") == 0, "{delta}");
}

#[test]
fn services_of_another_environment_accept_where_there_are_zones() {
    let host = Host::new();
    let place = place(&host);
    let script = fsocket_testkit::script("apps/services.py");
    let run = |side| {
        let mut command = host.command(side, fsocket_testkit::PYTHON);
        command.arg(&script).arg(&place).env("FASTSOCKET_DISABLE", "shm");
        Proc::spawn(host.logs(), "services", command).finish(Duration::from_secs(120)).success().stdout
    };
    let Some(delta) = e2e::same_output(&host, run) else { return };
    assert!(delta.get("zone_joins") >= 4, "a zone\n{delta}");
    assert!(delta.get("fallback.zone_shared") >= 4, "which has ended\n{delta}");
}

/// In another root, under another mount: the loader has nothing to complain of.
#[test]
fn programs_that_cannot_open_the_library() {
    let host = Host::new();
    let Some(delta) = e2e::same_transcripts(&host, 120, "hidden.py", &[]) else { return };
    assert!(delta.get("connect_shm") == 1 && delta.get("path_switch") >= 1, "one, for a program without\n{delta}");
    assert!(delta.get("hostile_peer") == 0 && delta.get("fallback.switch") == 0, "{delta}");
}
