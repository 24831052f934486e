//! Kills processes at random moments, and checks what the other side sees.

use crate::random::Random;
use crate::victims::{children, tree, Stage, SERVERS};
use anyhow::{bail, ensure, Result};
use fsocket_sys as sys;
use fsocket_testkit::{net, Proc};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

#[derive(clap::Args, Debug)]
pub struct Kills {
    /// How many
    #[arg(long, default_value_t = 300)]
    pub count: u64,
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Kinds of sockets: tcp, unix
    #[arg(long, value_delimiter = ',', default_value = "tcp,unix", value_parser = ["tcp", "unix"])]
    pub over: Vec<String>,
    /// Also judge the time: the other side is told within 100 ms (p99)
    #[arg(long)]
    pub strict: bool,
}

/// A client without an answer after this time hangs.
const LIMIT: Duration = Duration::from_secs(60);
/// One in this many kills hits a monitor.
const MONITOR: usize = 20;
const CONNECTIONS: u64 = 3;

struct Scene {
    stage: Stage,
    server: Proc,
    style: &'static str,
    at: At,
    over: Vec<String>,
}

/// The address of a server's socket.
#[derive(Clone, Debug)]
enum At {
    Port(u16),
    Path(PathBuf),
}

impl At {
    /// The server may create files in `dir`.
    fn new(dir: &Path, over: &str) -> At {
        match over {
            "unix" => At::Path(dir.join(net::free_port().to_string())),
            _ => At::Port(net::free_port()),
        }
    }
    fn over(&self) -> &'static str {
        match self {
            At::Port(_) => "tcp",
            At::Path(_) => "unix",
        }
    }
    fn argument(&self) -> String {
        match self {
            At::Port(port) => port.to_string(),
            At::Path(path) => path.display().to_string(),
        }
    }
    fn listens(&self) -> bool {
        match self {
            At::Port(port) => net::kernel_sockets(*port, "0A") > 0,
            At::Path(path) => net::unix_listens(path),
        }
    }
}

fn program(dir: &Path) -> Result<PathBuf> {
    let program = dir.join("fsocket-hostile");
    if !program.exists() {
        std::fs::copy(std::env::current_exe()?, &program)?;
    }
    Ok(program)
}

fn party(stage: &Stage, dir: &Path, args: &[&str]) -> Result<Proc> {
    let mut c = stage.command(SERVERS, program(dir)?, true);
    c.arg("party").args(args);
    Ok(Proc::spawn(dir, args[0], c))
}

fn start_server(stage: &Stage, over: &[String], random: &mut Random) -> Result<(Proc, &'static str, At)> {
    let style = *random.one(&["server-threads", "server-fork", "server-poll"]);
    let at = At::new(&stage.home("sockets", true)?, random.one::<String>(over));
    let server = party(stage, &stage.dir, &[style, &at.argument()])?;
    ensure!(net::wait_until(LIMIT, || at.listens()).is_ok(), "{style} does not listen at {at:?}");
    Ok((server, style, at))
}

impl Scene {
    fn new(dir: &Path, over: &[String], random: &mut Random) -> Result<Scene> {
        let _ = std::fs::remove_file(dir.join("monitor.sock"));
        let stage = Stage::new(dir, "")?;
        let (server, style, at) = start_server(&stage, over, random)?;
        Ok(Scene { stage, server, style, at, over: over.to_owned() })
    }

    fn kill_server(&mut self) {
        for pid in children(self.server.pid()) {
            kill(pid);
        }
        kill(self.server.pid());
        if let At::Path(path) = &self.at {
            let _ = std::fs::remove_file(path);
        }
    }

    fn again(&mut self, random: &mut Random) -> Result<()> {
        self.kill_server();
        (self.server, self.style, self.at) = start_server(&self.stage, &self.over, random)?;
        Ok(())
    }
}

fn kill(pid: u32) {
    // SAFETY: `kill` takes numbers only. The process was started by this one, or is a child of such
    // a process.
    unsafe { libc::kill(pid as i32, libc::SIGKILL) };
}

/// The ends of connections that a party has reported: the time in nanoseconds, by connection.
fn ends(said: &str) -> BTreeMap<u64, u64> {
    let line = |l: &str| {
        let mut words = l.strip_prefix("end ")?.split(' ');
        Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?))
    };
    said.lines().filter_map(line).collect()
}

