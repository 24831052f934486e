//! Connections that the kernel refuses or the administrator forbids must not use shared memory,
//! either. Their outcomes must be those of stock sockets; the counters show their paths.
//!
//! Long: tests of one subject on one fixture.

use fsocket_testkit::host::{Accel, Side, Stock};
use fsocket_testkit::netns::{Hosts, NetHost};
use fsocket_testkit::{artifacts, helper, need, need_hosts, net, stock_mode, Delta, Host, Proc, PYTHON};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

/// Users that have no name on this machine.
const ALICE: u32 = 54321;
const BOB: u32 = 54322;

/// An echo server on a host, and the options of its clients.
struct Server<'a> {
    host: &'a Host,
    address: &'static str,
    port: u16,
    _process: Proc,
}

impl<'a> Server<'a> {
    #[track_caller]
    fn of(host: &'a Host, user: u32, place: Option<&NetHost>) -> Server<'a> {
        Server::at(host, user, place, "127.0.0.1")
    }

    #[track_caller]
    fn at(host: &'a Host, user: u32, place: Option<&NetHost>, address: &'static str) -> Server<'a> {
        let port = match place {
            Some(place) => place.within(net::free_port),
            None => net::free_port(),
        };
        let path = helper("echo_server.py").display().to_string();
        let mut command = command(host, Accel, user);
        command.args([path.as_str(), "threaded", &port.to_string(), address]);
        let process = Proc::spawn(host.logs(), "server", command);
        let up = net::wait_until(Duration::from_secs(60), || host.kernel_sockets(port, "0A") > 0);
        assert!(up.is_ok(), "the server does not listen: {}", process.stderr());
        let server = Server { host, address, port, _process: process };
        // When the server has answered, its thread is in `accept` again.
        assert_eq!(server.client_as(Stock, user, &["client"], 1).0, ["ok"]);
        server
    }

    /// Waits until connections use shared memory. A new network namespace still gets addresses for
    /// a while; after each one the monitor reads its rules again, and connections use the kernel
    /// until then.
    #[track_caller]
    fn is_over(&self) {
        let over = || stock_mode() || self.client(Accel, &["client"], 1).1.get("connect_shm") == 1;
        net::wait_until(Duration::from_secs(60), over).expect("a connection over shared memory");
    }

    /// The output of `crates/e2e/tests/e2e/policy/policy.py` without its last line, and the
    /// counters.
    #[track_caller]
    fn client_as(&self, side: Side, user: u32, what: &[&str], n: u32) -> (Vec<String>, Delta) {
        let before = self.host.snapshot();
        let mut command = command(self.host, side, user);
        command.env("POLICY_HOST", self.address);
        command
            .arg(helper("policy/policy.py"))
            .args([what[0], &self.port.to_string(), &n.to_string()])
            .args(&what[1..]);
        let done =
            Proc::spawn(self.host.logs(), what[0], command).finish(Duration::from_secs(60)).success().says("end");
        let lines = done.stdout.lines().filter(|l| *l != "end").map(str::to_owned).collect();
        (lines, self.host.snapshot().since(&before))
    }

    #[track_caller]
    fn client(&self, side: Side, what: &[&str], n: u32) -> (Vec<String>, Delta) {
        self.client_as(side, root(), what, n)
    }

    /// All connections must end as on stock sockets. All but `kernel` of them must use shared
    /// memory, and each of those must be counted as `why`.
    #[track_caller]
    fn as_stock(&self, user: u32, what: &[&str], shm: i128, why: &str, kernel: i128) {
        // In this case a second thread makes the same connections once more.
        let n = if what == ["thread"] { shm } else { shm + kernel } as u32;
        let (stock, _) = self.client_as(Stock, user, what, n);
        let (ours, delta) = self.client_as(Accel, user, what, n);
        assert_eq!(ours, stock, "{what:?}\n{delta}");
        if stock_mode() {
            return;
        }
        assert_eq!(delta.get("connect_shm"), shm, "{what:?}\n{delta}");
        // Counters of a process without contact to the monitor are not visible.
        let counted = if why.is_empty() { 0 } else { kernel };
        assert!(counted == 0 || delta.get(why) == kernel, "{what:?}: {why}\n{delta}");
        assert!(counted == 0 || delta.get("connect_kernel") == kernel, "{what:?}\n{delta}");
    }
}

