//! The state about connections to other hosts: the agent, its stand-ins, and requests that it has
//! not answered.

use crate::context::Context;
use crate::shm::offers::{End, Offers};
use crate::{ConnId, FamilyId, ListenerId};
use fsocket_proto::request;
use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

pub struct Agent {
    pub line: ConnId,
    pub pid: u32,
}

/// A process that wants to move its connection into a slot.
pub struct Wish {
    pub asked: request::Upgrade,
}

/// The program's end of a connection that a stand-in opens.
#[derive(Clone, Copy)]
pub struct Accepted {
    pub by: ConnId,
    pub name: u64,
    pub listener: ListenerId,
    /// Bytes that the other host's end has sent and received.
    pub counts: [u64; 2],
}

#[derive(Default)]
pub struct Remote {
    pub agent: Option<Agent>,
    /// Hosts that have a link now. `known`: hosts that have or had one.
    pub linked: HashSet<IpAddr>,
    pub known: HashSet<IpAddr>,
    /// Fork groups of agents. If an agent ends, the connections it had open are not treated as
    /// closed by their peers.
    pub families: HashSet<FamilyId>,
    pub last_wish: u64,
    pub wishes: HashMap<u64, Wish>,
    /// Accepted ends of connections with linked hosts: the process's name for each, and its
    /// listener.
    pub offers: Offers<End, (u64, ListenerId)>,
    /// The agent's names for its accepting stand-ins, by cookie.
    pub stand_ins: HashMap<u64, u64>,
    /// The programs' ends, by the cookie of the stand-in that opens.
    pub pairs: HashMap<u64, Accepted>,
    pub counts: (u64, [u64; 2]),
}

impl Remote {
    pub fn is_line(&self, id: ConnId) -> bool {
        self.agent.as_ref().is_some_and(|a| a.line == id)
    }

    /// Whether this is the agent's process as a client with the library.
    pub fn is_agent(&self, ctx: &Context, id: ConnId) -> bool {
        self.agent.as_ref().is_some_and(|a| ctx.clients.get(id).is_some_and(|c| c.is_process() && c.pid == a.pid))
    }

    pub fn agent(&self, ctx: &Context) -> Option<ConnId> {
        let pid = self.agent.as_ref()?.pid;
        ctx.clients.iter().find(|(_, c)| c.is_process() && c.pid == pid).map(|(id, _)| id)
    }

    /// Whether this family belongs to an agent. If the agent dies, that does not mean that the
    /// program on the other host has closed the connection.
    pub fn carries(&self, family: FamilyId) -> bool {
        self.families.contains(&family)
    }

    pub fn is_linked(&self, ctx: &Context, end: &End) -> bool {
        end.0 == ctx.netns && self.linked.contains(&end.2.ip())
    }

    /// A process, or the agent's control connection, has ended.
    pub fn leave(&mut self, id: ConnId) {
        self.offers.leave(id);
        self.pairs.retain(|_, p| p.by != id);
        if self.is_line(id) {
            tracing::warn!("the agent has ended: no connection to another host moves to RDMA");
            *self = Remote {
                known: std::mem::take(&mut self.known),
                families: std::mem::take(&mut self.families),
                ..Remote::default()
            };
        }
    }
}
