//! Slow work on channels, in pieces: finding those that have lost a side, and ending listeners.

use super::channels::Channel;
use super::state::Shm;
use super::sweeping::Sweep;
use super::wake::refuse_waiting;
use crate::context::Context;
use crate::turns::TURN;
use crate::{ChannelId, FamilyId};
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

impl Shm {
    /// Finds channels that have lost a side for good. This reads all sockets of the clients' fork
    /// groups, which may be many. Work that takes longer than a turn is left for later turns.
    pub fn sweep(&mut self, ctx: &mut Context) {
        if let Some(running) = &mut self.sweeping {
            running.again = true;
            return;
        }
        if let Some(at) = self.sweeps.not_before() {
            if self.look_again.is_none_or(|(then, _)| then > at) {
                self.look_again = Some((at, at.saturating_duration_since(Instant::now())));
            }
            return;
        }
        let began = Instant::now();
        let mut sweep = self.begin_sweep(ctx);
        sweep.spent = began.elapsed();
        self.sweeping = Some(Box::new(sweep));
        self.go_on_sweeping(ctx, TURN);
    }

    fn begin_sweep(&mut self, ctx: &mut Context) -> Sweep {
        let forgotten = |ch: &&Channel| !ch.is_whole() && ch.known_to.is_empty();
        for id in self.channels.iter().filter(forgotten).map(|ch| ch.id).collect::<Vec<_>>() {
            self.remove_channel(ctx, id);
        }
        let lost = |ch: &&Channel| ch.is_whole() && (ch.client_ended || ch.listener_gone);
        let mut sweep = Sweep::default();
        let mut ranks: HashMap<u32, usize> = HashMap::new();
        let mut left = Vec::new();
        for ch in self.channels.iter().filter(lost).filter(|ch| !ch.is_ending) {
            let rank = ranks.entry(ch.client_uid).or_default();
            *rank += 1;
            left.push((*rank, ch.id));
            sweep.candidates.insert(ch.id, ch.client_family);
        }
        left.sort_unstable();
        sweep.left = left.into_iter().map(|(_, id)| id).collect();
        let families: HashSet<FamilyId> = sweep.candidates.values().copied().collect();
        let arenas = ctx.arenas.iter().filter(|a| families.contains(&a.family));
        sweep.arenas = arenas.map(|a| (a.family, a.mem.clone())).collect();
        sweep.crowded = self.channels.iter().filter(|ch| ch.client_gone).count() > crate::limits::LINGERING_CHANNELS;
        sweep
    }

    /// Goes on with the sweep, for `budget` at most.
    pub fn go_on_sweeping(&mut self, ctx: &mut Context, budget: Duration) {
        let Some(mut sweep) = self.sweeping.take() else { return };
        let began = Instant::now();
        loop {
            if let Some((family, mem)) = sweep.arenas.front() {
                let (family, mem) = (*family, mem.clone());
                sweep.read(family, &mem);
            } else if let Some(id) = sweep.left.pop_front() {
                self.sweep_one(ctx, id, sweep.crowded, sweep.used.contains(&id));
            } else {
                break;
            }
            if began.elapsed() >= budget {
                sweep.spent += began.elapsed();
                self.sweeping = Some(sweep);
                return;
            }
        }
        self.sweeps.was_done(Instant::now() - sweep.spent - began.elapsed());
        if sweep.again {
            let soon = Instant::now();
            self.look_again = Some((soon, Duration::from_millis(1)));
        }
    }

    /// Ends channels that no process accepts from any more. Waiting connections are reset, and
    /// both sides are told. Work that takes longer than a turn is left for later turns of the
    /// listener's user.
    pub fn end_channels(&mut self, ctx: &mut Context, uid: u32, channels: impl Iterator<Item = ChannelId>) {
        channels.for_each(|id| self.ended.add(uid, id));
        if self.ended.waiting(uid) > 0 {
            self.go_on_ending(ctx, uid);
        }
    }

    /// Goes on with this user's ended listeners for one turn.
    pub fn go_on_ending(&mut self, ctx: &mut Context, uid: u32) {
        let began = Instant::now();
        while began.elapsed() < TURN {
            let Some(id) = self.ended.take(uid) else { break };
            let Some(ch) = self.channels.get_mut(id) else { continue };
            ch.is_ending = false;
            let families: Vec<FamilyId> = ch.server_families.iter().copied().chain([ch.client_family]).collect();
            if let Some(ch) = self.channels.get(id) {
                refuse_waiting(ch, &ctx.clients);
            }
            self.tell_gone(ctx, id, families, false);
        }
        if self.ended.waiting(uid) == 0 {
            self.sweep(ctx);
        }
    }
}
