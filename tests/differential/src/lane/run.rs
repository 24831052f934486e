//! The scheduler.
//!
//! Long: what depends on the same state of a random program.

use super::format::{self, Ports};
use super::{Lane, Mode, Transcript};
use crate::call::{Call, Kind};
use crate::program::{Program, Step, ACTORS, VARS};
use crate::shared::{state, SPAWN};
use crate::symbols as sym;
use crate::watch::{Doing, Watch};
use anyhow::{bail, Result};
use fsocket_sys as sys;
use std::sync::atomic::Ordering::*;
use std::time::{Duration, Instant};

/// Limit for a step that has a timeout of its own, or that never comes to rest.
const LIMIT: Duration = Duration::from_secs(30);
/// After this time, the threads that have not come to rest are reported.
const RESTLESS: Duration = Duration::from_secs(10);
/// The scheduler waits for timeouts up to this many milliseconds. Longer ones are not meant to
/// expire.
pub const SHORT_MS: i64 = 200;
/// Added to a timeout of the program, in microseconds.
const SLACK_US: u64 = 30_000;
/// A lingering close waits for an acknowledgement, which may be delayed. Microseconds.
const LINGER_US: u64 = 90_000;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Status {
    Absent,
    Idle,
    /// The actor makes this step.
    Busy(usize),
    Dead,
}

struct Actor {
    status: Status,
    /// The process whose variables it uses.
    process: usize,
    pid: i32,
    watch: Watch,
    signals: [u32; 3],
}

struct Run<'a> {
    lane: &'a mut Lane,
    program: &'a Program,
    actors: Vec<Actor>,
    /// For each process: the descriptor number of each variable.
    vars: Vec<[i64; VARS]>,
    ports: Ports,
    /// Connections that are not accepted yet: port and client, in order.
    waiting: Vec<(usize, usize)>,
    /// Processes that have accepted, with the port.
    acceptors: Vec<(usize, usize)>,
    lines: Vec<String>,
    quiet_us: u64,
    restless: bool,
}

pub fn run(lane: &mut Lane, program: &Program, mode: Mode) -> Result<Transcript> {
    let quiet_us = lane.quiet_us;
    for i in 0..ACTORS {
        lane.shared.slot(i).forget();
    }
    lane.shared.run.fetch_add(1, Relaxed);
    let none = || Actor { status: Status::Absent, process: 0, pid: 0, watch: Watch::new(-1), signals: [0; 3] };
    let actors = (0..ACTORS).map(|_| none()).collect();
    let mut run = Run {
        lane,
        program,
        actors,
        vars: Vec::new(),
        ports: Ports::default(),
        waiting: Vec::new(),
        acceptors: Vec::new(),
        lines: Vec::new(),
        quiet_us,
        restless: false,
    };
    let done = run.all(mode);
    let ended = run.end(mode);
    let lines = std::mem::take(&mut run.lines);
    done?;
    ended?;
    lane.remove_sockets(program);
    Ok(Transcript { lines })
}

