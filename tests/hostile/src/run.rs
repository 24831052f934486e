//! Alternates quiet times and attacks, and compares what honest users see.

use crate::honest::{Seen, KEPT};
use crate::peer::Peer;
use crate::random::Random;
use crate::victims::{cpu_of, resident, tree, Stage, Victim, CLIENTS, HOSTILE, SERVERS};
use anyhow::{ensure, Context, Result};
use fsocket_proto::raw::Packet;
use fsocket_proto::{request, Payload};
use fsocket_testkit::Proc;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

#[derive(clap::Args, Debug)]
pub struct Run {
    /// Seconds of attack; as long again without
    #[arg(long, default_value_t = 12)]
    pub time: u64,
    #[arg(long, default_value_t = 4)]
    pub uids: u32,
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Turns of quiet and attack
    #[arg(long, default_value_t = 2)]
    pub turns: u64,
    /// nginx, redis, threaded, fork, epoll
    #[arg(long, value_delimiter = ',', default_value = "nginx,redis,threaded,fork")]
    pub servers: Vec<String>,
    /// One script only, as `attack --script`
    #[arg(long)]
    pub script: Option<String>,
    /// The hostile users may not share memory with the servers' user
    #[arg(long)]
    pub strangers: bool,
    /// Fail if an attack takes more of a server's time than that, percent of a CPU
    #[arg(long)]
    pub cpu_share: Option<f64>,
    /// A third turn each time: stock servers and clients, and as many attackers that open as many connections by
    /// kernel TCP
    #[arg(long)]
    pub control: bool,
    /// Also judge times: p99 within 2 times the quiet one, CPU within 1.2 times, or neither above the control run's
    /// (with --control); monitor within 50 ms
    #[arg(long)]
    pub strict: bool,
}

/// The load that runs at the same time as the honest clients.
#[derive(Clone, Copy)]
enum Beside {
    Nobody,
    Hostile(u64),
    /// The same load by kernel TCP.
    Kernel(u64),
}

/// The results of a turn.
#[derive(Default)]
struct Turn {
    seen: BTreeMap<&'static str, Seen>,
    cpu: BTreeMap<&'static str, f64>,
    monitor_cpu: f64,
    /// Times in microseconds in which the monitor has answered.
    answers: Vec<u32>,
}

impl Turn {
    fn add(&mut self, other: Turn) {
        for (name, s) in other.seen {
            let all = self.seen.entry(name).or_default();
            all.requests += s.requests;
            all.wrong += s.wrong;
            all.hung += s.hung;
            all.failed += s.failed;
            if !s.why.is_empty() {
                all.why = s.why;
            }
            all.times.extend(s.times);
            all.times.sort_unstable();
        }
        for (name, s) in other.cpu {
            *self.cpu.entry(name).or_default() += s;
        }
        self.monitor_cpu += other.monitor_cpu;
        self.answers.extend(other.answers);
        self.answers.sort_unstable();
    }
}

fn quantile(sorted: &[u32], per_mille: usize) -> f64 {
    let at = (sorted.len() * per_mille / 1000).min(sorted.len().saturating_sub(1));
    sorted.get(at).map_or(0.0, |us| f64::from(*us) / 1000.0)
}

