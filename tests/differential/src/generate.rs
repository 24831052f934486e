//! Random programs. A small model of the program's past steers the choice to interesting steps:
//! kinds of variables, bytes in flight, sleeping threads. The model need not be right, because the
//! kernel is the judge.
//!
//! Long: what depends on the same state of a random program.

mod acts;
mod cork;
mod edges;
mod io;
mod long;
mod model;
mod odd;
mod passing;
mod recycled;
mod shadow;
mod stdio;
mod trees;
mod unix;
mod waiting;

use crate::call::Call;
use crate::program::{Program, Step, ACTORS, PORTS, VARS};
use crate::rng::Rng;
use crate::symbols as sym;
use model::{Fd, Model, Side, What};

/// Steps that are generated only on demand: known gaps, and behaviour that the kernel does not
/// promise.
pub const SWITCHES: &[(&str, &str)] = &[
    ("scm", "many SCM_RIGHTS, of TCP sockets as well (docs/limits.md)"),
    ("exec_epoll", "exec with an epoll instance that survives it: the path switch is an edge (docs/limits.md)"),
    ("oob", "MSG_OOB (docs/limits.md)"),
    ("bulk", "more than fits into socket buffers: how much fits is not promised (docs/limits.md)"),
    ("outq", "SIOCOUTQ: the kernel counts what is not acknowledged yet, which takes time"),
    ("shared_epoll", "an epoll instance used by the child that inherited it (docs/limits.md)"),
    ("upgrade", "more clients whose connections begin in the kernel, and go over to shared memory at once (FASTSOCKET_UPGRADE=1)"),
    ("unspec", "connect to AF_UNSPEC on a connection (docs/limits.md)"),
    ("odd", "mostly pointers that lead nowhere, odd values, lengths and options, forms of calls by `syscall`"),
    ("long", "mostly calls with lengths at every power of two, and below zero"),
    ("stdio", "many connections and listeners on the numbers 0 to 2, and programs that have one as standard input and output"),
    ("cork", "TCP_CORK, MSG_MORE, TCP_NODELAY: nobody looks between the first send and the release (ADR 55)"),
    ("recycled", "sockets that are changed in every way and closed, and looks at the next; sockets in BPF maps"),
    ("unix", "mostly Unix streams, most of which go over to shared memory (ADR 78)"),
    ("acts", "mostly options, each with calls whose answers depend on what it does"),
    ("trees", "mostly process trees: vfork, clone and unshare of descriptors, subreapers, limits of resources"),
    ("edges", "mostly clients that come and go, before listeners that are watched by edges"),
    ("listeners", "mostly listeners that shadow each other, and threads that connect to themselves"),
];

/// Which of [`SWITCHES`] are on.
#[derive(Clone, Copy, Default, Debug)]
pub struct Switches(u32);

impl Switches {
    pub fn parse(words: &str) -> anyhow::Result<Switches> {
        let mut on = 0;
        for word in words.split(',').filter(|w| !w.is_empty()) {
            match SWITCHES.iter().position(|(name, _)| *name == word) {
                Some(i) => on |= 1 << i,
                None if word == "all" => on = u32::MAX,
                None => anyhow::bail!("no switch {word:?}"),
            }
        }
        Ok(Switches(on))
    }
    pub fn has(self, name: &str) -> bool {
        SWITCHES.iter().position(|(n, _)| *n == name).is_some_and(|i| self.0 >> i & 1 != 0)
    }

    /// The time for which a step may sleep that ends by itself, in microseconds. An opener that
    /// offers a connection waits 2 ms for the other side (`OFFER_NS`), and then continues in the
    /// kernel. If listeners share a port, the monitor waits in the kernel for a moment (zones).
    pub fn patience_us(self) -> u64 {
        match () {
            () if self.has("listeners") => 20_000,
            // Some options move a connection to kernel TCP.
            () if ["odd", "recycled", "acts", "trees"].iter().any(|name| self.has(name)) => 5_000,
            () if self.has("unix") => 5_000,
            () if self.has("upgrade") => 3_000,
            () => 0,
        }
    }
}

pub(crate) struct Gen {
    rng: Rng,
    m: Model,
    switches: Switches,
    steps: Vec<Step>,
    next_var: usize,
    /// False if connections wait in a queue that others may join, or if listeners shadow each
    /// other.
    mixable: bool,
}

