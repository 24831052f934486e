//! Changing a connection in the name of a side that is gone, and waking the
//! other one: what the library does in `close`, done from outside.

use crate::clients::Clients;
use crate::membarrier::heavy_fence;
use crate::shm::channels::{Channel, ChannelMem};
use crate::shm::switched::Release;
use fsocket_abi::arena;
use fsocket_abi::channel::{slot_state, status, SERVER, SUMMARY_SYN};
use fsocket_abi::flags::FlagSet;
use fsocket_abi::sock::{Sock, LINGER_ON, LINGER_SECS};
use fsocket_proto::values::Waiter;
use fsocket_sync::atomic::{fence, Ordering};
use fsocket_sync::doorbell::{Want, FUTEX_BIT};
use rustix::thread::futex;

/// Closes `side` of a connection: its status bits are set and the other side
/// hears of it, whether it waits for data or for space.
pub fn close_side(ch: &Channel, slot: usize, side: usize, bits: u32, clients: &Clients) {
    let control = ch.mem.slot(slot);
    let how = match bits & status::RST {
        0 => Release::ReadAll(ch.mem.carried(slot, 1 - side)),
        _ => Release::Reset,
    };
    ch.switched.borrow_mut().release(slot, side, control.generation.load(Ordering::Relaxed), how);
    control.dir[side].prod.status.fetch_or(bits, Ordering::Release);
    // Before the want words are read. The sleeper's membarrier pairs with it
    // (this process is registered).
    fence(Ordering::SeqCst);
    let other = 1 - side;
    wake_slot(ch, other, &control.dir[side].want_data, slot, clients);
    wake_slot(ch, other, &control.dir[other].want_space, slot, clients);
    tell_news(ch, other, slot, clients);
}

/// A side whose peer can write all words of the connection that it sleeps on.
fn tell_news(ch: &Channel, side: usize, slot: usize, clients: &Clients) {
    clients.tell_news(&ch.known_to, |family| ch.is_party(side, family), arena::news_of(ch.id, slot));
}

/// Those on `side` who wait on a connection look again.
pub fn wake_side(ch: &Channel, slot: usize, side: usize, clients: &Clients) {
    let control = ch.mem.slot(slot);
    fence(Ordering::SeqCst);
    wake_slot(ch, side, &control.dir[1 - side].want_data, slot, clients);
    wake_slot(ch, side, &control.dir[side].want_space, slot, clients);
    tell_news(ch, side, slot, clients);
}

/// Status bits with which `side`, that crashed, leaves: as TCP, reset if it had
/// not read everything or was not to linger, unless the connection was over.
pub fn closing_bits(ch: &Channel, slot: usize, side: usize, sock: &Sock, unread: bool) -> u32 {
    let status = |side: usize| ch.mem.slot(slot).dir[side].prod.status.load(Ordering::Acquire);
    let (own, peer) = (status(side), status(1 - side));
    let flags = sock.flags.get();
    let over = peer & status::RST != 0
        || (peer & status::FIN != 0 && flags.has(FlagSet::SHUT_WR))
        || (peer & (status::CLOSED | status::SHUT_BOTH) != 0 && flags.has(FlagSet::SENT_AFTER_CLOSE));
    let abort = sock.option(LINGER_ON) != 0 && sock.option(LINGER_SECS) == 0;
    // The bytes that it had not read have gone over to the kernel with it.
    let unread = unread && !flags.is_drained();
    status::CLOSED
        | match over {
            true if own & (status::FIN | status::RST) != 0 => 0,
            false if unread || abort => status::RST,
            _ => status::FIN,
        }
}

/// Closes a side of all connections where it is not closed yet: nobody is left
/// on it who could.
pub fn close_all(ch: &Channel, side: usize, clients: &Clients) {
    for slot in ch.mem.touched_slots() {
        let control = ch.mem.slot(slot);
        if control.state.load(Ordering::Acquire) != slot_state::FREE
            && control.dir[side].prod.status.load(Ordering::Acquire) & status::CLOSED == 0
        {
            close_side(ch, slot, side, status::RST | status::CLOSED, clients);
        }
    }
    ch.switched.borrow_mut().leave(side);
}

/// Nobody accepts any more: refuses new connections and resets those that
/// nobody took.
pub fn end_listening(ch: &Channel, clients: &Clients) {
    ch.mem.listener_closed().store(1, Ordering::SeqCst);
    // A client that publishes a SYN and then finds `listener_closed` unset has
    // published before this fence, so the loop sees it.
    heavy_fence();
    refuse_waiting(ch, clients);
}