/// Waits until `p` has reported the end of all `ids`. Returns the milliseconds from `began` to each
/// end.
fn wait_ends(p: &Proc, ids: &BTreeSet<u64>, began: u64, what: &str) -> Result<Vec<f64>> {
    let until = Instant::now() + LIMIT;
    loop {
        let said = p.stdout();
        ensure!(!said.contains("wrong"), "{what}: wrong bytes\n{said}");
        let seen = ends(&said);
        if ids.iter().all(|id| seen.contains_key(id)) {
            return Ok(ids.iter().map(|id| seen[id].saturating_sub(began) as f64 / 1e6).collect());
        }
        if Instant::now() > until {
            let missing: Vec<_> = ids.iter().filter(|id| !seen.contains_key(id)).collect();
            bail!("{what}: nobody was told of the end of {missing:?}\n{}", p.stderr());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Number of descriptors of both processes of a monitor.
fn descriptors(pid: u32) -> usize {
    tree(pid).iter().map(|pid| std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, |d| d.count())).sum()
}

/// Returns true if nothing is wrong.
///
/// # Errors
/// Wrong bytes, a hang, a leak, or a failure of the test itself.
// Long: one experiment from start to table.
pub fn run(k: &Kills) -> Result<bool> {
    let dir = tempfile::Builder::new().prefix("fastsocket-kills-").tempdir()?;
    let mut random = Random::new(k.seed);
    let mut scene = Scene::new(dir.path(), &k.over, &mut random)?;
    std::thread::sleep(Duration::from_millis(200));
    let mut empty = descriptors(scene.stage.monitor.pid());
    let (mut told, mut alone) = (Vec::new(), Vec::new());
    let (mut kills, mut moved) = (BTreeMap::<(&str, &str), u64>::new(), [0; 2]);
    let began = Instant::now();
    for i in 0..k.count {
        let first = (i + 1) * CONNECTIONS;
        let ids: BTreeSet<u64> = (first..first + CONNECTIONS).collect();
        let client = party(&scene.stage, dir.path(), &["client", &scene.at.argument(), &first.to_string()])?;
        let ready = net::wait_until(LIMIT, || client.stdout().matches("ready").count() as u64 == CONNECTIONS);
        ensure!(ready.is_ok(), "{}: not served: {}{}", scene.style, client.stdout(), client.stderr());
        sys::nanosleep(random.below(20_000_000) as u64);
        let without = random.below(MONITOR) == 0;
        if without {
            add(&mut moved, &scene.stage)?;
            *kills.entry((scene.at.over(), "monitor")).or_default() += 1;
            kill(scene.stage.monitor.pid());
            sys::nanosleep(random.below(1_000_000_000) as u64);
            ensure!(ends(&client.stdout()).is_empty(), "connections ended with the monitor: {}", client.stdout());
        }
        let at = sys::now_ns();
        let what = match random.below(10) {
            0..=4 => "client",
            5..=7 => "server",
            _ if scene.style == "server-fork" => "worker",
            _ => "client",
        };
        *kills.entry((scene.at.over(), what)).or_default() += 1;
        let name = format!(
            "kill {i} ({what} of {} over {}, monitor {})",
            scene.style,
            scene.at.over(),
            if without { "killed before" } else { "there" }
        );
        let times = match what {
            "client" => {
                kill(client.pid());
                wait_ends(&scene.server, &ids, at, &name)?
            }
            "server" => {
                scene.kill_server();
                wait_ends(&client, &ids, at, &name)?
            }
            _ => {
                let workers = children(scene.server.pid());
                ensure!(!workers.is_empty(), "no worker");
                kill(*random.one(&workers));
                // It is not known which connection the worker served, so one of them has to end.
                let one = net::wait_until(LIMIT, || !ends(&client.stdout()).is_empty());
                ensure!(one.is_ok(), "{name}: nobody was told\n{}", client.stderr());
                ends(&client.stdout()).values().map(|t| t.saturating_sub(at) as f64 / 1e6).collect()
            }
        };
        if without { &mut alone } else { &mut told }.extend(times);
        drop(client);
        if without {
            scene.kill_server();
            let _ = scene.server.running();
            drop(scene);
            scene = Scene::new(dir.path(), &k.over, &mut random)?;
            empty = descriptors(scene.stage.monitor.pid());
        } else if what == "server" || what == "worker" || random.below(8) == 0 {
            scene.again(&mut random)?;
        }
        if i % 100 == 99 {
            println!("{} kills, {} s", i + 1, began.elapsed().as_secs());
            clean(dir.path());
        }
    }
    add(&mut moved, &scene.stage)?;
    scene.kill_server();
    let _ = scene.server.running();
    let monitor = scene.stage.monitor.pid();
    // (From the first client on, the monitor keeps sockets and files open by which it asks for the
    // kernel's policy.)
    let back = net::wait_until(LIMIT, || descriptors(monitor) <= empty + 9);
    told.sort_by(f64::total_cmp);
    alone.sort_by(f64::total_cmp);
    let show = |name: &str, t: &[f64]| {
        let at = |q: usize| t.get((t.len() * q / 1000).min(t.len().saturating_sub(1))).copied().unwrap_or(0.0);
        println!(
            "{name}: {} ends, told within {:.1} ms (median), {:.1} ms (p99), {:.1} ms (all)",
            t.len(),
            at(500),
            at(990),
            at(1000)
        );
        at(990)
    };
    println!("{kills:?}, over shared memory: {} TCP connections, {} ends of Unix connections", moved[0], moved[1]);
    let p99 = show("with the monitor", &told);
    show("after the monitor was killed", &alone);
    let mut good = true;
    let mut wrong = |what: String| {
        println!("WRONG {what}");
        good = false;
    };
    if back.is_err() {
        wrong(format!("the monitor holds {} descriptors, {empty} when nobody was there", descriptors(monitor)));
    }
    for (over, moved) in ["tcp", "unix"].into_iter().zip(moved) {
        let count = kills.iter().filter(|((o, what), _)| *o == over && *what != "monitor").map(|(_, n)| n).sum::<u64>();
        if moved < count {
            wrong(format!("only {moved} of {over} went over shared memory at {count} kills"));
        }
    }
    if k.strict && p99 > 100.0 {
        wrong(format!("told within {p99} ms"));
    }
    Ok(good)
}

/// Adds the numbers of connections that have used shared memory: TCP connections, and ends of Unix
/// connections.
fn add(moved: &mut [u64; 2], stage: &Stage) -> Result<()> {
    for (sum, counter) in moved.iter_mut().zip(["connect_shm", "path_upgrade"]) {
        *sum += stage.counter(SERVERS, counter)?;
    }
    Ok(())
}

/// Removes output files of parties, which are not needed any more.
fn clean(dir: &Path) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.contains("client.") {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}
