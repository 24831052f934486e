//! The agent's state: its connection to the monitor, the other agents, and the connections.

use crate::carriers;
use crate::hooked::Poll;
use crate::line::{Line, Links};
use crate::link::{self, Dial, Made, Out};
use crate::mirror::{Mirror, BUFFER};
use crate::peer::Peer;
use crate::stand_in::Maker;
use anyhow::Context as _;
use fsocket_rdma::agree::{self, Key};
use rustix::event::{eventfd, EventfdFlags};
use rustix::fd::AsFd;
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::net::IpAddr;
use std::path::Path;
use std::sync::mpsc::{channel, Receiver};
use std::sync::Arc;
use std::time::Instant;

/// Marks of events in the epoll instance: the high half is the kind, the low half tells which one
/// of the kind.
pub const LINE: u64 = 1 << 32;
pub const WAKER: u64 = 2 << 32;
pub const STRANGERS: u64 = 3 << 32;
pub const CONTROL: u64 = 4 << 32;
pub const CARRIER: u64 = 5 << 32;
pub const MIRROR: u64 = 6 << 32;

pub struct Agent {
    pub line: Line,
    pub maker: Maker,
    pub poll: Poll,
    pub made: Receiver<Made>,
    pub out: Out,
    pub peers: Vec<Peer>,
    /// Connections by this agent's numbers, which begin at 1.
    pub mirrors: BTreeMap<u32, Mirror>,
    pub last: u32,
    /// The last connections that did not move here.
    pub never: VecDeque<u32>,
    /// Address of this host.
    pub own: IpAddr,
    pub key: Arc<Key>,
    /// The number of this agent.
    pub instance: u64,
    /// The byte counts that the monitor sent for the next wish (request to move a connection).
    pub counts: [u64; 2],
    /// Connections that must be served before the next sleep.
    pub due: HashSet<u32>,
    pub buffer: Vec<u8>,
    /// When the agent was told to end.
    pub stops: Option<Instant>,
}

impl Agent {
    pub fn new(socket: &Path) -> anyhow::Result<Agent> {
        carriers::check()?;
        let (line, links) = Line::new(socket)?;
        let Links { address, peers, key } = links;
        let secret = std::fs::read(&key).with_context(|| key.display().to_string())?;
        let key = Arc::new(Key::new(&secret)?);
        let waker = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (give, made) = channel();
        let out = || Out { made: give.clone(), waker: waker.clone() };
        out().hear_of_signals();
        link::accept(address, &peers, &key, out).with_context(|| address.to_string())?;
        let connecting = |(number, at): (usize, &std::net::SocketAddr)| {
            let dial = link::connects(address.ip(), at.ip()).then(|| Dial::new(number, *at, &key, out));
            Peer::new(*at, dial)
        };
        let peers = peers.iter().enumerate().map(connecting).collect();
        let mut instance = [0; 8];
        agree::random(&mut instance)?;
        let agent = Agent {
            line,
            maker: Maker::new(address.ip()).with_context(|| address.to_string())?,
            poll: Poll::new()?,
            made,
            out: out(),
            peers,
            mirrors: BTreeMap::new(),
            last: 0,
            never: VecDeque::new(),
            own: address.ip(),
            key,
            instance: u64::from_le_bytes(instance) | 1,
            counts: [0; 2],
            due: HashSet::new(),
            buffer: vec![0; BUFFER],
            stops: None,
        };
        agent.poll.add(agent.line.fd.as_fd(), libc::EPOLLIN, LINE)?;
        agent.poll.add(agent.out.waker.as_fd(), libc::EPOLLIN, WAKER)?;
        agent.poll.add(agent.maker.listener().as_fd(), libc::EPOLLIN, STRANGERS)?;
        Ok(agent)
    }
}
