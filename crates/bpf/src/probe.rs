//! Checks the abilities of this kernel and this process, before they are needed.

use libbpf_rs::{libbpf_sys, ErrorKind, MapHandle, MapType};
use std::fs;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

/// Why something cannot be done. The text is for the operator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Missing {
    /// Neither root nor CAP_BPF (with CAP_NET_ADMIN and CAP_PERFMON).
    #[error("not permitted to load BPF programs: run as root, or grant CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON")]
    Permission,
    /// The kernel has no information about its own types.
    #[error("this kernel has no BTF (/sys/kernel/btf/vmlinux): it was built without CONFIG_DEBUG_INFO_BTF")]
    Btf,
    /// The kernel lacks a tracepoint to which programs attach by type.
    #[error("this kernel has no tracepoint {0}")]
    Tracepoint(String),
    /// No cgroup v2 hierarchy is mounted.
    #[error("no cgroup v2 hierarchy is mounted (looked in /proc/self/mountinfo)")]
    Cgroup2,
    /// The kernel lacks the bpf system call.
    #[error("this kernel has no bpf system call")]
    Syscall,
    /// bpffs is not mounted, and cannot be mounted.
    #[error("no bpf file system at {0}, and mounting one failed: {1}")]
    Bpffs(String, String),
}

/// May this process load BPF programs?
///
/// # Errors
/// [`Missing::Permission`], [`Missing::Syscall`].
pub fn permitted() -> Result<(), Missing> {
    // Tries to make a kind of map that always needs CAP_BPF, whatever unprivileged_bpf_disabled
    // says. The kernel makes the same check for our programs, but this way none is loaded.
    let opts = libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_sys::bpf_map_create_opts>() as u64,
        map_flags: libbpf_sys::BPF_F_NO_PREALLOC,
        ..Default::default()
    };
    match MapHandle::create(MapType::LpmTrie, Some("fsocket_probe"), 8, 8, 1, &opts) {
        Err(e) if e.kind() == ErrorKind::PermissionDenied => Err(Missing::Permission),
        Err(e) if e.kind() == ErrorKind::Unsupported => Err(Missing::Syscall),
        // The next load will report any other error in full.
        _ => Ok(()),
    }
}

/// Does the kernel have its own type information?
///
/// # Errors
/// [`Missing::Btf`].
pub fn btf() -> Result<(), Missing> {
    if Path::new("/sys/kernel/btf/vmlinux").exists() {
        Ok(())
    } else {
        Err(Missing::Btf)
    }
}

/// Has the kernel the tracepoint `name`, for `tp_btf`?
///
/// # Errors
/// [`Missing::Btf`], [`Missing::Tracepoint`].
pub fn tracepoint(name: &str) -> Result<(), Missing> {
    btf()?;
    let vmlinux = libbpf_rs::btf::Btf::from_vmlinux().map_err(|_| Missing::Btf)?;
    match vmlinux.type_by_name::<libbpf_rs::btf::types::Typedef<'_>>(&format!("btf_trace_{name}")) {
        Some(_) => Ok(()),
        None => Err(Missing::Tracepoint(name.to_owned())),
    }
}

/// Can a socket have a range of ports of its own (IP_LOCAL_PORT_RANGE, Linux 6.3)?
pub fn port_range() -> bool {
    const IP_LOCAL_PORT_RANGE: libc::c_int = 51;
    use rustix::net::{socket, AddressFamily, SocketType};
    // Without IPv4 there is no such socket, and nothing to steer, either.
    let Ok(socket) = socket(AddressFamily::INET, SocketType::STREAM, None) else { return false };
    let (mut value, mut len) = (0u32, size_of::<u32>() as libc::socklen_t);
    // SAFETY: the kernel writes to `value` (at most `len` bytes, its size) and to `len`; both
    // live during the call.
    let asked = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_IP,
            IP_LOCAL_PORT_RANGE,
            (&raw mut value).cast(),
            &raw mut len,
        )
    };
    asked == 0
}

/// Where the root of the cgroup v2 hierarchy is mounted. (On systems that use both versions, this
/// is /sys/fs/cgroup/unified.)
///
/// # Errors
/// [`Missing::Cgroup2`].
pub fn cgroup2() -> Result<PathBuf, Missing> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    cgroup2_in(&mounts).ok_or(Missing::Cgroup2)
}

/// A line of `mountinfo` has: fields, " - ", file system type, source, options; see proc(5).
fn cgroup2_in(mounts: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let (fields, rest) = line.split_once(" - ")?;
        let root_and_place: Vec<&str> = fields.split(' ').skip(3).take(2).collect();
        match (rest.split(' ').next()?, root_and_place.as_slice()) {
            ("cgroup2", ["/", place]) => Some(PathBuf::from(place)),
            _ => None,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_cgroup2_wherever_it_is() {
        let hybrid = "25 1 0:22 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
                      36 25 0:33 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n\
                      37 25 0:34 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 none rw\n";
        assert_eq!(cgroup2_in(hybrid).unwrap(), Path::new("/sys/fs/cgroup/unified"));
        let part = "37 25 0:34 /system.slice /mnt rw - cgroup2 none rw\n";
        assert_eq!(cgroup2_in(part), None, "not the root of the hierarchy");
    }

    #[test]
    fn names_what_is_missing() {
        if btf().is_ok() {
            assert_eq!(
                tracepoint("no_such_thing").unwrap_err().to_string(),
                "this kernel has no tracepoint no_such_thing"
            );
            assert_eq!(tracepoint("tcp_probe"), Ok(()));
        } else {
            println!("SKIPPED: names_what_is_missing: this kernel has no BTF");
        }
    }
}
