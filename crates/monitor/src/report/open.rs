//! Connections that processes have open over shared memory, from their arenas.

use super::{End, Sources};
use crate::clients::Client;
use crate::{ChannelId, FamilyId};
use fsocket_abi::flags::FlagSet;
use fsocket_proto::report;
use std::collections::{HashMap, HashSet};

/// Ends by process, and the connections behind which the kernel has an idle one.
#[derive(Default)]
pub(super) struct Open {
    /// By family and nonce.
    processes: HashMap<(FamilyId, u64), report::Open>,
    /// Channel and slot.
    pub(super) idle_kernel: HashSet<(ChannelId, usize)>,
}

impl Open {
    /// The ends that a process has open.
    pub(super) fn of(&self, process: &Client) -> report::Open {
        self.processes.get(&(process.family, process.nonce)).copied().unwrap_or_default()
    }
}

impl Sources<'_> {
    /// Looks at every socket in use of the families that the viewer sees.
    pub(super) fn open(&self, sees: &dyn Fn(u32) -> bool) -> Open {
        let mut open = Open::default();
        let mut agents = HashMap::new();
        for arena in self.ctx.arenas.iter().filter(|a| sees(a.uid)) {
            for sock in arena.mem.open_socks() {
                let Some(end) = End::read(sock) else { continue };
                let channel = self.shm.channels.get(end.channel).filter(|ch| ch.is_party(end.side, arena.family));
                let is_agents = channel.is_some_and(|ch| {
                    *agents.entry((end.channel, end.side)).or_insert_with(|| self.is_agents(ch, end.side))
                });
                let is_unix = i32::from(sock.family()) == libc::AF_UNIX;
                let has_idle = !is_unix && channel.is_some() && sock.flags.get().has(FlagSet::ACROSS);
                if has_idle {
                    open.idle_kernel.insert((end.channel, end.slot));
                }
                let holders = sock.holders().filter(|nonce| *nonce != 0);
                for nonce in holders {
                    let of = open.processes.entry((arena.family, nonce)).or_default();
                    *if is_agents { &mut of.agents } else { &mut of.shm } += 1;
                    of.idle_kernel += u64::from(has_idle);
                }
            }
        }
        open
    }
}
