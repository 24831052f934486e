//! Receive Flow Deliver with real programs: for every request, haproxy in the middle host opens a
//! connection to the backend host. The packets of this connection must be handled on the CPU of
//! the thread that opened it.
//!
//! Long: tests of one subject on one fixture.

use fsocket_e2e as e2e;
use fsocket_e2e::need_steering;
use fsocket_testkit::host::{Accel, Side, Stock};
use fsocket_testkit::netns::{Chain, Receive};
use fsocket_testkit::{artifacts, need, net, Finished, Host, Proc};
use std::path::PathBuf;
use std::time::Duration;

const REQUESTS: usize = 2000;

/// Runs the command line in the middle host, with this host's monitor.
fn cli(host: &Host, name: &str, args: &[&str]) -> Proc {
    let mut command = host.command(Stock, artifacts::cli());
    command.args(args).env("FASTSOCKET_SOCKET", host.socket());
    Proc::spawn(host.logs(), name, command)
}

fn steer(host: &Host, args: &[&str]) -> Finished {
    cli(host, "steer", &[&["steer"], args].concat()).finish(Duration::from_secs(60))
}

/// Starts nginx without the library in the backend host: at port 80 over IPv4, at 8080 over IPv6.
fn backend(host: &Host, chain: &Chain, nginx: PathBuf) -> Proc {
    let (v4, v6) = (chain.backend_address(), chain.backend.interfaces[0].v6);
    let dir = host.path().join("backend");
    host.file("backend/www/1000", e2e::noise(1, 1000));
    let config = host.file(
        "backend/nginx.conf",
        format!(
            "daemon off;\nuser root;\nworker_processes 2;\npid {0}/pid;\nerror_log {0}/error.log;\n\
             events {{ worker_connections 1024; }}\nhttp {{ access_log off;\n\
             client_body_temp_path {0}/body; proxy_temp_path {0}/proxy; fastcgi_temp_path {0}/fcgi;\n\
             uwsgi_temp_path {0}/uwsgi; scgi_temp_path {0}/scgi;\n\
             server {{ listen {v4}:80 backlog=4096; listen {v4}:81; listen {v4}:82; listen [{v6}]:8080 backlog=4096; root {0}/www; }} }}\n",
            dir.display()
        ),
    );
    let mut command = std::process::Command::new(nginx);
    command.arg("-p").arg(&dir).arg("-c").arg(config).env_remove("LD_PRELOAD");
    chain.backend.place(&mut command);
    let proc = Proc::spawn(host.logs(), "backend", command);
    net::wait_until(Duration::from_secs(60), || chain.backend.within(|| net::kernel_sockets(80, "0A")) > 0)
        .expect("nginx listens in the backend host");
    proc
}

/// Starts haproxy with one thread per CPU; it makes a new connection to `server` for each request.
fn haproxy(side: Side, host: &Host, chain: &Chain, program: PathBuf, server: &str) -> Proc {
    let front = chain.middle_front();
    let config = host.file(
        "haproxy.cfg",
        format!(
            "global\n  maxconn 1000\n  nbthread 2\n  cpu-map auto:1/1-2 0-1\ndefaults\n  mode http\n  \
             timeout connect 5s\n  timeout client 20s\n  timeout server 20s\n  option http-server-close\n  \
             http-reuse never\nfrontend f\n  bind {front}:8000\n  default_backend b\nbackend b\n  server s1 {server}\n"
        ),
    );
    host.server(side, "haproxy", 8000, program, &["-db", "-f", &config.display().to_string()])
}

