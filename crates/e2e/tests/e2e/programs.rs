//! Runs two of the programs of `make programs`. The others are slow and need more packages.

use fsocket_testkit::{artifacts, need, stock_mode, workspace, PYTHON};
use std::process::Command;

#[test]
fn redis_and_nginx_with_its_binary_upgrade() {
    need!("nginx");
    need!("redis-server");
    need!("curl");
    // SAFETY: `geteuid` takes no arguments.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("SKIPPED: needs root, for namespaces");
        return;
    }
    let side = if stock_mode() { "--stock" } else { "--ours" };
    let library = artifacts::library();
    let bin = library.parent().expect("a directory");
    let logs = std::env::temp_dir().join(format!("fastsocket-programs-{}", std::process::id()));
    let mut command = Command::new(PYTHON);
    command.arg(workspace().join("tests/programs/run.py")).args(["nginx", "redis", side, "--no-docs"]);
    let done = command.arg("--bin").arg(bin).arg("--keep").arg(&logs).output().expect("python");
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{said}{}", String::from_utf8_lossy(&done.stderr));
    assert!(said.contains("programs: 3 tried, all steps passed"), "{said}");
    let _ = std::fs::remove_dir_all(&logs);
}