fn root() -> u32 {
    // SAFETY: `geteuid` takes no arguments.
    unsafe { libc::geteuid() }
}

fn command(host: &Host, side: Side, user: u32) -> Command {
    let mut command = host.command(side, PYTHON);
    // The monitor of all users would pin BPF programs, which would outlive it.
    command.env("FASTSOCKET_DISABLE", "zones");
    if user != root() {
        command.uid(user).gid(user);
    }
    command
}

const FIRST: &str = "fallback.kernel_first";

#[test]
fn a_client_under_landlock_gets_what_the_kernel_gives() {
    let host = Host::new();
    let server = Server::of(&host, root(), None);
    server.as_stock(root(), &["client"], 5, "", 0);
    let (stock, _) = server.client(Stock, &["landlock"], 3);
    assert_eq!(stock, ["EACCES"; 3], "this kernel has no Landlock for TCP");
    // Only the kernel knows which rights the threads still have.
    server.as_stock(root(), &["landlock"], 0, "", 3);
    server.as_stock(root(), &["thread"], 3, "fallback.disabled", 3);
    // A program that has inherited the restriction does not know about it; the library must use
    // the kernel's answer.
    server.as_stock(root(), &["landlock-exec"], 0, FIRST, 3);
    let port = server.port.to_string();
    server.as_stock(root(), &["landlock-exec", &port], 4, FIRST, 1);
}

#[test]
fn a_client_with_unix_sockets_only_has_unix_sockets_only() {
    let host = Host::new();
    let server = Server::of(&host, root(), None);
    let (stock, _) = server.client(Stock, &["unix-only"], 2);
    assert_eq!(stock, ["EAFNOSUPPORT"; 2]);
    let (ours, delta) = server.client(Accel, &["unix-only"], 2);
    assert_eq!(ours, stock);
    delta.assert_kernel_only();
}

/// Runs a shell script in a host, and panics if it fails.
#[track_caller]
fn sh(place: &NetHost, script: &str) {
    let mut command = Command::new("sh");
    command.args(["-ec", script]);
    place.place(&mut command);
    let Output { status, stderr, .. } = command.output().expect("sh");
    assert!(status.success(), "{script}: {}", String::from_utf8_lossy(&stderr));
}

/// While `policy` is in force in a network namespace, a client must get `error`; so must a client
/// that was running before.
#[track_caller]
fn refused_by(policy: &str, undo: &str, error: &str) {
    refused_at("127.0.0.1", policy, undo, error);
}

#[track_caller]
fn refused_at(address: &'static str, policy: &str, undo: &str, error: &str) {
    let mut hosts = Hosts::new().expect("hosts");
    let place = hosts.add("policy").expect("a host");
    let host = Host::under_policy(&place);
    let server = Server::at(&host, root(), Some(&place), address);
    server.is_over();
    server.as_stock(root(), &["client"], 4, "", 0);
    let mut watch = command(&host, Accel, root());
    watch.env("POLICY_HOST", address);
    watch.arg(helper("policy/policy.py")).args(["watch", &server.port.to_string(), "60"]);
    let mut watch = Proc::spawn(host.logs(), "watch", watch);
    watch.wait_stdout("ok\n", Duration::from_secs(60));
    sh(&place, &policy.replace("PORT", &server.port.to_string()));
    watch.wait_stdout(&format!("{error}\n"), Duration::from_secs(60));
    let (stock, _) = server.client(Stock, &["client"], 3);
    let (ours, delta) = server.client(Accel, &["client"], 3);
    assert_eq!((&stock, &ours), (&vec![error.to_owned(); 3], &stock));
    // The other client is still running.
    assert!(stock_mode() || delta.get("connect_shm") == 0 && delta.get(FIRST) >= 3, "{delta}");
    sh(&place, undo);
    assert_eq!(watch.finish(Duration::from_secs(60)).success().stdout, format!("ok\n{error}\nok\nend\n"));
}