/// Makes requests from the client host to port 8000 of the middle host, each on its own
/// connection, and measures meanwhile. Of the connections of `program` with this `kind`, returns
/// the packets handled on the CPU where the program uses them, and the others.
fn load(host: &Host, chain: &Chain, ab: &PathBuf, program: &str, kind: &str) -> (u64, u64) {
    let measuring = cli(host, "locality", &["stat", "--locality", "60", "--json"]);
    net::wait_until(Duration::from_secs(60), || measuring.stderr().contains("measuring")).expect("it measures");
    let mut command = std::process::Command::new(ab);
    let url = format!("http://{}:8000/1000", chain.middle_front());
    command.args(["-q", "-n", &REQUESTS.to_string(), "-c", "8", &url]);
    chain.client.place(&mut command);
    let done = Proc::spawn(host.logs(), "ab", command).finish(Duration::from_secs(60)).success();
    e2e::ab_clean(&done.stdout);
    assert_eq!(e2e::ab_number(&done.stdout, "HTML transferred:"), REQUESTS as u64 * 1000);
    measuring.signal(libc::SIGINT);
    let report = measuring.finish(Duration::from_secs(60)).success().stdout;
    let report: serde_json::Value = serde_json::from_str(&report).expect("JSON");
    let processes = report["processes"].as_array().expect("processes");
    // Leave out nginx of the backend host, which has the same name.
    let own: Vec<_> = processes.iter().filter(|p| p["program"] == program && !stranger(chain, p)).collect();
    assert!(!own.is_empty(), "{program} is not in {report}");
    let sum = |name: &str| own.iter().map(|p| p[kind][name].as_u64().expect("a number")).sum();
    (sum("local"), sum("remote"))
}

/// As `load`, but asserts that packets were handled where they are used. (If a CPU is taken away from this machine for
/// some time, the other one takes a few connections over.)
fn all_local(host: &Host, chain: &Chain, ab: &PathBuf, program: &str, kind: &str) {
    let (local, remote) = load(host, chain, ab, program, kind);
    println!("{program}: {local} packets local, {remote} elsewhere");
    // Each request has an answer packet, the end of the connection, and ACKs.
    assert!(local >= 2 * REQUESTS as u64, "{local} packets");
    assert!(remote * 100 <= local, "{remote} beside {local} local packets");
}

/// Whether this process runs in another host than the middle one.
fn stranger(chain: &Chain, process: &serde_json::Value) -> bool {
    let theirs = std::fs::read_link(format!("/proc/{}/ns/net", process["pid"]));
    let ours = chain.middle.within(|| std::fs::read_link("/proc/thread-self/ns/net"));
    theirs.ok() != ours.ok()
}

/// nginx in the middle host, at port 8000, with a worker pinned to each CPU.
fn front(side: Side, host: &Host, chain: &Chain, nginx: &PathBuf) -> Proc {
    let dir = host.path().join(format!("front-{side:?}"));
    std::fs::create_dir_all(dir.join("www")).expect("directory");
    std::fs::write(dir.join("www/1000"), e2e::noise(1, 1000)).expect("file");
    let config = format!(
        "daemon off;\nuser root;\nworker_processes 2;\nworker_cpu_affinity 01 10;\npid {0}/pid;\n\
         error_log {0}/error.log;\nevents {{ worker_connections 1024; }}\nhttp {{ access_log off;\n\
         client_body_temp_path {0}/body; proxy_temp_path {0}/proxy; fastcgi_temp_path {0}/fcgi;\n\
         uwsgi_temp_path {0}/uwsgi; scgi_temp_path {0}/scgi;\n\
         server {{ listen {1}:8000 backlog=4096; root {0}/www; }} }}\n",
        dir.display(),
        chain.middle_front()
    );
    std::fs::write(dir.join("conf"), config).expect("file");
    let (dir, config) = (dir.display().to_string(), dir.join("conf").display().to_string());
    host.server(side, "front", 8000, nginx, &["-p", &dir, "-c", &config])
}

/// `net.ipv4.NAME` of the middle host.
fn sysctl(chain: &Chain, name: &str, value: &str) {
    let script = format!("echo '{value}' > /proc/sys/net/ipv4/{name}");
    chain.middle.inside("sh", &["-c", &script]).expect("sysctl");
}

