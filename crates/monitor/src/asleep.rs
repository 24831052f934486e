//! Finds programs that run with the library but have made no call that starts it. They have not
//! announced themselves to the private monitor, which must nevertheless stay for them.

use crate::endpoint::{self, File};
use rustix::fd::OwnedFd;
use rustix::process::{pidfd_open, Pid, PidfdFlags};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The monitor reads at most this many bytes of a process's environment.
const ENVIRONMENT: u64 = 1 << 20;

/// Finds a process that has the library and whose environment names `socket` as the monitor's
/// socket. In the process's root directory, the path of a monitor of this ABI must also lead to
/// `file`. (In another mount namespace or root directory the path may lead to another file, or to
/// none.) Processes of other users are not found: this process cannot read their environment.
pub fn any(socket: &Path, file: File) -> Option<OwnedFd> {
    let there = endpoint::named(socket);
    let wanted = [fsocket_proto::paths::ENV_SOCKET.as_bytes(), b"=", socket.as_os_str().as_bytes()].concat();
    let processes = std::fs::read_dir("/proc").ok()?.flatten();
    processes.filter_map(|p| p.file_name().to_str()?.parse().ok()).find_map(|pid: i32| {
        let pid = Pid::from_raw(pid).filter(|p| *p != rustix::process::getpid())?;
        let fd = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        (is_told(pid, &wanted) && has_library(pid) && sees(pid, &there, file)).then_some(fd)
    })
}

fn is_told(pid: Pid, wanted: &[u8]) -> bool {
    use std::io::Read;
    let mut all = Vec::new();
    let read = |file: std::fs::File| file.take(ENVIRONMENT).read_to_end(&mut all);
    let path = format!("/proc/{}/environ", pid.as_raw_nonzero());
    std::fs::File::open(path).and_then(read).is_ok() && all.split(|b| *b == 0).any(|entry| entry == wanted)
}

/// Whether `socket`, resolved in the root directory of the process, is that file.
fn sees(pid: Pid, socket: &Path, file: File) -> bool {
    let Ok(relative) = socket.strip_prefix("/") else { return true };
    File::at(&Path::new(&format!("/proc/{}/root", pid.as_raw_nonzero())).join(relative)) == Some(file)
}

fn has_library(pid: Pid) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", pid.as_raw_nonzero()));
    maps.is_ok_and(|text| text.contains("libfsocket"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_without_the_library_does_not_count() {
        let socket = Path::new("/nowhere/asleep");
        let mut told = std::process::Command::new("sleep");
        let mut told = told.arg("60").env(fsocket_proto::paths::ENV_SOCKET, socket).spawn().unwrap();
        let pid = Pid::from_child(&told);
        let wanted = [fsocket_proto::paths::ENV_SOCKET.as_bytes(), b"=/nowhere/asleep"].concat();
        // (The child has the new environment only after its `execve`.)
        while !is_told(pid, &wanted) {
            std::thread::yield_now();
        }
        assert!(!is_told(pid, &wanted[..wanted.len() - 1]));
        let file = File::at(Path::new("/")).unwrap();
        assert!(!has_library(pid) && any(socket, file).is_none());
        assert!(sees(pid, Path::new("/"), file) && !sees(pid, Path::new("/proc"), file));
        told.kill().unwrap();
        told.wait().unwrap();
    }
}
