//! The generator's view of a program's processes and descriptors.

use std::collections::{HashMap, HashSet, VecDeque};

/// One end of a connection: side 0 connected, side 1 accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Side {
    pub conn: usize,
    pub side: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum What {
    Fresh { family: i32 },
    Listener { port: usize },
    End(Side),
    Epoll(usize),
    PipeRead(usize),
    PipeWrite(usize),
    Event(usize),
    Timer,
    Unix((usize, usize)),
    File,
}

impl What {
    pub fn is_socket(self) -> bool {
        matches!(self, What::Fresh { .. } | What::Listener { .. } | What::End(_) | What::Unix(_))
    }
    pub fn side(self) -> Option<Side> {
        match self {
            What::End(s) => Some(s),
            _ => None,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Fd {
    pub var: usize,
    pub what: What,
}

#[derive(Clone, Debug)]
pub struct Actor {
    pub process: usize,
    pub alive: bool,
    /// The objects for which the actor waits. It sleeps if this is not empty.
    pub sleeps_on: Vec<What>,
    /// The wait consumes what arrives, so no other actor may wait for it.
    pub consumes: bool,
}

#[derive(Clone, Debug, Default)]
pub struct Conn {
    /// Bytes that side 0 and side 1 may read.
    pub bytes: [usize; 2],
    /// The side that has sent its FIN.
    pub fin: [bool; 2],
    /// The side to which urgent data was sent.
    pub urgent: [bool; 2],
    /// The sides that have had SO_RCVLOWAT set.
    pub low_water: [bool; 2],
    /// The connection is between Unix sockets.
    pub unix: bool,
    /// The client has moved the connection to kernel TCP.
    pub moved: bool,
}

#[derive(Default)]
pub struct Model {
    pub actors: Vec<Actor>,
    fds: Vec<Vec<Fd>>,
    /// Address of each listener's port.
    pub ports: Vec<i64>,
    pub conns: Vec<Conn>,
    /// Connections that wait at a port, with the client's process.
    queues: HashMap<usize, VecDeque<(usize, usize)>>,
    /// Ports at which several processes accept.
    shared_ports: HashSet<usize>,
    /// Processes that have inherited an epoll instance, though the model assumes that none uses it.
    inherited_epoll: HashSet<usize>,
    nonblock: HashSet<usize>,
    pub kernel_bytes: HashMap<What, usize>,
    /// Entries of epoll instances: instance, variable.
    pub watched: HashSet<(usize, usize)>,
    next: usize,
}

impl Model {
    pub fn new(processes: usize) -> Model {
        let actor = |process| Actor { process, alive: true, sleeps_on: Vec::new(), consumes: false };
        Model { actors: (0..processes).map(actor).collect(), fds: vec![Vec::new(); processes], ..Model::default() }
    }

    pub fn number(&mut self) -> usize {
        self.next += 1;
        self.next
    }
    pub fn new_unix(&mut self) -> usize {
        self.number()
    }
    pub fn new_conn(&mut self) -> usize {
        self.conns.push(Conn::default());
        self.conns.len() - 1
    }
    pub fn queue(&mut self, port: usize, conn: usize, client: usize) {
        let process = self.process(client);
        self.queues.entry(port).or_default().push_back((conn, process));
    }
    /// Executes another program, which counts as a different client.
    pub fn exec(&mut self, actor: usize) {
        let process = self.process(actor);
        for (_, p) in self.queues.values_mut().flatten().filter(|(_, p)| *p == process) {
            *p = usize::MAX;
        }
    }
    pub fn has_epoll(&self, actor: usize) -> bool {
        self.fds_of(actor).iter().any(|f| matches!(f.what, What::Epoll(_)))
    }
    /// Would the next program miss a connection? It accepts only from the kernel's queue, and a
    /// connection waits at a listener that it inherits.
    pub fn exec_would_miss(&self, actor: usize) -> bool {
        let waits = |f: &Fd| matches!(f.what, What::Listener { port } if self.queued(port) > 0);
        self.inherited_epoll.contains(&self.process(actor)) && self.fds_of(actor).iter().any(waits)
    }
    /// Does an epoll instance watch a closed variable, whose file has another number?
    pub fn watches_closed(&self, actor: usize) -> bool {
        let held = |var: usize| self.fds_of(actor).iter().any(|f| f.var == var);
        self.watched.iter().any(|(ep, var)| held(*ep) && !held(*var))
    }
    /// No order is defined any more between connections that wait at the port.
    pub fn share(&mut self, port: usize) {
        self.shared_ports.insert(port);
    }
    /// Has a client moved a connection to kernel TCP that waits at the port?
    pub fn queued_has_moved(&self, port: usize) -> bool {
        self.queues.get(&port).is_some_and(|q| q.iter().any(|(conn, _)| self.conns[*conn].moved))
    }
    pub fn queued(&self, port: usize) -> usize {
        self.queues.get(&port).map_or(0, VecDeque::len)
    }
    pub fn dequeue(&mut self, port: usize) -> Option<usize> {
        self.queues.get_mut(&port)?.pop_front().map(|(conn, _)| conn)
    }
    /// Is the order in which connections are accepted defined if `client` makes one more? There is
    /// no order between client processes, or between accepting processes.
    pub fn in_order(&self, port: usize, client: usize) -> bool {
        let process = self.process(client);
        let same = self.queues.get(&port).is_none_or(|q| q.iter().all(|(_, p)| *p == process));
        self.queued(port) == 0 || (same && !self.shared_ports.contains(&port))
    }

    /// Do all connections that wait at a port come from one client? (Connections from before an
    /// `exec` belong to another client.)
    pub fn one_client(&self, port: usize) -> bool {
        let Some(q) = self.queues.get(&port) else { return true };
        let clients: HashSet<usize> = q.iter().map(|(_, p)| *p).collect();
        q.len() < 2 || clients.len() == 1 && !clients.contains(&usize::MAX)
    }

    fn process(&self, actor: usize) -> usize {
        self.actors[actor].process
    }
    pub fn install(&mut self, actor: usize, fd: Fd) {
        let p = self.process(actor);
        self.fds[p].retain(|f| f.var != fd.var);
        self.fds[p].push(fd);
    }
    pub fn set(&mut self, actor: usize, var: usize, what: What) {
        self.install(actor, Fd { var, what });
    }
    pub fn close(&mut self, actor: usize, var: usize) {
        let p = self.process(actor);
        let Some(i) = self.fds[p].iter().position(|f| f.var == var) else { return };
        let gone = self.fds[p].swap_remove(i);
        if let What::End(s) = gone.what {
            if self.holders_of(gone.what).is_empty() {
                self.conns[s.conn].fin[s.side] = true;
            }
        }
    }
    pub fn fds_of(&self, actor: usize) -> Vec<Fd> {
        self.fds[self.process(actor)].clone()
    }
    pub fn set_nonblock(&mut self, var: usize, on: bool) {
        if on {
            self.nonblock.insert(var);
        } else {
            self.nonblock.remove(&var);
        }
    }
    pub fn is_nonblock(&self, var: usize) -> bool {
        self.nonblock.contains(&var)
    }

    /// Actors that are awake and hold `what`, with its variable.
    pub fn holders_of(&self, what: What) -> Vec<(usize, usize)> {
        let mut found = Vec::new();
        for a in self.awake() {
            found.extend(self.fds_of(a).iter().filter(|f| f.what == what).map(|f| (a, f.var)));
        }
        found
    }
    pub fn processes_with(&self, what: What) -> usize {
        self.fds.iter().filter(|fds| fds.iter().any(|f| f.what == what)).count()
    }
    pub fn listeners(&self) -> Vec<(usize, usize, usize)> {
        let mut found = Vec::new();
        for a in self.awake() {
            for f in self.fds_of(a) {
                if let What::Listener { port } = f.what {
                    if !self.is_slept_on(f.what) {
                        found.push((a, f.var, port));
                    }
                }
            }
        }
        found
    }

    pub fn alive(&self) -> Vec<usize> {
        (0..self.actors.len()).filter(|i| self.actors[*i].alive).collect()
    }
    pub fn awake(&self) -> Vec<usize> {
        self.alive().into_iter().filter(|i| self.actors[*i].sleeps_on.is_empty()).collect()
    }
    pub fn asleep(&self) -> Vec<usize> {
        self.alive().into_iter().filter(|i| !self.actors[*i].sleeps_on.is_empty()).collect()
    }
    pub fn someone_sleeps(&self) -> bool {
        !self.asleep().is_empty()
    }
    pub fn is_slept_on(&self, what: What) -> bool {
        self.asleep().iter().any(|a| self.actors[*a].sleeps_on.contains(&what))
    }
    /// May an actor begin to wait for these objects?
    pub fn may_sleep_on(&self, what: &[What], consumes: bool) -> bool {
        self.asleep().iter().all(|a| {
            let other = &self.actors[*a];
            !(consumes || other.consumes) || !what.iter().any(|w| other.sleeps_on.contains(w))
        })
    }
    pub fn sleep(&mut self, actor: usize, what: Vec<What>, consumes: bool) {
        self.actors[actor].sleeps_on = what;
        self.actors[actor].consumes = consumes;
    }
    pub fn wake(&mut self, actor: usize) {
        self.actors[actor].sleeps_on.clear();
    }
    pub fn wake_all_on(&mut self, what: What) {
        for a in &mut self.actors {
            if a.sleeps_on.contains(&what) {
                a.sleeps_on.clear();
            }
        }
    }

    pub fn fork(&mut self, actor: usize, with_epoll: bool) {
        let mut copy = self.fds_of(actor);
        self.shared_ports.extend(copy.iter().filter_map(|f| match f.what {
            What::Listener { port } => Some(port),
            _ => None,
        }));
        let had_epoll = self.has_epoll(actor) || self.inherited_epoll.contains(&self.process(actor));
        copy.retain(|f| with_epoll || !matches!(f.what, What::Epoll(_)));
        self.fds.push(copy);
        let process = self.fds.len() - 1;
        if had_epoll {
            self.inherited_epoll.insert(process);
        }
        self.actors.push(Actor { process, alive: true, sleeps_on: Vec::new(), consumes: false });
    }
    /// Has a child inherited an epoll instance?
    pub fn is_epoll_inherited(&self) -> bool {
        !self.inherited_epoll.is_empty()
    }
    pub fn thread(&mut self, actor: usize) {
        let process = self.process(actor);
        self.actors.push(Actor { process, alive: true, sleeps_on: Vec::new(), consumes: false });
    }
    /// Gives a thread a copy of the descriptors. (Its process stays one process, which the model
    /// forgets.)
    pub fn unshare(&mut self, actor: usize) {
        self.fds.push(self.fds_of(actor));
        self.actors[actor].process = self.fds.len() - 1;
    }
    pub fn process_ends(&mut self, actor: usize) {
        let p = self.process(actor);
        for a in self.actors.iter_mut().filter(|a| a.process == p) {
            a.alive = false;
        }
        let gone = std::mem::take(&mut self.fds[p]);
        for f in gone {
            if let What::End(s) = f.what {
                if self.holders_of(f.what).is_empty() {
                    self.conns[s.conn].fin[s.side] = true;
                    self.wake_all_on(What::End(Side { conn: s.conn, side: 1 - s.side }));
                }
            }
        }
    }
    pub fn processes_alive(&self) -> usize {
        self.actors.iter().filter(|a| a.alive).map(|a| a.process).collect::<HashSet<_>>().len()
    }
    pub fn threads_of(&self, actor: usize) -> usize {
        self.actors.iter().filter(|a| a.alive && a.process == self.process(actor)).count()
    }
    /// For each process, one actor that is awake.
    pub fn one_per_process(&self) -> Vec<usize> {
        let mut seen = HashSet::new();
        self.awake().into_iter().filter(|a| seen.insert(self.process(*a))).collect()
    }
}
