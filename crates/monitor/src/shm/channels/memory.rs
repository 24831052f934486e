//! The memory of a channel, as the monitor sees it: slots, queues and waiters.

use crate::foreign::{ForeignFd, ForeignMap};
use crate::memory::{memfd, Mapping};
use crate::ChannelId;
use fsocket_abi::channel::{
    ring_off, slot_state, status, Header, Slot, SynQueue, Waiter, CHANNEL_SIZE, CLIENT, MAGIC, RING_CAP, RING_OFF,
    SERVER, SLOTS, SLOT_OFF, SYN_CAP, SYN_OFF, WAITERS, WAITER_OFF, WORKERS,
};
use fsocket_abi::path_switch::PeerStatus;
use fsocket_sync::atomic::{AtomicU32, AtomicU64, Ordering};
use rustix::fs::SealFlags;
use std::io;
use std::mem::offset_of;
use std::rc::Rc;

/// Name of a channel's memfd.
pub fn name_of(id: ChannelId) -> String {
    format!("fastsocket-channel-{id}")
}

/// The memory of a channel: everything except the rings is mapped.
pub struct ChannelMem {
    fd: Rc<ForeignFd>,
    map: ForeignMap,
}

impl ChannelMem {
    /// Makes the memory for a client of this user.
    ///
    /// # Errors
    /// Out of descriptors, memory or address space.
    pub fn new(id: ChannelId, uid: u32) -> io::Result<ChannelMem> {
        let fd = memfd(&name_of(id), CHANNEL_SIZE, SealFlags::SHRINK | SealFlags::GROW)?;
        let mem = ChannelMem::of(ForeignFd::new(fd, uid))?;
        mem.map.at::<AtomicU64>(offset_of!(Header, magic)).store(MAGIC, Ordering::Relaxed);
        mem.map.at::<AtomicU32>(offset_of!(Header, version)).store(fsocket_abi::VERSION, Ordering::Relaxed);
        mem.map.at::<AtomicU32>(offset_of!(Header, id)).store(id, Ordering::Relaxed);
        Ok(mem)
    }

    /// # Errors
    /// Out of memory or address space.
    pub fn of(fd: ForeignFd) -> io::Result<ChannelMem> {
        let map = ForeignMap::new(Mapping::new(fd.as_fd(), RING_OFF)?, fd.uid());
        Ok(ChannelMem { fd: Rc::new(fd), map })
    }

    pub fn fd(&self) -> Rc<ForeignFd> {
        self.fd.clone()
    }

    pub fn set_workers(&self, mask: u64) {
        self.map.at::<AtomicU64>(offset_of!(Header, workers)).store(mask, Ordering::Release);
    }

    pub fn set_avoid(&self, mask: u64) {
        self.map.at::<AtomicU64>(offset_of!(Header, avoid)).store(mask, Ordering::Relaxed);
    }

    /// Counts that a worker has left connections in its queue.
    pub fn note_left_behind(&self) {
        self.map.at::<AtomicU32>(offset_of!(Header, left_behind)).fetch_add(1, Ordering::Release);
    }

    /// Makes the client send its connections to all workers in turn.
    pub fn set_turns(&self) {
        self.map.at::<AtomicU32>(offset_of!(Header, turns)).store(1, Ordering::Relaxed);
    }

    pub fn idle(&self) -> &AtomicU32 {
        self.map.at(offset_of!(Header, idle))
    }

    pub fn listener_closed(&self) -> &AtomicU32 {
        self.map.at(offset_of!(Header, listener_closed))
    }

    pub fn set_client_gone(&self) {
        self.map.at::<AtomicU32>(offset_of!(Header, client_gone)).store(1, Ordering::SeqCst);
    }

    /// Queue `q`, from 0 to [`WORKERS`].
    pub fn queue(&self, q: usize) -> &SynQueue {
        assert!(q <= WORKERS);
        self.map.at(SYN_OFF + q * size_of::<SynQueue>())
    }

    /// Waiter `w` of `side`.
    pub fn waiter(&self, side: usize, w: usize) -> &Waiter {
        assert!(side < 2 && w < WAITERS);
        self.map.at(WAITER_OFF + (side * (WAITERS + 1) + w) * size_of::<Waiter>())
    }

    pub fn slot(&self, slot: usize) -> &Slot {
        assert!(slot < SLOTS);
        self.map.at(SLOT_OFF + slot * size_of::<Slot>())
    }

    /// How many bytes of the ring written by `side` will also arrive first in the other side's
    /// kernel socket.
    pub fn carried(&self, slot: usize, side: usize) -> usize {
        let s = self.slot(slot);
        let carried = PeerStatus::look(&s.dir[side].prod).has_carried();
        let n = if carried { s.migrated[side].limit.load(Ordering::Relaxed) } else { 0 };
        n.min(RING_CAP as u64) as usize
    }