/// Returns true if nothing is wrong.
///
/// # Errors
/// A failure of the test itself.
pub fn run(r: &Run) -> Result<bool> {
    // SAFETY: the call takes no argument.
    ensure!(unsafe { libc::geteuid() } == 0, "needs root, to be several users");
    let dir = tempfile::Builder::new().prefix("fastsocket-hostile-").tempdir()?;
    let mut stage = Stage::new(dir.path(), &config(r))?;
    let mut victims = stage.servers(&r.servers, true)?;
    let mut stock = if r.control { stage.servers(&r.servers, false)? } else { Vec::new() };
    let each = (r.time / r.turns.max(1)).max(2);
    println!("hostile: {} s of attack in {} turns, {} users, seed {}", each * r.turns, r.turns, r.uids, r.seed);
    turn(r, &stage, &victims, 2, Beside::Nobody)?; // fills caches and pools
    let (mut quiet, mut attacked, mut control) = (Turn::default(), Turn::default(), Turn::default());
    for n in 0..r.turns {
        let seed = r.seed.wrapping_add(n);
        quiet.add(turn(r, &stage, &victims, each, Beside::Nobody)?);
        attacked.add(turn(r, &stage, &victims, each, Beside::Hostile(seed))?);
        if r.control {
            control.add(turn(r, &stage, &stock, each, Beside::Kernel(seed))?);
        }
    }
    ensure!(stage.monitor.running(), "the monitor has ended: {}", stage.monitor.stderr());
    for v in victims.iter_mut().chain(&mut stock) {
        ensure!(v.proc.running(), "{} has ended: {}", v.name, v.proc.stderr());
    }
    let mut wrong = judged(r, &victims, [&quiet, &attacked, &control], (each * r.turns) as f64);
    let (worst, p99) = (quantile(&attacked.answers, 1000), quantile(&attacked.answers, 990));
    println!(
        "monitor: answers within {p99:.2} ms (p99), {worst:.2} ms (all); CPU {:.2} s, {:.2} s; {} MiB",
        quiet.monitor_cpu,
        attacked.monitor_cpu,
        tree(stage.monitor.pid()).into_iter().map(resident).sum::<u64>()
    );
    if r.strict && worst > 50.0 {
        wrong.push(format!("the monitor answered after {worst} ms"));
    }
    let over_shm = (CLIENTS..).take(r.servers.len()).map(|uid| stage.over_shm(uid)).sum::<Result<u64>>()?;
    let requests: u64 = [&quiet, &attacked].iter().flat_map(|t| t.seen.values()).map(|s| s.requests).sum();
    println!("honest connections over shared memory: {over_shm}, about {} in all", requests / KEPT);
    if over_shm < requests / KEPT / 2 {
        wrong.push("honest clients went over the kernel".into());
    }
    if attacked.answers.is_empty() {
        wrong.push("the monitor answered nobody".into());
    }
    for what in &wrong {
        println!("WRONG {what}");
    }
    Ok(wrong.is_empty())
}

/// Prints the results of each server. Returns what is wrong.
fn judged(r: &Run, victims: &[Victim], [quiet, attacked, control]: [&Turn; 3], seconds: f64) -> Vec<String> {
    let mut wrong = Vec::new();
    println!(
        "{:<10}{:>9}{:>6}{:>6}{:>7}{:>26}{:>26}{:>6}",
        "", "requests", "wrong", "hung", "failed", "p99, ms", "CPU, s", "MiB"
    );
    println!("{:<38}{:>8}{:>9}{:>9}{:>8}{:>9}{:>9}", "", "quiet", "attack", "control", "quiet", "attack", "control");
    for v in victims {
        let (q, a) = (&quiet.seen[v.name], &attacked.seen[v.name]);
        let p99 = |t: &Turn| t.seen.get(v.name).map_or(f64::NAN, |s| quantile(&s.times, 990));
        let cpu = |t: &Turn| t.cpu.get(v.name).copied().unwrap_or(f64::NAN);
        let p = [quiet, attacked, control].map(p99);
        let c = [quiet, attacked, control].map(cpu);
        println!(
            "{:<10}{:>9}{:>6}{:>6}{:>7}{:>8.2}{:>9.2}{:>9.2}{:>8.2}{:>9.2}{:>9.2}{:>6}",
            v.name,
            a.requests,
            a.wrong,
            a.hung,
            a.failed,
            p[0],
            p[1],
            p[2],
            c[0],
            c[1],
            c[2],
            v.memory()
        );
        for s in [Some(q), Some(a), control.seen.get(v.name)].into_iter().flatten() {
            if s.wrong + s.hung + s.failed > 0 || s.requests == 0 {
                wrong.push(format!(
                    "{}: {} wrong, {} hung, {} failed of {} ({})",
                    v.name, s.wrong, s.hung, s.failed, s.requests, s.why
                ));
            }
        }
        // (Without a control run its figure is NaN.)
        let exceeds = |[quiet, attack, control]: [f64; 3], times: f64| {
            attack > times * quiet && (control.is_nan() || attack > control)
        };
        if r.strict && exceeds(p, 2.0) {
            wrong.push(format!("{}: p99 {} ms, {} ms without an attack", v.name, p[1], p[0]));
        }
        let share = (c[1] - c[0]) * 100.0 / seconds;
        if r.cpu_share.is_some_and(|most| share > most) {
            wrong.push(format!("{}: the attack has taken {share:.0} % of a CPU", v.name));
        }
        if r.strict && exceeds(c, 1.2) {
            wrong.push(format!("{}: {} s of CPU, {} s without an attack", v.name, c[1], c[0]));
        }
    }
    wrong
}