#[test]
fn ports_come_from_the_cpus_slice_unless_the_application_says_otherwise() {
    need_steering!();
    let (nginx, python) = (need!("nginx"), need!("python3"));
    let chain = Chain::new(2, &Receive::Inline).expect("hosts");
    let host = Host::on(&chain.middle);
    let _backend = backend(&host, &chain, nginx);
    let address = chain.backend_address().to_string();
    let app = fsocket_testkit::helper("steering/slices.py").display().to_string();
    // Two slices of 32 ports. The first one lacks 10 reserved ports.
    sysctl(&chain, "ip_local_port_range", "40000 40063");
    sysctl(&chain, "ip_local_reserved_ports", "40000-40009");
    steer(&host, &[&chain.middle.interfaces[1].device]).success().says("40000-40031").says("40032-40063");
    // Each CPU connects to a port of its own. Otherwise connections of the first CPU in TIME_WAIT
    // would block ports of the second. The application's own range lies in the second slice.
    for (cpu, slice, free, to) in [("0", 40000..=40031, 22, "80"), ("1", 40032..=40063, 31, "81")] {
        let before = host.snapshot();
        // The first connections use three ports of the slice. More connections then empty the
        // slice, and the last four use any free port.
        let count = free - 3 + 4;
        let done = host.run(Accel, "slices", 60, &python, &[&app, cpu, &address, to, &count.to_string()]).success();
        let ports: serde_json::Value = serde_json::from_str(&done.stdout).expect("JSON");
        let port = |name: &str| ports[name].as_u64().expect(name);
        assert_eq!(port("bound"), 29999, "{ports}");
        assert!(
            (30000..=30099).contains(&port("own_range")) || (40010..=40063).contains(&port("own_range")),
            "{ports}"
        );
        for name in ["late_port", "option", "nonblocking"] {
            assert!(slice.contains(&port(name)), "{name}: {ports}");
        }
        let plain: Vec<u64> = ports["plain"].as_array().expect("ports").iter().map(|p| p.as_u64().unwrap()).collect();
        let (first, rest) = plain.split_at(free - 3);
        assert!(first.iter().all(|p| slice.contains(p)), "CPU {cpu}: {ports}");
        assert!(plain.iter().all(|p| (40010..=40063).contains(p)), "reserved ports stay free: {ports}");
        assert!(rest.iter().all(|p| !slice.contains(p)), "CPU {cpu}: a full slice: {ports}");
        let delta = host.snapshot().since(&before);
        // Not counted: the bound connection, the one with its own range, and the one on loopback.
        assert_eq!(delta.get("connect_slice"), 3 + count as i128, "{ports}");
        assert_eq!((delta.get("slice_full"), delta.get("slice_refused")), (4, 0), "{ports}");
    }
    // The result must be the same if shared memory is switched off.
    let before = host.snapshot();
    let mut command = host.command(Accel, &python);
    command.args([&app, "1", &address, "82", "5"]).env("FASTSOCKET_DISABLE", "shm");
    let done = Proc::spawn(host.logs(), "slices", command).finish(Duration::from_secs(60)).success();
    let ports: serde_json::Value = serde_json::from_str(&done.stdout).expect("JSON");
    let own = |port: &serde_json::Value| (40032..=40063).contains(&port.as_u64().expect("a port"));
    assert!(ports["plain"].as_array().expect("ports").iter().all(own), "{ports}");
    assert!(own(&ports["late_port"]) && ports["bound"] == 29999, "{ports}");
    assert_eq!(host.snapshot().since(&before).get("connect_slice"), 3 + 5, "{ports}");
    // Without steering there are no slices.
    steer(&host, &[&chain.middle.interfaces[1].device, "--off"]).success();
    let before = host.snapshot();
    host.run(Accel, "slices", 60, &python, &[&app, "0", &address, "80", "1"]).success();
    assert_eq!(host.snapshot().since(&before).get("connect_slice"), 0);
}

/// The output of `ip` for a device of the middle host.
fn shown(chain: &Chain, device: &str) -> String {
    let mut ip = std::process::Command::new("ip");
    ip.args(["-d", "link", "show", "dev", device]);
    chain.middle.place(&mut ip);
    String::from_utf8(ip.output().expect("ip").stdout).expect("text")
}

