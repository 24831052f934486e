//! Connections that processes have open over shared memory, read from their arenas.

use super::end::End;
use crate::arenas::Arena;
use crate::clients::Client;
use crate::shm::channels::Channel;
use crate::shm::Shm;
use crate::{ChannelId, FamilyId};
use fsocket_abi::flags::FlagSet;
use fsocket_proto::report;
use std::collections::{HashMap, HashSet};

/// Open ends for each process, and connections that also have an idle kernel connection.
#[derive(Default)]
pub(super) struct Open {
    /// Open ends, by family and nonce.
    processes: HashMap<(FamilyId, u64), report::Open>,
    /// Connections with an idle kernel connection, by channel and slot.
    pub(super) idle_kernel: HashSet<(ChannelId, usize)>,
}

impl Open {
    /// The ends that a process has open.
    pub(super) fn of(&self, process: &Client) -> report::Open {
        self.processes.get(&(process.family, process.nonce)).copied().unwrap_or_default()
    }

    /// Reads every socket in use in these arenas.
    pub(super) fn look<'a>(
        arenas: impl Iterator<Item = &'a Arena>,
        shm: &Shm,
        is_agents: &dyn Fn(&Channel, usize) -> bool,
    ) -> Open {
        let mut open = Open::default();
        let mut agents = HashMap::new();
        for arena in arenas {
            for sock in arena.mem.open_socks() {
                let Some(end) = End::read(sock) else { continue };
                let channel = shm.channels.get(end.channel).filter(|ch| ch.is_party(end.side, arena.family));
                let is_agents = channel.is_some_and(|ch| {
                    *agents.entry((end.channel, end.side)).or_insert_with(|| is_agents(ch, end.side))
                });
                let is_unix = i32::from(sock.family()) == libc::AF_UNIX;
                let has_idle = !is_unix && channel.is_some() && sock.flags.get().has(FlagSet::ACROSS);
                if has_idle {
                    open.idle_kernel.insert((end.channel, end.slot));
                }
                for nonce in sock.holders().filter(|nonce| *nonce != 0) {
                    let of = open.processes.entry((arena.family, nonce)).or_default();
                    *if is_agents { &mut of.agents } else { &mut of.shm } += 1;
                    of.idle_kernel += u64::from(has_idle);
                }
            }
        }
        open
    }
}
