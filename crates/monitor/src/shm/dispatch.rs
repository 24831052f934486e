//! Leads connections over shared memory to workers that have CPU time left.
//!
//! The client alone decides to which worker a connection goes. It sees in its channel which
//! workers sleep and how long the queues are. The monitor adds what the client cannot see, as flow
//! groups do for kernel connections. A worker whose CPU is busy gets no connection while another
//! CPU has time. This holds even if the scheduler would run the worker at once, because other work
//! on that CPU would be delayed. The monitor also wakes a sleeping worker if connections wait in a
//! queue whose own worker does not look.
//!
//! The monitor looks only at channels with new connections: the client says when one comes. If
//! only one process accepts, there is nothing to decide, and the client says nothing.

use crate::context::Context;
use crate::knobs::Knobs;
use crate::shm::channels::{ChannelMem, Channels};
use crate::shm::distrust::is_nonsense;
use crate::shm::listeners::Listeners;
use crate::shm::wake::wake_stealers;
use crate::steer::front::Front;
use crate::steer::Spare;
use crate::{ChannelId, ListenerId};
use fsocket_abi::channel::WORKERS;
use fsocket_sync::{atomic::Ordering, idle};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// State of the distribution of connections over shared memory.
#[derive(Default)]
pub struct Dispatch {
    /// When to look at channels next.
    pub next: Option<Instant>,
    /// Channels with new connections.
    awake: BTreeMap<ChannelId, Awake>,
    /// Workers on busy CPUs, as a bit mask for each listener.
    avoid: BTreeMap<ListenerId, u64>,
}

/// A channel's queues, as they were at the last look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Seen {
    /// Head and tail by queue.
    ends: BTreeMap<usize, (u32, u32)>,
}

/// State of a channel that is looked at.
#[derive(Debug, Default)]
struct Awake {
    seen: Seen,
    /// Number of successive looks that found a stuck queue.
    stuck: u32,
}

impl Seen {
    fn now(mem: &ChannelMem) -> Seen {
        let ends = |q: usize| {
            let queue = mem.queue(q);
            (queue.head.load(Ordering::Acquire), queue.tail.load(Ordering::Acquire))
        };
        Seen { ends: mem.touched_queues().map(|q| (q, ends(q))).collect() }
    }

    fn is_empty(&self) -> bool {
        self.ends.values().all(|(head, tail)| head == tail)
    }

    /// Whether a connection has waited since the look `before`, and no worker has taken any from
    /// its queue.
    fn is_stuck_since(&self, before: &Seen) -> bool {
        self.ends.iter().any(|(q, (head, _))| before.ends.get(q).is_some_and(|(h, t)| h != t && head == h))
    }
}

/// Workers to avoid. `was`: the former set. `cpus`: each worker with its CPU; `None`: it may run
/// on any.
fn avoid(was: u64, cpus: &[(usize, Option<u32>)], spare: &Spare) -> u64 {
    let which = |is: &dyn Fn(u32) -> bool, unpinned: bool| {
        let of = cpus.iter().filter(|(_, cpu)| cpu.map_or(unpinned, is));
        of.fold(0u64, |mask, (w, _)| mask | 1 << w)
    };
    let idle = which(&|cpu| spare.idle.contains(&cpu), !spare.idle.is_empty());
    let full = which(&|cpu| spare.full.contains(&cpu), false);
    let all = which(&|_| true, true);
    // An avoided worker is used again when a fifth of its CPU is idle, as for flow groups.
    let still = was & all & !idle;
    let new = if idle & !still == 0 { 0 } else { full };
    let mask = still | new;
    // If no other worker has time either, none is avoided.
    if all & !mask & !full == 0 {
        0
    } else {
        mask
    }
}

impl Dispatch {
    /// Looks at this channel from now on, because new connections may come.
    pub fn arrives(&mut self, channel: ChannelId, knobs: &Knobs) {
        if knobs.off {
            return;
        }
        self.awake.entry(channel).or_default();
        let at = Instant::now() + knobs.interval;
        self.next.get_or_insert(at);
    }

    pub fn looks_at(&self, channel: ChannelId) -> bool {
        self.awake.contains_key(&channel)
    }

