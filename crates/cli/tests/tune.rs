//! `fastsocket tune` on real devices, in network namespaces of their own.
//!
//! Each test's thread enters a network and mount namespace of its own. Everything that a test
//! makes disappears with its thread, so no test has to clean up.

#[path = "../../tune/tests/common/fake.rs"]
mod fake;
#[path = "../../tune/tests/common/settings.rs"]
mod settings;

use fsocket_tune::{ethtool, CpuSet};
use rustix::thread::{unshare_unsafe, UnshareFlags};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const QUEUES: &str = "/sys/class/net/v0/queues";

/// Runs a program of the system and panics unless it succeeds.
#[track_caller]
fn run(line: &str) -> String {
    let words: Vec<&str> = line.split(' ').collect();
    let output = Command::new(words[0]).args(&words[1..]).env("PATH", search_path()).output();
    let output = output.unwrap_or_else(|e| panic!("{line}: {e}"));
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn search_path() -> String {
    format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default())
}

/// Moves this thread and its children into namespaces of their own. Returns false, with a message,
/// where the user may not do that.
fn alone(sysfs: bool) -> bool {
    let strict = std::env::var_os("FASTSOCKET_TEST_STRICT").is_some();
    for program in ["ip", "ethtool", "mount"] {
        if !search_path().split(':').any(|dir| Path::new(dir).join(program).is_file()) {
            assert!(!strict, "{program} is not installed (FASTSOCKET_TEST_STRICT is set)");
            eprintln!("SKIPPED: {program} is not installed (make deps)");
            return false;
        }
    }
    let able = rustix::process::geteuid().is_root()
        // SAFETY: the call does not unshare the descriptor table, and no other thread relies on
        // this thread's namespaces.
        && unsafe { unshare_unsafe(UnshareFlags::NEWNET | UnshareFlags::NEWNS) }.is_ok();
    if !able {
        assert!(!strict, "no namespaces of its own (FASTSOCKET_TEST_STRICT is set)");
        eprintln!("SKIPPED: namespaces need root");
        return false;
    }
    run("mount --make-rprivate /");
    if sysfs {
        run("mount -t sysfs sysfs /sys");
    }
    run("ip link set lo up");
    true
}

/// Creates a pair of veth devices with four queues each way, of which one is in use at first.
fn veth() {
    run("ip link add v0 numtxqueues 4 numrxqueues 4 type veth peer name v1 numtxqueues 4 numrxqueues 4");
    run("ip link set v0 up");
    run("ip link set v1 up");
    run("ethtool -L v0 rx 1 tx 2");
}

struct Tune {
    state: tempfile::TempDir,
}

impl Tune {
    fn new() -> Tune {
        Tune { state: tempfile::tempdir().unwrap() }
    }

    fn command(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fastsocket"));
        command.arg("tune").args(line.split(' ')).arg("--state-dir").arg(self.state.path());
        command
    }

    /// Runs the command and checks that its exit status is `status`.
    #[track_caller]
    fn run(&self, line: &str, status: i32) -> String {
        said(self.command(line).output().unwrap(), line, status)
    }

    #[track_caller]
    fn json(&self, line: &str, status: i32) -> serde_json::Value {
        let output = self.command(&format!("{line} --json")).output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{line}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// State files in the directory, without the lock file.
    fn files(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.state.path()).unwrap();
        entries.map(|e| e.unwrap().path()).filter(|p| p.extension().is_some_and(|e| e == "json")).collect()
    }
}

#[track_caller]
fn said(output: Output, line: &str, status: i32) -> String {
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(status), "tune {line}: {text}");
    text
}

/// Reads everything that `tune` may change: the queues of v0, network settings, interrupts, and
/// ethtool's values.
fn snapshot() -> BTreeMap<String, String> {
    // The counts of spurious interrupts are left out, because they change by themselves.
    let mut found = settings::settings("v0", &["/spurious"]);
    for what in ["-l", "-k"] {
        found.insert(format!("ethtool {what}"), run(&format!("ethtool {what} v0")));
    }
    found
}

#[track_caller]
fn unchanged(before: &BTreeMap<String, String>) {
    let after = snapshot();
    for (name, text) in before {
        assert_eq!(after.get(name), Some(text), "{name}");
    }
    assert_eq!(after.len(), before.len());
}

fn file(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path.as_ref()).unwrap_or_else(|e| panic!("{}: {e}", path.as_ref().display())).trim().to_owned()
}

fn mask(queue_file: &str) -> CpuSet {
    CpuSet::parse_mask(&file(format!("{QUEUES}/{queue_file}"))).unwrap()
}

/// CPUs that this process may use.
fn cpus() -> CpuSet {
    let status = file("/proc/self/status");
    let line = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")).unwrap();
    CpuSet::parse_list(line).unwrap()
}

