//! The place of a process: its network namespace, and its container.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::MetadataExt;

/// Inode number of a process's namespace of this kind (`net`, `pid`, …). 0: this user may not
/// look.
pub fn namespace(pid: i32, kind: &str) -> u64 {
    std::fs::metadata(format!("/proc/{pid}/ns/{kind}")).map_or(0, |m| m.ino())
}

/// Inode number of the user namespace that owns the network namespace of process `pid`. 0: this
/// user may not look, or the owner is outside of this process's user namespace.
pub fn netns_owner(pid: i32) -> u64 {
    const NS_GET_USERNS: libc::Ioctl = 0xb701;
    let Ok(netns) = File::open(format!("/proc/{pid}/ns/net")) else { return 0 };
    // SAFETY: NS_GET_USERNS takes no argument.
    let fd = unsafe { libc::ioctl(netns.as_raw_fd(), NS_GET_USERNS) };
    if fd < 0 {
        return 0;
    }
    // SAFETY: the ioctl has just made the descriptor, so it has no other owner.
    let owner = unsafe { File::from_raw_fd(fd) };
    owner.metadata().map_or(0, |m| m.ino())
}

/// Addresses of this host's devices in the network namespace of a process.
pub fn local_addresses(pid: i32) -> HashSet<IpAddr> {
    let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/net/{name}")).unwrap_or_default();
    v4_of(&read("fib_trie")).map(IpAddr::V4).chain(v6_of(&read("if_inet6")).map(IpAddr::V6)).collect()
}

fn v4_of(fib_trie: &str) -> impl Iterator<Item = Ipv4Addr> + '_ {
    let lines = fib_trie.lines().zip(fib_trie.lines().skip(1));
    let local = lines.filter(|(_, kind)| kind.trim() == "/32 host LOCAL");
    local.filter_map(|(address, _)| address.trim().strip_prefix("|-- ")?.parse().ok())
}

fn v6_of(if_inet6: &str) -> impl Iterator<Item = Ipv6Addr> + '_ {
    if_inet6.lines().filter_map(|line| Some(u128::from_str_radix(line.split(' ').next()?, 16).ok()?.into()))
}

/// Names that `ip netns` gave to network namespaces, by inode number.
pub fn namespace_names() -> HashMap<u64, String> {
    let entries = std::fs::read_dir("/run/netns").into_iter().flatten().flatten();
    // `metadata` follows the path to the namespace, which is mounted over the file; the entry
    // itself has another inode.
    let one = |e: std::fs::DirEntry| {
        Some((std::fs::metadata(e.path()).ok()?.ino(), e.file_name().to_string_lossy().into_owned()))
    };
    entries.filter_map(one).collect()
}

/// The container of a process, if its control group names one.
pub fn container(pid: u32) -> Option<String> {
    container_of(&std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?)
}

/// Number of characters of a container's ID, as `docker ps` shows it.
const SHORT: usize = 12;

/// Finds the container in the name of the control group. Docker, containerd, CRI-O and podman put
/// the container's ID there; LXC and systemd-nspawn put its name there.
fn container_of(groups: &str) -> Option<String> {
    let path = groups.lines().filter_map(|line| line.splitn(3, ':').nth(2)).max_by_key(|path| path.len())?;
    // Search from the end of the path, because containers may be nested and the innermost one is
    // wanted.
    path.rsplit('/').find_map(|part| {
        let part = part.strip_suffix(".scope").unwrap_or(part);
        let number = part.rsplit(['-', ':']).next()?;
        if number.len() == 64 && number.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Some(number[..SHORT].to_owned());
        }
        let named = part.strip_prefix("lxc.payload.").or_else(|| part.strip_prefix("machine-"))?;
        Some(named.replace("\\x2d", "-"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_a_namespace() {
        let trie =
            "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 10.88.1.0\n        /24 link UNICAST\n     |-- 10.88.1.1\n        \
                    /32 host LOCAL\n     |-- 10.88.1.255\n        /32 link BROADCAST\n";
        assert_eq!(v4_of(trie).collect::<Vec<_>>(), [Ipv4Addr::new(10, 88, 1, 1)]);
        let lines =
            "fd090000000000000000000000000001 02 40 00 80 eth0\n00000000000000000000000000000001 01 80 10 80 lo\n";
        let expected: [Ipv6Addr; 2] = ["fd09::1".parse().unwrap(), Ipv6Addr::LOCALHOST];
        assert_eq!(v6_of(lines).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn containers_by_their_groups() {
        let id = "0123456789abcdef".repeat(4);
        for (group, container) in [
            (format!("0::/system.slice/docker-{id}.scope"), Some("0123456789ab")),
            (format!("0::/docker/{id}"), Some("0123456789ab")),
            (format!("0::/docker/{id}/inner.service"), Some("0123456789ab")),
            (format!("0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{id}.scope"), Some("0123456789ab")),
            (format!("0::/system.slice/x.service/kubepods:cri-containerd:{id}"), Some("0123456789ab")),
            (format!("0::/machine.slice/libpod-{id}.scope/container"), Some("0123456789ab")),
            (format!("12:cpu:/\n3:name=systemd:/docker/{id}\n0::/"), Some("0123456789ab")),
            ("0::/lxc.payload.web/system.slice".into(), Some("web")),
            ("0::/machine.slice/machine-my\\x2dbox.scope/payload".into(), Some("my-box")),
            ("0::/system.slice/nginx.service".into(), None),
            ("0::/".into(), None),
            (String::new(), None),
        ] {
            assert_eq!(container_of(&group).as_deref(), container, "{group}");
        }
    }
}
