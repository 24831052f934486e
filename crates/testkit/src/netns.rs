//! Hosts made of network namespaces, joined by multi-queue veth pairs.
//!
//! ```no_run
//! use fsocket_testkit::netns::{Chain, Receive};
//! let net = Chain::new(2, &Receive::Threads(vec![0, 1])).expect("root and iproute2");
//! let mut command = std::process::Command::new("nginx");
//! net.middle.place(&mut command); // runs in the middle host
//! println!("clients reach it at {}", net.middle_front());
//! ```
//!
//! A guard process ([`Cleanup`]) undoes everything, even if the test was killed. It first kills
//! processes that are left in a host.

mod bridge;
mod cleanup;
mod link;

pub use bridge::Containers;
pub use cleanup::Cleanup;
pub use link::{napi_threads, Receive};

use std::fs::File;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;

/// The reason why hosts cannot be made here. `None`: they can.
pub fn unavailable() -> Option<String> {
    // SAFETY: `geteuid` takes no arguments.
    if unsafe { libc::geteuid() } != 0 {
        return Some("network namespaces need root".to_owned());
    }
    let missing = ["ip", "ethtool"].into_iter().find(|name| crate::find_program(name).is_none());
    missing.map(|name| format!("{name} is not installed (make deps)"))
}

/// Skips the test, with a message, if hosts cannot be made here.
#[macro_export]
macro_rules! need_hosts {
    () => {
        match $crate::netns::unavailable() {
            None => {}
            Some(why) if std::env::var_os("FASTSOCKET_TEST_STRICT").is_some() => {
                panic!("{why} (FASTSOCKET_TEST_STRICT is set)")
            }
            Some(why) => {
                eprintln!("SKIPPED: {why}");
                return;
            }
        }
    };
}

/// Several hosts, and the links between them.
pub struct Hosts {
    tag: String,
    links: u32,
    cleanup: Cleanup,
}

impl Hosts {
    pub fn new() -> Result<Hosts, String> {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        if let Some(why) = unavailable() {
            return Err(why);
        }
        // The tag is unique on this machine, because several test programs run at once.
        let tag = format!("fs{:x}_{}", std::process::id(), SERIAL.fetch_add(1, Ordering::Relaxed));
        Ok(Hosts { tag, links: 0, cleanup: Cleanup::new()? })
    }

    /// Creates a host with a loopback device.
    pub fn add(&mut self, name: &str) -> Result<NetHost, String> {
        let namespace = format!("{}-{name}", self.tag);
        // Repeat, because a process may fork before it is killed (a master replaces its workers).
        self.cleanup.push(&format!(
            "for i in 1 2 3 4 5; do p=$(ip netns pids {namespace}) && [ \"$p\" ] && kill -9 $p || break; done; \
             ip netns del {namespace}"
        ))?;
        link::ip(&["netns", "add", &namespace])?;
        link::ip(&["-n", &namespace, "link", "set", "lo", "up"])?;
        // Tests make hundreds of thousands of short connections. So use all ports, except for
        // those that tests give to servers.
        let taken = format!("{}-{}", crate::net::FIRST, crate::net::FIRST + crate::net::COUNT - 1);
        let ports = format!(
            "echo 1024 65535 > /proc/sys/net/ipv4/ip_local_port_range; \
             echo {taken} > /proc/sys/net/ipv4/ip_local_reserved_ports"
        );
        link::inside(&namespace, "sh", &["-c", &ports])?;
        let file = File::open(format!("/run/netns/{namespace}")).map_err(|e| format!("{namespace}: {e}"))?;
        Ok(NetHost { name: name.to_owned(), namespace, fd: Arc::new(file.into()), interfaces: Vec::new() })
    }

    /// Joins two hosts. `a` gets 10.9.N.1 and fd09:N::1, `b` .2 and ::2, where
    /// N counts the links from 1.
    pub fn link(&mut self, a: &mut NetHost, b: &mut NetHost, queues: usize, receive: &Receive) -> Result<(), String> {
        self.links += 1;
        let number = self.links;
        let interface = |end: u8| Interface {
            // The kernel allows 15 characters. The name must be unique, because the NAPI threads
            // have it in their names.
            device: format!("{}{}{number}", self.tag, if end == 1 { 'a' } else { 'b' }),
            v4: Ipv4Addr::new(10, 9, number as u8, end),
            v6: Ipv6Addr::new(0xfd09, number as u16, 0, 0, 0, 0, 0, end.into()),
        };
        let (first, second) = (interface(1), interface(2));
        link::create(&a.end(&first), &b.end(&second), queues, receive)?;
        a.interfaces.push(first);
        b.interfaces.push(second);
        Ok(())
    }

