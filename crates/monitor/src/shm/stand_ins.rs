//! The monitor's state about other hosts' connections: the agent, its stand-ins, and the requests to it.

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

/// A process wants its connection to go over into a slot.
pub struct Wish {
    pub asked: request::Upgrade,
}

/// The program's end of a connection for which a stand-in opens.
#[derive(Clone, Copy)]
pub struct Accepted {
    pub by: ConnId,
    pub name: u64,
    pub listener: ListenerId,
    /// Of the other host's end: sent and received.
    pub counts: [u64; 2],
}

#[derive(Default)]
pub struct Remote {
    pub agent: Option<Agent>,
    /// Hosts that can be reached, and those that could once.
    pub linked: HashSet<IpAddr>,
    pub known: HashSet<IpAddr>,
    /// Of agents: what they leave open has not ended.
    pub families: HashSet<FamilyId>,
    pub last_wish: u64,
    pub wishes: HashMap<u64, Wish>,
    /// Accepted ends of connections with such hosts: what the process calls each, and the listener.
    pub offers: Offers<End, (u64, ListenerId)>,
    /// By cookie: what the agent calls its stand-ins that accept.
    pub stand_ins: HashMap<u64, u64>,
    /// By cookie of the stand-in that opens.
    pub pairs: HashMap<u64, Accepted>,
    pub counts: (u64, [u64; 2]),
}

impl Remote {
    pub fn is_line(&self, id: ConnId) -> bool {
        self.agent.as_ref().is_some_and(|a| a.line == id)
    }

    /// The process with its library.
    pub fn is_agent(&self, ctx: &Context, id: ConnId) -> bool {
        self.agent.as_ref().is_some_and(|a| ctx.clients.get(id).is_some_and(|c| c.is_process() && c.pid == a.pid))
    }

    pub fn agent(&self, ctx: &Context) -> Option<ConnId> {
        let pid = self.agent.as_ref()?.pid;
        ctx.clients.iter().find(|(_, c)| c.is_process() && c.pid == pid).map(|(id, _)| id)
    }

    /// Whether the ends of this family are the agent's: if it dies, the other host's program has not closed anything.
    pub fn carries(&self, family: FamilyId) -> bool {
        self.families.contains(&family)
    }

    pub fn is_linked(&self, ctx: &Context, end: &End) -> bool {
        end.0 == ctx.netns && self.linked.contains(&end.2.ip())
    }

    /// A process is gone, or the agent's line.
    pub fn leave(&mut self, id: ConnId) {
        self.offers.leave(id);
        self.pairs.retain(|_, p| p.by != id);
        if self.is_line(id) {
            tracing::warn!("the agent has ended: no connection to another host goes over");
            *self = Remote {
                known: std::mem::take(&mut self.known),
                families: std::mem::take(&mut self.families),
                ..Remote::default()
            };
        }
    }
}