/// The program of a seed, and whether it may also run with the library on one side only.
/// Connections over both paths must not wait for one `accept`, because there is no order between
/// the paths.
pub fn program(seed: u64, switches: Switches) -> (Program, bool) {
    let mut rng = Rng::new(seed);
    let processes = if switches.has("edges") { rng.pick(&[2, 3, 4]) } else { rng.pick(&[1, 2, 2, 2, 2, 3]) };
    let length = 6 + rng.below(rng.clone().pick(&[12, 24, 40]));
    let more = ["edges", "acts", "trees"].iter().any(|name| switches.has(name));
    let length = length + if more { 20 } else { 0 };
    let mut g = Gen { rng, m: Model::new(processes), switches, steps: Vec::new(), next_var: 0, mixable: true };
    g.opening();
    for _ in 0..length * 4 {
        if g.steps.len() >= length {
            break;
        }
        g.something();
    }
    g.closing_look();
    (Program { processes: processes as u8, steps: g.steps }, g.mixable)
}

impl Gen {
    fn push(&mut self, actor: usize, out: usize, call: Call, args: &[i64]) {
        let (call, args) = if self.keeps_number(call, args) { (Call::CloseStd, &args[..1]) } else { (call, args) };
        self.steps.push(Step { actor: actor as u8, out: out as u8, call, args: args.to_vec() });
    }
    /// Reserves `n` new variables.
    fn vars(&mut self, n: usize) -> usize {
        let v = self.next_var.min(VARS - n);
        self.next_var += n;
        v
    }
    fn new_fd(&mut self, actor: usize, call: Call, args: &[i64], what: What) -> usize {
        let v = self.vars(1);
        self.push(actor, v, call, args);
        self.m.install(actor, Fd { var: v, what });
        v
    }

    /// Most programs begin with a listener and a connection.
    fn opening(&mut self) {
        if self.switches.has("edges") {
            return self.edges_opening();
        }
        if self.switches.has("trees") {
            self.limits();
        }
        self.listener(0);
        for _ in 0..self.rng.pick(&[1, 1, 1, 2]) {
            self.connection();
        }
    }

    fn listener(&mut self, actor: usize) {
        if self.switches.has("unix") && self.rng.chance(95) {
            return self.unix_listener(actor);
        }
        let port = self.m.ports.len();
        if port >= PORTS || self.next_var + 8 > VARS {
            return;
        }
        let addr = self.rng.pick(&[0i64, 0, 0, 1, 1, 2, 3, 4]);
        let family = if matches!(addr, 2 | 3) { libc::AF_INET6 } else { libc::AF_INET };
        let nonblock = self.rng.chance(25);
        let flags = self.socket_flags(nonblock);
        let v = self.new_fd(actor, Call::Socket, &[family.into(), flags], What::Fresh { family });
        if self.rng.chance(40) {
            self.push(actor, 0, Call::SetOpt, &[v as i64, option("REUSEADDR"), 1]);
        }
        if self.rng.chance(75) {
            // Without it Nagle's algorithm decides when small sends arrive.
            self.push(actor, 0, Call::SetOpt, &[v as i64, option("NODELAY"), 1]);
        }
        self.push(actor, 0, Call::Bind, &[v as i64, addr, -1]);
        let backlog = self.rng.pick(&[16, 128, 5]);
        self.push(actor, 0, Call::Listen, &[v as i64, backlog, port as i64]);
        self.m.ports.push(addr);
        self.m.set(actor, v, What::Listener { port });
        self.m.set_nonblock(v, nonblock);
    }

    fn socket_flags(&mut self, nonblock: bool) -> i64 {
        let cloexec = if self.rng.chance(30) { libc::SOCK_CLOEXEC } else { 0 };
        i64::from(cloexec | if nonblock { libc::SOCK_NONBLOCK } else { 0 })
    }

    /// Address and family for a client of a listener, and whether the address leads to the
    /// listener.
    fn way_to(&mut self, port: usize) -> (i64, i32, bool) {
        let (a, f) = match self.m.ports[port] {
            0 => (0, libc::AF_INET),
            1 => (self.rng.pick(&[0, 0, 4]), libc::AF_INET),
            2 => (2, libc::AF_INET6),
            3 => self.rng.pick(&[(2, libc::AF_INET6), (0, libc::AF_INET), (5, libc::AF_INET6)]),
            at @ (sym::PATH | sym::ABSTRACT) => return (at, libc::AF_UNIX, true),
            _ => (4, libc::AF_INET),
        };
        if self.rng.chance(2) {
            let other = self.rng.pick(&[0, 2, 4]);
            let own = self.m.ports[port];
            return (other, f, (f == libc::AF_INET6) == (other == 2) && (other == own || own == 1 || own == 3));
        }
        (a, f, true)
    }

