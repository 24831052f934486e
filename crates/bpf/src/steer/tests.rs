//! Tests the verdict on single packets. The packets are made by hand, and the kernel runs the
//! program on them (BPF_PROG_TEST_RUN), so nothing is attached to a device.

use super::*;
use libbpf_rs::ProgramInput;

const PASS: u32 = 2;
const REDIRECT: u32 = 4;
/// The CPU that runs the test has slice 0, and the other CPU has slice 1.
const SLICE_0: u16 = 32768;
const SLICE_1: u16 = 40960;

/// A network frame, built header by header.
struct Frame(Vec<u8>);

impl Frame {
    fn ethernet(vlans: usize, proto: u16) -> Frame {
        let mut bytes = vec![0; 12];
        for tag in 0..vlans {
            bytes.extend([if tag == 0 && vlans > 1 { 0x88a8u16 } else { 0x8100 }, 42].map(u16::to_be_bytes).concat());
        }
        bytes.extend(proto.to_be_bytes());
        Frame(bytes)
    }

    fn ipv4(mut self, options: usize, fragment: u16, proto: u8) -> Frame {
        let mut ip = vec![0u8; 20 + options];
        ip[0] = 0x40 | (5 + options / 4) as u8;
        ip[6..8].copy_from_slice(&fragment.to_be_bytes());
        ip[9] = proto;
        ip[12..16].copy_from_slice(&[10, 0, 0, 2]);
        ip[16..20].copy_from_slice(&[10, 0, 0, 1]);
        self.0.extend(ip);
        self
    }

    fn ipv6(mut self, next: u8) -> Frame {
        let mut ip = vec![0u8; 40];
        (ip[0], ip[6]) = (0x60, next);
        self.0.extend(ip);
        self
    }

    /// Adds an extension header of 8 (1 + `length`) bytes.
    fn extension(mut self, next: u8, length: u8) -> Frame {
        self.0.extend([next, length]);
        self.0.extend(vec![0; 6 + 8 * usize::from(length)]);
        self
    }

    fn tcp(mut self, from: u16, to: u16) -> Frame {
        self.0.extend([from, to].map(u16::to_be_bytes).concat());
        self.0.extend([0; 16]);
        self
    }
}

fn v4(from: u16, to: u16) -> Frame {
    Frame::ethernet(0, 0x0800).ipv4(0, 0, 6).tcp(from, to)
}

/// Loads the programs and runs this thread on CPU 0. CPUs 0 and 1 have a slice each.
fn programs(policy: Policy, precise: bool) -> Option<Programs> {
    if let Err(reason) = probe::permitted().and_then(|()| probe::btf()) {
        println!("SKIPPED: steer::tests: {reason}");
        return None;
    }
    if libbpf_rs::num_possible_cpus().unwrap() < 2 {
        println!("SKIPPED: steer::tests: one CPU");
        return None;
    }
    // SAFETY: cpu_set_t is plain data, and CPU 0 is a valid index.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(0, &mut set);
        set
    };
    // SAFETY: `set` is a set of the given size; the call changes this thread only.
    assert_eq!(unsafe { libc::sched_setaffinity(0, size_of_val(&set), &set) }, 0);
    let request =
        Request { device: String::new(), policy, precise, cpus: vec![0, 1], slices: true, mode: None, netns: 0 };
    let programs = Programs::load(&request, false).unwrap_or_else(|e| panic!("{e}"));
    programs.set_slices(&Slices { first: SLICE_0, ports: 8192, cpus: vec![0, 1] }).unwrap();
    Some(programs)
}

fn verdict(programs: &Programs, frame: &Frame) -> u32 {
    let input = ProgramInput { data_in: Some(&frame.0), ..Default::default() };
    programs.steer.progs.steer.test_run(input).unwrap().return_value
}

/// The verdict on a frame, and the name of the counter that has grown.
fn judged(programs: &Programs, frame: &Frame) -> (u32, &'static str) {
    let before = programs.counts().unwrap();
    let verdict = verdict(programs, frame);
    let after = programs.counts().unwrap();
    let mut moved = after.iter().zip(&before).filter(|(a, b)| a.total() != b.total());
    let (name, by) = moved.next().map(|(a, b)| (a.name, a.total() - b.total())).expect("each packet counts");
    assert_eq!((by, moved.next()), (1, None), "each packet counts once");
    (verdict, name)
}

