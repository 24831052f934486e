//! Tests the locality program on real connections over loopback. There softirq runs on the
//! sender's CPU, so the test knows which packets are local.

use fsocket_bpf::locality::{Cell, Kind, Locality};
use fsocket_bpf::Error;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

const ROUNDS: u64 = 50;

/// Prints why a test cannot run here, and ends the test.
macro_rules! or_skip {
    ($result:expr) => {
        match $result {
            Ok(value) => value,
            Err(Error::Missing(reason)) => {
                println!("SKIPPED: {}: {reason}", module_path!());
                return;
            }
            Err(other) => panic!("{other}"),
        }
    };
}

fn pin(cpu: usize) {
    fsocket_testkit::process::set_affinity(0, &[cpu]).unwrap_or_else(|e| panic!("cannot pin to CPU {cpu}: {e}"));
}

/// Sends requests and answers of one byte. Server and client run on one CPU each.
fn ping_pong(server: usize, client: usize) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let serving = thread::spawn(move || {
        pin(server);
        let (mut stream, _) = listener.accept().unwrap();
        let mut byte = [0];
        while stream.read(&mut byte).unwrap() == 1 {
            stream.write_all(&byte).unwrap();
        }
    });
    thread::spawn(move || {
        pin(client);
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        let mut byte = [7];
        for _ in 0..ROUNDS {
            stream.write_all(&byte).unwrap();
            stream.read_exact(&mut byte).unwrap();
        }
    })
    .join()
    .unwrap();
    serving.join().unwrap();
}

/// Number of local packets and of other packets of this process.
fn shares(cells: &[Cell], kind: Kind) -> (u64, u64) {
    let mine = || cells.iter().filter(|c| c.tgid == std::process::id() && c.kind == kind);
    let sum = |local| mine().filter(|c| c.is_local() == local).map(|c| c.packets).sum();
    (sum(true), sum(false))
}

/// [`Locality`] attaches a program to the root of all cgroups. Every monitor that looks for policies finds it there, and
/// asks the kernel first.
mod alone {
    use super::*;

    #[test]
    fn tells_local_from_remote() {
        let measuring = or_skip!(Locality::start());
        ping_pong(0, 0);
        let cells = measuring.cells().unwrap();
        for kind in [Kind::Passive, Kind::Active] {
            let (local, remote) = shares(&cells, kind);
            assert!(local >= ROUNDS && remote == 0, "one CPU, {kind:?}: {local} local, {remote} remote\n{cells:?}");
        }
        let is_ours = |c: &Cell| c.comm.starts_with("locality") || c.comm.starts_with("alone::tells");
        assert!(cells.iter().any(is_ours), "{cells:?}");
        drop(measuring);

        if thread::available_parallelism().unwrap().get() < 2 {
            println!("SKIPPED: second half of tells_local_from_remote: one CPU");
            return;
        }
        let measuring = or_skip!(Locality::start());
        ping_pong(0, 1);
        let cells = measuring.cells().unwrap();
        for kind in [Kind::Passive, Kind::Active] {
            let (_, remote) = shares(&cells, kind);
            assert!(remote >= ROUNDS, "two CPUs, {kind:?}: {remote} remote\n{cells:?}");
        }
        for failure in measuring.reasons().unwrap() {
            if ["too_many_cpus", "no_record", "no_cell"].contains(&failure.name) {
                assert_eq!(failure.total(), 0, "{}", failure.name);
            }
        }
    }
}
