//! Programs that load the library inherit connections and listeners through
//! `exec` and `posix_spawn` as they are: over shared memory before and after.

use fsocket_e2e as e2e;
use fsocket_testkit::Host;

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