    /// Adds a shell command that runs at the end, before the hosts are removed.
    pub fn on_end(&mut self, undo: &str) -> Result<(), String> {
        self.cleanup.push(undo)
    }
}

/// One end of a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    pub device: String,
    pub v4: Ipv4Addr,
    pub v6: Ipv6Addr,
}

/// A host: a network namespace. It is removed when its [`Hosts`] is dropped.
#[derive(Clone)]
pub struct NetHost {
    pub name: String,
    /// The name that `ip netns` lists.
    pub namespace: String,
    /// In the order of the links.
    pub interfaces: Vec<Interface>,
    fd: Arc<OwnedFd>,
}

impl NetHost {
    /// Makes a command run in this host. Only its network differs: files, processes and /sys are
    /// those of this machine (see [`NetHost::inside`]).
    pub fn place(&self, command: &mut Command) {
        let fd = self.fd.clone();
        // SAFETY: between fork and exec, the closure makes one system call. Its descriptor stays
        // open because the closure owns it.
        unsafe { command.pre_exec(move || enter(fd.as_raw_fd())) };
    }

    /// Moves the calling thread into this host for good. Only for threads that the test has
    /// started; see [`NetHost::within`] for a closure.
    pub fn enter(&self) -> std::io::Result<()> {
        enter(self.fd.as_raw_fd())
    }

    /// Runs a closure in this host, on a thread of its own. Sockets made by the closure stay in
    /// this host.
    #[track_caller]
    pub fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let fd = self.fd.as_raw_fd();
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || {
                enter(fd).expect("setns");
                work()
            });
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Runs a short program in this host until it ends, with this host's /sys mounted (as `ip
    /// netns exec` does).
    pub fn inside(&self, program: &str, args: &[&str]) -> Result<(), String> {
        link::inside(&self.namespace, program, args)
    }

    /// Runs a program in this host and returns its output.
    pub fn output(&self, program: &str, args: &[&str]) -> Result<String, String> {
        let mut command = Command::new(program);
        command.args(args).env_remove("LD_PRELOAD");
        self.place(&mut command);
        let output = command.output().map_err(|e| format!("{program}: {e}"))?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn end(&self, interface: &Interface) -> link::End {
        link::End {
            namespace: self.namespace.clone(),
            device: interface.device.clone(),
            v4: format!("{}/24", interface.v4),
            v6: format!("{}/64", interface.v6),
        }
    }
}

/// Moves the calling thread into a network namespace.
fn enter(fd: i32) -> std::io::Result<()> {
    // SAFETY: `setns` takes no pointers.
    if unsafe { libc::setns(fd, libc::CLONE_NEWNET) } == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error())
    }
}

/// The hosts of the paper's tests: clients, the server or proxy under test, and the backend to
/// which a proxy connects.
///
/// `client 10.9.1.1 -- 10.9.1.2 middle 10.9.2.1 -- 10.9.2.2 backend`
pub struct Chain {
    pub client: NetHost,
    pub middle: NetHost,
    pub backend: NetHost,
    /// Last, so that it is dropped after the descriptors above.
    pub hosts: Hosts,
}

impl Chain {
    /// Makes both links with that many queues. All ends receive in the same way.
    pub fn new(queues: usize, receive: &Receive) -> Result<Chain, String> {
        let mut hosts = Hosts::new()?;
        let mut client = hosts.add("client")?;
        let mut middle = hosts.add("middle")?;
        let mut backend = hosts.add("backend")?;
        hosts.link(&mut client, &mut middle, queues, receive)?;
        hosts.link(&mut middle, &mut backend, queues, receive)?;
        Ok(Chain { client, middle, backend, hosts })
    }

    /// Address of the middle host as clients see it.
    pub fn middle_front(&self) -> Ipv4Addr {
        self.middle.interfaces[0].v4
    }

    /// The same, IPv6.
    pub fn middle_front6(&self) -> Ipv6Addr {
        self.middle.interfaces[0].v6
    }

    /// Address of the backend host as the middle host sees it.
    pub fn backend_address(&self) -> Ipv4Addr {
        self.backend.interfaces[0].v4
    }
}