#[test]
fn bad_input_is_told_and_leaves_nothing() {
    need_steering!();
    let chain = Chain::new(2, &Receive::Inline).expect("hosts");
    let mut host = Host::on(&chain.middle);
    let device = chain.middle.interfaces[1].device.clone();
    let refused = |host: &Host, args: &[&str], why: &str| {
        let done = steer(host, args);
        assert_ne!(done.code, Some(0), "{args:?} was taken: {}", done.stdout);
        assert!(done.stderr.contains(why), "{args:?}: {:?} instead of {why:?}", done.stderr);
        assert!(!shown(&chain, &device).contains("xdp"));
    };
    refused(&host, &["nosuch0"], "no device nosuch0 in this network namespace");
    refused(&host, &[&device, "--policy", "nonsense"], "policy nonsense: not rfd");
    refused(&host, &[&device, "--policy", "/etc/hostname"], "the kernel refused to load it");
    refused(&host, &[&device, "--cpus", "3-1"], "'3-1' is not a set of CPUs");
    refused(&host, &[&device, "--cpus", "4000"], "map cpus");
    refused(&host, &[&device, "--off"], "is not steered");

    // A second policy replaces the first one. The status must tell when a device is gone.
    steer(&host, &[&device]).success().says("rfd by XDP");
    steer(&host, &[&device, "--policy", "flow-groups", "--mode", "generic"])
        .success()
        .says("flow-groups by XDP generic");
    chain.middle.inside("ip", &["link", "del", &device]).expect("ip link del");
    // The kernel announces the end of the device, so the status shows it as gone, or not at all.
    let status = steer(&host, &[]).success().stdout;
    assert!(status.contains("GONE") || status.contains("no device of this network namespace is steered"), "{status}");
    steer(&host, &[]).success().says("no device of this network namespace is steered");

    // The steering ends with the monitor, even if that is killed.
    let device = chain.middle.interfaces[0].device.clone();
    steer(&host, &[&device]).success();
    assert!(shown(&chain, &device).contains("xdp"));
    host.kill_monitor();
    net::wait_until(Duration::from_secs(60), || !shown(&chain, &device).contains("xdp")).expect("nothing is left");
    let done = steer(&host, &[&device]);
    assert!(done.code != Some(0) && done.stderr.contains("monitor"), "{}", done.stderr);
}

/// Masks and flow counts of the receive queues of a device of the middle host.
fn rps(host: &Host, chain: &Chain, device: &str) -> String {
    let out = host.file("rps", "");
    let script = format!("cat /sys/class/net/{device}/queues/rx-*/rps_* > {}", out.display());
    chain.middle.inside("sh", &["-c", &script]).expect("queues");
    std::fs::read_to_string(out).expect("text")
}

/// The size of the flow table for RFS. There is one table for all network namespaces, which can be
/// set in the first one only. Dropping this value restores the size.
struct FlowTable(String);
impl FlowTable {
    const FILE: &str = "/proc/sys/net/core/rps_sock_flow_entries";
    fn set() -> FlowTable {
        let before = std::fs::read_to_string(Self::FILE).expect("RFS");
        std::fs::write(Self::FILE, "32768").expect("root");
        FlowTable(before)
    }
}
impl Drop for FlowTable {
    fn drop(&mut self) {
        std::fs::write(Self::FILE, &self.0).expect("root");
    }
}

/// `stat --locality` attaches a BPF program to the root of all cgroups. Every monitor that looks for policies finds it
/// there, and asks the kernel first. And the flow table is one for the whole machine, and can be set from the first
/// network namespace only.
mod alone {
    use super::*;

    #[test]
    fn haproxy_to_a_backend_host_is_local_with_steering() {
        need_steering!();
        let (nginx, program, ab) = (need!("nginx"), need!("haproxy"), need!("ab"));
        let chain = Chain::new(2, &Receive::Threads(vec![0, 1])).expect("hosts");
        let host = Host::on(&chain.middle);
        let _backend = backend(&host, &chain, nginx);
        let device = chain.middle.interfaces[1].device.clone();
        let servers = [format!("{}:80", chain.backend_address()), format!("[{}]:8080", chain.backend.interfaces[0].v6)];
        for server in &servers {
            let proxy = haproxy(Accel, &host, &chain, program.clone(), server);

            // Without steering, half of the packets reach the wrong CPU.
            let before = host.snapshot();
            let (local, remote) = load(&host, &chain, &ab, "haproxy", "active");
            println!("{server}: not steered: {local} packets local, {remote} elsewhere");
            assert!(remote * 4 > local, "the network does not spread flows: {local} local, {remote} elsewhere");
            assert_eq!(host.snapshot().since(&before).get("connect_slice"), 0, "no slices without steering");

            steer(&host, &[&device]).success().says("rfd by XDP native").says("SOURCE PORTS").says("16384-32767");
            let before = host.snapshot();
            all_local(&host, &chain, &ab, "haproxy", "active");
            let delta = host.snapshot().since(&before);
            assert_eq!((delta.get("connect_slice"), delta.get("slice_full")), (REQUESTS as i128, 0));

            let status = steer(&host, &["--json"]).success().stdout;
            let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
            let packets = &status["devices"][0]["packets"];
            let count =
                |name: &str| packets[name].as_array().expect(name).iter().map(|n| n.as_u64().unwrap()).sum::<u64>();
            assert!(count("to_self") > 0 && count("to_other") > 0, "{status}");
            assert_eq!(count("no_cpu") + count("queue_full"), 0, "{status}");

            steer(&host, &[&device, "--off"]).success().says("no device");
            assert!(!shown(&chain, &device).contains("xdp"), "{}", shown(&chain, &device));
            drop(proxy);
        }
    }

