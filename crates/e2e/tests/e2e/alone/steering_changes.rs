//! Steering changes while it carries connections: a CPU disappears and returns, or a device
//! disappears.

use fsocket_e2e::{need_hotplug, need_steering};
use fsocket_testkit::host::Stock;
use fsocket_testkit::load::{Load, Plan};
use fsocket_testkit::netns::{Chain, Receive};
use fsocket_testkit::servers::{self, Way};
use fsocket_testkit::{artifacts, need, net, Host, Proc};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A proxy in the middle host, nginx in the backend host, and load from the client host.
struct Stage {
    middle: Host,
    /// Kept because nginx serves files from its directory.
    _backend: Host,
    _proxy: Proc,
    _nginx: Proc,
    plan: Plan,
    chain: Chain,
}

impl Stage {
    /// Both devices of the middle host are steered.
    fn new(chain: Chain) -> Stage {
        let middle = Host::on(&chain.middle);
        let backend = Host::without_monitor(&chain.backend);
        backend.file("www/64", [b'x'; 64]);
        for device in &chain.middle.interfaces {
            servers::steer(&middle, &device.device);
        }
        let front: SocketAddr = (chain.middle_front(), 80).into();
        let back: SocketAddr = (chain.backend_address(), 80).into();
        let nginx = servers::nginx(&backend, Way::Stock, &[back], 2);
        let proxy = ["--proxy", &back.to_string(), "--quiet"];
        let demo = servers::demo(&middle, Way::Steered, &[front], 2, &proxy);
        servers::wait_zones(&middle, 2);
        Stage {
            middle,
            _backend: backend,
            _proxy: demo,
            _nginx: nginx,
            plan: Plan::get(front, "/64", &[b'x'; 64], 3),
            chain,
        }
    }

    /// Makes requests while `happens` runs; it returns for how long the kernel let nothing run on
    /// a CPU. No request may fail, and each connection must take its source port from a slice.
    #[track_caller]
    fn under_load(&self, what: &str, happens: impl FnOnce() -> Duration) {
        let before = self.middle.snapshot();
        let stop = AtomicBool::new(false);
        let (outcomes, stood) = std::thread::scope(|s| {
            let load = s.spawn(|| {
                let mut all = Vec::new();
                // Pause between loads, because a fully loaded machine takes minutes to give a CPU
                // away.
                while !stop.load(Ordering::Relaxed) {
                    all.push(Load::start(&self.plan, Some(&self.chain.client), Some(4)).finish());
                    std::thread::sleep(Duration::from_millis(3));
                }
                all
            });
            std::thread::sleep(Duration::from_millis(400));
            let happened = std::panic::catch_unwind(std::panic::AssertUnwindSafe(happens));
            stop.store(true, Ordering::Relaxed);
            let outcomes = load.join().expect("the load ends");
            (outcomes, happened.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        });
        let answered: u64 = outcomes.iter().map(|o| o.answered).sum();
        let slowest = outcomes.iter().map(|o| o.slowest).max().unwrap_or_default();
        let failed: Vec<_> = outcomes.iter().flat_map(|o| &o.failed).collect();
        println!("{what}: {answered} answered, the slowest took {slowest:?}, failed: {failed:?}");
        assert!(answered > 100, "{what}: {answered} answered, {failed:?}");
        if stood < Duration::from_secs(2) {
            assert!(failed.is_empty(), "{what}: {failed:?}");
        } else {
            // docs/limits.md, "Zones and steering".
            eprintln!("{what}: NOT JUDGED: the kernel took {stood:?} to take a CPU away");
        }
        let delta = self.middle.snapshot().since(&before);
        let sliced = delta.get("connect_slice");
        assert!(sliced >= answered.into(), "{what}: {sliced} ports from slices\n{delta}");
    }

    /// The output of `fastsocket steer`.
    fn status(&self) -> String {
        let mut command = self.middle.command(Stock, artifacts::cli());
        command.arg("steer").env("FASTSOCKET_SOCKET", self.middle.socket());
        Proc::spawn(self.middle.logs(), "steer", command).finish(Duration::from_secs(60)).success().stdout
    }
}

fn pause(ms: u64) -> Duration {
    std::thread::sleep(Duration::from_millis(ms));
    Duration::ZERO
}

/// Packets that are steered to a missing CPU must still be handled. When the CPU is back, it
/// handles its packets again.
#[test]
fn a_cpu_goes_and_comes_back() {
    need_steering!();
    need!("nginx");
    let cpu = need_hotplug!();
    // Receive inline, not in real-time threads: these would leave a single remaining CPU no time.
    let stage = Stage::new(Chain::new(2, &Receive::Inline).expect("hosts"));
    stage.under_load("unplugged", || cpu.away_and_back(2));
    stage.under_load("afterwards", || pause(600));
}

/// One of three steered devices disappears under load. The load over the other two must go on, and
/// a later device of the same name can be steered.
#[test]
fn a_device_disappears() {
    need_steering!();
    need!("nginx");
    let mut chain = Chain::new(2, &Receive::Threads(vec![0, 1])).expect("hosts");
    let Chain { middle, backend, hosts, .. } = &mut chain;
    hosts.link(middle, backend, 2, &Receive::Inline).expect("a third link");
    let device = chain.middle.interfaces[2].clone();
    let stage = Stage::new(chain);
    assert!(stage.status().contains(&device.device), "{}", stage.status());
    stage.under_load("a device disappears", || {
        stage.chain.middle.inside("ip", &["link", "del", &device.device]).expect("ip link del");
        pause(500)
    });
    let gone = || !stage.status().contains(&device.device);
    net::wait_until(Duration::from_secs(60), gone).unwrap_or_else(|e| panic!("{e}: {}", stage.status()));
    let inside = |args: &[&str]| stage.chain.middle.inside("ip", args).expect("ip");
    inside(&["link", "add", &device.device, "numtxqueues", "2", "numrxqueues", "2", "type", "veth"]);
    inside(&["link", "set", &device.device, "up"]);
    stage.under_load("a device comes", || {
        servers::steer(&stage.middle, &device.device);
        pause(300)
    });
    assert!(stage.status().contains(&format!("{}: rfd", device.device)), "{}", stage.status());
}