    /// Connection requests in queue `q` that no worker has taken. 0 if the number is larger than
    /// the queue: then its positions are nonsense, and no worker takes anything.
    pub fn queued(&self, q: usize) -> u32 {
        let queue = self.queue(q);
        let (head, tail) = (queue.head.load(Ordering::Acquire), queue.tail.load(Ordering::Acquire));
        match tail.wrapping_sub(head) {
            n if n <= SYN_CAP as u32 => n,
            _ => 0,
        }
    }

    pub fn queued_all(&self) -> u32 {
        self.touched_queues().map(|q| self.queued(q)).sum()
    }

    /// Connections that the client has put into queues, as its positions say.
    pub fn opened(&self) -> u64 {
        self.touched_queues().map(|q| u64::from(self.queue(q).tail.load(Ordering::Relaxed))).sum()
    }

    /// Slots in pages that were ever written. All others are FREE. Reading the others would
    /// allocate their pages.
    pub fn touched_slots(&self) -> impl Iterator<Item = usize> {
        self.touched(SLOT_OFF, SLOTS, size_of::<Slot>())
    }

    /// Queues in pages that were ever written, see [`Self::touched_slots`].
    pub fn touched_queues(&self) -> impl Iterator<Item = usize> {
        self.touched(SYN_OFF, 1 + WORKERS, size_of::<SynQueue>())
    }

    /// Waiters in pages that were ever written, see [`Self::touched_slots`].
    pub fn touched_waiters(&self, side: usize) -> impl Iterator<Item = usize> {
        self.touched(WAITER_OFF + side * (WAITERS + 1) * size_of::<Waiter>(), WAITERS, size_of::<Waiter>())
    }

    /// Those of `count` items of `size` bytes at `off` whose pages have memory.
    fn touched(&self, off: usize, count: usize, size: usize) -> impl Iterator<Item = usize> {
        use rustix::fs::{seek, SeekFrom};
        let end = off + count * size;
        let mut found = Vec::new();
        let mut at = off;
        // Each round skips at least one page, and there are only a few hundred pages.
        while at < end {
            let Ok(data) = seek(self.fd.as_fd(), SeekFrom::Data(at as u64)).map(|at| at as usize) else { break };
            let hole = seek(self.fd.as_fd(), SeekFrom::Hole(data as u64)).map_or(end, |at| at as usize);
            if data >= end || hole <= data {
                break;
            }
            let first = data.saturating_sub(off) / size;
            let last = (hole.min(end) - off).div_ceil(size).min(count);
            // An item that crosses a page boundary may be in the list already.
            let first = found.last().map_or(first, |l: &usize| first.max(l + 1));
            found.extend(first..last);
            at = hole;
        }
        found.into_iter()
    }

    /// Maps ring `dir` of a slot.
    ///
    /// # Errors
    /// Out of memory or address space.
    pub fn ring(&self, slot: usize, dir: usize) -> io::Result<Mapping> {
        assert!(slot < SLOTS && dir < 2);
        Mapping::part(self.fd.as_fd(), ring_off(slot, dir), RING_CAP)
    }

    /// The eight bytes at `off` of ring `dir` of `slot`. The read uses pread: mapping all rings
    /// would take two gigabytes, and reading a mapping would allocate pages.
    pub fn ring_word(&self, slot: usize, dir: usize, off: u64) -> u64 {
        assert!(slot < SLOTS && dir < 2);
        let off = off & (RING_CAP as u64 - 1) & !7;
        let mut word = [0u8; 8];
        match rustix::io::retry_on_intr(|| {
            rustix::io::pread(self.fd.as_fd(), &mut word, ring_off(slot, dir) as u64 + off)
        }) {
            Ok(8) => u64::from_ne_bytes(word),
            _ => 0,
        }
    }