const TABLE: &str = "nft add table inet t; nft add chain inet t out '{ type filter hook output priority 0; }'";

#[test]
fn a_rule_of_netfilter_that_rejects() {
    need_hosts!();
    need!("nft");
    // The rule covers new connections only. Otherwise a connection in progress would sometimes see
    // ECONNRESET.
    let new = "tcp dport PORT tcp flags & (syn | ack) == syn";
    let reject = format!("{TABLE}; nft add rule inet t out '{new}' reject with tcp reset");
    refused_by(&reject, "nft delete table inet t", "ECONNREFUSED");
}

#[test]
fn a_rule_of_routing_that_prohibits() {
    need_hosts!();
    // The first routing rule finds local addresses, but it can be moved behind others.
    let local = "ip rule add pref 100 lookup local; ip rule del pref 0";
    let prohibit = format!("{local}; ip rule add pref 50 ipproto tcp dport PORT prohibit");
    refused_by(&prohibit, "ip rule del pref 50", "EACCES");
}

#[test]
fn a_policy_of_ipsec_that_blocks() {
    need_hosts!();
    refused_at(
        "::1",
        "ip xfrm policy add dir out dst ::1 proto tcp dport PORT action block",
        "ip xfrm policy flush",
        "EPERM",
    );
}

#[test]
fn a_loopback_device_that_is_down() {
    need_hosts!();
    refused_at("::1", "ip link set lo down", "ip link set lo up", "EADDRNOTAVAIL");
}

/// If a queueing discipline or a BPF program lets everything pass, one connection in two seconds
/// uses the kernel.
#[test]
fn disciplines_and_programs_of_the_loopback_device_are_noticed() {
    need_hosts!();
    need!("tc");
    let mut hosts = Hosts::new().expect("hosts");
    let place = hosts.add("policy").expect("a host");
    let host = Host::under_policy(&place);
    let server = Server::of(&host, root(), Some(&place));
    server.is_over();
    server.as_stock(root(), &["client"], 4, "", 0);
    for kind in ["clsact", "ingress", "root pfifo"] {
        sh(&place, &format!("tc qdisc add dev lo {kind}"));
        server.as_stock(root(), &["client"], 3, FIRST, 1);
        sh(&place, &format!("tc qdisc del dev lo {}", kind.split(' ').next().expect("a word")));
    }
    for kind in ["xdp", "tcx", "netfilter"] {
        match bpf(&host, server.port, kind) {
            Some(_attached) => server.as_stock(root(), &["client"], 3, FIRST, 1),
            None => eprintln!("SKIPPED: {kind}: this kernel has no such programs"),
        }
    }
    server.as_stock(root(), &["client"], 4, "", 0);
}

/// Programs of another network namespace must not matter.
#[test]
fn programs_of_netfilter_elsewhere_do_not_matter() {
    need_hosts!();
    let mut hosts = Hosts::new().expect("hosts");
    let place = hosts.add("policy").expect("a host");
    let elsewhere = Host::without_monitor(&hosts.add("elsewhere").expect("a host"));
    let host = Host::under_policy(&place);
    let server = Server::of(&host, root(), Some(&place));
    let Some(_attached) = bpf(&elsewhere, server.port, "netfilter") else {
        return eprintln!("SKIPPED: this kernel has no such programs");
    };
    server.is_over();
    server.as_stock(root(), &["client"], 4, "", 0);
}

/// Attaches a BPF program at a place for policies, until the value is dropped.
fn bpf(host: &Host, port: u16, kind: &str) -> Option<Proc> {
    let mut command = command(host, Stock, root());
    command.arg(helper("bpf_policy.py")).args([kind, &port.to_string()]);
    let mut process = Proc::spawn(host.logs(), kind, command);
    process.wait_stdout("\n", Duration::from_secs(60));
    process.stdout().contains("attached").then_some(process)
}