/// The configuration: the servers' user shares memory with the user of each honest client, and with
/// the hostile users.
fn config(r: &Run) -> String {
    let clients = (CLIENTS..).take(r.servers.len());
    let hostile = (HOSTILE..).take(if r.strangers { 0 } else { r.uids as usize });
    let users: Vec<String> = [SERVERS].into_iter().chain(clients).chain(hostile).map(|u| u.to_string()).collect();
    format!("share = [[{}]]\n", users.join(", "))
}

/// Runs one turn.
fn turn(r: &Run, stage: &Stage, victims: &[Victim], seconds: u64, beside: Beside) -> Result<Turn> {
    let me = std::env::current_exe()?;
    let program = stage.dir.join("fsocket-hostile");
    if !program.exists() {
        std::fs::copy(me, &program)?; // where every user can reach it
    }
    let cpu: Vec<f64> = victims.iter().map(Victim::cpu).collect();
    let monitor_cpu = cpu_of(stage.monitor.pid());
    let attackers = attackers(r, stage, victims, seconds, beside, &program);
    let clients: Vec<Proc> = victims
        .iter()
        .enumerate()
        .map(|(i, v)| {
            let mut c = stage.command(CLIENTS + i as u32, &program, v.preloaded);
            c.args(["honest", "--kind", v.kind, "--port", &v.port.to_string(), "--time", &seconds.to_string()]);
            Proc::spawn(&stage.dir, &format!("honest-{}", v.name), c)
        })
        .collect();
    let answers = ask_monitor(stage, seconds);
    let mut turn = Turn { answers, ..Turn::default() };
    for (v, c) in victims.iter().zip(clients) {
        let said = c.finish(Duration::from_secs(seconds + 30)).success().stdout;
        turn.seen.insert(v.name, serde_json::from_str(&said).with_context(|| format!("{}: {said}", v.name))?);
    }
    for (v, before) in victims.iter().zip(cpu) {
        turn.cpu.insert(v.name, v.cpu() - before);
    }
    turn.monitor_cpu = cpu_of(stage.monitor.pid()) - monitor_cpu;
    for a in attackers {
        let said = a.finish(Duration::from_secs(seconds + 30)).success().stdout;
        println!("lives: {}", said.trim());
    }
    Ok(turn)
}

fn attackers(r: &Run, stage: &Stage, victims: &[Victim], seconds: u64, beside: Beside, program: &PathBuf) -> Vec<Proc> {
    let (seed, kernel) = match beside {
        Beside::Nobody => return Vec::new(),
        Beside::Hostile(seed) => (seed, None),
        Beside::Kernel(seed) => (seed, Some("--kernel")),
    };
    let ports: Vec<String> = victims.iter().map(|v| v.port.to_string()).collect();
    // At most four processes attack at a time. If there are more users, they take turns.
    let processes = r.uids.clamp(1, 4);
    (0..processes)
        .map(|i| {
            let per = (r.uids / processes).max(1);
            // Attackers get the CPU only if no other process wants it, because the test does not
            // measure how the CPU is shared.
            let mut c = Command::new("nice");
            c.args(["-n", "19"]).arg(program).arg("attack").arg("--socket").arg(stage.socket());
            c.args(["--ports", &ports.join(","), "--time", &seconds.to_string()]);
            c.args(["--seed", &(seed.wrapping_mul(1000) + u64::from(i)).to_string()]);
            c.args(["--uid", &(HOSTILE + i * per).to_string(), "--uids", &per.to_string()]);
            c.args(r.script.iter().flat_map(|s| ["--script", s])).args(kernel);
            c.env_remove("LD_PRELOAD");
            Proc::spawn(&stage.dir, &format!("attack-{i}"), c)
        })
        .collect()
}

/// Measures repeatedly how long the monitor takes to answer.
fn ask_monitor(stage: &Stage, seconds: u64) -> Vec<u32> {
    let stop = AtomicBool::new(false);
    let socket = stage.socket();
    std::thread::scope(|s| {
        let asking = s.spawn(|| {
            let mut answers = Vec::new();
            let Ok(mut peer) = Peer::connect(&socket) else { return answers };
            if !peer.hello(&mut Random::new(7)) {
                return answers;
            }
            while !stop.load(Ordering::Relaxed) {
                let began = Instant::now();
                if peer.request(Packet { id: u64::MAX, ..Packet::new(request::Claim::KIND) }, None).is_none() {
                    break;
                }
                answers.push(began.elapsed().as_micros() as u32);
                std::thread::sleep(Duration::from_millis(5));
            }
            answers
        });
        std::thread::sleep(Duration::from_secs(seconds));
        stop.store(true, Ordering::Relaxed);
        let mut answers = asking.join().unwrap_or_default();
        answers.sort_unstable();
        answers
    })
}
