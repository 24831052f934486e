//! The programs: ten pairs of a server and a client. The client reports whether every byte was
//! right.

use fsocket_e2e as e2e;
use fsocket_testkit::host::Accel;
use fsocket_testkit::{find_program, helper, net, Host, PYTHON};
use std::path::PathBuf;
use std::process::Command;

/// The programs of a pair. Each fault starts them again.
pub struct Pair {
    pub name: &'static str,
    pub port: u16,
    server: Vec<String>,
    client: Vec<String>,
    /// The command and port of a program that the server needs, which is started once.
    pub behind: Option<(Vec<String>, u16)>,
    /// Files to which the server writes errors, besides its output.
    pub logs: Vec<PathBuf>,
    /// Messages for a failed call that do not name the error. The number is the call, or 0 for any
    /// call.
    pub refusals: &'static [(i64, &'static str)],
}

/// The names of all pairs, with the programs that must be installed.
pub const NAMES: &[(&str, &[&str])] = &[
    ("echo-c", &["cc"]),
    ("echo-epoll", &[]),
    ("echo-poll", &[]),
    ("echo-threads", &[]),
    ("echo-fork", &[]),
    ("nginx", &["nginx", "curl"]),
    ("redis", &["redis-server", "redis-cli"]),
    ("memcached", &["memcached"]),
    ("node", &["node"]),
    ("haproxy", &["haproxy", "nginx", "curl"]),
];