/// A handshake does not tell which listener such a program has chosen, so no connection may use
/// shared memory.
#[test]
fn a_program_that_chooses_the_listener() {
    need_hosts!();
    let mut hosts = Hosts::new().expect("hosts");
    let place = hosts.add("policy").expect("a host");
    let host = Host::under_policy(&place);
    let server = Server::of(&host, root(), Some(&place));
    let other = Server::of(&host, root(), Some(&place));
    server.is_over();
    server.as_stock(root(), &["client"], 4, "", 0);
    let _attached = bpf(&host, server.port, "sk_lookup").expect("sk_lookup");
    let (stock, _) = server.client(Stock, &["client"], 3);
    let (ours, delta) = server.client(Accel, &["client"], 3);
    assert_eq!((&stock, &ours), (&vec!["ECONNREFUSED".to_owned(); 3], &stock));
    // The kernel's answer to the question which listener it would choose may also be counted.
    let left = delta.get("fallback.policy") + delta.get("fallback.no_listener");
    assert!(stock_mode() || left == 3 && delta.get("connect_shm") == 0, "{delta}");
    // The program lets other ports pass, but only the kernel can know that.
    other.as_stock(root(), &["client"], 0, "fallback.policy", 3);
}

/// If the kernel has allowed a plain connection, that proves nothing for a socket with a mark,
/// with another user, …
#[test]
fn rules_tell_sockets_by_what_they_are_and_who_has_made_them() {
    need_hosts!();
    need!("nft");
    let mut hosts = Hosts::new().expect("hosts");
    let place = hosts.add("policy").expect("a host");
    let host = Host::under_policy(&place);
    let port = place.within(net::free_port).to_string();
    let Some(delta) = fsocket_e2e::same_transcripts(&host, 60, "policy_attributes.py", &[&port]) else { return };
    // Each of 13 kinds has four plain connections (the first one uses the kernel), three special
    // ones, and one more.
    let (shm, kernel) = (delta.get("connect_shm"), delta.get("connect_kernel"));
    assert!(shm >= 13 * 2 && kernel >= 13 * 4 && shm + kernel == 4 + 13 * 8, "{delta}");
}

/// A redirected connection must reach the server of the redirection, not the listener of the
/// address. A rule that does not concern a connection costs one kernel connection in five seconds.
#[test]
fn a_rule_of_netfilter_that_redirects_and_one_that_does_not_matter() {
    need_hosts!();
    need!("nft");
    let mut hosts = Hosts::new().expect("hosts");
    let place = hosts.add("policy").expect("a host");
    let host = Host::under_policy(&place);
    let server = Server::of(&host, root(), Some(&place));
    sh(&place, TABLE);
    server.as_stock(root(), &["client"], 4, FIRST, 1);
    let other = Server::of(&host, root(), Some(&place));
    sh(
        &place,
        &format!(
            "nft add chain inet t nat '{{ type nat hook output priority -100; }}'; \
             nft add rule inet t nat tcp dport {} redirect to :{}",
            server.port, other.port
        ),
    );
    let (ours, delta) = server.client(Accel, &["client"], 4);
    assert_eq!(ours, ["ok"; 4]);
    assert!(stock_mode() || delta.get("connect_shm") == 0 && delta.get("fallback.policy") == 3, "{delta}");
}

#[test]
fn users_share_memory_if_the_administrator_names_them() {
    need_hosts!();
    const OTHER: &str = "fallback.other_user";
    let host = Host::for_all_users(&format!("share = [[{BOB}, {}]]\n", root()));
    let server = Server::of(&host, ALICE, None);
    server.as_stock(ALICE, &["client"], 4, "", 0);
    server.as_stock(BOB, &["client"], 0, OTHER, 4);
    server.as_stock(root(), &["client"], 0, OTHER, 4);
    let roots = Server::of(&host, root(), None);
    roots.as_stock(BOB, &["client"], 4, "", 0);
    roots.as_stock(ALICE, &["client"], 0, OTHER, 4);
}