    /// Marks connections that wait for `accept` and have no mark yet. Returns their number.
    pub fn mark_waiting(&self, mark: u32) -> usize {
        if self.queued_all() == 0 {
            return 0;
        }
        let waits = |slot: &&Slot| slot.state.load(Ordering::Acquire) == slot_state::SYN;
        let word = |slot: &Slot| {
            slot.dir[SERVER].prod.options.compare_exchange(0, mark, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        self.touched_slots().map(|i| self.slot(i)).filter(waits).filter(|slot| word(slot)).count()
    }

    /// Whether no server ever had a connection in this channel. (Otherwise the channel may contain
    /// a server's bytes, even those of a closed connection.)
    pub fn is_untouched_by_servers(&self) -> bool {
        self.touched_slots().map(|i| self.slot(i)).all(|slot| {
            let first = slot.generation.load(Ordering::Relaxed) <= 1;
            first && matches!(slot.state.load(Ordering::Acquire), slot_state::FREE | slot_state::SYN)
        })
    }

    /// Slots that are in use on at least one side. Waiting connections count only up to the number
    /// that the queues contain. Once the client is gone, no worker takes what it has written only
    /// into slots.
    pub fn slots_in_use(&self) -> usize {
        let queued = self.queued_all() as usize;
        let mut waiting = 0;
        self.touched_slots()
            .filter(|&i| {
                let slot = self.slot(i);
                let closed = |side: usize| slot.dir[side].prod.status.load(Ordering::Acquire) & status::CLOSED != 0;
                let open = !(closed(CLIENT) && closed(SERVER));
                match slot.state.load(Ordering::Acquire) {
                    slot_state::SYN if open => {
                        waiting += 1;
                        waiting <= queued
                    }
                    slot_state::ESTABLISHED => open,
                    _ => false,
                }
            })
            .count()
    }

    /// Whether some connections have left their queue and were not claimed by a worker yet. A
    /// worker may be about to claim them.
    pub fn is_being_claimed(&self) -> bool {
        let closed =
            |slot: &Slot, side: usize| slot.dir[side].prod.status.load(Ordering::Acquire) & status::CLOSED != 0;
        let waits = |slot: &&Slot| slot.state.load(Ordering::Acquire) == slot_state::SYN;
        let open = |slot: &&Slot| !(closed(slot, CLIENT) && closed(slot, SERVER));
        let waiting = self.touched_slots().map(|i| self.slot(i)).filter(waits).filter(open).count();
        waiting > self.queued_all() as usize
    }

    /// Whether the channel is empty, and no connection has moved from it to the kernel, where its
    /// port may still be in use.
    pub fn is_at_rest(&self) -> bool {
        let stays = |slot: &Slot| slot.switching.load(Ordering::Relaxed) == 0;
        self.queued_all() == 0
            && self.slots_in_use() == 0
            && !self.is_being_claimed()
            && self.touched_slots().all(|i| stays(self.slot(i)))
    }

    /// Bytes of memory that the channel takes.
    pub fn resident(&self) -> u64 {
        rustix::fs::fstat(self.fd.as_fd()).map_or(0, |st| st.st_blocks as u64 * 512)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_sealed_sparse_and_labelled() {
        let mem = ChannelMem::new(7, 0).unwrap();
        assert_eq!(rustix::fs::fstat(mem.fd.as_fd()).unwrap().st_size as usize, CHANNEL_SIZE);
        assert!(rustix::fs::ftruncate(mem.fd.as_fd(), 0).is_err());
        assert!(mem.resident() < 1 << 20);
        assert_eq!(mem.slots_in_use(), 0);
        assert_eq!(mem.queued_all(), 0);
        assert!(mem.resident() < 100_000, "looking allocated pages: {}", mem.resident());
        assert_eq!(mem.ring_word(SLOTS - 1, 1, u64::MAX), 0);
        let header = Mapping::new(mem.fd.as_fd(), 4096).unwrap();
        assert_eq!(header.at::<AtomicU64>(0).load(Ordering::Relaxed), MAGIC);
        assert_eq!(header.at::<AtomicU32>(offset_of!(Header, id)).load(Ordering::Relaxed), 7);
    }

    #[test]
    fn items_with_memory_behind_them_are_found() {
        let mem = ChannelMem::new(7, 0).unwrap();
        for i in [0, 7, 500, 1023] {
            mem.slot(i).state.store(slot_state::ESTABLISHED, Ordering::Relaxed);
        }
        let seen: Vec<_> = mem.touched_slots().collect();
        assert!(seen.is_sorted() && seen.windows(2).all(|w| w[0] != w[1]) && seen.len() < 64);
        assert_eq!(mem.slots_in_use(), 4);
        mem.queue(64).tail.store(3, Ordering::Relaxed);
        mem.queue(0).tail.store(1, Ordering::Relaxed);
        assert_eq!(mem.queued_all(), 4);
        mem.waiter(1, WAITERS - 1).waker.store(1, Ordering::Relaxed);
        assert!(mem.touched_waiters(1).any(|w| w == WAITERS - 1));
    }

    /// The moment between a worker's look at the queue and its look at the slot.
    #[test]
    fn what_was_taken_out_of_a_queue_is_being_claimed() {
        let mem = ChannelMem::new(7, 0).unwrap();
        assert!(!mem.is_being_claimed());
        mem.slot(3).state.store(slot_state::SYN, Ordering::Relaxed);
        mem.queue(0).tail.store(1, Ordering::Relaxed);
        assert!(mem.slots_in_use() == 1 && !mem.is_being_claimed());
        mem.queue(0).head.store(1, Ordering::Relaxed);
        assert!(mem.slots_in_use() == 0 && mem.is_being_claimed());
        mem.slot(3).state.store(slot_state::ESTABLISHED, Ordering::Relaxed);
        assert!(mem.slots_in_use() == 1 && !mem.is_being_claimed());
    }

    #[test]
    fn what_nobody_can_accept_is_not_in_use() {
        let mem = ChannelMem::new(1, 0).unwrap();
        for i in [0, 7] {
            mem.slot(i).state.store(slot_state::SYN, Ordering::Relaxed);
        }
        assert_eq!(mem.slots_in_use(), 0, "in no queue");
        mem.queue(0).tail.store(1, Ordering::Relaxed);
        assert_eq!(mem.slots_in_use(), 1);
        mem.queue(0).tail.store(SYN_CAP as u32 + 1, Ordering::Relaxed);
        assert_eq!((mem.queued(0), mem.slots_in_use()), (0, 0), "a queue of nonsense");
    }
}