#[test]
fn classification_in_the_papers_order() {
    let Some(p) = programs(Policy::Rfd, false) else { return };
    // 1. From a well-known port: active, whatever the other port is.
    assert_eq!(judged(&p, &v4(80, SLICE_1)), (REDIRECT, "to_other"));
    assert_eq!(judged(&p, &v4(80, SLICE_0)), (PASS, "to_self"));
    assert_eq!(judged(&p, &v4(80, 80)), (PASS, "passed_active"));
    // 2. To a well-known port: passive.
    assert_eq!(judged(&p, &v4(SLICE_1, 80)), (PASS, "passed_passive"));
    // 3. To a listened port: passive; else active.
    assert_eq!(judged(&p, &v4(5000, SLICE_1 + 5)), (REDIRECT, "to_other"));
    p.set_listened(SLICE_1 + 5, true).unwrap();
    assert_eq!(judged(&p, &v4(5000, SLICE_1 + 5)), (PASS, "passed_passive"));
    assert_eq!(judged(&p, &v4(80, SLICE_1 + 5)), (REDIRECT, "to_other"), "the first rule goes first");
    p.set_listened(SLICE_1 + 5, false).unwrap();
    assert_eq!(judged(&p, &v4(5000, SLICE_1 + 5)), (REDIRECT, "to_other"));
    // The ends of the slices.
    assert_eq!(judged(&p, &v4(80, SLICE_0 - 1)), (PASS, "passed_active"));
    assert_eq!(judged(&p, &v4(80, SLICE_1 - 1)), (PASS, "to_self"));
    assert_eq!(judged(&p, &v4(80, SLICE_1 + 8191)), (REDIRECT, "to_other"));
    assert_eq!(judged(&p, &v4(80, SLICE_1 + 8192)), (PASS, "passed_active"));
}

#[test]
fn finds_tcp_behind_whatever_is_before_it() {
    let Some(p) = programs(Policy::Rfd, false) else { return };
    let steered = (REDIRECT, "to_other");
    for vlans in 0..=2 {
        assert_eq!(judged(&p, &Frame::ethernet(vlans, 0x0800).ipv4(0, 0, 6).tcp(80, SLICE_1)), steered);
        assert_eq!(judged(&p, &Frame::ethernet(vlans, 0x86dd).ipv6(6).tcp(80, SLICE_1)), steered);
    }
    assert_eq!(judged(&p, &Frame::ethernet(0, 0x0800).ipv4(40, 0, 6).tcp(80, SLICE_1)), steered, "IPv4 options");
    // The flag "don't fragment" does not make a packet a fragment.
    assert_eq!(judged(&p, &Frame::ethernet(0, 0x0800).ipv4(0, 0x4000, 6).tcp(80, SLICE_1)), steered);
    let extended = Frame::ethernet(0, 0x86dd).ipv6(0).extension(43, 0).extension(60, 2).extension(6, 1);
    assert_eq!(judged(&p, &extended.tcp(80, SLICE_1)), steered, "hop-by-hop, routing, destination options");
}

#[test]
fn leaves_alone_what_it_does_not_understand() {
    let Some(p) = programs(Policy::Rfd, false) else { return };
    let fragment = (PASS, "fragment");
    assert_eq!(judged(&p, &Frame::ethernet(0, 0x0800).ipv4(0, 0x2000, 6).tcp(80, SLICE_1)), fragment, "first");
    assert_eq!(judged(&p, &Frame::ethernet(0, 0x0800).ipv4(0, 3, 6).tcp(80, SLICE_1)), fragment, "later");
    assert_eq!(judged(&p, &Frame::ethernet(0, 0x86dd).ipv6(44).extension(6, 0).tcp(80, SLICE_1)), fragment);
    let other = (PASS, "not_tcp");
    assert_eq!(judged(&p, &Frame::ethernet(0, 0x0800).ipv4(0, 0, 17).tcp(80, SLICE_1)), other, "UDP");
    assert_eq!(judged(&p, &Frame::ethernet(0, 0x0806).tcp(80, SLICE_1)), other, "ARP");
    assert_eq!(judged(&p, &Frame::ethernet(3, 0x0800).ipv4(0, 0, 6).tcp(80, SLICE_1)), other, "three tags");
    let mut endless = Frame::ethernet(0, 0x86dd).ipv6(0);
    for _ in 0..8 {
        endless = endless.extension(0, 0);
    }
    assert_eq!(judged(&p, &endless.tcp(80, SLICE_1)), other, "endless extension headers");
    let mut lying = Frame::ethernet(0, 0x0800).ipv4(0, 0, 6).tcp(80, SLICE_1);
    lying.0[14] = 0x41;
    assert_eq!(judged(&p, &lying), (PASS, "short"), "an IPv4 header of 4 bytes");
    lying.0[14] = 0x4f;
    assert_eq!(judged(&p, &lying), (PASS, "short"), "an IPv4 header beyond the end");
    for whole in [v4(80, SLICE_1), Frame::ethernet(1, 0x86dd).ipv6(0).extension(6, 0).tcp(80, SLICE_1)] {
        for length in 14..whole.0.len() {
            assert_eq!(judged(&p, &Frame(whole.0[..length].to_vec())), (PASS, "short"), "cut at {length}");
        }
    }
}

