//! The data of `fastsocket stat` and `fastsocket ss`.

mod end;
mod open;

use crate::address;
use crate::arenas::{add, add_all, Arena, Totals, ZoneTotals};
use crate::context::Context;
use crate::foreign::ForeignFd;
use crate::shm::channels::Channel;
use crate::shm::listeners::Listener;
use crate::shm::Shm;
use crate::zones::Zones;
use crate::{ChannelId, ConnId};
use end::End;
use fsocket_abi::arena::zone_accept::NAMES;
use fsocket_abi::arena::COUNTERS;
use fsocket_abi::channel::{slot_state, status, CLIENT, SERVER};
use fsocket_abi::flags::FlagSet;
use fsocket_abi::sock::Name;
use fsocket_proto::report::{self, Connection, Counters, Process, Report};
use fsocket_proto::Addr;
use fsocket_sync::atomic::Ordering;
use open::Open;
use rustix::fd::AsRawFd;
use rustix::fs::{Mode, OFlags};
use std::collections::HashMap;
use std::io::Write;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Version of the report's schema.
const VERSION: u32 = 1;

/// Connections in one report, at most.
const MOST: usize = 1 << 17;
/// The monitor reuses a report that took more CPU time than this to make, so that a viewer who
/// asks again and again costs others little.
const LONG: Duration = Duration::from_millis(5);
/// A kept report is reused for this many times the CPU time that it took.
const KEPT_FOR: u32 = 20;

/// Reports that took long to make: length in bytes, file, and until when to reuse them.
#[derive(Default)]
pub struct Kept(HashMap<Wanted, (u64, Rc<ForeignFd>, Instant)>);

/// Which report a viewer wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Wanted {
    /// The user who will see the report. Root and the owner of a private monitor see everything.
    /// Others see their own processes, and all listeners in their network namespace.
    pub viewer: u32,
    /// The cookie of the viewer's network namespace.
    pub netns: Option<u64>,
    /// Without the list of connections.
    pub is_brief: bool,
}

impl Kept {
    /// A report that may be reused, and its length. The descriptor has a file position of its own.
    pub fn get(&mut self, wanted: Wanted) -> Option<(u64, ForeignFd)> {
        let now = Instant::now();
        self.0.retain(|_, (_, _, until)| *until > now);
        let (length, fd, _) = self.0.get(&wanted)?;
        let own = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
        let again = rustix::fs::open(own, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
        Some((*length, ForeignFd::new(again, wanted.viewer)))
    }

    /// Keeps a report if it took much CPU time. (Wall time is not used: on a busy machine each
    /// report would seem long, and viewers would get stale ones.)
    pub fn keep(&mut self, wanted: Wanted, length: u64, fd: &Rc<ForeignFd>, took: Duration) {
        if took > LONG {
            self.0.insert(wanted, (length, fd.clone(), Instant::now() + took * KEPT_FOR));
        }
    }
}

/// CPU time of this thread.
pub fn cpu_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}

/// Leaves a last report beside the socket: a private monitor ends with its programs, and a user
/// may look at the report later. (Errors are only logged.)
pub fn leave(report: &Report, socket: &Path) {
    let file = report::last(socket);
    let new = file.with_extension("new");
    let _ = std::fs::remove_file(&new);
    let json = serde_json::to_vec(report).unwrap_or_default();
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let written = options.open(&new).and_then(|mut f| f.write_all(&json));
    if let Err(e) = written.and_then(|()| std::fs::rename(&new, &file)) {
        tracing::debug!("no last report: {e}");
        let _ = std::fs::remove_file(&new);
    }
}

/// The sources of a report.
pub struct Sources<'a> {
    pub ctx: &'a Context,
    pub shm: &'a Shm,
    pub zones: &'a Zones,
    /// Flow groups of devices.
    pub steered: Vec<report::FlowGroups>,
    pub event_loop: report::Loop,
}

