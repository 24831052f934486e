//! Selects the packets of a program, by the ports of its sockets.

use procfs::process::{FDTarget, Process};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Shortest time between two reads of the program's socket tables. The filter may miss a
/// connection that the program opens and closes within this time. It does not miss an accepted
/// connection, because its local port is the listening port, which is known already.
const PAUSE: Duration = Duration::from_millis(20);

const ETHERNET: usize = 14;
const TCP: u8 = 6;

/// Decides for each captured packet whether it belongs to the program.
pub struct Filter {
    pids: BTreeSet<i32>,
    /// If not empty, only packets from or to one of these ports pass.
    ports: Vec<u16>,
    known: BTreeSet<u16>,
    looked: Option<Instant>,
}

impl Filter {
    pub fn new(pids: BTreeSet<i32>, ports: Vec<u16>) -> Filter {
        Filter { pids, ports, known: BTreeSet::new(), looked: None }
    }

    /// Whether `packet` is a TCP segment from or to a socket of the program.
    pub fn wants(&mut self, packet: &[u8]) -> bool {
        let Some(ends) = ports(packet) else { return false };
        if !self.ports.is_empty() && !ends.iter().any(|port| self.ports.contains(port)) {
            return false;
        }
        let is_known = |f: &Filter| ends.iter().any(|port| f.known.contains(port));
        if !is_known(self) && self.looked.is_none_or(|at| at.elapsed() >= PAUSE) {
            self.known.extend(self.pids.iter().flat_map(|pid| own_ports(*pid)));
            self.looked = Some(Instant::now());
        }
        is_known(self)
    }
}

/// Source and destination port of the TCP segment in an Ethernet frame. `None`: the frame holds no
/// TCP segment.
fn ports(frame: &[u8]) -> Option<[u16; 2]> {
    let ip = frame.get(ETHERNET..)?;
    let tcp = match (frame.get(12..14)?, ip.first()? >> 4) {
        ([0x08, 0x00], 4) if *ip.get(9)? == TCP => ip.get(usize::from(ip[0] & 15) * 4..)?,
        ([0x86, 0xdd], 6) if *ip.get(6)? == TCP => ip.get(40..)?,
        _ => return None,
    };
    let port = |at: usize| Some(u16::from_be_bytes([*tcp.get(at)?, *tcp.get(at + 1)?]));
    Some([port(0)?, port(2)?])
}

/// Ports of the TCP sockets that a process has.
fn own_ports(pid: i32) -> Vec<u16> {
    let Ok(process) = Process::new(pid) else { return Vec::new() };
    let inodes: BTreeSet<u64> = process
        .fd()
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|fd| match fd.target {
            FDTarget::Socket(inode) => Some(inode),
            _ => None,
        })
        .collect();
    let all = [process.tcp(), process.tcp6()].into_iter().flatten().flatten();
    all.filter(|e| inodes.contains(&e.inode)).map(|e| e.local_address.port()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn frame(kind: [u8; 2], ip: &[u8], ends: [u16; 2]) -> Vec<u8> {
        [&[0; 12][..], &kind, ip, &ends[0].to_be_bytes(), &ends[1].to_be_bytes()].concat()
    }

    #[test]
    fn segments_of_both_versions() {
        let mut v4 = [0u8; 24];
        (v4[0], v4[9]) = (0x46, TCP);
        assert_eq!(ports(&frame([8, 0], &v4, [1, 70])), Some([1, 70]));
        let mut v6 = [0u8; 40];
        (v6[0], v6[6]) = (0x60, TCP);
        assert_eq!(ports(&frame([0x86, 0xdd], &v6, [80, 2])), Some([80, 2]));
        v4[9] = 17;
        assert_eq!(ports(&frame([8, 0], &v4, [1, 2])), None);
        for cut in 0..frame([8, 0], &v4, [1, 2]).len() {
            assert_eq!(ports(&frame([8, 0], &v4, [1, 2])[..cut]), None);
        }
    }

    #[test]
    fn by_process_and_port() {
        let own = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut v4 = [0u8; 20];
        (v4[0], v4[9]) = (0x45, TCP);
        let to = |port| frame([8, 0], &v4, [1, port]);
        let me = BTreeSet::from([std::process::id() as i32]);
        let mut filter = Filter::new(me.clone(), Vec::new());
        assert!(filter.wants(&to(port)));
        assert!(!filter.wants(&to(own)), "that one is closed");
        assert!(!Filter::new(me, vec![own]).wants(&to(port)));
        assert!(!Filter::new(BTreeSet::new(), Vec::new()).wants(&to(port)));
    }
}