#[test]
fn flow_groups_are_the_clients_low_twelve_bits() {
    let Some(p) = programs(Policy::FlowGroups, false) else { return };
    assert_eq!(judged(&p, &v4(50002, 80)), (PASS, "passed_passive"), "no group has a CPU yet");
    p.set_groups(&[0, 1]).unwrap();
    assert_eq!(judged(&p, &v4(50002, 80)), (REDIRECT, "to_other"));
    assert_eq!(judged(&p, &v4(50001, 80)), (PASS, "to_self"));
    // Moving a group is one map write.
    p.set_group(50002 & 4095, Some(0)).unwrap();
    assert_eq!(judged(&p, &v4(50002, 80)), (PASS, "to_self"));
    assert_eq!(judged(&p, &v4(50002 - 4096, 80)), (PASS, "to_self"), "the same group");
    assert_eq!(judged(&p, &v4(50003, 80)), (REDIRECT, "to_other"), "no other group moved");
    assert!(p.set_group(4096, Some(0)).is_err());
    // Active connections are still steered by slice.
    assert_eq!(judged(&p, &v4(80, SLICE_1)), (REDIRECT, "to_other"));
}

#[test]
fn a_cpu_that_does_not_steer_keeps_the_packet_here() {
    let Some(p) = programs(Policy::FlowGroups, false) else { return };
    p.set_group(1, Some(100_000)).unwrap();
    assert_eq!(judged(&p, &v4(1 + 4096, 80)), (PASS, "no_cpu"));
}

#[test]
fn precise_mode_asks_the_socket_table() {
    let Some(p) = programs(Policy::Rfd, true) else { return };
    // Listens on every address, in this thread's namespace, where BPF_PROG_TEST_RUN runs.
    let listener = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    p.set_slices(&Slices { first: port & !8191, ports: 8192, cpus: vec![1] }).unwrap();
    assert_eq!(judged(&p, &v4(5000, port)), (PASS, "passed_passive"));
    assert_eq!(judged(&p, &v4(80, port)), (PASS, "passed_passive"), "the first rule is skipped");
    drop(listener);
    assert_eq!(judged(&p, &v4(5000, port)), (REDIRECT, "to_other"));
}

/// Loads an operator's policy. If that fails, returns the text of the error.
fn own_policy(object: &str) -> std::result::Result<Option<Programs>, String> {
    if programs(Policy::Rfd, false).is_none() {
        return Ok(None);
    }
    let policy = Policy::User(object.into());
    let cpus = vec![0, 1];
    let request = Request { device: String::new(), policy, precise: false, cpus, slices: true, mode: None, netns: 0 };
    Programs::load(&request, false).map(Some).map_err(|e| e.to_string())
}

#[test]
fn a_policy_of_ones_own_decides() {
    let Some(p) = own_policy(concat!(env!("OUT_DIR"), "/by_address.bpf.o")).unwrap() else { return };
    // The packet's source is 10.0.0.2, which is even.
    assert_eq!(judged(&p, &v4(80, SLICE_1)), (PASS, "to_self"));
    let mut odd = v4(80, SLICE_0);
    odd.0[14 + 15] = 3;
    assert_eq!(judged(&p, &odd), (REDIRECT, "to_other"));
}

#[test]
fn a_policy_that_others_can_change_is_refused() {
    use std::os::unix::fs::{chown, PermissionsExt};
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("mine.bpf.o");
    let write = |mode| {
        std::fs::write(&file, "object").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    for mode in [0o666, 0o620] {
        write(mode);
        let refused = trusted(&file).unwrap_err().to_string();
        assert!(refused.contains("mine.bpf.o") && refused.contains("only root can write"), "{refused}");
    }
    write(0o644);
    assert_eq!(trusted(&file).unwrap(), b"object");
    if chown(&file, Some(70_001), None).is_ok() {
        assert!(trusted(&file).unwrap_err().to_string().contains("user 70001"));
    } else {
        eprintln!("SKIPPED: a policy of another user: not root");
    }
}

#[test]
fn a_policy_that_cannot_be_is_refused_with_the_reason() {
    let refused = |object: &str| match own_policy(object) {
        Ok(None) => None,
        Ok(Some(_)) => panic!("{object} was taken"),
        Err(message) => Some(message),
    };
    let Some(missing) = refused("/nonexistent/policy.bpf.o") else { return };
    assert!(missing.contains("/nonexistent/policy.bpf.o") && missing.contains("No such file"), "{missing}");
    let verifier = refused(concat!(env!("OUT_DIR"), "/bad.bpf.o")).unwrap();
    assert!(verifier.contains("the kernel refused to load it"), "{verifier}");
    assert!(verifier.contains("invalid access to map value"), "the verifier's own words: {verifier}");
    let no_object = refused("/etc/hostname").unwrap();
    assert!(no_object.contains("/etc/hostname"), "{no_object}");
}