/// The pair of this name, with its files in the host's directory. Returns `None` if a program is
/// missing.
pub fn make(name: &str, host: &Host) -> Option<Pair> {
    let known = NAMES.iter().find(|n| n.0 == name)?;
    if known.1.iter().any(|program| find_program(program).is_none()) {
        return None;
    }
    let port = net::free_port();
    let p = port.to_string();
    let script = |s: &str| helper(s).display().to_string();
    let python = |file: &str, args: &[&str]| {
        let head = [PYTHON.to_owned(), script(file)];
        head.into_iter().chain(args.iter().map(|a| (*a).to_owned())).collect::<Vec<_>>()
    };
    let words = |all: &[&str]| all.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>();
    let path = |program: &str| find_program(program).map(|p| p.display().to_string()).unwrap_or_default();
    let asks = |kind: &str| python("echo_client.py", &[kind, &p, "--connections", "2", "--bytes", "120000"]);
    let mut pair =
        Pair { name: known.0, port, server: vec![], client: vec![], behind: None, logs: vec![], refusals: &[] };
    (pair.server, pair.client) = match name {
        "echo-c" => {
            let program = e2e::native::build(host, "echo", &["echo.c"], &[]).display().to_string();
            (words(&[&program, "serve", &p, "100000"]), words(&[&program, "ask", &p, "2", "7"]))
        }
        "echo-epoll" => (python("echo_server.py", &["epoll", &p]), asks("seq")),
        "echo-poll" => (python("echo_server.py", &["poll", &p]), asks("asyncio")),
        "echo-threads" => (python("echo_server.py", &["threaded", &p]), asks("blocking")),
        "echo-fork" => (python("echo_server.py", &["fork", &p]), asks("seq")),
        "nginx" => {
            let (server, log) = nginx(host, port);
            pair.logs.push(log);
            pair.refusals = CURL;
            (server, curl(&path("curl"), port))
        }
        "redis" => {
            let server = ["--port", &p, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"];
            let commands = "for i in 1 2 3; do redis-cli -p \"$1\" eval \
                \"redis.call('set','k',string.rep('x',100000)) return redis.call('get','k')\" 0 | cksum; \
                redis-cli -p \"$1\" ping; done";
            let client = words(&["/bin/sh", "-c", commands, "sh", &p]);
            pair.refusals = &[(0, "Unrecoverable error creating TCP socket accept handler")];
            ([vec![path("redis-server")], words(&server)].concat(), client)
        }
        "memcached" => {
            let args = ["-p", &p, "-U", "0", "-l", "127.0.0.1", "-t", "2", "-u", "nobody"];
            ([vec![path("memcached")], words(&args)].concat(), python("memcached_client.py", &[&p, "4"]))
        }
        "node" => {
            let node = path("node");
            (
                words(&[&node, &script("echo_server.js"), &p]),
                words(&[&node, &script("echo_client.js"), &p, "2", "100000"]),
            )
        }
        "haproxy" => {
            let inner = net::free_port();
            pair.refusals = HAPROXY;
            pair.behind = Some((nginx(host, inner).0, inner));
            let config = host.file(
                "haproxy.cfg",
                format!(
                    "global\n  nbthread 2\n  log stderr local0\ndefaults\n  mode http\n  log global\n  \
                     timeout connect 5s\n  timeout client 20s\n  timeout server 20s\n\
                     frontend f\n  bind 127.0.0.1:{port}\n  default_backend b\n\
                     backend b\n  server s 127.0.0.1:{inner}\n"
                ),
            );
            (words(&[&path("haproxy"), "-db", "-f", &config.display().to_string()]), curl(&path("curl"), port))
        }
        _ => return None,
    };
    Some(pair)
}

/// `poll` has failed, after or during `connect`.
const CURL: &[(i64, &str)] = &[
    (libc::SYS_ppoll, "(43) A libcurl function was given a bad argument"),
    (libc::SYS_ppoll, "(7) Failed to connect"),
];

/// haproxy names no error. The message about the mode means TCP_NODELAY, and those about limits
/// mean `accept`.
const HAPROXY: &[(i64, &str)] = &[
    CURL[0],
    CURL[1],
    (libc::SYS_setsockopt, "cannot do so_reuseaddr"),
    (libc::SYS_setsockopt, "Cannot set client socket to non blocking mode"),
    (libc::SYS_socket, "reached process FD limit"),
    (libc::SYS_socket, "reached system FD limit"),
    (libc::SYS_socket, "reached system memory limit"),
];

/// Gets files of three sizes, and prints only their checksums.
fn curl(curl: &str, port: u16) -> Vec<String> {
    let get = format!(
        "set -o pipefail; for size in 1000 65536 1000000; do \
         {curl} -sS --fail --max-time 8 http://127.0.0.1:{port}/$size | cksum || exit 1; done"
    );
    vec!["/bin/bash".into(), "-c".into(), get]
}

fn nginx(host: &Host, port: u16) -> (Vec<String>, PathBuf) {
    let root = e2e::document_root(host);
    host.file("nginx/placeholder", "");
    let dir = host.path().join("nginx");
    let d = dir.display();
    let config = host.file(
        "nginx/nginx.conf",
        format!(
            "daemon off;\nworker_processes 1;\npid {d}/pid;\nerror_log {d}/error.log info;\n\
             events {{ worker_connections 64; }}\nhttp {{\n  access_log off;\n  sendfile on;\n\
             client_body_temp_path {d}/body;\n  proxy_temp_path {d}/proxy;\n  fastcgi_temp_path {d}/fastcgi;\n  \
             uwsgi_temp_path {d}/uwsgi;\n  scgi_temp_path {d}/scgi;\n  \
             server {{ listen 127.0.0.1:{port}; root {}; }}\n}}\n",
            root.display()
        ),
    );
    let program = find_program("nginx").map(|p| p.display().to_string()).unwrap_or_default();
    (vec![program, "-p".into(), d.to_string(), "-c".into(), config.display().to_string()], dir.join("error.log"))
}

impl Pair {
    fn command(host: &Host, words: &[String]) -> Command {
        let mut command = host.command(Accel, &words[0]);
        // (The library must not wait for an answer that a fault has lost.)
        command.env_remove(fsocket_proto::paths::ENV_PATIENCE);
        command.args(&words[1..]);
        command
    }

    pub fn server(&self, host: &Host) -> Command {
        Pair::command(host, &self.server)
    }

    pub fn client(&self, host: &Host) -> Command {
        Pair::command(host, &self.client)
    }

    pub fn behind(&self, host: &Host) -> Option<(Command, u16)> {
        self.behind.as_ref().map(|(words, port)| (Pair::command(host, words), *port))
    }
}
