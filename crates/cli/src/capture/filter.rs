//! Which packets are a program's: by the ports of its sockets.

use procfs::process::{FDTarget, Process};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// How often sockets are looked for at most. A connection that the program opens, and that is over sooner, may be
/// missed; one that it accepts is known by the port where it listens.
const PAUSE: Duration = Duration::from_millis(20);

const ETHERNET: usize = 14;
const TCP: u8 = 6;

/// See the module's description.
pub struct Filter {
    pids: BTreeSet<i32>,
    /// Only with one of these, unless there are none.
    ports: Vec<u16>,
    known: BTreeSet<u16>,
    looked: Option<Instant>,
}

impl Filter {
    pub fn new(pids: BTreeSet<i32>, ports: Vec<u16>) -> Filter {
        Filter { pids, ports, known: BTreeSet::new(), looked: None }
    }

    /// Is it a segment of theirs?
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

/// Source and destination of a TCP segment in an Ethernet frame.
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

/// Of the TCP sockets that a process has.
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