    /// Makes a client connect and a server accept, in either order.
    fn connection(&mut self) {
        let listeners = self.m.listeners();
        let Some((server, lv, port)) = self.rng.pick_opt(&listeners) else { return };
        let awake = self.m.awake();
        let Some(client) = self
            .rng
            .pick_opt(&awake.iter().copied().filter(|a| *a != server).collect::<Vec<_>>())
            .or(Some(server))
            .filter(|_| self.next_var + 8 <= VARS)
        else {
            return;
        };
        if self.m.ports[port] >= sym::PATH {
            return self.unix_connection(client, server, lv, port);
        }
        if !self.m.in_order(port, client) {
            return self.accept_waiting(server, lv, port);
        }
        let (addr, family, leads) = self.way_to(port);
        let nonblock = self.rng.chance(25);
        let flags = self.socket_flags(nonblock);
        let cv = self.new_fd(client, Call::Socket, &[family.into(), flags], What::Fresh { family });
        self.m.set_nonblock(cv, nonblock);
        // A bound client uses kernel TCP. There is no order between waiting connections of the two
        // paths, so the connection is accepted at once.
        let upgrade = self.switches.has("upgrade") && self.rng.chance(60);
        let bound = (upgrade || self.rng.chance(4)) && self.m.queued(port) == 0;
        if bound && upgrade {
            // Such a connection uses kernel TCP at first.
            self.push(client, 0, Call::SetOpt, &[cv as i64, option("REUSEPORT"), 1]);
        }
        if bound {
            self.push(client, 0, Call::Bind, &[cv as i64, if family == libc::AF_INET { 0 } else { 2 }, -1]);
        }
        if self.rng.chance(10) && self.epoll_of(client).is_some() {
            let ep = self.epoll_of(client).unwrap_or(0);
            self.watch(client, ep, cv);
        }
        // A server that waits in accept is released by the client.
        let early =
            leads && client != server && self.rng.chance(15) && !self.m.is_nonblock(lv) && self.m.queued(port) == 0;
        let av = early.then(|| self.accept_step(server, lv));
        self.push(client, 0, Call::Connect, &[cv as i64, addr, port as i64]);
        if !leads {
            return;
        }
        let conn = self.m.new_conn();
        self.m.set(client, cv, What::End(Side { conn, side: 0 }));
        if self.rng.chance(80) {
            self.push(client, 0, Call::SetOpt, &[cv as i64, option("NODELAY"), 1]);
        }
        match av {
            Some(av) => self.m.install(server, Fd { var: av, what: What::End(Side { conn, side: 1 }) }),
            None => {
                self.m.queue(port, conn, client);
                if bound || self.rng.chance(90) {
                    self.accept_waiting(server, lv, port);
                } else {
                    self.mixable = false;
                }
            }
        }
    }

    fn accept_waiting(&mut self, server: usize, lv: usize, port: usize) {
        if let Some(conn) = self.m.dequeue(port) {
            let av = self.accept_step(server, lv);
            self.m.install(server, Fd { var: av, what: What::End(Side { conn, side: 1 }) });
        }
    }

    fn accept_step(&mut self, actor: usize, lv: usize) -> usize {
        let v = self.vars(1);
        match self.rng.below(4) {
            0 => self.push(actor, v, Call::AcceptNull, &[lv as i64]),
            1 => {
                let nonblock = self.rng.chance(50);
                let flags = self.socket_flags(nonblock);
                self.push(actor, v, Call::Accept4, &[lv as i64, flags]);
                self.m.set_nonblock(v, nonblock);
            }
            _ => self.push(actor, v, Call::Accept, &[lv as i64]),
        }
        v
    }

