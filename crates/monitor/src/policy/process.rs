//! The kernel's facts about a process that sends a request.

use super::cgroups::Cgroups;
use super::rules::Party;
use crate::ancillary::Sender;
use crate::broker::Broker;
use crate::pidfd::{is_alive, read};
use rustix::fd::AsFd;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;

/// Which optional facts about a process to read.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wanted {
    pub exe: bool,
    pub cgroup: bool,
}

impl Sender {
    /// Calls `read` with the process's directory in /proc. `None` if the process ended before
    /// `read` was done.
    pub(super) fn of_live<T>(&self, read: impl FnOnce(PathBuf) -> Option<T>) -> Option<T> {
        if self.pid == 0 {
            return None;
        }
        let value = read(PathBuf::from(format!("/proc/{}", self.pid)))?;
        let Some(pidfd) = &self.pidfd else { return Some(value) };
        is_alive(pidfd.as_fd()).then_some(value)
    }

    /// The facts about a process that rules ask for. The executable changes only by `exec`. But it
    /// is no proof: the user of the process may preload other code into it, or trace it. A process
    /// leaves its cgroup only with the right to write to both cgroups.
    pub fn party(&self, wanted: Wanted, broker: &Broker, cgroups: &mut Cgroups) -> Party {
        // (Only a privileged process may read the executable of another user's process.)
        let exe = || self.of_live(|_| broker.exe(self.pid, self.pidfd.as_ref().map(AsFd::as_fd)));
        Party {
            uid: self.uid,
            gid: self.gid,
            exe: wanted.exe.then(exe).flatten(),
            cgroup: if wanted.cgroup { cgroups.of(self) } else { None },
        }
    }

    /// A number for the rights that the kernel shows. The library computes its class by the same
    /// rule (`fsocket_runtime::rights`). 0: unreadable.
    pub fn rights(&self) -> u64 {
        self.of_live(|proc| Some(rights(&read(&proc.join("status"))?))).unwrap_or(0)
    }

    /// The restrictions of the process. If they are unreadable, the strictest are assumed.
    /// `labels`: the result of [`labels`].
    pub fn restraint(&self, labels: bool) -> Restraint {
        self.of_live(|proc| {
            let status = read(&proc.join("status"))?;
            let label = if labels { read(&proc.join("attr/current")).unwrap_or_default() } else { String::new() };
            Some(Restraint::read(&status, &label))
        })
        .unwrap_or(Restraint { no_new_privs: true, filters: u32::MAX, confined: true })
    }
}

/// Restrictions that a process has set on itself or inherited. It cannot remove them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Restraint {
    /// Without a privilege, only processes with this flag can have Landlock rules. The kernel does
    /// not show those rules, so the flag stands for them.
    pub no_new_privs: bool,
    /// Number of filters of system calls (seccomp).
    pub filters: u32,
    /// Whether AppArmor or SELinux confines the process.
    pub confined: bool,
}

impl Restraint {
    fn read(status: &str, label: &str) -> Restraint {
        let number = |name: &str| -> Option<u32> {
            status.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':')?.trim().parse().ok())
        };
        let label = label.trim_end_matches(['\0', '\n']);
        Restraint {
            no_new_privs: number("NoNewPrivs") != Some(0),
            // The number of filters exists since Linux 5.9. Before, there is only the mode, which
            // is 0 without filters.
            filters: number("Seccomp_filters").or(number("Seccomp")).unwrap_or(u32::MAX),
            // "unconfined" (AppArmor), "…:unconfined_t:…" (SELinux); Smack's usual label is "_".
            confined: !label.is_empty() && label != "_" && !label.contains("unconfined"),
        }
    }

    /// The restrictions of this process.
    pub fn own() -> Restraint {
        Sender { pid: std::process::id(), uid: 0, gid: 0, pidfd: None }.restraint(true)
    }

    /// Whether the kernel may refuse to this process something that it allows to the monitor.
    /// Filters are inherited and never removed. So a monitor in a container has the container's
    /// filters, and so has each process that it serves there.
    pub fn is_more_than(&self, own: &Restraint) -> bool {
        self.no_new_privs || self.filters > own.filters || self.confined && !own.confined
    }
}

/// Whether a security module gives labels to processes. The modules are fixed when the kernel
/// starts. Without a labelling module, reading the label of any process fails with EINVAL.
pub fn labels() -> bool {
    let label = std::fs::File::open("/proc/self/attr/current");
    let read = label.and_then(|file| Ok(rustix::io::read(file, &mut [0u8; 1])?));
    !read.is_err_and(|e| e.raw_os_error() == Some(libc::EINVAL))
}

