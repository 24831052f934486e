//! Clients that come and go while a server is busy, at listeners that are watched edge-triggered.
//! If as many connections wait as before, some of them may still be new.
//!
//! Process 0 is the server, and no other process holds its listeners. All others are clients,
//! without an order between them. So `accept_all` takes the waiting connections of several clients,
//! and `accept` is used if all belong to one client.

use super::model::{Fd, What};
use super::{option, Gen};
use crate::call::Call;
use crate::program::{ACTORS, PORTS, VARS};

const IN: i64 = libc::EPOLLIN as i64;
const ET: i64 = libc::EPOLLET as u32 as i64;
const ONESHOT: i64 = libc::EPOLLONESHOT as i64;
const SERVER: usize = 0;

impl Gen {
    /// Makes one or two listeners, and one or two epoll instances that watch these.
    pub(super) fn edges_opening(&mut self) {
        for _ in 0..self.rng.pick(&[1, 1, 2]) {
            self.edge_listener();
        }
        for _ in 0..self.rng.pick(&[1, 1, 2]) {
            self.edge_instance();
        }
    }

    fn edge_listener(&mut self) {
        let port = self.m.ports.len();
        if port >= PORTS || self.next_var + 8 > VARS {
            return;
        }
        let addr = self.rng.pick(&[0i64, 0, 1, 2, 3]);
        let family = if addr < 2 { libc::AF_INET } else { libc::AF_INET6 };
        let flags = i64::from(libc::SOCK_NONBLOCK);
        let v = self.new_fd(SERVER, Call::Socket, &[family.into(), flags], What::Fresh { family });
        // (The ports of earlier connections cannot be used for a minute.)
        self.push(SERVER, 0, Call::SetOpt, &[v as i64, option("REUSEADDR"), 1]);
        self.push(SERVER, 0, Call::Bind, &[v as i64, addr, -1]);
        self.push(SERVER, 0, Call::Listen, &[v as i64, 64, port as i64]);
        self.m.ports.push(addr);
        self.m.set(SERVER, v, What::Listener { port });
        self.m.set_nonblock(v, true);
    }

    fn edge_instance(&mut self) {
        if self.next_var + 8 > VARS {
            return;
        }
        let what = What::Epoll(self.m.number());
        let ep = self.new_fd(SERVER, Call::EpollCreate, &[0], what);
        for fd in self.m.fds_of(SERVER).into_iter().filter(|f| matches!(f.what, What::Listener { .. })) {
            let how = self.listening();
            self.push(SERVER, 0, Call::EpollAdd, &[ep as i64, fd.var as i64, how]);
            self.m.watched.insert((ep, fd.var));
        }
        if self.rng.chance(30) {
            let what = What::Epoll(self.m.number());
            let outer = self.new_fd(SERVER, Call::EpollCreate, &[0], what);
            let how = self.rng.pick(&[IN | ET, IN | ET, IN]);
            self.push(SERVER, 0, Call::EpollAdd, &[outer as i64, ep as i64, how]);
            self.m.watched.insert((outer, ep));
        }
    }

    /// Random events for a listener.
    fn listening(&mut self) -> i64 {
        self.rng.pick(&[IN | ET, IN | ET, IN | ET, IN | ET | ONESHOT, IN | ONESHOT, IN])
    }

    /// Adds one random step.
    pub(super) fn edges(&mut self, _: usize) {
        match self.rng.below(100) {
            0..=3 => self.turn_over(),
            4..=33 => self.somebody_comes(),
            34..=55 => self.somebody_goes(),
            56..=73 => self.server_looks(),
            74..=87 => self.server_takes(),
            88..=90 => self.arm_again(),
            91 => self.edge_instance(),
            92 => self.edge_listener(),
            93 => self.listener_goes(),
            94..=96 => self.another_thread(),
            _ => self.ends_talk(),
        }
    }

    /// At the end the server collects its events, accepts all connections, and does both once more.
    pub(super) fn edges_end(&mut self) {
        for _ in 0..2 {
            let fds = self.m.fds_of(SERVER);
            for ep in fds.into_iter().filter(|f| matches!(f.what, What::Epoll(_))) {
                if !self.m.is_slept_on(ep.what) {
                    self.push(SERVER, 0, Call::EpollWait, &[ep.var as i64, 32, 0]);
                }
            }
            for (v, _) in self.ports_of_server() {
                self.push(SERVER, 0, Call::AcceptAll, &[v as i64]);
            }
        }
    }

    fn clients(&self) -> Vec<usize> {
        let awake = self.m.awake();
        awake.into_iter().filter(|a| self.m.actors[*a].process != self.m.actors[SERVER].process).collect()
    }

    fn servers(&self) -> Vec<usize> {
        let awake = self.m.awake();
        awake.into_iter().filter(|a| self.m.actors[*a].process == self.m.actors[SERVER].process).collect()
    }

