//! Finds the cgroup of a process, without /proc if the kernel tells it by the pidfd (Linux 6.13).
//!
//! Reading /proc makes the kernel build a directory for the process, which is slow. By pidfd the
//! kernel tells the number of the cgroup. It never reuses that number, and a cgroup of version 2
//! never changes its path. So the path of a number can be cached. It is cached only if the
//! directory at that path has the number, because the process may have moved between the two
//! readings.

use crate::ancillary::Sender;
use crate::pidfd::{cgroup_number, read};
use rustix::fd::AsFd;
use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

/// When the cache has this many entries, all are dropped.
const KNOWN: usize = 1024;

#[derive(Default)]
pub struct Cgroups {
    /// Where the cgroup hierarchy is mounted. Looked up once.
    mount: Option<Option<PathBuf>>,
    paths: HashMap<u64, String>,
}

impl Cgroups {
    /// The cgroup of a sender; `None`: the process has ended, or its cgroup cannot be read.
    pub fn of(&mut self, sender: &Sender) -> Option<String> {
        let number = sender.pidfd.as_ref().and_then(|pidfd| cgroup_number(pidfd.as_fd()));
        if let Some(path) = number.and_then(|number| self.paths.get(&number)) {
            return Some(path.clone());
        }
        let path = sender.of_live(|proc| cgroup(&read(&proc.join("cgroup"))?))?;
        if let Some(number) = number.filter(|number| self.has_number(&path, *number)) {
            if self.paths.len() >= KNOWN {
                self.paths.clear();
            }
            self.paths.insert(number, path.clone());
        }
        Some(path)
    }

    fn has_number(&mut self, path: &str, number: u64) -> bool {
        let mount = self.mount.get_or_insert_with(|| fsocket_bpf::probe::cgroup2().ok());
        let place = mount.as_ref().filter(|_| path.starts_with('/') && !path.starts_with("/.."));
        place.is_some_and(|mount| mount.join(path.trim_start_matches('/')).metadata().is_ok_and(|m| m.ino() == number))
    }
}

/// The v2 path in the text of /proc/PID/cgroup.
pub fn cgroup(text: &str) -> Option<String> {
    text.lines().find_map(|l| l.strip_prefix("0::")).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{pidfd_open, Pid, PidfdFlags};

    fn sender(pid: u32) -> Sender {
        let pidfd = pidfd_open(Pid::from_raw(pid as i32).unwrap(), PidfdFlags::empty()).ok();
        Sender { pid, uid: 0, gid: 0, pidfd }
    }

    /// Makes cgroups if this process may.
    #[test]
    fn a_process_that_moves_is_seen_in_its_new_cgroup() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let (s, mut known) = (sender(child.id()), Cgroups::default());
        let read = || cgroup(&std::fs::read_to_string(format!("/proc/{}/cgroup", child.id())).unwrap());
        let mut seen = vec![(known.of(&s), read())];
        let mount = fsocket_bpf::probe::cgroup2();
        let made: Vec<_> = (0..2)
            .filter_map(|i| {
                let path = mount.as_ref().ok()?.join(format!("fastsocket-test-{}-{i}", child.id()));
                std::fs::create_dir(&path).ok().map(|()| path)
            })
            .collect();
        for path in made.iter().chain(&made) {
            if std::fs::write(path.join("cgroup.procs"), child.id().to_string()).is_ok() {
                seen.push((known.of(&s), read()));
            }
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let ended = known.of(&s);
        for path in &made {
            let _ = std::fs::remove_dir(path);
        }
        assert!(seen.iter().all(|(kept, now)| kept == now), "{seen:?}");
        assert_eq!(ended, None);
        if made.is_empty() {
            return eprintln!("SKIPPED: no cgroups can be made");
        }
        if s.pidfd.as_ref().and_then(|fd| cgroup_number(fd.as_fd())).is_none() && seen.len() < 5 {
            eprintln!("SKIPPED: the kernel tells no number");
        }
        // A path whose directory has another number is not cached.
        let mut wrong = Cgroups::default();
        assert!(!wrong.has_number("/", u64::MAX) && !wrong.has_number("/../..", 1));
    }
}