#[test]
fn veth_there_and_back() {
    if !alone(true) {
        return;
    }
    veth();
    fs::write(format!("{QUEUES}/rx-0/rps_cpus"), "1").unwrap();
    fs::write(format!("{QUEUES}/tx-1/xps_cpus"), "1").unwrap();
    let before = snapshot();
    let tune = Tune::new();

    // Without --apply, the command changes nothing.
    let text = tune.run("v0", 0);
    assert!(text.contains("would change") && text.contains("veth"), "{text}");
    let plan = tune.json("v0", 0);
    assert_eq!(plan["device"]["channels"]["count"]["rx"], 1);
    assert_eq!(plan["device"]["channels"]["max_rx"], 4);
    unchanged(&before);
    assert!(tune.files().is_empty());

    tune.run("v0 --apply", 0);
    let want = cpus().len().min(4);
    let listing = run("ethtool -l v0");
    let now: Vec<&str> = listing.split("Current").nth(1).unwrap().split_whitespace().collect();
    let after = |word: &str| now.iter().position(|w| *w == word).map(|i| now[i + 1].to_owned()).unwrap();
    assert_eq!((after("RX:"), after("TX:")), (want.to_string(), want.to_string()), "{listing}");
    if want > 1 {
        let mut all = CpuSet::new();
        for q in 0..want {
            let set = mask(&format!("tx-{q}/xps_cpus"));
            assert!(!set.is_empty() && all.and(&set).is_empty(), "tx-{q}: {set}");
            all = all.or(&set);
        }
        assert_eq!(all, cpus());
    }
    for q in 0..want {
        assert!(mask(&format!("rx-{q}/rps_cpus")).is_empty());
    }
    for (name, value) in [
        ("core/somaxconn", "16384"),
        ("ipv4/tcp_max_syn_backlog", "16384"),
        ("ipv4/ip_local_port_range", "16384\t65535"),
        ("ipv4/tcp_tw_reuse", "1"),
        ("ipv4/tcp_migrate_req", "1"),
        ("ipv4/tcp_syncookies", "1"),
    ] {
        assert_eq!(file(format!("/proc/sys/net/{name}")), value, "{name}");
    }
    assert_eq!(tune.files().len(), 1);
    assert!(tune.run("v0", 0).contains("tuned before"));
    let tuned = snapshot();
    assert!(tune.run("v0 --apply", 0).contains("nothing to change"));
    unchanged(&tuned);

    tune.run("v0 --revert", 0);
    unchanged(&before);
    assert!(tune.files().is_empty());
    assert!(tune.run("v0 --revert", 0).contains("nothing to undo"));
}

#[test]
fn rps_on_request_and_groups_left_alone() {
    if !alone(true) {
        return;
    }
    veth();
    let before = snapshot();
    let tune = Tune::new();
    tune.run("v0 --apply --only rps --rps spread", 0);
    let group = if cpus().len() > 1 { cpus() } else { CpuSet::new() };
    assert_eq!(mask("rx-0/rps_cpus"), group);
    let changed = snapshot().iter().filter(|(name, text)| before.get(*name) != Some(text)).count();
    assert_eq!(changed, usize::from(cpus().len() > 1), "only that");
    tune.run("v0 --revert", 0);
    unchanged(&before);
}

#[test]
fn what_somebody_changed_since() {
    if !alone(true) {
        return;
    }
    veth();
    let before = snapshot();
    let tune = Tune::new();
    tune.run("v0 --apply", 0);
    fs::write("/proc/sys/net/ipv4/tcp_tw_reuse", "0").unwrap();
    let text = tune.run("v0 --revert", 1);
    assert!(text.contains("it was changed to 0"), "{text}");
    assert_eq!(file("/proc/sys/net/ipv4/tcp_tw_reuse"), "0");
    tune.run("v0 --revert --force", 0);
    unchanged(&before);
}

#[test]
fn a_device_that_goes() {
    if !alone(true) {
        return;
    }
    veth();
    let tune = Tune::new();
    let before = file("/proc/sys/net/core/somaxconn");
    tune.run("v0 --apply", 0);
    run("ip link del v0");
    let text = tune.run("v0 --revert", 0);
    assert!(text.contains("the device is gone"), "{text}");
    assert_eq!(file("/proc/sys/net/core/somaxconn"), before);
    assert!(tune.files().is_empty());
}

#[test]
fn renamed_in_between() {
    if !alone(true) {
        return;
    }
    veth();
    let tune = Tune::new();
    let before = file(format!("{QUEUES}/tx-0/xps_cpus"));
    tune.run("v0 --apply", 0);
    run("ip link set v0 down");
    run("ip link set v0 name other0");
    let text = tune.run("v0 --revert", 0);
    assert!(text.contains("is called other0 now"), "{text}");
    assert_eq!(file("/sys/class/net/other0/queues/tx-0/xps_cpus"), before);
    assert!(!Path::new("/sys/class/net/other0/queues/rx-1").exists());
}