    /// By a table instead of slices, steering also works for programs without the library.
    #[test]
    fn haproxy_without_the_library_is_local_with_connect_cpu() {
        need_steering!();
        let (nginx, program, ab) = (need!("nginx"), need!("haproxy"), need!("ab"));
        let chain = Chain::new(2, &Receive::Threads(vec![0, 1])).expect("hosts");
        let host = Host::on(&chain.middle);
        let _backend = backend(&host, &chain, nginx);
        let device = chain.middle.interfaces[1].device.clone();
        let _proxy = haproxy(Stock, &host, &chain, program, &format!("{}:80", chain.backend_address()));
        steer(&host, &[&device, "--policy", "connect-cpu"]).success().says("connect-cpu by XDP native");
        all_local(&host, &chain, &ab, "haproxy", "active");
    }

    #[test]
    fn rfd_goes_by_the_table_where_the_kernel_has_no_port_ranges() {
        need_steering!();
        let (nginx, program, ab, _cc) = (need!("nginx"), need!("haproxy"), need!("ab"), need!("cc"));
        let chain = Chain::new(2, &Receive::Threads(vec![0, 1])).expect("hosts");
        let mut host = Host::without_monitor(&chain.middle);
        let older = host.path().join("no_port_ranges.so");
        fsocket_testkit::compile("steering/no_port_ranges.c", &older, &["-shared", "-fPIC"]);
        host.start_monitor_with(|command| {
            command.env("LD_PRELOAD", &older);
        });
        let _backend = backend(&host, &chain, nginx);
        let device = chain.middle.interfaces[1].device.clone();
        let _proxy = haproxy(Accel, &host, &chain, program, &format!("{}:80", chain.backend_address()));
        let why = "gives a socket no range of ports, so there are no slices";
        steer(&host, &[&device]).success().says("rfd by XDP native").says(why).says("connect-cpu instead");
        let before = host.snapshot();
        all_local(&host, &chain, &ab, "haproxy", "active");
        let delta = host.snapshot().since(&before);
        assert_eq!((delta.get("connect_slice"), delta.get("slice_refused")), (0, 0), "{delta}");
        let refused = steer(&host, &[&device, "--mode", "ntuple"]);
        assert_ne!(refused.code, Some(0), "{}", refused.stdout);
        assert!(refused.stderr.contains(why), "{}", refused.stderr);
    }

    #[test]
    fn nginx_on_two_queues_is_local() {
        need_steering!();
        let (nginx, ab) = (need!("nginx"), need!("ab"));
        let chain = Chain::new(2, &Receive::Threads(vec![0, 1])).expect("hosts");
        // On a machine that does other work, too, a worker may be away for longer than the balance
        // has patience, and what another one takes is not local.
        let host = Host::configured(Some(&chain.middle), "[balance]\nenabled = false\n");
        let stock = front(Stock, &host, &chain, &nginx);
        let (local, remote) = load(&host, &chain, &ab, "nginx", "passive");
        println!("stock: {local} packets local, {remote} elsewhere");
        assert!(remote * 4 > local, "the network does not spread flows: {local} local, {remote} elsewhere");
        drop(stock);
        let ours = front(Accel, &host, &chain, &nginx);
        // After this time, both are known as workers.
        std::thread::sleep(Duration::from_millis(200));
        all_local(&host, &chain, &ab, "nginx", "passive");
        drop(ours);
    }