    /// Adds one random step.
    fn something(&mut self) {
        if self.m.someone_sleeps() && self.rng.chance(45) {
            return self.release();
        }
        let awake = self.m.awake();
        let Some(actor) = self.rng.pick_opt(&awake) else { return self.release() };
        if self.switches.has("edges") {
            return self.edges(actor);
        }
        if self.switches.has("listeners") && self.rng.chance(40) {
            return if self.rng.chance(60) { self.shadows(actor) } else { self.connect_to_itself(actor) };
        }
        if self.switches.has("unix") && self.rng.chance(22) {
            return self.unix(actor);
        }
        if self.switches.has("acts") && self.rng.chance(50) {
            return self.acts(actor);
        }
        if self.switches.has("trees") && self.rng.chance(35) {
            return self.trees(actor);
        }
        if self.switches.has("odd") && self.rng.chance(50) {
            return self.odd(actor);
        }
        if self.switches.has("long") && self.rng.chance(50) {
            return self.long(actor);
        }
        if self.switches.has("recycled") && self.rng.chance(40) {
            return self.recycled(actor);
        }
        if self.switches.has("scm") && self.rng.chance(15) {
            return self.pass(actor);
        }
        if self.switches.has("stdio") && self.rng.chance(25) {
            return self.stdio(actor);
        }
        if self.switches.has("cork") && self.rng.chance(25) {
            return self.corked(actor);
        }
        match self.rng.below(100) {
            0..=23 => self.transfer(actor),
            24..=33 => self.receive(actor),
            34..=41 => self.poll_some(actor),
            42..=53 => self.epoll_some(actor),
            54..=58 => self.end_some(actor),
            59..=63 => self.options(actor),
            64..=68 => self.flags(actor),
            69..=73 => self.kernel_things(actor),
            74..=77 => self.duplicate(actor),
            78..=81 => self.connection(),
            82 => self.listener(actor),
            83 => self.connect_to_itself(actor),
            84..=87 => self.populate(actor),
            88..=91 => self.ask(actor),
            92..=93 => self.blocking_timeout(actor),
            94..=95 => self.pass(actor),
            96..=97 => self.mischief(actor),
            _ => self.signal(),
        }
    }

    /// Adds a fork, a thread, the end of a process, or an exec.
    fn populate(&mut self, actor: usize) {
        let new = self.m.actors.len();
        match self.rng.below(10) {
            // (If the child holds a closed descriptor, it stays in the kernel's epoll instance.)
            0..=3 if new < ACTORS - 1 && !self.m.watches_closed(actor) => {
                self.push(actor, 0, Call::Fork, &[new as i64]);
                self.m.fork(actor, self.switches.has("shared_epoll"));
            }
            4..=7 if new < ACTORS - 1 => {
                self.push(actor, 0, Call::Thread, &[new as i64]);
                self.m.thread(actor);
            }
            8 if self.m.awake().len() > 2 => {
                self.push(actor, 0, Call::Exit, &[]);
                self.m.process_ends(actor);
            }
            9 if self.m.actors.len() > 1 && self.m.processes_alive() > 1 => {
                let alive = self.m.alive();
                let victim = self.rng.pick(&alive);
                self.push(0, 0, Call::Kill, &[victim as i64]);
                self.m.process_ends(victim);
            }
            // (The model does not know of an end that exec closes. docs/limits.md excludes two
            // cases: a listener at which a connection waits that its client has moved to kernel
            // TCP, and a listener that is inherited with an epoll instance.)
            _ if self.m.threads_of(actor) == 1
                && !(0..self.m.ports.len()).any(|port| self.m.queued_has_moved(port))
                && !self.m.exec_would_miss(actor)
                && !self.switches.has("cork")
                && (self.switches.has("exec_epoll") || !self.m.has_epoll(actor)) =>
            {
                self.m.exec(actor);
                self.push(actor, 0, Call::Exec, &[]);
            }
            _ => {}
        }
    }

    fn signal(&mut self) {
        let alive = self.m.alive();
        if let Some(a) = self.rng.pick_opt(&alive) {
            let signal = self.rng.pick(&[libc::SIGUSR1, libc::SIGUSR2]);
            self.push(0, 0, Call::Signal, &[a as i64, signal.into()]);
        }
        if self.rng.chance(30) {
            if let Some(a) = self.rng.pick_opt(&self.m.awake()) {
                if self.rng.chance(50) {
                    let on = self.rng.chance(70);
                    return self.push(a, 0, Call::SetRestart, &[on.into()]);
                }
                let mask = self.rng.below(4) as i64;
                self.push(a, 0, Call::BlockSignals, &[mask]);
            }
        }
    }

