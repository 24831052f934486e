//! CPUs that disappear and return: by hotplug, and by a cpuset control group.

use fsocket_testkit::netns::Cleanup;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const ONLINE: &str = "/sys/devices/system/cpu/cpu1/online";

/// CPU 1, which hotplug can take away from the whole machine. Dropping this value brings the CPU
/// back.
pub struct Hotplug {
    _cleanup: Cleanup,
}

impl Hotplug {
    /// `None`: this machine does not allow hotplug. The caller reports that.
    pub fn new() -> Option<Hotplug> {
        // SAFETY: `geteuid` takes no arguments.
        if unsafe { libc::geteuid() } != 0 || std::fs::read_to_string(ONLINE).ok()?.trim() != "1" {
            return None;
        }
        let mut cleanup = Cleanup::new().expect("guard");
        cleanup.push(&format!("echo 1 > {ONLINE}")).expect("push");
        Some(Hotplug { _cleanup: cleanup })
    }

    /// Switches the CPU on or off. Returns the time that the kernel took: usually about 40 ms, but
    /// seconds on a busy machine.
    pub fn set(&self, online: bool) -> Duration {
        let began = Instant::now();
        std::fs::write(ONLINE, if online { "1" } else { "0" }).expect("hotplug");
        began.elapsed()
    }

    /// Takes the CPU away and brings it back, several times. Returns the longest time that the
    /// kernel took for a change.
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

/// Skips the test, with a message, if CPU 1 cannot be taken away.
#[macro_export]
macro_rules! need_hotplug {
    () => {
        match $crate::cpus::Hotplug::new() {
            Some(hotplug) => hotplug,
            None => return eprintln!("SKIPPED: CPU 1 cannot be taken offline here (root, and a kernel with hotplug)"),
        }
    };
}

/// A control group with CPUs of its own. Dropping this value removes the group and kills the
/// processes in it.
pub struct Cpuset {
    path: PathBuf,
    _cleanup: Cleanup,
}

impl Cpuset {
    /// Makes a group with CPUs 0 and 1. `None`: there are no control groups with CPUs here.
    pub fn new() -> Option<Cpuset> {
        let root = hierarchy()?;
        let path = root.join(format!("fastsocket-test-{}", std::process::id()));
        let mut cleanup = Cleanup::new().ok()?;
        let shown = path.display();
        // A group can be removed only when it is empty, and a killed process needs a moment to
        // end.
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

    /// The file to which a process writes its number in order to join the group.
    pub fn procs(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }
}

/// Directory of the cpuset hierarchy: of version 1, or of version 2 with the cpuset controller.
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