/// Resets connections that nobody took. After a fence, behind which `listener_closed` is set.
pub fn refuse_waiting(ch: &Channel, clients: &Clients) {
    for slot in ch.mem.touched_slots() {
        // The first to change the state from SYN decides: a worker that accepts, or the monitor.
        let state = &ch.mem.slot(slot).state;
        let ours =
            state.compare_exchange(slot_state::SYN, slot_state::ESTABLISHED, Ordering::AcqRel, Ordering::Relaxed);
        if ours.is_ok() {
            close_side(ch, slot, SERVER, status::RST | status::CLOSED, clients);
        }
    }
}

/// A worker died with connections in its queue: everybody who still accepts
/// shall come and take them.
pub fn wake_stealers(ch: &Channel, clients: &Clients) {
    fence(Ordering::SeqCst);
    for q in ch.mem.touched_queues() {
        let want = &ch.mem.queue(q).want;
        if want.take() & FUTEX_BIT != 0 {
            wake_futex(want);
        }
    }
    for w in ch.mem.touched_waiters(SERVER) {
        let waiter = ch.mem.waiter(SERVER, w);
        if waiter.waker.load(Ordering::Relaxed) != 0 {
            waiter.summary.fetch_or(SUMMARY_SYN, Ordering::Release);
            ring(ch, SERVER, w, clients);
        }
    }
}

fn wake_slot(ch: &Channel, side: usize, want: &Want, slot: usize, clients: &Clients) {
    // First the bits: a thread that is woken and sleeps again sets its own once more, which nobody else may take.
    let mut bits = want.take() & !FUTEX_BIT;
    // Threads on the futex also without their bit: a process that was killed may have taken it, and not have come to
    // wake them. (Threads on a waker look by themselves every two seconds.)
    wake_futex(want);
    while bits != 0 {
        let w = bits.trailing_zeros() as usize;
        bits &= bits - 1;
        let waiter = ch.mem.waiter(side, w);
        waiter.ready[slot / 64].fetch_or(1 << (slot % 64), Ordering::Release);
        waiter.summary.fetch_or(1 << (slot / 64), Ordering::Release);
        ring(ch, side, w, clients);
    }
}

fn wake_futex(want: &Want) {
    want.seq.fetch_add(1, Ordering::Release);
    let _ = futex::wake(&want.seq, futex::Flags::empty(), i32::MAX as u32);
}

/// Wakes the waiter if it sleeps. Only a process of that side's own families: the key
/// in shared memory may be anything.
fn ring(ch: &Channel, side: usize, w: usize, clients: &Clients) {
    let waiter = ch.mem.waiter(side, w);
    // `ready` and `summary` before `sleeping`; the sleeper stores `sleeping`,
    // runs a heavy fence and looks at `summary`.
    fence(Ordering::SeqCst);
    if waiter.sleeping.swap(0, Ordering::AcqRel) != 0 {
        let key = waiter.waker.load(Ordering::Relaxed);
        clients.wake(key, |family| ch.is_party(side, family), ch.id, (Waiter { side, number: w }, None));
    }
}

/// Frees the waiters of a process that is gone.
pub fn free_waiters(ch: &Channel, side: usize, is_dead: impl Fn(u64) -> bool) {
    for w in ch.mem.touched_waiters(side) {
        let waiter = ch.mem.waiter(side, w);
        let key = waiter.waker.load(Ordering::Acquire);
        if key == 0 || !is_dead(key) {
            continue;
        }
        waiter.sleeping.store(0, Ordering::Relaxed);
        waiter.summary.store(0, Ordering::Relaxed);
        for word in &waiter.ready {
            word.store(0, Ordering::Relaxed);
        }
        // Release: clean before it is anybody's. Only if it still is the dead
        // one's.
        let _ = waiter.waker.compare_exchange(key, 0, Ordering::Release, Ordering::Relaxed);
    }
}

/// Whether a side that reads at `pos` (with `base` at offset 0 of the ring) has
/// something left to read. `partial`: bytes left of a record that it began.
pub fn has_unread(mem: &ChannelMem, slot: usize, side: usize, pos: u64, base: u64, partial: u64) -> bool {
    use fsocket_abi::channel::record;
    if partial != 0 {
        return true;
    }
    let dir = 1 - side;
    let header = mem.ring_word(slot, dir, pos.wrapping_sub(base));
    if record::unpack(header).0 == record::PAD {
        return mem.ring_word(slot, dir, 0) != 0;
    }
    // As the reader sees it: the sender goes on at the start of an empty ring,
    // which the reader may not have followed.
    header != 0 || (base != pos && mem.slot(slot).dir[dir].prod.rewind_from.load(Ordering::Acquire) == pos)
}