    fn options(&mut self, actor: usize) {
        let Some(fd) = self.socket_of(actor) else { return };
        if self.switches.has("unix") && self.has_sent(fd) {
            return;
        }
        let v = fd.var as i64;
        if self.rng.chance(50) {
            let names: Vec<i64> = (0..sym::OPTIONS.len() as i64).collect();
            let which = self.rng.pick(&names);
            if which == option("V6ONLY") && self.moves() {
                return; // on a switched connection: docs/limits.md
            }
            return self.push(actor, 0, Call::GetOpt, &[v, which]);
        }
        match self.rng.below(8) {
            0 => {
                let ms = self.rng.pick(&[0, 20, 30, 5000]);
                let call = self.rng.pick(&[Call::SetRcvTimeo, Call::SetSndTimeo]);
                self.push(actor, 0, call, &[v, ms]);
            }
            1 => {
                let call = self.rng.pick(&[Call::GetRcvTimeo, Call::GetSndTimeo, Call::GetLinger]);
                self.push(actor, 0, call, &[v]);
            }
            2 => {
                let (on, secs) = self.rng.pick(&[(0, 0), (1, 0), (1, 0), (1, 3)]);
                self.push(actor, 0, Call::SetLinger, &[v, on, secs]);
            }
            _ => {
                let mut names = vec![
                    "REUSEADDR",
                    "KEEPALIVE",
                    "OOBINLINE",
                    "PRIORITY",
                    "BROADCAST",
                    "DONTROUTE",
                    "NODELAY",
                    "KEEPIDLE",
                    "KEEPINTVL",
                    "KEEPCNT",
                    "USER_TIMEOUT",
                    "SYNCNT",
                    "LINGER2",
                    "TOS",
                    "TTL",
                    "BOGUS",
                    "V6ONLY",
                    "ERROR",
                    "TYPE",
                    "ACCEPTCONN",
                ];
                if matches!(fd.what, What::End(_)) {
                    names.push("RCVLOWAT"); // on a listener: docs/limits.md
                }
                if self.switches.has("bulk") {
                    names.extend(["SNDBUF", "RCVBUF"]);
                }
                let name = self.rng.pick(&names);
                if name == "V6ONLY" && self.moves() {
                    return; // on a switched connection: docs/limits.md
                }
                let mut value = self.rng.pick(&[0, 1, 1, 5, 100, -1, 40000]);
                if matches!(name, "NODELAY" | "LINGER2") {
                    value = 1; // without it, sends or the end depend on acknowledgements
                }
                if let Some(side) = fd.what.side().filter(|_| name == "RCVLOWAT") {
                    self.m.conns[side.conn].low_water[side.side] = true;
                }
                self.push(actor, 0, Call::SetOpt, &[v, option(name), value]);
            }
        }
    }

    fn flags(&mut self, actor: usize) {
        let Some(fd) = self.any_of(actor) else { return };
        let v = fd.var as i64;
        match self.rng.below(6) {
            0 => {
                let on = self.rng.chance(50);
                self.push(actor, 0, Call::SetFl, &[v, if on { libc::O_NONBLOCK.into() } else { 0 }]);
                self.m.set_nonblock(fd.var, on);
            }
            1 => {
                let on = self.rng.chance(50);
                self.push(actor, 0, Call::NbIo, &[v, on.into()]);
                self.m.set_nonblock(fd.var, on);
            }
            2 => self.push(actor, 0, Call::GetFl, &[v]),
            3 => self.push(actor, 0, Call::GetFd, &[v]),
            4 => {
                let on = self.rng.below(2) as i64;
                self.push(actor, 0, Call::SetFd, &[v, on]);
            }
            _ => self.push(actor, 0, Call::FionRead, &[v]),
        }
    }

    fn ask(&mut self, actor: usize) {
        let Some(fd) = self.socket_of(actor) else { return };
        let call = self.rng.pick(&[
            Call::GetSockName,
            Call::GetPeerName,
            Call::TcpState,
            Call::AtMark,
            Call::FionRead,
            Call::GetFl,
        ]);
        self.push(actor, 0, call, &[fd.var as i64]);
        if self.switches.has("outq") && self.rng.chance(20) {
            self.push(actor, 0, Call::OutQ, &[fd.var as i64]);
        }
        if self.rng.chance(30) {
            self.push(actor, 0, Call::GetOpt, &[fd.var as i64, option("ERROR")]);
        }
    }

