//! The attacks in which programs of tests/apps take part, each under the library and on kernel
//! sockets.

use super::line::{Line, Rows};
use crate::victims::{cpu_of, resident, Stage, SERVERS};
use anyhow::{ensure, Context, Result};
use fsocket_testkit::{artifacts, find_program, helper, net, Proc, PYTHON};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

pub fn run(r: &Rows, dir: &Path) -> Vec<Line> {
    type Row = fn(&Rows, &Path) -> Result<Vec<Line>>;
    let all: [(u8, Row); 7] =
        [(4, moved), (5, kept), (6, bpffs), (9, attributes), (10, loopback), (11, secure), (13, teased)];
    let mut lines = Vec::new();
    for (row, what) in all.into_iter().filter(|(row, _)| r.wants(*row)) {
        let dir = dir.join(format!("row{row}"));
        let made = std::fs::create_dir_all(&dir).context("a directory");
        lines.extend(made.and_then(|()| what(r, &dir)).unwrap_or_else(|e| {
            vec![Line { wrong: vec![format!("{e:#}")], ..line(row, "the test itself", "", ["", "", ""]) }]
        }));
    }
    lines
}

fn line(row: u8, name: &str, figure: &str, [alone, attacked, stock]: [&str; 3]) -> Line {
    Line {
        row,
        name: name.into(),
        figure: figure.into(),
        alone: alone.into(),
        attacked: attacked.into(),
        stock: stock.into(),
        wrong: Vec::new(),
    }
}

/// A server of tests/apps, and a program that runs with it.
struct Pair<'a> {
    stage: &'a Stage,
    app: String,
    preloaded: bool,
}

impl Pair<'_> {
    fn start(&self, name: &str, args: &[&str]) -> Proc {
        let mut c = self.stage.command(SERVERS, PYTHON, self.preloaded);
        c.arg(&self.app).args(args);
        Proc::spawn(&self.stage.dir, name, c)
    }

    fn server(&self, port: u16, args: &[&str]) -> Result<Proc> {
        let number = port.to_string();
        let mut server = self.start("server", &[&["serve", &number], args].concat());
        net::wait_until(LIMIT, || !server.running() || net::kernel_sockets(port, "0A") > 0).ok();
        ensure!(server.running(), "the server has ended: {}", server.stderr());
        Ok(server)
    }
}

/// Row 4: a peer moves a sleeper to another futex word, and is killed.
fn moved(_: &Rows, dir: &Path) -> Result<Vec<Line>> {
    let stage = Stage::new(dir, "")?;
    let case = |how: &str| -> Result<Line> {
        let ended = |preloaded| -> Result<(String, bool)> {
            let pair = Pair { stage: &stage, app: helper("second_word.py").display().to_string(), preloaded };
            let port = net::free_port();
            let server = pair.server(port, &[how])?;
            let said = pair.start("move", &["move", &port.to_string(), &server.pid().to_string()]).finish(LIMIT).stdout;
            Ok((said.trim().to_owned(), net::wait_until(LIMIT, || server.stdout().contains("ended")).is_ok()))
        };
        let ((said, ours), (_, stock)) = (ended(true)?, ended(false)?);
        let word = |ended| if ended { "told" } else { "sleeps" };
        let name = format!("moves a sleeper in {how} ({said})");
        let mut line = line(4, &name, "told of the end", ["told", word(ours), word(stock)]);
        line.wrong.extend((!ours).then(|| "it sleeps for ever".to_owned()));
        line.wrong.extend((said == "moved 0" || said.is_empty()).then(|| "nobody was moved".to_owned()));
        Ok(line)
    };
    ["recv", "send", "poll"].into_iter().map(case).collect()
}

/// Row 13: a peer changes the futex words and wakes the sleepers.
fn teased(r: &Rows, dir: &Path) -> Result<Vec<Line>> {
    let stage = Stage::new(dir, "")?;
    let case = |how: &str| -> Result<Line> {
        let pair = Pair { stage: &stage, app: helper("second_word.py").display().to_string(), preloaded: true };
        let port = net::free_port();
        let server = pair.server(port, &[how])?;
        let pid = server.pid().to_string();
        let teasing = pair.start("tease", &["tease", &port.to_string(), &pid]);
        net::wait_until(LIMIT, || server.stdout().contains("sleeps")).map_err(anyhow::Error::msg)?;
        let before = cpu_of(server.pid());
        let said = teasing.finish(LIMIT).stdout;
        let seconds: f64 = said.trim().trim_start_matches("seconds ").parse().with_context(|| said.clone())?;
        let share = 100.0 * (cpu_of(server.pid()) - before) / seconds;
        let figure = format!("{share:.0}");
        let mut line = line(13, &format!("changes the words of a sleeper in {how}"), "CPU, %", ["0", &figure, "0, 0"]);
        line.wrong.extend((r.strict && share > 25.0).then(|| "it keeps a CPU busy".to_owned()));
        Ok(line)
    };
    ["recv", "send", "poll"].into_iter().map(case).collect()
}