    /// Looks at the channels if it is time. Returns those whose protocol is broken.
    pub fn look_if_due(
        &mut self,
        ctx: &Context,
        channels: &Channels,
        listeners: &Listeners,
        steers: &mut Front,
    ) -> Vec<ChannelId> {
        let now = Instant::now();
        if self.next.is_none_or(|at| at > now) {
            return Vec::new();
        }
        let mut awake = std::mem::take(&mut self.awake);
        let mut broken = Vec::new();
        awake.retain(|id, Awake { seen: before, stuck }| {
            let Some(ch) = channels.get(*id).filter(|ch| !ch.client_gone && !ch.listener_gone) else {
                return false;
            };
            if ch.mem.touched_queues().any(|q| is_nonsense(&ch.mem, q)) {
                broken.push(*id);
                return false;
            }
            let seen = Seen::now(&ch.mem);
            match seen.is_stuck_since(before) {
                // A worker may be stopped, or the client has put the connection where no worker
                // looks. The wake-ups become rarer while this lasts.
                true => {
                    *stuck = stuck.saturating_add(1);
                    if stuck.is_power_of_two() {
                        wake_stealers(ch, &ctx.clients);
                    }
                }
                false => *stuck = 0,
            }
            let quiet = seen == *before && seen.is_empty();
            *before = seen;
            if quiet {
                // From now on the monitor would not update this value.
                ch.mem.set_avoid(0);
            }
            let is_shared = listeners.get(ch.listener).is_some_and(|l| l.is_shared);
            !(quiet && (!is_shared || idle::park(ch.mem.idle(), || Seen::now(&ch.mem) != *before)))
        });
        let active: BTreeSet<ListenerId> =
            awake.keys().filter_map(|id| channels.get(*id)).map(|ch| ch.listener).collect();
        self.avoid.retain(|id, _| active.contains(id));
        for id in active {
            let mask = self.whom_to_avoid(id, now, ctx, listeners, steers);
            self.avoid.insert(id, mask);
        }
        for id in awake.keys() {
            if let Some(ch) = channels.get(*id) {
                ch.mem.set_avoid(self.avoid.get(&ch.listener).copied().unwrap_or(0));
            }
        }
        self.next = (!awake.is_empty()).then(|| now + ctx.config.balance.interval);
        self.awake = awake;
        broken
    }

    fn whom_to_avoid(
        &mut self,
        listener: ListenerId,
        now: Instant,
        ctx: &Context,
        listeners: &Listeners,
        steers: &mut Front,
    ) -> u64 {
        let Some(l) = listeners.get(listener) else { return 0 };
        let workers = l.workers.iter().enumerate().take(WORKERS).filter_map(|(w, conn)| {
            let pid = ctx.clients.get((*conn)?)?.pid;
            Some((w, pinned(pid)))
        });
        let cpus: Vec<(usize, Option<u32>)> = workers.collect();
        if cpus.len() < 2 || cpus.iter().all(|(_, cpu)| cpu.is_none()) {
            return 0;
        }
        let was = self.avoid.get(&listener).copied().unwrap_or(0);
        let mask = avoid(was, &cpus, steers.spare(now));
        if mask != was {
            tracing::debug!(listener, "workers {mask:#x} are on CPUs without time");
        }
        mask
    }
}

/// The CPU to which a process is pinned.
fn pinned(pid: u32) -> Option<u32> {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).ok()?)?;
    let set = rustix::thread::sched_getaffinity(Some(pid)).ok()?;
    if set.count() != 1 {
        return None;
    }
    (0..rustix::thread::CpuSet::MAX_CPU).find(|cpu| set.is_set(*cpu)).map(|cpu| cpu as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spare(idle: &[u32], full: &[u32]) -> Spare {
        let mut spare = Spare::default();
        spare.idle.extend(idle);
        spare.full.extend(full);
        spare
    }

    #[test]
    fn a_worker_on_a_full_cpu_is_avoided_while_another_has_time() {
        let two = [(0, Some(0)), (1, Some(1))];
        assert_eq!(avoid(0, &two, &spare(&[0], &[1])), 0b10);
        assert_eq!(avoid(0, &two, &spare(&[], &[1])), 0, "the other has not much either");
        assert_eq!(avoid(0, &two, &spare(&[], &[0, 1])), 0);
        assert_eq!(avoid(0b10, &two, &spare(&[], &[1])), 0b10, "the other has some still");
        assert_eq!(avoid(0b10, &two, &spare(&[], &[0, 1])), 0, "it has not");
        assert_eq!(avoid(0b10, &two, &spare(&[0], &[])), 0b10, "not much of its time is idle");
        assert_eq!(avoid(0b10, &two, &spare(&[0, 1], &[])), 0);
        assert_eq!(avoid(0b11, &two, &spare(&[], &[])), 0);
    }

    #[test]
    fn who_is_pinned_nowhere_goes_where_time_is() {
        let two = [(0, None), (3, Some(1))];
        assert_eq!(avoid(0, &two, &spare(&[0], &[1])), 0b1000);
        assert_eq!(avoid(0, &two, &spare(&[], &[1])), 0);
        // The former set has the number of a worker that has ended.
        assert_eq!(avoid(0b100, &two, &spare(&[0], &[])), 0);
    }

    #[test]
    fn what_waits_and_is_not_looked_at_is_stuck() {
        let seen = |head, tail| Seen { ends: [(1, (head, tail))].into() };
        assert!(seen(5, 9).is_stuck_since(&seen(5, 6)));
        assert!(!seen(6, 9).is_stuck_since(&seen(5, 6)));
        assert!(!seen(5, 6).is_stuck_since(&seen(5, 5)), "it has only just come");
        assert!(!seen(5, 6).is_stuck_since(&Seen::default()));
        assert!(seen(5, 5).is_empty() && !seen(5, 6).is_empty());
    }
}
