//! Two agents on two soft-RoCE devices over a veth pair. `scripts/rdma.sh` runs this in an
//! emulated machine. The other agent is a second process of this program, which [`FAR`] in the
//! environment tells its role.

use fsocket_rdma::agree::{Key, Role};
use fsocket_rdma::{Access, Agent, Down, Error, Event, Mapping, Refused, Region, Transfer, Window};
use rustix::fs::{fcntl_add_seals, ftruncate, memfd_create, MemfdFlags, SealFlags};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::sync::Once;
use std::time::{Duration, Instant};

/// Environment variable of the other agent with its address.
const FAR: &str = "FASTSOCKET_RDMA_FAR";
const NEAR: &str = "10.9.0.1";
const OTHER: &str = "10.9.0.2";
/// A long limit, because the machine is emulated.
const PATIENCE: Duration = Duration::from_secs(60);

const SIZE: usize = 256 << 10;
/// The part of the other agent's memory that this agent may write.
const GIVEN: std::ops::Range<usize> = 64 << 10..192 << 10;
const UNTOUCHED: u8 = 0xaa;

const WINDOW: u64 = 1;
const CHECK: u64 = 2;
const CHECKED: u64 = 3;
const ECHO: u64 = 4;

fn run(command: &str) {
    let status = Command::new("sh").args(["-euc", command]).status().unwrap();
    assert!(status.success(), "{command}: {status}");
}

/// Makes the devices of the two hosts.
fn devices() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        run("ip link add v0 type veth peer name v1
             for i in all v0 v1; do
                 echo 1 >/proc/sys/net/ipv4/conf/$i/accept_local; echo 0 >/proc/sys/net/ipv4/conf/$i/rp_filter
             done
             ip addr add 10.9.0.1/24 dev v0; ip addr add 10.9.0.2/24 dev v1
             ip link set v0 up; ip link set v1 up
             rdma link add rxe0 type rxe netdev v0; rdma link add rxe1 type rxe netdev v1");
    });
}

fn key() -> Key {
    Key::new(&[5; 32]).unwrap()
}

fn memory() -> (OwnedFd, Rc<Mapping>) {
    let fd = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&fd, SIZE as u64).unwrap();
    assert!(matches!(Mapping::new(&fd, SIZE), Err(Error::Memory)), "it can still shrink");
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    let mapping = Mapping::new(&fd, SIZE).unwrap();
    (fd, mapping)
}

fn pattern(at: usize) -> u8 {
    (at * 7 + at / 251) as u8
}

/// The other agent: gives a window, reports what was written there, and echoes messages.
fn far(addr: IpAddr) {
    let mut agent = Agent::new(addr).unwrap();
    let listener = TcpListener::bind((addr, 0)).unwrap();
    println!("PORT {}", listener.local_addr().unwrap().port());
    let link = match agent.link(listener.accept().unwrap().0, Role::Accepting, &key()) {
        Ok(link) => link,
        Err(e) => return println!("NO LINK {e}"),
    };
    let (fd, mapping) = memory();
    // SAFETY: the mapping has SIZE bytes, and no other process uses it yet.
    unsafe { mapping.base().write_bytes(UNTOUCHED, SIZE) };
    // A second mapping, as of a program that knows nothing of RDMA.
    let seen = Mapping::new(&fd, SIZE).unwrap();
    let given = agent.get(link).unwrap().register(&mapping, GIVEN, Access::Write).unwrap();
    let Window { addr, rkey, len } = given.window();
    let mut answers = VecDeque::from([[WINDOW, addr, rkey.into(), len.into(), 0, 0, 0]]);
    let mut events = Vec::new();
    loop {
        while let Some(answer) = answers.front() {
            match agent.get(link).unwrap().post(answer, None) {
                Ok(()) => drop(answers.pop_front()),
                Err(_) => break,
            }
        }
        agent.wait(-1).unwrap();
        agent.poll(&mut events).unwrap();
        for event in events.drain(..) {
            match event {
                Event::Message(_, [CHECK, at, len, ..]) => {
                    let written = GIVEN.start + at as usize..GIVEN.start + (at + len) as usize;
                    let right = (0..SIZE).all(|i| {
                        // SAFETY: `i` is within the mapping. The writer waits for the answer, so
                        // it does not write now.
                        let byte = unsafe { seen.base().add(i).read_volatile() };
                        byte == if written.contains(&i) { pattern(i - GIVEN.start) } else { UNTOUCHED }
                    });
                    // SAFETY: the mapping has SIZE bytes. The writer waits for the answer, so it
                    // does not write now.
                    unsafe { seen.base().write_bytes(UNTOUCHED, SIZE) };
                    answers.push_back([CHECKED, at, right.into(), 0, 0, 0, 0]);
                }
                Event::Message(_, body) => answers.push_back(body),
                Event::Down(_, down) => return println!("DOWN {down:?}"),
                _ => {}
            }
        }
    }
}

