//! Programs that load the library inherit connections and listeners through
//! `exec` and `posix_spawn` as they are: over shared memory before and after.

use fsocket_testkit::host::{Accel, Side, Stock};
use fsocket_testkit::{script, stock_mode, Host, PYTHON};

fn transcript(host: &Host, side: Side) -> String {
    let path = script("apps/exec.py").display().to_string();
    host.run(side, "exec", 120, PYTHON, &[&path]).success().says("ok").stdout
}

#[test]
fn what_is_inherited_stays_fast() {
    let host = Host::new();
    let stock = transcript(&host, Stock);
    let before = host.snapshot();
    let ours = transcript(&host, Accel);
    assert!(ours == stock, "transcripts differ; stock:\n{stock}\nours:\n{ours}");
    let delta = host.snapshot().since(&before);
    if stock_mode() {
        eprintln!("PATH NOT ASSERTED: stock mode");
        return;
    }
    assert!(delta.get("connect_shm") >= 25 && delta.get("accept_shm") >= 25, "not over shared memory\n{delta}");
    assert!(delta.get("connect_kernel") == 0 && delta.get("accept_kernel") == 0, "over kernel TCP\n{delta}");
    assert!(delta.get("path_switch") == 0, "went over to the kernel\n{delta}");
    assert!(delta.get("hostile_peer") == 0 && delta.get("fallback.switch") == 0, "{delta}");
    // Nothing is left of the programs that were replaced.
    let report = host.snapshot();
    assert!(report.resident() == 0 || stock_mode(), "something is left: {}", report.resident());
}
