//! What takes long for channels, in pieces: the look which of them have lost a side, and the ends of listeners.

use super::channels::Channel;
use super::state::Shm;
use super::sweeping::Sweep;
use super::wake::refuse_waiting;
use crate::context::Context;
use crate::turns::TURN;
use crate::{ChannelId, FamilyId};
use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

impl Shm {
    /// Looks which channels have lost a side for good. It reads all sockets of the clients' fork groups, and they may
    /// have many: what takes longer than a turn is left for those to come.
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

    /// The look at channels goes on, for `budget` at most.
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

    /// Nobody accepts on these channels any more. Connections that nobody took are reset, and both sides are told: now,
    /// and in the turns of the user whose listener it was.
    pub fn end_channels(&mut self, ctx: &mut Context, uid: u32, channels: impl Iterator<Item = ChannelId>) {
        let ended = self.ended.entry(uid).or_default();
        ended.extend(channels);
        if ended.is_empty() {
            self.ended.remove(&uid);
            return;
        }
        self.go_on_ending(ctx, uid);
    }

    /// The ends of this user's listeners go on for a turn.
    pub fn go_on_ending(&mut self, ctx: &mut Context, uid: u32) {
        let began = Instant::now();
        while began.elapsed() < TURN {
            let Some(id) = self.ended.get_mut(&uid).and_then(VecDeque::pop_front) else {
                self.ended.remove(&uid);
                return self.sweep(ctx);
            };
            let Some(ch) = self.channels.get_mut(id) else { continue };
            ch.is_ending = false;
            let families: Vec<FamilyId> = ch.server_families.iter().copied().chain([ch.client_family]).collect();
            if let Some(ch) = self.channels.get(id) {
                refuse_waiting(ch, &ctx.clients);
            }
            self.tell_gone(ctx, id, families, false);
        }
    }
}