    /// Adds calls on descriptors that do not support them, or are closed.
    fn mischief(&mut self, actor: usize) {
        if self.switches.has("cork") {
            return; // the model does not know what such a call ends
        }
        let v = self.rng.below(self.next_var) as i64;
        let foreign = |f: &Fd| f.var == v as usize && matches!(f.what, What::Epoll(_));
        if (0..self.m.actors.len()).any(|a| self.m.fds_of(a).iter().any(foreign)) {
            return;
        }
        let held = self.m.fds_of(actor).into_iter().find(|f| f.var == v as usize);
        if self.switches.has("unix") && held.is_some_and(|fd| self.has_sent(fd)) {
            return;
        }
        match self.rng.below(12) {
            0 => self.push(actor, 0, Call::Send, &[v, 3, libc::MSG_DONTWAIT.into()]),
            1 => self.push(actor, 0, Call::Recv, &[v, 3, libc::MSG_DONTWAIT.into()]),
            2 => self.push(actor, 0, Call::Listen, &[v, 5, -1]),
            // (The kernel can bind a connection again after it has ended.)
            3 if !self.is_end(v as usize) => self.push(actor, 0, Call::Bind, &[v, 0, -1]),
            // (A connection that has moved to kernel TCP reports EISCONN for the first repeated
            // call, too: docs/limits.md.)
            4 if !(self.m.ports.is_empty() || self.moves() && self.is_end(v as usize)) => {
                let p = self.rng.below(self.m.ports.len());
                self.push(actor, 0, Call::Connect, &[v, self.m.ports[p].min(0), p as i64]);
            }
            5 => self.push(actor, 0, Call::GetPeerName, &[v]),
            6 => self.push(actor, 0, Call::Poll, &[0, v, i64::from(libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP)]),
            7 => self.push(actor, 0, Call::Shutdown, &[v, self.rng.clone().pick(&[0, 1, 2, 7])]),
            8 => self.push(actor, 0, Call::GetOpt, &[v, option("ERROR")]),
            9 => self.push(actor, 0, Call::GetFl, &[v]),
            10 if self.switches.has("unspec") => self.push(actor, 0, Call::ConnectUnspec, &[v]),
            _ => {
                if let Some(fd) = held {
                    self.unwatch(actor, fd);
                }
                self.push(actor, 0, Call::Close, &[v]);
                self.m.close(actor, v as usize);
            }
        }
    }

    /// At the end, an actor of each process reports what is left.
    fn closing_look(&mut self) {
        if self.switches.has("edges") {
            self.edges_end();
        }
        for actor in self.m.one_per_process() {
            let ends: Vec<_> = self.m.fds_of(actor).into_iter().filter(|f| matches!(f.what, What::End(_))).collect();
            for fd in ends.iter().take(3) {
                let v = fd.var as i64;
                let all = libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP | libc::POLLPRI;
                self.push(actor, 0, Call::Poll, &[0, v, all.into()]);
                self.push(actor, 0, Call::Recv, &[v, 60000, libc::MSG_DONTWAIT.into()]);
                if self.rng.chance(50) {
                    self.push(actor, 0, Call::GetOpt, &[v, option("ERROR")]);
                    self.push(actor, 0, Call::Recv, &[v, 100, libc::MSG_DONTWAIT.into()]);
                }
            }
        }
    }

    fn any_of(&mut self, actor: usize) -> Option<Fd> {
        let fds = self.m.fds_of(actor);
        self.rng.pick_opt(&fds)
    }
    fn socket_of(&mut self, actor: usize) -> Option<Fd> {
        let ends: Vec<Fd> = self.m.fds_of(actor).into_iter().filter(|f| matches!(f.what, What::End(_))).collect();
        let sockets: Vec<Fd> = self.m.fds_of(actor).into_iter().filter(|f| f.what.is_socket()).collect();
        if self.rng.chance(70) {
            return self.rng.pick_opt(&ends).or_else(|| self.rng.pick_opt(&sockets));
        }
        self.rng.pick_opt(&sockets)
    }
    fn is_end(&self, var: usize) -> bool {
        let ends = |a: usize| self.m.fds_of(a).iter().any(|f| f.var == var && f.what.side().is_some());
        (0..self.m.actors.len()).any(ends)
    }
    fn end_of(&mut self, actor: usize) -> Option<(Fd, Side)> {
        let ends: Vec<_> = self.m.fds_of(actor).into_iter().filter_map(|f| f.what.side().map(|s| (f, s))).collect();
        self.rng.pick_opt(&ends)
    }
}

fn option(name: &str) -> i64 {
    sym::option(name).unwrap_or(0)
}