fn rights(status: &str) -> u64 {
    const CAP_SETGID: u64 = 6;
    const CAP_SETUID: u64 = 7;
    let line = |name: &str| status.lines().find_map(|l| l.strip_prefix(name)).unwrap_or_default();
    let caps = u64::from_str_radix(line("CapPrm:").trim(), 16).unwrap_or(0);
    // Real, effective and saved number. (The number for file access is left out.)
    let three = |name| line(name).split_whitespace().take(3).collect::<Vec<_>>();
    let users = (caps >> CAP_SETUID & 1 == 0).then(|| three("Uid:"));
    let groups = (caps >> CAP_SETGID & 1 == 0).then(|| (three("Gid:"), line("Groups:")));
    let mut hash = DefaultHasher::new();
    (caps, users, groups).hash(&mut hash);
    hash.finish().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags};

    fn broker() -> Broker {
        Broker::here(rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap().as_fd(), None, None)
    }

    #[test]
    fn our_own_is_read() {
        let me = Sender { pid: std::process::id(), uid: 1, gid: 2, pidfd: None };
        let p = me.party(Wanted { exe: true, cgroup: true }, &broker(), &mut Cgroups::default());
        assert_eq!(p.exe, std::env::current_exe().ok());
        assert_eq!((p.uid, p.gid), (1, 2));
        let none = me.party(Wanted::default(), &broker(), &mut Cgroups::default());
        assert_eq!((none.exe, none.cgroup), (None, None));
        let gone = Sender { pid: 0, ..me };
        assert_eq!(gone.party(Wanted { exe: true, cgroup: true }, &broker(), &mut Cgroups::default()).exe, None);
        assert!(gone.restraint(true).is_more_than(&Restraint::own()));
    }

    #[test]
    fn who_ended_is_nobody() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        let s = Sender { pid: child.id(), uid: 0, gid: 0, pidfd: Some(pidfd) };
        assert!(s.party(Wanted { exe: true, cgroup: false }, &broker(), &mut Cgroups::default()).exe.is_some());
        child.kill().unwrap();
        rustix::event::poll(&mut [PollFd::new(s.pidfd.as_ref().unwrap(), PollFlags::IN)], None).unwrap();
        assert!(s.party(Wanted { exe: true, cgroup: true }, &broker(), &mut Cgroups::default()).cgroup.is_none());
        child.wait().unwrap();
    }

    #[test]
    fn rights_are_users_groups_and_capabilities() {
        let of = |uid: &str, gid: &str, groups: &str, caps: &str| {
            rights(&format!("Uid:\t{uid}\nGid:\t{gid}\nGroups:\t{groups} \nCapPrm:\t{caps}\nCapEff:\t0\n"))
        };
        let (ids, none) = ("7\t7\t7\t7", "0000000000000000");
        let one = of(ids, ids, "7 9", none);
        assert_eq!(one, of("7\t7\t7\t8", ids, "7 9", none));
        let others = [
            of("7\t8\t7\t7", ids, "7 9", none),
            of(ids, "7\t7\t8\t7", "7 9", none),
            of(ids, ids, "7", none),
            of(ids, ids, "7 9", "0000000000001000"),
        ];
        assert!(others.iter().all(|other| *other != one && *other != 0));
        // A process that may become any user and have any group can change these numbers, so they
        // do not count.
        let all = "000001ffffffffff";
        assert_eq!(of(ids, ids, "7", all), of("0\t7\t0\t0", "0\t0\t0\t0", "", all));
        let me = Sender { pid: std::process::id(), ..Sender::default() };
        assert_eq!(me.rights(), me.rights());
        assert_ne!(me.rights(), 0);
        assert_eq!(Sender::default().rights(), 0, "it has no number here");
    }

    #[test]
    fn restraints() {
        let status = |nnp, filters| format!("Name:\tx\nNoNewPrivs:\t{nnp}\nSeccomp:\t2\nSeccomp_filters:\t{filters}\n");
        let of = |nnp, filters, label| Restraint::read(&status(nnp, filters), label);
        let free = of(0, 0, "");
        let boxed = of(0, 1, "docker-default (enforce)\n");
        assert!(!free.is_more_than(&free) && !boxed.is_more_than(&boxed) && !free.is_more_than(&boxed));
        assert!(boxed.is_more_than(&free));
        assert!(of(1, 0, "").is_more_than(&of(1, 0, "")), "Landlock does not show");
        assert!(of(0, 2, "").is_more_than(&boxed));
        assert!(!of(0, 0, "unconfined\n").is_more_than(&free));
        assert!(!of(0, 0, "unconfined_u:unconfined_r:unconfined_t:s0\0").is_more_than(&free));
        assert!(Restraint::read("", "").is_more_than(&free));
        assert_eq!(crate::policy::cgroups::cgroup("1:cpu:/x\n0::/a/b\n").as_deref(), Some("/a/b"));
    }
}