/// A client has a channel to a listener that the server then closes without the library's
/// knowledge.
#[track_caller]
fn closed_in_secret(host: &Host, place: Option<&NetHost>) {
    let port = place.map_or_else(net::free_port, |place| place.within(net::free_port));
    let before = host.snapshot();
    let mut command = command(host, Accel, root());
    if let Some(place) = place {
        place.place(&mut command);
    }
    command.arg(helper("policy/secret_close.py")).arg(port.to_string());
    let done = Proc::spawn(host.logs(), "secret", command).finish(Duration::from_secs(60)).success();
    let want = ["first", "first", "first", "first", "ECONNREFUSED", "second", "second", "second", "end"];
    assert_eq!(done.stdout.lines().collect::<Vec<_>>(), want);
    if !stock_mode() {
        let since = host.snapshot().since(&before);
        // The first connection may come before any process has waited at the listener.
        assert!((3..=4).contains(&since.get("connect_shm")), "{since}");
    }
}

#[test]
fn a_listener_that_is_closed_in_secret_gets_no_further_connection() {
    need_hosts!();
    closed_in_secret(&Host::for_all_users(""), None);
}

#[test]
fn nor_does_one_in_another_network_namespace() {
    need_hosts!();
    let mut hosts = Hosts::new().expect("hosts");
    let place = hosts.add("elsewhere").expect("a host");
    closed_in_secret(&Host::for_all_users(""), Some(&place));
}

#[test]
fn rules_are_for_users_ports_and_executables() {
    need_hosts!();
    const DENIED: &str = "fallback.policy";
    let exe = Path::new(PYTHON).canonicalize().expect("python");
    let port = net::free_port();
    let host = Host::for_all_users(&format!(
        "share = [[{ALICE}, {BOB}, {}]]\n\
         [[rule]]\naction = \"allow\"\nclient_user = {ALICE}\naddress = \"127.0.0.0/8\"\n\
         [[rule]]\naction = \"deny\"\nclient_user = {BOB}\nport = \"{port}-65535\"\nclient_exe = {exe:?}\n\
         [[rule]]\naction = \"deny\"\nclient_user = {BOB}\nclient_exe = {exe:?}\n\
         [[rule]]\naction = \"kernel-first\"\nserver_user = {}\n",
        root(),
        root()
    ));
    let server = Server::of(&host, root(), None);
    server.as_stock(ALICE, &["client"], 4, "", 0);
    server.as_stock(BOB, &["client"], 0, DENIED, 4);
    server.as_stock(root(), &["client"], 3, FIRST, 1);
}

#[test]
fn a_configuration_that_cannot_be_understood_starts_nothing() {
    let host = Host::new();
    let check = |text: &str, args: &[&str]| {
        let file = host.file("bad.toml", text);
        let mut command = Command::new(artifacts::monitor());
        command.arg("--config").arg(file).args(args).arg("--socket").arg(host.path().join("none/monitor.sock"));
        let done = Proc::spawn(host.logs(), "check", command).finish(Duration::from_secs(60));
        assert!(!host.path().join("none").exists());
        (done.code, done.stderr)
    };
    let bad = "share = [[\"root\", 1]]\n\n[[rule]]\naction = \"deny\"\nclient_user = \"no-such-user\"\n";
    for args in [&["--check"][..], &[], &["--private"]] {
        let (code, text) = check(bad, args);
        assert_eq!(code, Some(125), "{text}");
        assert!(text.contains("bad.toml:5: unknown user 'no-such-user'"), "{text}");
    }
    assert_eq!(check(&bad.replace("no-such-user", "root"), &["--check"]), (Some(0), String::new()));
}

/// A user without a name, for this process only: the directory in /tmp has the number in its name.
fn carol() -> u32 {
    const FIRST: u32 = 1 << 30;
    FIRST + std::process::id()
}

