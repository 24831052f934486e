//! The list of shapes.

use crate::ends::{Clients, Server};
use crate::scenario::size_name;
use clap::ValueEnum;
use serde::Serialize;

/// A special property of a shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Extra {
    Nothing,
    /// Clients send this many requests at once.
    Pipeline(usize),
    /// Each client sleeps for this many microseconds before each request.
    Think(u64),
    /// A connection for each request.
    Short,
    /// An endless loop of another program runs on each CPU.
    Hogs,
    /// The servers are on one CPU, the clients on another one.
    Pinned,
}

#[derive(Debug, Clone, Copy, Serialize)]
pub struct Shape {
    pub server: Server,
    pub clients: Clients,
    /// Connections that are open at once.
    pub conns: usize,
    /// Microseconds of work in each request, of the server and of the client.
    pub work: [u64; 2],
    /// Bytes of an answer.
    pub size: usize,
    pub extra: Extra,
    pub quick: bool,
}

impl Shape {
    const fn new(server: Server, clients: Clients, conns: usize, work: u64, size: usize) -> Self {
        Shape { server, clients, conns, work: [work, 0], size, extra: Extra::Nothing, quick: false }
    }
    const fn quick(self) -> Self {
        Shape { quick: true, ..self }
    }
    const fn with(self, extra: Extra) -> Self {
        Shape { extra, ..self }
    }

    /// The name that `--only` matches: server, clients, connections, microseconds of work and bytes of an answer.
    pub fn name(&self) -> String {
        let client_work = if self.work[1] > 0 { format!("+{}us", self.work[1]) } else { String::new() };
        let extra = match self.extra {
            Extra::Nothing => String::new(),
            Extra::Pipeline(n) => format!("/pipeline{n}"),
            Extra::Think(us) => format!("/think{us}us"),
            Extra::Short => "/short".into(),
            Extra::Hogs => "/hogs".into(),
            Extra::Pinned => "/pinned".into(),
        };
        format!("{}/{}/{}us{client_work}/{}{extra}", self.ends(), self.conns, self.work[0], size_name(self.size))
    }

    /// Names of the server and of the clients.
    pub fn ends(&self) -> String {
        let kind = |v: Option<clap::builder::PossibleValue>| v.map(|v| v.get_name().to_owned()).unwrap_or_default();
        format!("{}/{}", kind(self.server.to_possible_value()), kind(self.clients.to_possible_value()))
    }

    /// Bytes of a request.
    pub fn request(&self) -> usize {
        self.size.min(64)
    }

    /// Are there more threads that can run than CPUs?
    pub fn is_crowded(&self, cpus: usize) -> bool {
        let server = match self.server {
            Server::Loop => 1,
            Server::Pool => 2.min(self.conns),
            Server::Process | Server::Thread | Server::ForkEpoll => self.conns,
        };
        let clients = if self.clients == Clients::Loop { 1 } else { self.conns };
        match self.extra {
            Extra::Hogs => true,
            // Most of the clients sleep.
            Extra::Think(_) => false,
            _ => server + clients > cpus,
        }
    }
}

/// All shapes, each once.
pub fn all() -> Vec<Shape> {
    use Clients as C;
    use Server as S;
    let shape = Shape::new;
    let mut list = vec![
        shape(S::Process, C::Processes, 1, 0, 8).quick(),
        shape(S::Process, C::Processes, 4, 5, 64).quick(),
        shape(S::Process, C::Processes, 4, 20, 64).quick(),
        shape(S::Process, C::Processes, 4, 100, 64).quick(),
        shape(S::Process, C::Processes, 4, 0, 64 << 10).quick(),
        shape(S::ForkEpoll, C::Threads, 16, 0, 64).quick(),
        shape(S::ForkEpoll, C::Threads, 16, 20, 64).quick(),
        shape(S::Loop, C::Processes, 64, 0, 64).quick(),
        shape(S::Loop, C::Processes, 64, 20, 64).quick(),
        shape(S::Loop, C::Loop, 64, 5, 64).quick(),
        shape(S::Thread, C::Threads, 8, 5, 64).quick(),
        shape(S::Pool, C::Processes, 16, 20, 1 << 10).quick(),
        shape(S::Loop, C::Loop, 16, 5, 64).with(Extra::Pipeline(16)).quick(),
        shape(S::Pool, C::Threads, 4, 20, 64).with(Extra::Short).quick(),
    ];
    for server in Server::value_variants() {
        for clients in Clients::value_variants() {
            for conns in [1, 4, 16, 64] {
                for work in [0, 5, 20, 100] {
                    list.push(shape(*server, *clients, conns, work, 64));
                }
            }
            list.push(shape(*server, *clients, 256, 20, 64));
            list.push(shape(*server, *clients, 16, 1000, 64));
            list.push(Shape { work: [20, 20], ..shape(*server, *clients, 16, 0, 64) });
            for size in [8, 1 << 10, 16 << 10, 64 << 10, 256 << 10] {
                list.push(shape(*server, *clients, 4, 5, size));
            }
            list.push(shape(*server, *clients, 4, 5, 64).with(Extra::Pipeline(16)));
            list.push(shape(*server, *clients, 4, 5, 64).with(Extra::Hogs));
            list.push(shape(*server, *clients, 4, 5, 64).with(Extra::Pinned));
            // Clients in an epoll loop send without pauses and keep their connections.
            if *clients != C::Loop {
                list.push(shape(*server, *clients, 16, 20, 64).with(Extra::Think(500)));
                list.push(shape(*server, *clients, 4, 20, 64).with(Extra::Short));
            }
        }
    }
    let mut seen = std::collections::BTreeSet::new();
    list.retain(|s| seen.insert(s.name()));
    list
}