    fn ports_of_server(&self) -> Vec<(usize, usize)> {
        let fds = self.m.fds_of(SERVER);
        fds.iter()
            .filter_map(|f| if let What::Listener { port } = f.what { Some((f.var, port)) } else { None })
            .collect()
    }

    /// A client connects, once or twice, and may send something. Often the client is a new process.
    fn somebody_comes(&mut self) {
        let (clients, ports) = (self.clients(), self.ports_of_server());
        let (Some(mut client), Some((_, port))) = (self.rng.pick_opt(&clients), self.rng.pick_opt(&ports)) else {
            return;
        };
        let new = self.m.actors.len();
        if new < ACTORS && self.rng.chance(40) {
            self.push(client, 0, Call::Fork, &[new as i64]);
            self.m.fork(client, false);
            client = new;
        }
        for _ in 0..self.rng.pick(&[1, 1, 1, 2]) {
            if self.next_var + 4 > VARS {
                return;
            }
            let (addr, family, leads) = self.way_to(port);
            let nonblock = self.rng.chance(25);
            let flags = if nonblock { i64::from(libc::SOCK_NONBLOCK) } else { 0 };
            let v = self.new_fd(client, Call::Socket, &[family.into(), flags], What::Fresh { family });
            self.m.set_nonblock(v, nonblock);
            self.push(client, 0, Call::Come, &[v as i64, addr, port as i64]);
            if !leads {
                return;
            }
            if nonblock {
                // The connection may be writable before it has reached the listener.
                self.push(client, 0, Call::Poll, &[100, v as i64, libc::POLLOUT.into()]);
            }
            self.push(client, 0, Call::SetOpt, &[v as i64, option("NODELAY"), 1]);
            let conn = self.m.new_conn();
            self.m.queue(port, conn, client);
            self.m.set(client, v, What::End(super::model::Side { conn, side: 0 }));
            self.m.wake_all_on(What::Listener { port });
            if self.rng.chance(40) {
                let n = self.rng.pick(&[1, 3, 10]);
                self.push(client, 0, Call::Send, &[v as i64, n, libc::MSG_NOSIGNAL.into()]);
                self.m.conns[conn].bytes[1] += n as usize;
            }
        }
    }

    /// A client connects, is reported and accepted, and ends; then as many connect again. Then the
    /// server looks.
    fn turn_over(&mut self) {
        let before = self.m.actors.len();
        self.somebody_comes();
        self.server_looks();
        self.server_takes();
        let clients: Vec<usize> = self.clients().into_iter().filter(|a| *a >= before).collect();
        if self.m.processes_alive() > 3 {
            for client in clients {
                self.push(client, 0, Call::Exit, &[]);
                self.m.process_ends(client);
            }
        }
        self.somebody_comes();
        self.server_looks();
    }

    /// A client exits, is killed, executes another program, or closes what it has.
    fn somebody_goes(&mut self) {
        let clients = self.clients();
        let Some(client) = self.rng.pick_opt(&clients) else { return };
        let last = self.m.processes_alive() < 3;
        match self.rng.below(10) {
            0..=2 if !last => {
                self.push(client, 0, Call::Exit, &[]);
                self.m.process_ends(client);
            }
            3 if !last => {
                self.push(0, 0, Call::Kill, &[client as i64]);
                self.m.process_ends(client);
            }
            4 | 5 => {
                self.m.exec(client);
                self.push(client, 0, Call::Exec, &[]);
            }
            _ => {
                let all = self.rng.chance(60);
                let ends: Vec<Fd> = self.m.fds_of(client).into_iter().filter(|f| f.what.side().is_some()).collect();
                for fd in ends {
                    if !all && self.rng.chance(60) {
                        continue;
                    }
                    match self.rng.below(8) {
                        0 => self.push(client, 0, Call::Shutdown, &[fd.var as i64, 1]),
                        1 => self.push(client, 0, Call::SetLinger, &[fd.var as i64, 1, 0]),
                        _ => {}
                    }
                    self.push(client, 0, Call::Close, &[fd.var as i64]);
                    self.m.close(client, fd.var);
                }
            }
        }
    }

    fn instance(&mut self) -> Option<Fd> {
        let all: Vec<Fd> = self.m.fds_of(SERVER).into_iter().filter(|f| matches!(f.what, What::Epoll(_))).collect();
        self.rng.pick_opt(&all).filter(|f| !self.m.is_slept_on(f.what))
    }

    /// An epoll instance that no other instance watches, and on which no actor sleeps.
    fn open_instance(&mut self) -> Option<Fd> {
        let inner = |ep: usize| self.m.watched.iter().any(|w| w.1 == ep);
        let all: Vec<Fd> = self.m.fds_of(SERVER).into_iter().filter(|f| matches!(f.what, What::Epoll(_))).collect();
        let open: Vec<Fd> = all.into_iter().filter(|f| !inner(f.var)).collect();
        self.rng.pick_opt(&open).filter(|f| !self.m.is_slept_on(f.what))
    }