impl Run<'_> {
    fn all(&mut self, mode: Mode) -> Result<()> {
        for i in 0..self.program.processes as usize {
            self.lane.order_server(flavour(mode, i), SPAWN, i as i64)?;
            self.vars.push([-1; VARS]);
            if !self.appears(i, i) {
                bail!("process {i} did not start\n{}", self.lane.complaints());
            }
        }
        for i in 0..self.program.steps.len() {
            self.step(i)?;
        }
        for (k, a) in self.actors.iter().enumerate() {
            if let Status::Busy(i) = a.status {
                self.lines.push(format!("     a{k} is left in step {i}"));
            }
        }
        Ok(())
    }

    /// Kills all processes that are left, and collects them.
    fn end(&mut self, mode: Mode) -> Result<()> {
        for i in 0..ACTORS {
            let pid = self.lane.shared.slot(i).pid.load(Relaxed);
            if pid > 0 && self.actors[i].status != Status::Absent {
                // SAFETY: `kill` takes numbers only. The process is of this run and not collected,
                // so no other process has its ID.
                unsafe { libc::kill(pid, libc::SIGKILL) };
            }
        }
        for f in 0..2 {
            if (0..self.program.processes as usize).any(|i| flavour(mode, i) == f) {
                self.lane.collect_dead(f)?;
            }
        }
        let end = Instant::now() + Duration::from_millis(200);
        while !self.lane.monitor_sleeps() && Instant::now() < end {
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    fn is_done(&self, k: usize) -> bool {
        self.lane.shared.slot(k).state.load(Acquire) == state::DONE
    }

    /// Sleeps until an actor answers, for `us` microseconds at most.
    fn pause(&self, seen: u32, us: u64) {
        let _ = sys::futex_wait(&self.lane.shared.answers, seen, Some(us * 1000));
    }

    /// Waits until an actor that another step starts is there.
    fn appears(&mut self, i: usize, process: usize) -> bool {
        let slot = self.lane.shared.slot(i);
        let end = Instant::now() + LIMIT;
        loop {
            let seen = self.lane.shared.answers.load(Acquire);
            if slot.state.load(Acquire) != state::FREE {
                break;
            }
            if Instant::now() > end {
                return false;
            }
            self.pause(seen, 1000);
        }
        let (pid, tid) = (slot.pid.load(Relaxed), slot.tid.load(Relaxed));
        self.actors[i] = Actor { status: Status::Idle, process, pid, watch: Watch::new(tid), signals: [0; 3] };
        true
    }

    fn say(&mut self, i: usize, result: &str) {
        self.lines.push(format!("{i:3}  {}  =>  {result}", self.program.steps[i]));
    }

    fn step(&mut self, i: usize) -> Result<()> {
        let step = &self.program.steps[i];
        self.more_patience(step);
        if step.call.is_external() {
            self.external(i, step);
            self.settle();
            return Ok(());
        }
        let k = step.actor as usize;
        let refused = match self.actors[k].status {
            Status::Idle => None,
            Status::Absent => Some("nobody"),
            Status::Dead => Some("dead"),
            Status::Busy(_) => Some("busy"),
        };
        let starts = matches!(step.call, Call::Fork | Call::CloneFiles | Call::Thread);
        let taken = starts && self.actors[step.args[0] as usize].status != Status::Absent;
        let rival = |a: &Actor| matches!(a.status, Status::Busy(j) if self.program.contend(i, j));
        let crowded = self.actors.iter().any(rival).then_some("crowded");
        if let Some(why) = refused.or(taken.then_some("taken")).or(crowded).or(self.out_of_order(k, step)) {
            self.say(i, why);
            return Ok(());
        }
        let args = self.resolve(self.actors[k].process, step);
        for v in 0..step.call.spec().outs {
            self.vars[self.actors[k].process][step.out as usize + v] = -1;
        }
        self.actors[k].status = Status::Busy(i);
        self.lane.shared.slot(k).order(step.call as u32, i as u32, &args);
        let text = if step.call == Call::Exit {
            let gone = self.process_ends(self.actors[k].pid);
            if gone { "gone" } else { "did not end" }.into()
        } else if self.finishes(k, i) {
            self.result(k, i)
        } else if self.actors[k].status == Status::Dead {
            self.why_dead(k)
        } else {
            "blocks".into()
        };
        self.say(i, &text);
        if step.call == Call::Come {
            self.monitor_hears(); // README.md, known gaps
        }
        self.settle();
        Ok(())
    }

    /// Would the step make the order of connections undefined? There is no order between
    /// connections of several clients, or for several acceptors. Such a connection is made only
    /// when the queue is empty.
    fn out_of_order(&self, k: usize, step: &Step) -> Option<&'static str> {
        // (Unix sockets have one queue, in the kernel.)
        if step.call != Call::Connect || step.args[2] < 0 || step.args[1] >= sym::PATH {
            return None;
        }
        let (port, client) = (step.args[2] as usize, self.client(k, step));
        let mut queue = self.waiting.iter().filter(|(p, _)| *p == port);
        let acceptors = self.acceptors.iter().filter(|(p, _)| *p == port).count();
        let open = queue.clone().any(|(_, c)| *c != client) || (acceptors > 1 && queue.next().is_some());
        open.then_some("out of order")
    }

    /// A number for the client: the connecting process, or a socket that uses kernel TCP.
    fn client(&self, k: usize, step: &Step) -> usize {
        let var = step.args[0] as usize;
        if self.program.is_bound(var) || step.args[1] % 2 == 1 {
            1000 + var
        } else {
            self.actors[k].process
        }
    }

    /// Records the connections that wait to be accepted.
    fn account(&mut self, k: usize, step: &Step, ret: i64, errno: i32) {
        match step.call {
            Call::Connect if step.args[2] >= 0 && (ret == 0 || errno == libc::EINPROGRESS) => {
                let client = self.client(k, step);
                self.waiting.push((step.args[2] as usize, client));
            }
            Call::Accept | Call::AcceptNull | Call::Accept4 if ret >= 0 => {
                let Some(port) = self.program.port_of(step.args[0] as usize) else { return };
                if let Some(i) = self.waiting.iter().position(|(p, _)| *p == port) {
                    self.waiting.remove(i);
                }
                let me = (port, self.actors[k].process);
                if !self.acceptors.contains(&me) {
                    self.acceptors.push(me);
                }
            }
            Call::Exec if ret == 0 => {
                // The new program counts as another client. Its close-on-exec descriptors are
                // closed, and their numbers may be used again.
                let process = self.actors[k].process;
                for (_, client) in self.waiting.iter_mut().filter(|(_, client)| *client == process) {
                    *client += 2000;
                }
                let pid = self.actors[k].pid;
                let open = |fd: i64| std::path::Path::new(&format!("/proc/{pid}/fd/{fd}")).symlink_metadata().is_ok();
                for v in self.vars[process].iter_mut().filter(|v| **v >= 0 && !open(**v)) {
                    *v = -1;
                }
            }
            _ => {}
        }
    }

    /// Timeouts of sockets make blocked calls return by themselves, so the scheduler waits longer.
    fn more_patience(&mut self, step: &Step) {
        let us = match (step.call, step.args.get(1)) {
            (Call::SetRcvTimeo | Call::SetSndTimeo, Some(&ms)) if (1..=SHORT_MS).contains(&ms) => {
                ms as u64 * 1000 + SLACK_US
            }
            (Call::SetLinger, Some(&on)) if on != 0 && step.args[2] > 0 => LINGER_US,
            _ => 0,
        };
        self.quiet_us = self.quiet_us.max(us);
    }

    fn resolve(&self, process: usize, step: &Step) -> Vec<i64> {
        let vars = &self.vars[process];
        let mut args = Vec::new();
        for (i, kind) in step.call.spec().args.iter().enumerate() {
            match kind {
                Kind::Var => args.push(vars[step.args[i] as usize]),
                Kind::Port if step.args[i] < 0 => args.push(0),
                // listen() gets no port; its answer contains the port.
                Kind::Port => args.push(self.ports.number(step.args[i] as usize)),
                Kind::List(_) => {
                    for pair in step.args[i..].chunks_exact(2) {
                        args.extend([vars[pair[0] as usize], pair[1]]);
                    }
                }
                _ => args.push(step.args[i]),
            }
        }
        if matches!(step.call, Call::EpollAdd | Call::EpollMod | Call::EpollDel) {
            args.push(step.args[1]); // the event's data
        }
        args
    }

    /// Waits until actor `k` answers (true), or certainly sleeps (false).
    fn finishes(&mut self, k: usize, i: usize) -> bool {
        let start = Instant::now();
        let timed = has_timeout(&self.program.steps[i]);
        let mut quiet_since = None;
        let mut looks = 0;
        loop {
            let seen = self.lane.shared.answers.load(Acquire);
            if self.is_done(k) {
                return true;
            }
            let now = Instant::now();
            if !timed && looks > 0 && now - start > RESTLESS && !self.restless {
                self.restless = true;
                self.complain(i);
            }
            if now - start > LIMIT {
                return false;
            }
            // The first look comes late: most calls are done by then.
            if looks > 0 && !timed {
                if self.quiet() {
                    let since = *quiet_since.get_or_insert(now);
                    if looks > 3 && now - since >= Duration::from_micros(self.quiet_us) {
                        return false;
                    }
                } else {
                    quiet_since = None;
                }
            }
            if looks > 0 && self.actors[k].watch.doing() == Doing::Dead && !self.is_done(k) {
                self.died(k);
                return false;
            }
            self.pause(seen, if looks == 0 { 300 } else { 150 });
            looks += 1;
        }
    }

    /// Reports threads that do not come to rest, perhaps in a loop that should sleep.
    fn complain(&self, i: usize) {
        let busy = |k: &usize| matches!(self.actors[*k].status, Status::Busy(_));
        let running: Vec<String> = (0..ACTORS)
            .filter(busy)
            .filter(|k| self.actors[*k].watch.doing() == Doing::Running)
            .map(|k| format!("a{k}"))
            .collect();
        let monitor = if self.lane.monitor_sleeps() { "sleeps" } else { "runs" };
        eprintln!("restless in step {i} ({}): running {running:?}, the monitor {monitor}", self.program.steps[i]);
    }

    /// Is everything at rest? Every actor in a call sleeps, and so does the monitor.
    fn quiet(&self) -> bool {
        let rests = |(k, a): (usize, &Actor)| match (a.status, self.lane.shared.slot(k).state.load(Acquire)) {
            (Status::Busy(_), state::SETTLING) => false,
            (Status::Busy(_), state::DONE) => true,
            (Status::Busy(_), _) => a.watch.doing() != Doing::Running,
            _ => true,
        };
        self.actors.iter().enumerate().all(rests) && self.lane.monitor_sleeps()
    }

    /// After a step: lets the released actors finish.
    fn settle(&mut self) {
        let limit = Instant::now() + LIMIT;
        let mut quiet = 0;
        let mut finished = Vec::new();
        while self.actors.iter().any(|a| matches!(a.status, Status::Busy(_))) && Instant::now() < limit {
            let seen = self.lane.shared.answers.load(Acquire);
            let mut moved = false;
            for k in 0..ACTORS {
                let Status::Busy(i) = self.actors[k].status else { continue };
                if self.is_done(k) {
                    let result = self.result(k, i);
                    finished.push((k, format!("     a{k} returns from step {i}  =>  {result}")));
                    moved = true;
                } else if self.actors[k].watch.doing() == Doing::Dead {
                    self.died(k);
                    let why = self.why_dead(k);
                    finished.push((k, format!("     a{k} in step {i}  =>  {why}")));
                    moved = true;
                }
            }
            quiet = if !moved && self.quiet() { quiet + 1 } else { 0 };
            if quiet >= 3 {
                break;
            }
            if !moved {
                self.pause(seen, 60);
            }
        }
        finished.sort();
        self.lines.extend(finished.into_iter().map(|(_, line)| line));
    }

    /// Formats the answer of actor `k` to step `i`, and sets the actor's variables.
    fn result(&mut self, k: usize, i: usize) -> String {
        let step = &self.program.steps[i];
        let slot = self.lane.shared.slot(k);
        let ret = slot.ret.load(Relaxed);
        let process = self.actors[k].process;
        let vars = &mut self.vars[process];
        let outs = step.call.spec().outs;
        if outs > 0 {
            vars[step.out as usize] = ret;
        }
        if outs > 1 {
            vars[step.out as usize + 1] = if ret < 0 { -1 } else { slot.aux[0].load(Relaxed) };
        }
        if matches!(step.call, Call::Close | Call::CloseRange) && ret == 0 {
            // The number may be used again, sooner on one path than on the other (see `free`). So a
            // closed variable has no number here.
            let closed = slot.arg(0)..=slot.arg(step.call.spec().args.len() - 1);
            for v in vars.iter_mut().filter(|v| closed.contains(v)) {
                *v = -1;
            }
        }
        if step.call == Call::Listen && ret == 0 && step.args[2] >= 0 {
            self.ports.listens(step.args[2] as usize, slot.aux[0].load(Relaxed) as u16);
        }
        self.account(k, step, ret, slot.errno.load(Relaxed));
        if matches!(step.call, Call::Connect | Call::Come) {
            self.ports.connects(slot.aux[0].load(Relaxed) as u16);
        }
        let mut text = format::answer(step, slot, &mut self.ports);
        for (n, name) in ["USR1", "USR2", "PIPE"].iter().enumerate() {
            let now = slot.signals[n].load(Relaxed);
            let since = now - self.actors[k].signals[n];
            self.actors[k].signals[n] = now;
            if since > 0 {
                text += &format!("  signal {name}*{since}");
            }
        }
        slot.state.store(state::IDLE, Release);
        self.actors[k].status = Status::Idle;
        if step.call == Call::Exec && ret == 0 {
            self.actors[k].watch = Watch::new(slot.tid.load(Relaxed));
        }
        if step.call == Call::Unshare && ret == 0 {
            self.vars.push(self.vars[process]);
            self.actors[k].process = self.vars.len() - 1;
        }
        if matches!(step.call, Call::Fork | Call::CloneFiles | Call::Thread) && ret == 0 {
            let process = if step.call == Call::Fork {
                self.vars.push(self.vars[process]);
                self.vars.len() - 1
            } else {
                process
            };
            if !self.appears(step.args[0] as usize, process) {
                text += "  but nobody appears";
            }
        }
        text
    }

    fn external(&mut self, i: usize, step: &Step) {
        let k = step.args[0] as usize;
        if matches!(self.actors[k].status, Status::Absent | Status::Dead) {
            return self.say(i, "nobody");
        }
        let (pid, tid) = (self.actors[k].pid, self.lane.shared.slot(k).tid.load(Relaxed));
        if step.call == Call::Kill {
            // SAFETY: `kill` takes numbers only, and the process belongs to this run.
            unsafe { libc::kill(pid, libc::SIGKILL) };
            let gone = self.process_ends(pid);
            self.say(i, if gone { "gone" } else { "did not end" });
        } else {
            let handled = || self.lane.shared.slot(k).signals.iter().map(|n| n.load(Relaxed)).sum::<u32>();
            let before = handled();
            let sent = sys::tgkill(pid, tid, step.args[1] as i32).is_ok();
            // A second signal of a kind is lost while the first one is pending. (A blocked signal
            // is not handled at all.)
            for _ in 0..20 {
                if handled() != before {
                    break;
                }
                std::thread::sleep(Duration::from_micros(100));
            }
            self.say(i, if sent { "sent" } else { "not sent" });
        }
    }

    /// Waits until all threads of a process are gone.
    fn process_ends(&mut self, pid: i32) -> bool {
        let end = Instant::now() + LIMIT;
        let leader = Watch::new(pid);
        let alive = |a: &Actor| a.pid == pid && a.watch.doing() != Doing::Dead;
        while self.actors.iter().any(alive) || leader.doing() != Doing::Dead {
            if Instant::now() > end {
                return false;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        self.monitor_hears();
        self.mark_dead(pid);
        true
    }

    /// Gives the monitor time to learn of the step and to tell other processes: up to 20 ms.
    fn monitor_hears(&self) {
        for _ in 0..200 {
            std::thread::sleep(Duration::from_micros(100));
            if self.lane.monitor_sleeps() {
                break;
            }
        }
    }

    fn died(&mut self, k: usize) {
        self.mark_dead(self.actors[k].pid);
    }

    fn mark_dead(&mut self, pid: i32) {
        for a in self.actors.iter_mut().filter(|a| a.pid == pid) {
            a.status = Status::Dead;
        }
    }

    fn why_dead(&self, k: usize) -> String {
        match Watch::new(self.actors[k].pid).status() {
            Some(s) if s & 0x7f != 0 => format!("died of signal {}", s & 0x7f),
            Some(s) => format!("ended with status {}", s >> 8),
            None => "died".into(),
        }
    }
}

fn flavour(mode: Mode, process: usize) -> usize {
    (mode >> process & 1).into()
}

/// Does the step end by itself, at the latest by its timeout?
fn has_timeout(step: &Step) -> bool {
    let ms = match step.call {
        Call::Poll | Call::PPoll | Call::Select | Call::PSelect => step.args[0],
        Call::EpollWait | Call::EpollPwait | Call::EpollPwait2 => step.args[2],
        Call::Any => step.args[7],
        Call::Fill | Call::Drain | Call::Stuck => return true,
        Call::VFork | Call::CloneFiles => return true,
        Call::Sleep | Call::Fork | Call::Thread | Call::Exec | Call::Child => return true,
        _ => return false,
    };
    (0..=SHORT_MS).contains(&ms)
}
