//! Processes that are killed at random moments, and what the other side sees of it.

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
    /// Also judge the time: the other side is told within 100 ms (p99)
    #[arg(long)]
    pub strict: bool,
}

/// A client without an answer by then hangs.
const LIMIT: Duration = Duration::from_secs(60);
/// A monitor is killed once in so many.
const MONITOR: usize = 20;
const CONNECTIONS: u64 = 3;

struct Scene {
    dir: PathBuf,
    stage: Stage,
    server: Proc,
    style: &'static str,
    port: u16,
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

fn start_server(stage: &Stage, dir: &Path, random: &mut Random) -> Result<(Proc, &'static str, u16)> {
    let style = *random.one(&["server-threads", "server-fork", "server-poll"]);
    let port = net::free_port();
    let server = party(stage, dir, &[style, &port.to_string()])?;
    ensure!(net::wait_until(LIMIT, || net::kernel_sockets(port, "0A") > 0).is_ok(), "{style} does not listen");
    Ok((server, style, port))
}

impl Scene {
    fn new(dir: &Path, random: &mut Random) -> Result<Scene> {
        let _ = std::fs::remove_file(dir.join("monitor.sock"));
        let stage = Stage::new(dir, "")?;
        let (server, style, port) = start_server(&stage, dir, random)?;
        Ok(Scene { dir: dir.to_owned(), stage, server, style, port })
    }

    fn kill_server(&mut self) {
        for pid in children(self.server.pid()) {
            kill(pid);
        }
        kill(self.server.pid());
    }

    fn again(&mut self, random: &mut Random) -> Result<()> {
        self.kill_server();
        (self.server, self.style, self.port) = start_server(&self.stage, &self.dir, random)?;
        Ok(())
    }
}

fn kill(pid: u32) {
    // SAFETY: a plain system call; a process that this one has started, or a child of it.
    unsafe { libc::kill(pid as i32, libc::SIGKILL) };
}

/// Ends that somebody has told of: when, by connection.
fn ends(said: &str) -> BTreeMap<u64, u64> {
    let line = |l: &str| {
        let mut words = l.strip_prefix("end ")?.split(' ');
        Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?))
    };
    said.lines().filter_map(line).collect()
}

/// Waits until all of `ids` have ended according to `p`; milliseconds from `began`.
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

/// Of both processes of a monitor.
fn descriptors(pid: u32) -> usize {
    tree(pid).iter().map(|pid| std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, |d| d.count())).sum()
}

/// True: nothing is wrong.
///
/// # Errors
/// Wrong bytes, a hang, a leak, or the test itself does not work.
// Long: one experiment from its start to its table.
pub fn run(k: &Kills) -> Result<bool> {
    let dir = tempfile::Builder::new().prefix("fastsocket-kills-").tempdir()?;
    let mut random = Random::new(k.seed);
    let mut scene = Scene::new(dir.path(), &mut random)?;
    std::thread::sleep(Duration::from_millis(200));
    let mut empty = descriptors(scene.stage.monitor.pid());
    let (mut told, mut alone) = (Vec::new(), Vec::new());
    let (mut kills, mut shm) = (BTreeMap::<&str, u64>::new(), 0);
    let began = Instant::now();
    for i in 0..k.count {
        let first = (i + 1) * CONNECTIONS;
        let ids: BTreeSet<u64> = (first..first + CONNECTIONS).collect();
        let client = party(&scene.stage, dir.path(), &["client", &scene.port.to_string(), &first.to_string()])?;
        let ready = net::wait_until(LIMIT, || client.stdout().matches("ready").count() as u64 == CONNECTIONS);
        ensure!(ready.is_ok(), "{}: not served: {}{}", scene.style, client.stdout(), client.stderr());
        sys::nanosleep(random.below(20_000_000) as u64);
        let without = random.below(MONITOR) == 0;
        if without {
            shm += scene.stage.over_shm(SERVERS)?;
            *kills.entry("monitor").or_default() += 1;
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
        *kills.entry(what).or_default() += 1;
        let name = format!(
            "kill {i} ({what} of {}, monitor {})",
            scene.style,
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
                // Which connection it had is not known: one of them ends.
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
            scene = Scene::new(dir.path(), &mut random)?;
            empty = descriptors(scene.stage.monitor.pid());
        } else if what == "server" || what == "worker" || random.below(8) == 0 {
            scene.again(&mut random)?;
        }
        if i % 100 == 99 {
            println!("{} kills, {} s", i + 1, began.elapsed().as_secs());
            clean(dir.path());
        }
    }
    shm += scene.stage.over_shm(SERVERS)?;
    scene.kill_server();
    let _ = scene.server.running();
    let monitor = scene.stage.monitor.pid();
    // (It keeps sockets and files open by which it asks the kernel of its policy, from the first client on.)
    let back = net::wait_until(LIMIT, || descriptors(monitor) <= empty + 8);
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
    println!("{kills:?}, {shm} connections over shared memory");
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
    if shm < k.count {
        wrong(format!("only {shm} connections went over shared memory"));
    }
    if k.strict && p99 > 100.0 {
        wrong(format!("told within {p99} ms"));
    }
    Ok(good)
}

/// What parties have said is of no use any more.
fn clean(dir: &Path) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.contains("client.") {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}