/// Row 5: the server has closed connections, and the client keeps them.
fn kept(_: &Rows, dir: &Path) -> Result<Vec<Line>> {
    const N: u64 = 40;
    const MIB: u64 = 3;
    let stage = Stage::new(dir, "")?;
    let case = |way: &str| -> Result<Line> {
        let sizes = |preloaded| -> Result<[u64; 2]> {
            let pair = Pair { stage: &stage, app: helper("rings.py").display().to_string(), preloaded };
            let port = net::free_port();
            let mut server = pair.server(port, &[&N.to_string(), way])?;
            let before = resident(server.pid());
            let mut client = pair.start("hold", &["hold", &port.to_string(), &N.to_string(), way]);
            net::wait_until(LIMIT, || !client.running() || client.stdout().contains("holds")).ok();
            net::wait_until(LIMIT, || !server.running() || server.stdout().contains("served"))
                .map_err(anyhow::Error::msg)?;
            ensure!(client.running() && server.running(), "{}{}", client.stderr(), server.stderr());
            Ok([before, resident(server.pid())])
        };
        let ([alone, ours], [before, stock]) = (sizes(true)?, sizes(false)?);
        let figures = [alone.to_string(), ours.to_string(), format!("{before}, {stock}")];
        let name = format!("{N} closed connections kept ({way})");
        let mut line = line(5, &name, "server, MiB", figures.each_ref().map(String::as_str));
        line.wrong.extend((ours > stock.max(alone) + N * MIB / 2).then(|| "the server keeps the memory".to_owned()));
        Ok(line)
    };
    ["down", "up", "both", "half"].into_iter().map(case).collect()
}

/// Runs a shell script under `unshare` with this option, and returns its output.
fn shell(unshare: &str, text: &str) -> Result<String> {
    let out = Command::new("unshare").arg(unshare).args(["sh", "-c", text]).output()?;
    let (said, errors) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    ensure!(out.status.success(), "{said}{errors}");
    Ok(said.into_owned())
}

/// The lines of a shell script that start a monitor in the background and wait for it. `$m` is its
/// process ID.
fn monitor(socket: &Path) -> String {
    let at = socket.display();
    format!(
        "{} --socket {at} & m=$!; trap 'kill $m; wait $m' EXIT; for i in $(seq 600); do [ -S {at} ] && break; sleep 0.1; done; sleep 0.3;",
        artifacts::monitor().display()
    )
}

/// Row 6: in a directory that both may write, a user makes a file or link before root does.
fn bpffs(_: &Rows, dir: &Path) -> Result<Vec<Line>> {
    let at = "/sys/fs/bpf/fastsocket";
    let cases = [
        ("a link in bpffs to a folder of root's", format!("ln -s $t {at}")),
        ("a folder of a user's, with links", format!("mkdir {at}; ln -s $t {at}/zone; ln -s $t {at}/v1")),
        ("a chain of links", format!("ln -s $t /sys/fs/bpf/x; ln -s x {at}")),
    ];
    let case = |(n, (name, attack)): (usize, (&str, String))| -> Result<Line> {
        let (t, socket) = (dir.join(format!("target{n}")), dir.join(format!("monitor{n}.sock")));
        let mode = |attack: &str| {
            let text = format!(
                "mount --make-rprivate /; mount -t bpf -o mode=1777 bpf /sys/fs/bpf || exit 77; t={t}; mkdir -p -m 755 $t; touch $t/file; \
                 setpriv --reuid=65534 --regid=65534 --clear-groups sh -c \"t=$t; {attack}\" || exit 78; {monitor} \
                 echo $(stat -c %a $t) $(ls $t) $([ -S {s} ] && echo serves)",
                t = t.display(),
                monitor = monitor(&socket),
                s = socket.display(),
            );
            let said = shell("-m", &text);
            let _ = std::fs::remove_file(&socket);
            said.map(|s| s.trim().to_owned())
        };
        let (alone, attacked) = (mode("true")?, mode(&attack)?);
        let mut line = line(6, name, "mode, files, serves", [&alone, &attacked, "-"]);
        line.wrong.extend((attacked != "755 file serves").then(|| "root has followed".to_owned()));
        Ok(line)
    };
    cases.into_iter().enumerate().map(case).collect()
}

