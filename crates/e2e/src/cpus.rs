//! CPUs that go and come back: hotplug, and a cpuset control group.

use fsocket_testkit::netns::Cleanup;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const ONLINE: &str = "/sys/devices/system/cpu/cpu1/online";

/// CPU 1, which can be taken from the whole machine. It is back when this ends, however it ends.
pub struct Hotplug {
    _cleanup: Cleanup,
}

impl Hotplug {
    /// None: it cannot be done here; the test says so.
    pub fn new() -> Option<Hotplug> {
        // SAFETY: a plain system call.
        if unsafe { libc::geteuid() } != 0 || std::fs::read_to_string(ONLINE).ok()?.trim() != "1" {
            return None;
        }
        let mut cleanup = Cleanup::new().expect("guard");
        cleanup.push(&format!("echo 1 > {ONLINE}")).expect("push");
        Some(Hotplug { _cleanup: cleanup })
    }

    /// How long the kernel took for it: usually some 40 ms; on a busy machine, stock or not, seconds.
    pub fn set(&self, online: bool) -> Duration {
        let began = Instant::now();
        std::fs::write(ONLINE, if online { "1" } else { "0" }).expect("hotplug");
        began.elapsed()
    }

    /// Away for a while, and back for a while. The longest time that the kernel took.
    pub fn away_and_back(&self, times: usize) -> Duration {
        let turn = |_| {
            let mut longest = Duration::ZERO;
            for online in [false, true] {
                longest = longest.max(self.set(online));
                std::thread::sleep(Duration::from_millis(600));
            }
            longest
        };
        (0..times).map(turn).max().unwrap_or_default()
    }
}

/// Leaves the test, loudly, where CPU 1 cannot be taken away.
#[macro_export]
macro_rules! need_hotplug {
    () => {
        match $crate::cpus::Hotplug::new() {
            Some(hotplug) => hotplug,
            None => return eprintln!("SKIPPED: CPU 1 cannot be taken offline here (root, and a kernel with hotplug)"),
        }
    };
}

/// A control group with CPUs of its own. It goes when this ends; who is in it then is killed.
pub struct Cpuset {
    path: PathBuf,
    _cleanup: Cleanup,
}

impl Cpuset {
    /// With CPUs 0 and 1. None: there are no control groups with CPUs here.
    pub fn new() -> Option<Cpuset> {
        let root = hierarchy()?;
        let path = root.join(format!("fastsocket-test-{}", std::process::id()));
        let mut cleanup = Cleanup::new().ok()?;
        let shown = path.display();
        // A group can be removed only when nobody is in it, and a killed process takes a moment.
        cleanup
            .push(&format!(
                "for i in 1 2 3 4 5 6 7 8 9; do p=$(cat {shown}/cgroup.procs) && [ \"$p\" ] && kill -9 $p; \
                 rmdir {shown} && break; sleep 0.2; done"
            ))
            .expect("push");
        std::fs::create_dir(&path).ok()?;
        let set = Cpuset { path, _cleanup: cleanup };
        std::fs::write(set.path.join("cpuset.mems"), "0").ok()?;
        std::fs::write(set.path.join("cpuset.cpus"), "0-1").ok()?;
        Some(set)
    }

    pub fn cpus(&self, list: &str) {
        std::fs::write(self.path.join("cpuset.cpus"), list).expect("cpuset.cpus");
    }

    /// Where a process writes its number to be in it.
    pub fn procs(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }
}

/// Where cpusets are: of version 1, or of version 2 with that controller.
fn hierarchy() -> Option<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/mounts").ok()?;
    mounts.lines().find_map(|line| {
        let mut words = line.split(' ').skip(1);
        let (place, kind, options) = (Path::new(words.next()?), words.next()?, words.next()?);
        let first = kind == "cgroup" && options.split(',').any(|o| o == "cpuset");
        let enabled = || std::fs::read_to_string(place.join("cgroup.subtree_control")).unwrap_or_default();
        let second = kind == "cgroup2" && enabled().split_whitespace().any(|c| c == "cpuset");
        (first || second).then(|| place.to_owned())
    })
}
