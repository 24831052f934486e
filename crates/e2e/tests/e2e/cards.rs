//! Runs `fastsocket tune` on the drivers of real network cards, which QEMU emulates. Its changes
//! must take effect, and after a revert everything must be as before. Run by `make test-manycore`
//! (scripts/manycore.sh has the list of cards).

#[path = "../../../tune/tests/common/settings.rs"]
mod settings;

use fsocket_testkit::{artifacts, find_program, Host, Proc, Side};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The network cards of this machine: device and driver.
fn cards() -> Vec<(String, String)> {
    let devices = std::fs::read_dir("/sys/class/net").expect("sysfs").map(|d| d.expect("a device"));
    let driver = |path: PathBuf| std::fs::canonicalize(path.join("device/driver")).ok();
    let card = |path: PathBuf| Some((name(&path), name(&driver(path)?)));
    let mut cards: Vec<_> = devices.filter_map(|d| card(d.path())).collect();
    cards.sort();
    cards
}

fn name(path: &Path) -> String {
    path.file_name().expect("a name").to_string_lossy().into_owned()
}

/// The output of a program. It may fail, because some cards do not support every query.
fn said(program: &str, args: &[&str]) -> String {
    let output = Command::new(find_program(program).expect("installed")).args(args).output().expect("started");
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

/// Reads everything that `tune` may change.
fn snapshot(device: &str) -> BTreeMap<String, String> {
    // Settings that change by themselves.
    let moving = ["byte_queue_limits", "spurious", "effective_affinity", "/random/"];
    let mut found = settings::settings(device, &moving);
    for what in ["-l", "-x", "-c", "-k", "-g"] {
        found.insert(format!("ethtool {what}"), said("ethtool", &[what, device]));
    }
    found
}

fn changed(before: &BTreeMap<String, String>, after: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    after.iter().filter(|(name, text)| before.get(*name) != Some(text)).map(|(n, t)| (n.clone(), t.clone())).collect()
}

struct Tune {
    state: PathBuf,
    device: String,
}

impl Tune {
    #[track_caller]
    fn run(&self, args: &[&str]) -> Value {
        let mut command = Command::new(artifacts::cli());
        command.args(["tune", &self.device, "--json", "--state-dir"]).arg(&self.state).args(args);
        let output = command.output().expect("started");
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{}: {args:?}: {out}{err}", self.device);
        serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}"))
    }
}

/// The cards that the environment names, all set up.
fn up() -> Vec<(String, String)> {
    let cards = cards();
    let drivers: Vec<&str> = cards.iter().map(|(_, driver)| driver.as_str()).collect();
    for wanted in ["vmxnet3", "e1000", "e1000e", "8139cp", "pcnet32", "tulip", "virtio_net"] {
        assert!(drivers.contains(&wanted), "no card with the driver {wanted}: {drivers:?}");
    }
    for (device, _) in &cards {
        said("ip", &["link", "set", device, "up"]);
    }
    std::thread::sleep(Duration::from_secs(1));
    cards
}

#[test]
#[ignore = "needs emulated cards: make test-manycore"]
fn every_card_is_as_before_after_revert() {
    for (device, driver) in &up() {
        // Under /run, so that it disappears with the emulated machine.
        let tune = Tune { state: format!("/run/tuned-{device}").into(), device: device.clone() };
        let before = snapshot(device);
        for more in [&[][..], &["--cpus", "2-3"]] {
            tune.run(more);
            assert_eq!(changed(&before, &snapshot(device)), BTreeMap::new(), "{driver}: only looked at");
            tune.run(&[&["--apply"], more].concat());
            let tuned = changed(&before, &snapshot(device));
            println!("{driver} {more:?}: {} differ", tuned.len());
            assert!(tuned.contains_key("/proc/sys/net/core/somaxconn"), "{driver}: {tuned:?}");
            tune.run(&["--revert"]);
            assert_eq!(changed(&before, &snapshot(device)), BTreeMap::new(), "{driver} {more:?}: not as before");
        }
    }
}

fn steer(host: &Host, args: &[&str]) -> String {
    let mut command = host.command(Side::Stock, artifacts::cli());
    command.arg("steer").args(args).env("FASTSOCKET_SOCKET", host.socket());
    Proc::spawn(host.logs(), "steer", command).finish(Duration::from_secs(60)).success().stdout
}

/// Steering must find a way on every card, whatever features the card lacks.
#[test]
#[ignore = "needs emulated cards: make test-manycore"]
fn every_card_can_be_steered_and_is_left_as_it_was() {
    let host = Host::new();
    for (device, driver) in &up() {
        let before = snapshot(device);
        for policy in ["rfd", "flow-groups"] {
            let answer: Value =
                serde_json::from_str(&steer(&host, &[device, "--policy", policy, "--json"])).expect("JSON");
            let found = &answer["devices"][0];
            println!("{driver}: {policy} by {}; {}", found["by"], found["because"]);
            assert!(found["by"].as_str().is_some_and(|by| by.contains("XDP") || by.contains("RPS")), "{answer}");
            steer(&host, &[device, "--off"]);
            assert_eq!(changed(&before, &snapshot(device)), BTreeMap::new(), "{driver}: not as before");
            let shown = said("ip", &["-d", "link", "show", "dev", device]);
            assert!(!shown.contains("xdp"), "{shown}");
        }
    }
}

/// A killed monitor leaves offloads switched off; the next monitor must switch them on again.
#[test]
#[ignore = "needs emulated cards: make test-manycore"]
fn the_next_monitor_puts_offloads_back() {
    let mut host = Host::new();
    let (device, _) = up().into_iter().find(|(_, driver)| driver == "vmxnet3").expect("a card");
    let before = snapshot(&device);
    let lro = |at: &str| {
        let features = said("ethtool", &["-k", &device]);
        assert!(features.contains(&format!("large-receive-offload: {at}")), "{features}");
    };
    lro("on");
    steer(&host, &[&device]);
    lro("off");
    host.kill_monitor();
    lro("off");
    host.start_monitor();
    lro("on");
    assert_eq!(changed(&before, &snapshot(&device)), BTreeMap::new(), "not as before");
}