/// The output of a script in its own network namespace: under the library, and on kernel sockets.
fn in_network(dir: &Path, name: &str, app: &str) -> Result<[String; 2]> {
    let run = |preloaded: bool| {
        let socket = dir.join(format!("{name}.sock"));
        let (before, with) = match preloaded {
            true => (
                monitor(&socket),
                format!("LD_PRELOAD={} FASTSOCKET_SOCKET={}", artifacts::library().display(), socket.display()),
            ),
            false => (String::new(), String::new()),
        };
        let app = fsocket_testkit::helper(app);
        let said = shell("-n", &format!("ip link set lo up; {before} {with} {PYTHON} {} 7777", app.display()));
        let _ = std::fs::remove_file(&socket);
        said
    };
    Ok([run(true)?, run(false)?])
}

/// One line for each kind of rule: the outcome of connections that the rule does not match, and of
/// those that it matches.
fn compared(row: u8, what: &str, [ours, stock]: [String; 2]) -> Vec<Line> {
    let compare = |(ours, stock): (&str, &str)| {
        let (kind, _) = stock.split_once(" plain")?;
        let meant = |l: &str| l.split_once("meant ").map_or(String::new(), |m| outcome(m.1));
        let name = format!("{what}: {kind}");
        let mut line = line(row, &name, "connects", ["ok", &meant(ours), &format!("ok, {}", meant(stock))]);
        line.wrong.extend((ours != stock).then(|| format!("ours: {ours}; stock: {stock}")));
        Some(line)
    };
    ours.lines().zip(stock.lines()).filter_map(compare).collect()
}

/// The first outcome in a list.
fn outcome(list: &str) -> String {
    list.trim_start_matches(['[', '\'']).split(['\'', ']']).next().unwrap_or_default().to_owned()
}

/// Row 9: policies that distinguish sockets by their properties and owners.
fn attributes(_: &Rows, dir: &Path) -> Result<Vec<Line>> {
    if find_program("nft").is_none() {
        eprintln!("SKIPPED: nft is not installed");
        return Ok(Vec::new());
    }
    Ok(compared(9, "netfilter by", in_network(dir, "attributes", "policy_attributes.py")?))
}

/// Row 10: policies at the loopback device.
fn loopback(_: &Rows, dir: &Path) -> Result<Vec<Line>> {
    Ok(compared(10, "policy on lo", in_network(dir, "loopback", "loopback_policy.py")?))
}

/// Row 11: a set-user-ID program and root of a user namespace must not contact a socket that a user
/// presents as their monitor.
fn secure(_: &Rows, _: &Path) -> Result<Vec<Line>> {
    let said = |args: &str| {
        let app = helper("secure.py");
        shell("-m", &format!("exec {PYTHON} {} {args} {}", app.display(), artifacts::library().display()))
    };
    let (set_user_id, nobody) = (said("")?, said("nobody")?);
    let case = |name: &str, heard: bool, known: bool| {
        let word = if heard { "greeted" } else { "silent" };
        let mut line = line(11, name, "a false monitor", ["silent", word, "silent"]);
        line.wrong.extend((!known).then(|| "the test says nothing of it".to_owned()));
        line.wrong.extend(heard.then(|| "it was greeted".to_owned()));
        line
    };
    let of = |text: &str, start: &str| text.lines().find(|l| l.starts_with(start)).map(str::to_owned);
    let cases = [
        ("set-user-ID, a successor's socket", of(&set_user_id, "FASTSOCKET_SUCCESSOR")),
        ("set-user-ID, a socket by name", of(&set_user_id, "FASTSOCKET_SOCKET")),
        ("nobody, in a namespace that has one", of(&nobody, "a number")),
    ];
    Ok(cases
        .into_iter()
        .map(|(name, l)| case(name, l.as_ref().is_some_and(|l| l.contains("True")), l.is_some()))
        .collect())
}