/// Without a runtime directory, all programs of a user meet in a directory in /tmp. If another
/// user made that directory before, the programs must stay on stock sockets, and one line must say
/// so.
#[test]
fn programs_of_a_user_without_a_runtime_directory_meet() {
    need_hosts!();
    let host = Host::stopped();
    let carol = carol();
    let usual = std::path::PathBuf::from(format!("/tmp/fastsocket-{carol}"));
    let _ = std::fs::remove_dir_all(&usual);
    let _usual = RemovedAtEnd(&usual);
    let own = |words: &[&str], set_up: &dyn Fn(&mut Command)| {
        let mut command = Command::new(artifacts::cli());
        command.args(words).env_clear().env("PATH", "/usr/bin:/bin").uid(carol).gid(carol).current_dir("/");
        command.env("FASTSOCKET_LIBRARY", artifacts::library()).env("FASTSOCKET_MONITOR", artifacts::monitor());
        // All programs of tests have this setting, because a busy machine answers late.
        command.env("FASTSOCKET_PATIENCE", "20000");
        set_up(&mut command);
        Proc::spawn(host.logs(), "run", command)
    };
    let nothing = |_: &mut Command| ();
    let where_is = ["run", "sh", "-c", "echo $FASTSOCKET_SOCKET; ls -ld ${FASTSOCKET_SOCKET%/*}"];
    let run = |set_up: &dyn Fn(&mut Command)| {
        let done = own(&where_is, set_up).finish(Duration::from_secs(60)).success();
        (done.stdout, done.stderr)
    };
    // Another user owns the directory.
    std::fs::create_dir(&usual).expect("a trap");
    let (out, err) = run(&nothing);
    assert!(out.starts_with('\n') && err.contains("that belongs to this user; sh runs on stock sockets"), "{out}{err}");
    assert_eq!(err.lines().count(), 1, "{out}{err}");
    std::fs::remove_dir(&usual).expect("removed");
    // Two programs that have no common parent and no setting in common.
    let server =
        "import socket, sys; l = socket.create_server(('127.0.0.1', int(sys.argv[1]))); print('ok', flush=True)\n\
                  c, _ = l.accept(); c.sendall(c.recv(9)); c.recv(1)";
    let client =
        "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); s.sendall(b'ok')\n\
                  print(s.recv(9).decode())";
    let port = net::free_port().to_string();
    let mut server = own(&["run", "--", PYTHON, "-c", server, &port], &nothing);
    server.wait_stdout("ok", Duration::from_secs(60));
    let client = own(&["run", "--summary", "--", PYTHON, "-c", client, &port], &nothing);
    let client = client.finish(Duration::from_secs(60)).success();
    assert_eq!(client.stdout, "ok\n");
    assert!(client.stderr.contains("1 connections over shared memory"), "they have not met: {}", client.stderr);
    server.finish(Duration::from_secs(60)).success();
    let (out, err) = run(&nothing);
    let there = format!("{}/monitor.sock\n", usual.display());
    assert!(out.starts_with(&there) && out.contains("drwx------") && err.is_empty(), "{out}{err}");
    // A runtime directory is used only if it belongs to the user.
    let runtime = host.path().join("runtime");
    std::fs::create_dir(&runtime).expect("directory");
    let named = |c: &mut Command| {
        c.env("XDG_RUNTIME_DIR", &runtime);
    };
    assert!(run(&named).0.starts_with(&there));
    std::os::unix::fs::chown(&runtime, Some(carol), Some(carol)).expect("chown");
    std::fs::set_permissions(&runtime, std::os::unix::fs::PermissionsExt::from_mode(0o700)).expect("mode");
    let (out, err) = run(&named);
    assert!(out.starts_with(&runtime.join("fastsocket/monitor.sock").display().to_string()), "{out}{err}");
}

struct RemovedAtEnd<'a>(&'a Path);

impl Drop for RemovedAtEnd<'_> {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.0);
    }
}