impl Sources<'_> {
    /// The report.
    pub fn report(&self, wanted: Wanted) -> Report {
        let sees = |uid: u32| wanted.viewer == 0 || self.ctx.config.private || wanted.viewer == uid;
        let is_agents = |ch: &Channel, side| self.is_agents(ch, side);
        let open = Open::look(self.ctx.arenas.iter().filter(|a| sees(a.uid)), self.shm, &is_agents);
        Report {
            version: VERSION,
            monitor_pid: std::process::id(),
            monitor_version: env!("CARGO_PKG_VERSION").to_owned(),
            abi: fsocket_abi::VERSION,
            retired: self.ctx.config.retired,
            uptime: self.ctx.started.elapsed().as_secs_f64(),
            totals: self.report_totals(&sees),
            processes: self.report_processes(&sees, &open),
            listeners: self.report_listeners(wanted.netns, &sees),
            connections: if wanted.is_brief { Vec::new() } else { self.report_connections(&sees) },
            hosts: self.ctx.hosts.report(self.ctx.config.hosts.as_ref(), sees(0)),
            links: if sees(0) { self.report_links() } else { Vec::new() },
            groups: self.zones.report(&sees),
            zones: self.report_accepts(&sees),
            event_loop: self.event_loop.clone(),
            held: self.report_held(&sees),
            idle_kernel: open.idle_kernel.len() as u64,
            flow_groups: self.steered.iter().cloned().chain(self.zones.report_flow_groups(&sees)).collect(),
            channels: self
                .shm
                .channels
                .iter()
                .filter(|ch| sees(ch.client_uid) || self.shm.listeners.get(ch.listener).is_some_and(|l| sees(l.uid)))
                .map(|ch| report::Channel {
                    id: ch.id,
                    listener: ch.listener,
                    client_pid: ch.client_pid,
                    connections: ch.mem.slots_in_use() as u32,
                    resident: ch.mem.resident(),
                    by_agents: self.is_agents(ch, CLIENT) || self.is_agents(ch, SERVER),
                })
                .collect(),
        }
    }

    fn report_held(&self, sees: &dyn Fn(u32) -> bool) -> Vec<report::Held> {
        let all = crate::foreign::closer().by_user().into_iter().filter(|(uid, _)| sees(*uid));
        all.map(|(uid, descriptors)| report::Held { uid, descriptors }).collect()
    }

    fn report_links(&self) -> Vec<report::Link> {
        let peers = self.ctx.config.links.iter().flat_map(|links| &links.peers);
        let link = |ip: IpAddr| report::Link { address: ip.to_string(), up: self.shm.remote.linked.contains(&ip) };
        peers.map(|peer| link(peer.ip().to_canonical())).collect()
    }

    /// Whether the other end of a channel belongs to an agent.
    fn is_agents(&self, ch: &Channel, side: usize) -> bool {
        let remote = &self.shm.remote;
        let serves = |id: ConnId| self.ctx.clients.get(id).is_some_and(|c| remote.carries(c.family));
        match side {
            CLIENT => self.shm.listeners.get(ch.listener).is_some_and(|l| l.accepting().any(serves)),
            _ => remote.carries(ch.client_family),
        }
    }

    fn report_totals(&self, sees: &dyn Fn(u32) -> bool) -> Counters {
        let mut sum: Totals = [0; COUNTERS.len()];
        let ended = self.ctx.ended.counters.iter().filter(|(uid, _)| sees(**uid)).map(|(_, t)| *t);
        let live = self.ctx.arenas.iter().filter(|a| sees(a.uid)).map(|a| a.mem.live_counters());
        let clients = self.ctx.clients.iter().filter(|(_, c)| sees(c.uid));
        let told = clients.filter_map(|(_, c)| c.told.as_deref().copied());
        for totals in ended.chain(live).chain(told) {
            add_all(&mut sum, &totals);
        }
        let mut sum = named(&sum);
        // Counts of the connections between network namespaces, for all users together.
        if let Some(record) = self.shm.pairs.record.as_ref().filter(|_| sees(0)) {
            sum.extend(record.counts().map(|(name, n)| (format!("pairs.{name}"), n)));
        }
        if sees(0) {
            sum.insert("unix.refused".to_owned(), self.shm.unix_refused);
        }
        if let crate::hosts::State::On(hosts) = &self.ctx.hosts {
            if sees(0) {
                sum.extend(hosts.counts().map(|(name, n)| (format!("hosts.{name}"), n)));
            }
        }
        sum
    }

    fn report_processes(&self, sees: &dyn Fn(u32) -> bool, open: &Open) -> Vec<Process> {
        let mut roots = HashMap::new();
        let mut list: Vec<_> = self.ctx.clients.iter().filter(|(_, c)| c.is_process() && sees(c.uid)).collect();
        // The oldest process of a family gives its number to the family.
        list.sort_by_key(|(id, _)| *id);
        list.into_iter()
            .map(|(id, c)| {
                let root = *roots.entry(c.family).or_insert(c.pid);
                let own = self.ctx.arenas.of(id);
                // A child that has not said its name yet runs the same program as its family.
                let any = || self.ctx.arenas.in_family(c.family).next().map(|a| a.mem.comm()).unwrap_or_default();
                let mut counters = own.map_or([0; COUNTERS.len()], |a| a.mem.live_counters());
                if let Some(told) = &c.told {
                    add_all(&mut counters, told);
                }
                Process {
                    pid: c.pid,
                    comm: match own {
                        Some(arena) => arena.mem.comm(),
                        None if c.name.is_empty() => any(),
                        None => c.name.clone(),
                    },
                    family: root,
                    off: self.ctx.is_off(id),
                    rule: self.ctx.program(id).map(|p| p.place.clone()).unwrap_or_default(),
                    counters: named(&counters),
                    open: open.of(c),
                }
            })
            .collect()
    }

    /// Accepts by zone and kind.
    fn report_accepts(&self, sees: &dyn Fn(u32) -> bool) -> Vec<report::Zone> {
        let live = self.ctx.arenas.iter().filter(|a| sees(a.uid)).flat_map(|a| a.mem.zones());
        let ended = self.ctx.ended.zones.iter().filter(|(uid, _)| sees(**uid)).flat_map(|(_, t)| t);
        let mut sum = ZoneTotals::new();
        for (zone, accepted) in live.chain(ended.map(|(zone, a)| (*zone, *a))) {
            for (sum, n) in sum.entry(zone).or_default().iter_mut().zip(accepted) {
                add(sum, n);
            }
        }
        let named = |v: [u64; 4]| NAMES.iter().zip(v).map(|(name, n)| ((*name).to_owned(), n)).collect();
        sum.into_iter().map(|(cpu, accepted)| report::Zone { cpu, accepted: named(accepted) }).collect()
    }

    /// Listeners of this user, and all listeners in this network namespace, which the kernel shows
    /// to the user, too.
    fn report_listeners(&self, netns: Option<u64>, sees: &dyn Fn(u32) -> bool) -> Vec<report::Listener> {
        let visible_pid = |id: &ConnId| self.ctx.clients.get(*id).filter(|c| sees(c.uid)).map(|c| c.pid);
        self.shm
            .listeners
            .iter()
            // (A listener that stands for Unix connections is no real listener.)
            .filter(|l| l.unix.is_none())
            .filter(|l| sees(l.uid) || netns == Some(l.info.netns))
            .map(|l| report::Listener {
                id: l.id,
                local: address::show(&l.info.addr),
                pids: l.holders.iter().filter_map(visible_pid).collect(),
                workers: l.accepting().filter_map(|id| visible_pid(&id)).collect(),
                queued: self.channels_of(l).map(|ch| ch.mem.queued_all()).sum(),
                opened: self.channels_of(l).map(|ch| ch.mem.opened()).fold(l.opened, u64::saturating_add),
            })
            .collect()
    }

    fn channels_of<'a>(&'a self, listener: &'a Listener) -> impl Iterator<Item = &'a Channel> {
        listener.channels.iter().filter_map(|id| self.shm.channels.get(*id))
    }

    fn report_connections(&self, sees: &dyn Fn(u32) -> bool) -> Vec<Connection> {
        // Bytes as each end counts them, including ends that the viewer may not see: the
        // difference of the two is under way.
        let mut counted = HashMap::new();
        for arena in self.ctx.arenas.iter() {
            let ends = arena.mem.open_socks().filter_map(End::read);
            for end in
                ends.filter(|e| self.shm.channels.get(e.channel).is_some_and(|c| c.is_party(e.side, arena.family)))
            {
                counted.insert((end.channel, end.slot, end.side), (end.sent, end.received));
            }
        }
        let visible = self.ctx.arenas.iter().filter(|a| sees(a.uid));
        visible.flat_map(|a| self.arena_connections(a, &counted)).take(MOST).collect()
    }

    fn arena_connections<'a>(
        &'a self,
        arena: &'a Arena,
        counted: &'a HashMap<(ChannelId, usize, usize), (u64, u64)>,
    ) -> impl Iterator<Item = Connection> + 'a {
        let comm = arena.mem.comm();
        let pids: HashMap<u64, u32> =
            self.ctx.clients.iter().filter(|(_, c)| c.family == arena.family).map(|(_, c)| (c.nonce, c.pid)).collect();
        arena.mem.open_socks().filter_map(move |sock| {
            let end = End::read(sock)?;
            let channel = self.shm.channels.get(end.channel).filter(|ch| ch.is_party(end.side, arena.family));
            let by_agents = channel.is_some_and(|ch| self.is_agents(ch, end.side));
            let peer = counted.get(&(end.channel, end.slot, 1 - end.side)).copied();
            let under_way = |from: u64, to: u64| from.saturating_sub(to);
            let (recv_q, send_q) = match peer {
                Some((sent, received)) => (under_way(sent, end.received), under_way(end.sent, received)),
                // The connection waits for `accept`, so none of its bytes have been read.
                None if channel.is_some_and(|ch| waits(ch, end.slot)) => (0, end.sent),
                None => (0, 0),
            };
            let family = sock.family();
            let show = |(ip, port): Name| address::show(&Addr { ip, port, family, v6only: 0 });
            let unix = channel.and_then(|ch| self.shm.listeners.get(ch.listener)?.unix.as_deref());
            let (local, peer) = match unix {
                Some(name) if end.side == SERVER => (name.to_owned(), "*".to_owned()),
                Some(name) => ("*".to_owned(), name.to_owned()),
                // All processes that had accepted the connection have ended.
                None if i32::from(family) == libc::AF_UNIX => ("*".to_owned(), "*".to_owned()),
                None => (show(sock.local()), show(sock.peer())),
            };
            Some(Connection {
                state: state(channel, &end).into(),
                recv_q,
                send_q,
                local,
                peer,
                pids: sock.holders().filter_map(|h| pids.get(&h).copied()).collect(),
                comm: comm.clone(),
                path: "shm".into(),
                across_namespaces: !by_agents
                    && i32::from(family) != libc::AF_UNIX
                    && sock.flags.get().has(FlagSet::ACROSS),
                by_agents,
                channel: end.channel,
                slot: end.slot as u32,
                tx_bytes: end.sent,
                rx_bytes: end.received,
            })
        })
    }
}

fn waits(ch: &Channel, slot: usize) -> bool {
    ch.mem.slot(slot).state.load(Ordering::Relaxed) == slot_state::SYN
}

/// The state by the name that `ss` uses. A connection that waits for `accept` is established, as
/// in the kernel.
fn state(channel: Option<&Channel>, end: &End) -> &'static str {
    // If the channel is gone, the peer is gone, too.
    let Some(ch) = channel else { return "CLOSE-WAIT" };
    let bits = |side: usize| ch.mem.slot(end.slot).dir[side].prod.status.load(Ordering::Relaxed);
    let (own, peer) = (bits(end.side), bits(1 - end.side));
    let finished = |bits: u32| bits & (status::FIN | status::CLOSED) != 0;
    match (finished(own), finished(peer)) {
        _ if (own | peer) & status::RST != 0 => "CLOSE",
        (true, true) => "TIME-WAIT",
        (true, false) => "FIN-WAIT-2",
        (false, true) => "CLOSE-WAIT",
        (false, false) => "ESTAB",
    }
}

fn named(totals: &Totals) -> Counters {
    COUNTERS.iter().zip(totals).map(|(name, n)| ((*name).to_owned(), *n)).collect()
}
