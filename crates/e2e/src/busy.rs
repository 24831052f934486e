//! Helpers for the tests of balance. Their server is `tests/apps/busy_server.py`, whose workers
//! stop accepting for a while on request.

use crate::zones::{connect, counter, pin};
use fsocket_testkit::host::Side::Accel;
use fsocket_testkit::{net, stock_mode, Host, Proc};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

pub struct Server {
    pub process: Proc,
    pub port: u16,
}

impl Server {
    /// Starts `busy_server.py` with two workers. Returns when each has a local listen socket from
    /// which the other may steal.
    #[track_caller]
    pub fn start(host: &Host, mode: &str, backlog: u32, env: &[(&str, &str)]) -> Server {
        let port = net::free_port();
        let script = fsocket_testkit::helper("busy_server.py").display().to_string();
        let mut command = host.command(Accel, fsocket_testkit::PYTHON);
        command.args([&script, mode, &port.to_string(), "2", &backlog.to_string()]).env("FASTSOCKET_DISABLE", "shm");
        command.envs(env.iter().copied());
        let mut process = Proc::spawn(host.logs(), mode, command);
        let own = mode.contains("own-");
        let least = if own { 2 } else { 1 };
        let listens = || net::kernel_sockets(port, "0A") >= least;
        let up = net::wait_until(Duration::from_secs(60), || !process.running() || listens());
        assert!(up.is_ok() && process.running(), "{mode}: {}", process.stderr());
        let server = Server { process, port };
        // A worker that waits in a call gets a zone only after the library has seen it come back
        // to this call at once.
        for round in 0..60 {
            let zones = || counter(&host.zones(), "zone_joins");
            if stock_mode() || if own { zones() == 2 } else { net::kernel_sockets(port, "0A") == 3 } {
                break;
            }
            assert!(round < 59, "{mode}: no local listen sockets");
            for cpu in 0..2 {
                (0..20).for_each(|_| _ = server.told(&server.say(cpu, "who")));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        server
    }

    /// Opens a connection whose SYN is handled by this CPU, and sends `words`.
    #[track_caller]
    pub fn say(&self, cpu: usize, words: &str) -> TcpStream {
        let address: SocketAddr = ([127, 0, 0, 1], self.port).into();
        std::thread::scope(|s| {
            s.spawn(|| {
                pin(cpu);
                let mut c = connect(address);
                c.write_all(words.as_bytes()).expect("send");
                c
            })
            .join()
            .expect("a connection")
        })
    }

    /// Reads pid and thread of the worker that answered.
    #[track_caller]
    pub fn told(&self, c: &TcpStream) -> (i32, i32) {
        let v = self.all_told(c);
        (v[0], v[1])
    }

    /// Also reads the number of the connection within its process.
    #[track_caller]
    pub fn all_told(&self, mut c: &TcpStream) -> [i32; 3] {
        let mut text = String::new();
        c.read_to_string(&mut text).expect("an answer");
        let v: Vec<i32> = text.split_whitespace().map(|w| w.parse().expect("a number")).collect();
        v.try_into().unwrap_or_else(|v| panic!("{text:?}: {v:?}"))
    }

    /// Pid and thread of the worker that serves connections from this CPU.
    #[track_caller]
    pub fn worker(&self, cpu: usize) -> (i32, i32) {
        self.told(&self.say(cpu, "who"))
    }

    /// The workers of both CPUs, once they differ: until the slower worker has started, the other
    /// one serves both CPUs.
    #[track_caller]
    pub fn workers(&self) -> [(i32, i32); 2] {
        let both = || [0, 1].map(|cpu| self.worker(cpu));
        let differ = || both()[0] != both()[1];
        let found = fsocket_testkit::net::wait_until(std::time::Duration::from_secs(60), differ);
        assert!(found.is_ok() || fsocket_testkit::stock_mode(), "one worker has both CPUs");
        both()
    }

    /// Stops both workers, then opens so many connections on each CPU, which wait in the worker's
    /// queue.
    #[track_caller]
    pub fn stopped(&self, waiting: [usize; 2]) -> Stopped {
        let workers = self.workers().map(|(pid, _)| pid);
        assert_ne!(workers[0], workers[1], "one process has both CPUs");
        workers.iter().for_each(|pid| signal(*pid, libc::SIGSTOP));
        let waiting = [0, 1].map(|cpu| (0..waiting[cpu]).map(|_| self.say(cpu, "who")).collect());
        Stopped { workers, waiting }
    }
}

/// Two stopped workers, and the connections that wait for them.
pub struct Stopped {
    pub workers: [i32; 2],
    pub waiting: [Vec<TcpStream>; 2],
}

/// Sends a signal to a process of this test.
#[track_caller]
pub fn signal(pid: i32, signal: i32) {
    // SAFETY: `kill` takes no pointers.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0, "process {pid}");
}

/// A host with more patience: this machine may keep a worker off the CPU for a while, and the
/// other one must not steal from it then. Flow groups do not move, so connections that wait can
/// only be stolen.
#[track_caller]
pub fn patient() -> Host {
    Host::configured(None, "[balance]\npatience_us = 30000\nmigrate = false\n")
}

/// Number of connections that workers took from others' queues, by the shared counters.
pub fn stolen(zones: &Value) -> u64 {
    let steals = zones["groups"][0]["balance"]["steals"].as_array().cloned().unwrap_or_default();
    steals.iter().map(|s| s["connections"].as_u64().unwrap_or(0)).sum()
}
