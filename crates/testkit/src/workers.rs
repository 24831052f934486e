//! Worker processes of a server, and killing them.

use crate::net;
use crate::netns::NetHost;
use std::collections::HashSet;
use std::process::Command;
use std::time::Duration;

/// A worker is stopped for this long before it is killed, so that connections wait in its queue.
/// The queue of a busy worker is seldom empty then, that of an idle one always.
const HOLD: Duration = Duration::from_millis(20);

/// Child processes, oldest first.
pub fn children(pid: u32) -> Vec<i32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let mut pids: Vec<i32> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    pids.sort_unstable();
    pids
}

/// Numbers of connections that all kills so far concerned.
#[derive(Debug, Default)]
pub struct Killed {
    /// Connections that the killed workers had accepted; these are lost in any case.
    pub accepted: u64,
    /// Connections that waited in any queue at the moment of the kill. None of them may be lost.
    pub queued: u64,
}

impl Killed {
    /// Stops the oldest child of `parent`, counts its connections to `port`, and kills it with
    /// SIGKILL before it can continue.
    #[track_caller]
    pub fn kill_oldest(&mut self, place: &NetHost, parent: u32, port: u16) {
        // A busy parent may not have reaped the last victim yet, so skip dead children.
        let living = || children(parent).into_iter().find(|pid| !matches!(state(*pid), None | Some('Z' | 'X')));
        let mut found = None;
        let _ = net::wait_until(Duration::from_secs(60), || {
            found = living();
            found.is_some()
        });
        let victim = found.expect("a living worker");
        signal(victim, libc::SIGSTOP);
        std::thread::sleep(HOLD);
        net::wait_until(Duration::from_secs(60), || state(victim) == Some('T')).expect("a stopped worker");
        let held = sockets_of(victim);
        let (accepted, queued) = connections(Some(place), port, &held);
        signal(victim, libc::SIGKILL);
        // A kill takes time on a busy machine. Wait, so that the next victim is another worker.
        let dead = || matches!(state(victim), None | Some('Z' | 'X'));
        net::wait_until(Duration::from_secs(60), dead).expect("a dead worker");
        self.accepted += accepted;
        self.queued += queued;
    }
}

/// A process's state, as `ps` shows it.
fn state(pid: i32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The process's name before it may contain any characters.
    stat[stat.rfind(") ")? + 2..].chars().next()
}

fn signal(pid: i32, signal: i32) {
    // SAFETY: `kill` takes no pointers. The number belonged to a child a moment ago, and the
    // kernel does not reuse numbers that fast.
    unsafe { libc::kill(pid, signal) };
}

/// Inodes of the sockets that a process holds.
fn sockets_of(pid: i32) -> HashSet<u64> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let links = entries.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    links.filter_map(|link| link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()).collect()
}

/// Counts open connections to `port`: those whose sockets are in `held`, and those that are not
/// accepted yet. Uses `ss`, because /proc/net/tcp would first list hundreds of thousands in
/// TIME-WAIT, while the victim is stopped.
fn connections(place: Option<&NetHost>, port: u16, held: &HashSet<u64>) -> (u64, u64) {
    let mut command = Command::new("ss");
    command.args(["-Htne", "state", "established", "state", "close-wait", "sport", "=", &format!(":{port}")]);
    command.env_remove("LD_PRELOAD");
    if let Some(place) = place {
        place.place(&mut command);
    }
    let output = command.output().expect("ss");
    assert!(output.status.success(), "ss: {}", String::from_utf8_lossy(&output.stderr));
    let mut counts = (0, 0);
    for line in String::from_utf8_lossy(&output.stdout).lines().filter(|line| !line.trim().is_empty()) {
        let inode = line.split_whitespace().find_map(|word| word.strip_prefix("ino:"));
        let inode: u64 = inode.map_or(0, |inode| inode.parse().expect("inode"));
        // A socket gets its inode when a process accepts it.
        counts.0 += u64::from(held.contains(&inode));
        counts.1 += u64::from(inode == 0);
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn accepted_and_waiting_connections_are_told_apart() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
        let address = listener.local_addr().expect("address");
        let clients: Vec<TcpStream> = (0..5).map(|_| TcpStream::connect(address).expect("connect")).collect();
        let accepted: Vec<TcpStream> = (0..2).map(|_| listener.accept().expect("accept").0).collect();
        let own = sockets_of(std::process::id() as i32);
        assert_eq!(connections(None, address.port(), &own), (2, 3));
        assert_eq!(connections(None, address.port(), &HashSet::new()), (0, 3));
        drop((clients, accepted));
    }
}
