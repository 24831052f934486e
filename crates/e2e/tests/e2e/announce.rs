//! Two hosts whose monitors announce Fastsocket: each must report that the other host has it.

use fsocket_e2e as _;
use fsocket_testkit::netns::{Hosts, NetHost, Receive};
use fsocket_testkit::{need_hosts, net, stock_mode, Host, Proc, Side, PYTHON};
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

/// A host with a control group of its own.
struct Place {
    host: Host,
    group: String,
}

fn cgroups() -> PathBuf {
    let mounts = fs::read_to_string("/proc/self/mounts").expect("mounts");
    let root = mounts.lines().find_map(|l| {
        l.strip_prefix("cgroup2 ").or_else(|| l.strip_prefix("cgroup ")?.contains(" cgroup2 ").then_some(l))
    });
    root.and_then(|l| l.split(' ').find(|w| w.starts_with('/'))).expect("cgroup v2").into()
}

impl Place {
    fn new(net: &NetHost, name: &str, number: u32, announce: bool) -> Place {
        let group = format!("/fsocket-hosts-{}-{name}", std::process::id());
        fs::create_dir(cgroups().join(&group[1..])).expect("a cgroup");
        let settings = format!("[hosts]\nannounce = {announce}\ncgroup = \"{group}\"\nnumber = {number}\n");
        let place = Place { host: Host::for_all_users_on(net, &settings), group };
        // The monitor answers once it has loaded its BPF program. A listener must be started after
        // that.
        let state = place.host.snapshot().report.expect("a report").hosts.state;
        assert_eq!(state, if announce { "on" } else { "off" });
        place
    }

    /// Starts a program without the library in this host.
    fn start(&self, net: &NetHost, program: &str) -> Proc {
        let mut command = Command::new("sh");
        let procs = cgroups().join(&self.group[1..]).join("cgroup.procs");
        command.args(["-c", &format!("echo $$ > {}; exec \"$0\" -c \"$1\"", procs.display()), PYTHON, program]);
        net.place(&mut command);
        Proc::spawn(self.host.logs(), "program", command)
    }

    fn known(&self) -> Vec<(String, u32)> {
        let report = self.host.snapshot().report.expect("a report");
        report.hosts.known.into_iter().map(|h| (h.address, h.number)).collect()
    }

    fn says(&self, what: &str) -> String {
        let mut command = self.host.command(Side::Stock, fsocket_testkit::artifacts::cli());
        command.arg(what).env("FASTSOCKET_SOCKET", self.host.socket());
        Proc::spawn(self.host.logs(), what, command).finish(LIMIT).stdout.clone()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let group = cgroups().join(&self.group[1..]);
        let gone = net::wait_until(LIMIT, || fs::remove_dir(&group).is_ok());
        assert!(gone.is_ok() || std::thread::panicking(), "processes are left in {}", group.display());
    }
}

#[test]
fn hosts_that_announce_themselves_know_each_other() {
    need_hosts!();
    if stock_mode() {
        return eprintln!("SKIPPED: nothing is announced in stock mode");
    }
    for both in [true, false] {
        let mut hosts = Hosts::new().expect("hosts");
        let (mut a, mut b) = (hosts.add("a").expect("a"), hosts.add("b").expect("b"));
        hosts.link(&mut a, &mut b, 1, &Receive::Inline).expect("a link");
        let (client, server) = (Place::new(&a, "a", 11, true), Place::new(&b, "b", 22, both));
        let (from, to) = (a.interfaces[0].v4.to_string(), b.interfaces[0].v4.to_string());
        let port = net::free_port();
        let listener = server.start(
            &b,
            &format!(
                "import socket\ns = socket.create_server(('{to}', {port}))\n\
                 while True:\n c = s.accept()[0]\n c.sendall(c.recv(9))\n c.close()"
            ),
        );
        net::wait_until(LIMIT, || b.within(|| net::kernel_sockets(port, "0A")) > 0).expect("it listens");
        let asks = format!(
            "import socket\nfor i in range(3):\n c = socket.create_connection(('{to}', {port}))\n \
             c.sendall(b'question')\n assert c.recv(9) == b'question'\n c.close()\nprint('ok')"
        );
        client.start(&a, &asks).finish(LIMIT).success().says("ok");
        let total = |place: &Place, name: &str| {
            let report = place.host.snapshot().report.expect("a report");
            report.totals.get(name).copied().unwrap_or_default()
        };
        if both {
            assert_eq!((total(&client, "hosts.opened"), total(&server, "hosts.accepted")), (3, 3));
            assert_eq!(client.known(), [(to.clone(), 22)]);
            assert_eq!(server.known(), [(from, 11)]);
            assert_eq!((total(&client, "hosts.opened"), total(&server, "hosts.accepted")), (3, 3));
            let said = client.says("ss");
            assert!(said.contains(&format!("{to}: another host, capable (kernel TCP: no RDMA), number 22")), "{said}");
        } else {
            assert_eq!((client.known(), server.known()), (Vec::new(), Vec::new()));
            assert_eq!((total(&client, "hosts.opened"), total(&client, "hosts.without")), (0, 3));
        }
        let said = client.says("doctor");
        assert!(said.contains("ok    other hosts: announced, number 11"), "{said}");
        drop(listener);
    }
}