struct Pair {
    near: Agent,
    link: u32,
    far: Child,
    said: BufReader<std::process::ChildStdout>,
    window: Window,
    /// Memory from which the test writes.
    region: Region,
    events: VecDeque<Event>,
}

fn start_far() -> (Child, BufReader<std::process::ChildStdout>, TcpStream) {
    let mut far = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "--nocapture", "the_other_agent"])
        .env(FAR, OTHER)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(far.stdout.take().unwrap());
    let port = said_by(&mut said, "PORT ").parse().unwrap();
    (far, said, TcpStream::connect((OTHER, port)).unwrap())
}

/// The text that the other agent printed after `what`.
fn said_by(said: &mut impl BufRead, what: &str) -> String {
    let mut all = String::new();
    loop {
        let from = all.len();
        assert_ne!(said.read_line(&mut all).unwrap(), 0, "no {what:?} in {all:?}");
        // The test harness may have printed something before it on the same line.
        if let Some((_, found)) = all[from..].split_once(what) {
            return found.trim().to_owned();
        }
    }
}

impl Pair {
    fn new() -> Pair {
        devices();
        let (far, said, stream) = start_far();
        let mut near = Agent::new(NEAR.parse().unwrap()).unwrap();
        let link = near.link(stream, Role::Connecting, &key()).unwrap();
        let (_, mapping) = memory();
        for at in 0..GIVEN.len() {
            // SAFETY: `at` is within the mapping, which no other process has.
            unsafe { mapping.base().add(at).write(pattern(at)) };
        }
        let region = near.get(link).unwrap().register(&mapping, 0..GIVEN.len(), Access::None).unwrap();
        let window = Window { addr: 0, rkey: 0, len: 0 };
        let mut pair = Pair { near, link, far, said, window, region, events: VecDeque::new() };
        let [WINDOW, addr, rkey, len, ..] = pair.message() else { panic!("no window") };
        pair.window = Window { addr, rkey: rkey as u32, len: len as u32 };
        pair
    }

    /// The next event; sleeps until there is one.
    fn event(&mut self) -> Event {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(event) = self.events.pop_front() {
                return event;
            }
            assert!(Instant::now() < until, "nothing happens");
            self.near.wait(1000).unwrap();
            let mut fresh = Vec::new();
            self.near.poll(&mut fresh).unwrap();
            self.events.extend(fresh);
        }
    }

    fn message(&mut self) -> [u64; 7] {
        loop {
            match self.event() {
                Event::Message(_, body) => return body,
                Event::Down(_, down) => panic!("{down:?}"),
                _ => {}
            }
        }
    }

    fn down(&mut self) -> Down {
        loop {
            if let Event::Down(_, down) = self.event() {
                assert!(self.near.get(self.link).is_none(), "and it is forgotten");
                return down;
            }
        }
    }

    fn write(&mut self, at: usize, len: usize, to: Window) -> Result<(), Refused> {
        let transfer = Transfer { region: &self.region, from: at..at + len, to, at };
        self.near.get(self.link).unwrap().post(&[CHECK, at as u64, len as u64, 0, 0, 0, 0], Some(transfer))
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        let _ = self.far.kill();
        let _ = self.far.wait();
    }
}

#[test]
#[ignore = "the other agent of the tests here"]
fn the_other_agent() {
    if let Ok(addr) = std::env::var(FAR) {
        far(addr.parse().unwrap());
    }
}

#[test]
#[ignore = "needs soft-RoCE: scripts/rdma.sh"]
fn bytes_are_written_where_they_should_and_nowhere_else() {
    let mut pair = Pair::new();
    for (at, len) in [(0, 64), (4096, 4096), (8, 1), (0, 64 << 10), (64 << 10, 64 << 10)] {
        pair.write(at, len, pair.window).unwrap();
        assert_eq!(pair.message()[..3], [CHECKED, at as u64, 1], "{len} bytes");
    }
    assert_eq!(pair.write(GIVEN.len() - 8, 8, Window { len: 64, ..pair.window }), Err(Refused::Range));
    // An idle agent must sleep: after the remaining completions there are no events.
    let mut rest = Vec::new();
    while pair.near.wait(500).unwrap() {
        pair.near.poll(&mut rest).unwrap();
        assert!(rest.len() < 8, "{rest:?}");
    }
    pair.near.drop_link(pair.link);
    assert_eq!(said_by(&mut pair.said, "DOWN "), "Gone");
}