    #[test]
    fn without_xdp_the_kernel_follows_the_application() {
        need_steering!();
        let (nginx, program, ab) = (need!("nginx"), need!("haproxy"), need!("ab"));
        let chain = Chain::new(2, &Receive::Threads(vec![0, 1])).expect("hosts");
        let mut host = Host::on(&chain.middle);
        let _backend = backend(&host, &chain, nginx);
        let device = chain.middle.interfaces[1].device.clone();
        let before = rps(&host, &chain, &device);
        // Another monitor's program is attached to the device, and the device has no filters.
        let other = Host::on(&chain.middle);
        steer(&other, &[&device]).success().says("by XDP native").says("the device has no filters");
        steer(&host, &[&device])
            .success()
            .says("rfd by RPS")
            .says("rules in the card")
            .says("another XDP program is attached already");
        assert_ne!(rps(&host, &chain, &device), before);
        steer(&host, &[&device, "--off"]).success();
        steer(&other, &[&device, "--off"]).success();
        assert_eq!(rps(&host, &chain, &device), before);

        let proxy = haproxy(Accel, &host, &chain, program, &format!("{}:80", chain.backend_address()));
        let (local, remote) = load(&host, &chain, &ab, "haproxy", "active");
        println!("not steered: {local} packets local, {remote} elsewhere");
        steer(&host, &[&device, "--mode", "rps"]).success().says("by RPS");
        let _table = FlowTable::set();
        let (local_rps, remote_rps) = load(&host, &chain, &ab, "haproxy", "active");
        println!("RPS: {local_rps} packets local, {remote_rps} elsewhere");
        // RFS uses a table of hashes that is updated when the application reads or writes, so some
        // packets go elsewhere.
        assert!(remote_rps * 20 < local_rps, "{local_rps} local, {remote_rps} elsewhere");
        drop(proxy);

        // A killed monitor leaves the masks changed; the next monitor must restore them.
        host.kill_monitor();
        assert_ne!(rps(&host, &chain, &device), before);
        host.start_monitor();
        assert_eq!(rps(&host, &chain, &device), before);
        steer(&host, &[]).success().says("no device of this network namespace is steered");
        for (args, why) in [
            (&["--mode", "ntuple"][..], "the device has no filters"),
            (&["--mode", "ntuple", "--policy", "recv-cpu"], "cannot do policy recv-cpu"),
            (&["--mode", "rps", "--policy", "/etc/hostname"], "cannot do policy /etc/hostname"),
        ] {
            let done = steer(&host, &[&[device.as_str()], args].concat());
            assert!(done.code != Some(0) && done.stderr.contains(why), "{args:?}: {}", done.stderr);
        }
        // The device disappears while it is steered.
        steer(&host, &[&device, "--mode", "rps"]).success();
        chain.middle.inside("ip", &["link", "del", &device]).expect("ip link del");
        let status = steer(&host, &[]).success().stdout;
        assert!(
            status.contains("GONE") || status.contains("no device of this network namespace is steered"),
            "{status}"
        );
    }
}

#[test]
fn a_restarted_monitor_steers_again() {
    need_steering!();
    let chain = Chain::new(2, &Receive::Inline).expect("hosts");
    let mut host = Host::keeping_on(&chain.middle);
    let [first, second] = [0, 1].map(|i| chain.middle.interfaces[i].device.clone());
    steer(&host, &[&first]).success().says("rfd by XDP");
    steer(&host, &[&second, "--mode", "rps"]).success().says("by RPS");
    host.kill_monitor();
    host.start_monitor();
    let status = steer(&host, &[]).success().stdout;
    assert!(status.contains(&format!("{first}: rfd by XDP")), "{status}");
    assert!(status.contains(&format!("{second}: rfd by RPS")), "{status}");
    steer(&host, &[&first, "--off"]).success();
    host.kill_monitor();
    host.start_monitor();
    let status = steer(&host, &[]).success().stdout;
    assert!(!status.contains(&first) && status.contains(&second), "{status}");
    steer(&host, &[&second, "--off"]).success();
}
