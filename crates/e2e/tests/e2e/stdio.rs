//! Connections that have a descriptor number from 0 to 2 (ADR 81).

use fsocket_e2e as e2e;
use fsocket_testkit::{Delta, Host, PYTHON};

fn run(host: &Host) -> Option<Delta> {
    let delta = e2e::same_transcripts(host, 60, "stdio/standard.py", &[])?;
    assert!(delta.get("connect_shm") == 3 && delta.get("accept_shm") == 3, "not over shared memory\n{delta}");
    assert!(delta.get("hostile_peer") == 0 && delta.get("fallback.switch") == 0, "{delta}");
    Some(delta)
}

/// libc may have a stream at such a number, which reads and writes below the hooks. So these
/// connections use the kernel.
#[test]
fn standard_input_and_output_are_kernel_connections() {
    let Some(delta) = run(&Host::new()) else { return };
    assert!(delta.get("path_switch") >= 3, "not switched\n{delta}");
}

/// With `stdio = false` the administrator says that the program uses no such stream.
#[test]
fn without_streams_they_stay_in_shared_memory() {
    let python = std::path::Path::new(PYTHON).canonicalize().expect("a program");
    let settings = format!("[[program]]\nexe = \"{}\"\nstdio = false\n", python.display());
    let Some(delta) = run(&Host::configured(None, &settings)) else { return };
    assert!(delta.get("path_switch") == 0, "switched\n{delta}");
}