#[test]
fn devices_without_queues() {
    if !alone(true) {
        return;
    }
    run("ip link add d0 type ifb");
    let tune = Tune::new();
    for device in ["lo", "d0"] {
        let text = tune.run(device, 0);
        for lack in ["number cannot be changed", "a software device: no interrupts", "one transmit queue"] {
            assert!(text.contains(lack), "{device}: {lack}: {text}");
        }
        tune.run(&format!("{device} --apply"), 0);
        tune.run(&format!("{device} --revert"), 0);
    }
}

#[test]
fn refusals() {
    if !alone(false) {
        return;
    }
    run("ip link add d0 type ifb");
    let tune = Tune::new();
    assert!(tune.run("nosuch", 1).contains("no such network device"));
    assert!(tune.run("nosuch --apply", 1).contains("no such network device"));
    assert!(tune.run("../../etc", 125).contains("cannot be the name"));
    assert!(tune.run("d0", 1).contains("another network namespace"), "/sys is still the machine's");
    for usage in ["d0 --apply --revert", "d0 --force", "d0 --skip nonsense", "d0 --cpus x", "--apply"] {
        tune.run(usage, 125);
    }
    run("mount -t sysfs sysfs /sys");
    // A user other than root may look but not change anything, and needs a readable copy of the
    // program.
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("fastsocket");
    fs::copy(env!("CARGO_BIN_EXE_fastsocket"), &program).unwrap();
    fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let user = |line: &str, status| {
        let mut command = Command::new(&program);
        command.arg("tune").args(line.split(' ')).uid(65534).gid(65534);
        said(command.output().unwrap(), line, status)
    };
    assert!(user("d0", 0).contains("would change"));
    assert!(user("d0 --apply", 1).contains("--apply needs root"));
    assert!(user("d0 --revert", 1).contains("--revert needs root"));
    assert!(tune.files().is_empty());
}

/// Compares the results of our ioctls with the output of the program `ethtool`.
#[test]
fn ethtool_says_the_same() {
    if !alone(true) {
        return;
    }
    veth();
    use ethtool::Nic;
    let nic = ethtool::Ioctl::new("v0").unwrap();
    let driver = nic.driver().unwrap();
    assert!(run("ethtool -i v0").starts_with(&format!("driver: {}\nversion: {}\n", driver.name, driver.version)));
    let count = nic.channels().unwrap().count;
    assert_eq!((count.rx, count.tx, count.combined), (1, 2, 0));
    let listed = run("ethtool -k v0");
    let features = nic.features().unwrap();
    let mut compared = 0;
    for line in listed.lines() {
        let Some((name, state)) = line.trim().split_once(": ") else { continue };
        let Some(feature) = features.get(name) else { continue };
        assert_eq!(feature.on, state.starts_with("on"), "{line}");
        assert_eq!(!feature.changeable, state.contains("[fixed]"), "{line}");
        compared += 1;
    }
    assert!(compared > 20, "{compared} of {}", features.len());
    nic.set_feature("tx-tcp-segmentation", false).unwrap();
    assert!(run("ethtool -k v0").contains("tx-tcp-segmentation: off"));
    assert!(!nic.features().unwrap()["tx-tcp-segmentation"].on);
    for refused in [nic.rss().map(drop), nic.coalesce().map(drop), nic.set_feature("no-such", true)] {
        assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::EOPNOTSUPP));
    }
}

/// Runs the command on a recording of a server with 96 CPUs and a network card with 64 queues.
#[test]
fn a_recorded_server() {
    let fake = fake::Fake::new(32);
    let before = fake.snapshot();
    let tune = |line: &str, status| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fastsocket"));
        command.arg("tune").args(line.split(' ')).arg("--root").arg(fake.dir.path());
        said(command.output().unwrap(), line, status)
    };
    let plan = tune("eth0", 0);
    for text in ["mlx5_core", "NUMA node 1", "isolated: 46-47", "->  64 combined", "more alike"] {
        assert!(plan.contains(text), "{text}: {plan}");
    }
    assert_eq!(fake.snapshot(), before);
    assert!(tune("eth0 -v", 0).contains("tx-63 xps_cpus"));
    tune("eth0 --apply", 0);
    assert_eq!(fake.affinity(63), "95");
    assert!(fake.path("var/lib/fastsocket/tune/eth0.json").exists());
    fake.put("proc/sys/net/core/somaxconn", "7");
    assert!(tune("eth0 --revert", 1).contains("it was changed to 7"));
    tune("eth0 --revert --force", 0);
    assert_eq!(fake.snapshot(), before);
}