#[test]
#[ignore = "needs soft-RoCE: scripts/rdma.sh"]
fn messages_stay_in_order_and_a_full_queue_says_so() {
    const COUNT: u64 = 1000;
    let mut pair = Pair::new();
    let (mut sent, mut echoed, mut full) = (0, 0, 0);
    while echoed < COUNT {
        while sent < COUNT {
            match pair.near.get(pair.link).unwrap().post(&[ECHO, sent, 0, 0, 0, 0, 0], None) {
                Ok(()) => sent += 1,
                Err(Refused::Full) => {
                    full += 1;
                    break;
                }
                Err(e) => panic!("{e:?}"),
            }
        }
        match pair.event() {
            Event::Message(_, body) => {
                assert_eq!(body[..2], [ECHO, echoed]);
                echoed += 1;
            }
            Event::Down(_, down) => panic!("{down:?}"),
            _ => {}
        }
    }
    assert!(full > 0, "{COUNT} messages at once are more than fit");
}

#[test]
#[ignore = "needs soft-RoCE: scripts/rdma.sh"]
fn memory_that_was_not_given_cannot_be_written() {
    for shift in [GIVEN.len() as u64, 0u64.wrapping_sub(4096)] {
        let mut pair = Pair::new();
        // This memory is mapped by the other agent, but outside of the given window.
        let outside = Window { addr: pair.window.addr.wrapping_add(shift), ..pair.window };
        pair.write(0, 64, outside).unwrap();
        assert_eq!(pair.down(), Down::Denied);
    }
    // A link must not be able to write what another link on the same device was given, either.
    let (mut one, mut two) = (Pair::new(), Pair::new());
    one.write(0, 64, two.window).unwrap();
    assert_eq!(one.down(), Down::Denied);
    two.write(0, 64, two.window).unwrap();
    assert_eq!(two.message()[..3], [CHECKED, 0, 1]);
}

#[test]
#[ignore = "needs soft-RoCE: scripts/rdma.sh"]
fn an_agent_that_dies_is_noticed() {
    let mut pair = Pair::new();
    pair.far.kill().unwrap();
    assert_eq!(pair.down(), Down::Gone);
}

#[test]
#[ignore = "needs soft-RoCE: scripts/rdma.sh"]
fn another_key_makes_no_link() {
    devices();
    let (mut far, mut said, stream) = start_far();
    let mut near = Agent::new(NEAR.parse().unwrap()).unwrap();
    let other = Key::new(&[6; 32]).unwrap();
    assert!(matches!(near.link(stream, Role::Connecting, &other), Err(Error::Agree(_))));
    assert!(said_by(&mut said, "NO LINK ").contains("does not have the key"));
    far.wait().unwrap();
}

#[test]
#[ignore = "needs soft-RoCE: scripts/rdma.sh"]
fn packets_that_are_lost_end_the_link() {
    let mut pair = Pair::new();
    run("tc qdisc add dev v0 root netem loss 100%");
    pair.write(0, 4096, pair.window).unwrap();
    let down = pair.down();
    run("tc qdisc del dev v0 root");
    assert_eq!(down, Down::Cut);
}

#[test]
#[ignore = "needs soft-RoCE: scripts/rdma.sh"]
fn a_port_that_goes_down_ends_idle_links_at_both_ends() {
    let mut pair = Pair::new();
    run("ip link set v0 down");
    let down = pair.down();
    let other = said_by(&mut pair.said, "DOWN ");
    run("ip link set v0 up");
    assert_eq!(down, Down::Cut);
    // Either its port has lost the carrier, or its peer has ended first.
    assert!(["Cut", "Gone"].contains(&other.as_str()), "{other}");
}

#[test]
#[ignore = "needs soft-RoCE: scripts/rdma.sh"]
fn without_a_device_or_the_libraries_there_is_an_error() {
    devices();
    assert!(matches!(Agent::new("192.0.2.1".parse().unwrap()), Err(Error::NoDevice(_))));
    // The root file system is an overlay of this machine alone, so files may be moved away.
    run("for f in $(ldconfig -p | sed -n 's/.*=> //p' | grep libibverbs.so); do mv $f $f.away; done");
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "the_libraries_are_not_there"])
        .env(FAR, "none")
        .status();
    run("for f in $(ldconfig -p | sed -n 's/.*=> //p' | grep libibverbs.so); do mv $f.away $f; done");
    assert!(child.unwrap().success());
}

#[test]
#[ignore = "a part of the test before"]
fn the_libraries_are_not_there() {
    if std::env::var_os(FAR).is_some() {
        assert!(matches!(Agent::new(NEAR.parse().unwrap()), Err(Error::NotSupported)));
    }
}
