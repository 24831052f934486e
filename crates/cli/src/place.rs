//! Where a process is: its network namespace, and its container.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;

/// Number of a process's namespace of a kind; 0: we may not look.
pub fn namespace(pid: i32, kind: &str) -> u64 {
    std::fs::metadata(format!("/proc/{pid}/ns/{kind}")).map_or(0, |m| m.ino())
}

/// Names that `ip netns` has given.
pub fn namespace_names() -> HashMap<u64, String> {
    let entries = std::fs::read_dir("/run/netns").into_iter().flatten().flatten();
    // (`metadata` of the path: the namespace is mounted over the file.)
    let one = |e: std::fs::DirEntry| {
        Some((std::fs::metadata(e.path()).ok()?.ino(), e.file_name().to_string_lossy().into_owned()))
    };
    entries.filter_map(one).collect()
}

/// The container of a process, if its control group tells one.
pub fn container(pid: u32) -> Option<String> {
    container_of(&std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?)
}

/// Characters of a container's number, as `docker ps` shows them.
const SHORT: usize = 12;

/// Docker, containerd, CRI-O and podman name the group after the container's number; LXC and
/// systemd-nspawn after the container.
fn container_of(groups: &str) -> Option<String> {
    let path = groups.lines().filter_map(|line| line.splitn(3, ':').nth(2)).max_by_key(|path| path.len())?;
    // The innermost: containers can be within others.
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