    fn server_looks(&mut self) {
        let servers = self.servers();
        let (Some(server), Some(ep)) = (self.rng.pick_opt(&servers), self.instance()) else { return };
        let e = ep.var as i64;
        let ms = if self.rng.chance(8) { 15 } else { 0 };
        match self.rng.below(5) {
            0 => self.push(server, 0, Call::EpollPwait, &[e, 32, ms, 0]),
            1 => self.push(server, 0, Call::EpollPwait2, &[e, 32, ms, 0]),
            2 => self.push(server, 0, Call::Poll, &[0, e, IN]),
            _ => self.push(server, 0, Call::EpollWait, &[e, 32, ms]),
        }
    }

    fn server_takes(&mut self) {
        let servers = self.servers();
        let ports = self.ports_of_server();
        let (Some(server), Some((v, port))) = (self.rng.pick_opt(&servers), self.rng.pick_opt(&ports)) else { return };
        if self.next_var + 4 < VARS && self.m.one_client(port) && self.rng.chance(60) {
            self.accept_waiting(server, v, port);
            let Some(fd) = self.m.fds_of(SERVER).pop().filter(|f| f.what.side().is_some()) else { return };
            if let Some(ep) = self.open_instance().filter(|_| self.rng.chance(40)) {
                let how = self.rng.pick(&[IN | ET, IN | ET | i64::from(libc::EPOLLRDHUP), IN]);
                self.push(server, 0, Call::EpollAdd, &[ep.var as i64, fd.var as i64, how]);
                self.m.watched.insert((ep.var, fd.var));
            }
            return;
        }
        self.push(server, 0, Call::AcceptAll, &[v as i64]);
        while let Some(conn) = self.m.dequeue(port) {
            self.m.conns[conn].fin[1] = true;
        }
    }

    /// Arms a listener again, by EPOLL_CTL_MOD or by removing and adding it. All that is ready is
    /// reported again then.
    fn arm_again(&mut self) {
        let Some(ep) = self.open_instance() else { return };
        let mut watched: Vec<usize> = self.m.watched.iter().filter(|w| w.0 == ep.var).map(|w| w.1).collect();
        watched.sort_unstable();
        let Some(var) = self.rng.pick_opt(&watched) else { return };
        let how = self.listening();
        let args = [ep.var as i64, var as i64, how];
        if self.rng.chance(30) {
            self.push(SERVER, 0, Call::EpollDel, &args[..2]);
            return self.push(SERVER, 0, Call::EpollAdd, &args);
        }
        self.push(SERVER, 0, Call::EpollMod, &args);
    }

    /// Closes a listener with its waiting connections, and makes another one, which may get its
    /// place and its number.
    fn listener_goes(&mut self) {
        let ports = self.ports_of_server();
        let Some((v, port)) = self.rng.pick_opt(&ports) else { return };
        if self.m.is_slept_on(What::Listener { port }) || self.m.ports.len() >= PORTS {
            return;
        }
        self.push(SERVER, 0, Call::Close, &[v as i64]);
        self.m.watched.retain(|w| w.1 != v);
        self.m.close(SERVER, v);
        self.edge_listener();
        let Some((v, _)) = self.ports_of_server().pop() else { return };
        if let Some(ep) = self.open_instance() {
            self.push(SERVER, 0, Call::EpollAdd, &[ep.var as i64, v as i64, IN | ET]);
            self.m.watched.insert((ep.var, v));
        }
    }

    /// One of the server's threads sleeps until a client comes.
    fn another_thread(&mut self) {
        let servers = self.servers();
        let new = self.m.actors.len();
        if servers.len() < 2 {
            if new < ACTORS - 1 && !servers.is_empty() {
                self.push(servers[0], 0, Call::Thread, &[new as i64]);
                // (README.md: for connections of the kernel each thread that waits is a worker.)
                self.mixable = false;
                self.m.thread(servers[0]);
            }
            return;
        }
        let (Some(ep), sleeper) = (self.instance(), servers[servers.len() - 1]) else { return };
        let mut on = vec![ep.what];
        on.extend(self.ports_of_server().iter().map(|(_, port)| What::Listener { port: *port }));
        if sleeper != SERVER && self.m.may_sleep_on(&on, true) {
            self.push(sleeper, 0, Call::EpollWait, &[ep.var as i64, 32, -1]);
            self.m.sleep(sleeper, on, true);
        }
    }

    fn ends_talk(&mut self) {
        let awake = self.m.awake();
        let Some(actor) = self.rng.pick_opt(&awake) else { return };
        let Some((fd, side)) = self.end_of(actor) else { return };
        // (`accept_all` reads the bytes of connections in the queue.)
        match self.rng.below(4) {
            0 => self.receive_from(actor, fd),
            1 => self.end_some(actor),
            _ => drop(self.send_over(actor, fd, side)),
        }
    }
}
