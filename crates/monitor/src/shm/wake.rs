//! Changes a connection in the name of a side that is gone, and wakes the other one: the work of
//! the library's `close`, done from outside.

use crate::clients::Clients;
use crate::membarrier::heavy_fence;
use crate::shm::channels::{Channel, ChannelMem};
use crate::shm::ends::leave_end;
use crate::shm::switched::{Named, Release};
use fsocket_abi::arena;
use fsocket_abi::channel::{slot_state, status, SERVER, SUMMARY_SYN};
use fsocket_abi::flags::FlagSet;
use fsocket_abi::sock::{Sock, LINGER_ON, LINGER_SECS};
use fsocket_proto::values::Waiter;
use fsocket_sync::atomic::{fence, Ordering};
use fsocket_sync::doorbell::{Want, FUTEX_BIT};
use rustix::thread::futex;

/// Closes `side` of a connection: sets its status bits and wakes the other side, whether that waits
/// for data or for space.
pub fn close_side(ch: &Channel, slot: usize, side: usize, bits: u32, clients: &Clients) {
    let control = ch.mem.slot(slot);
    let how = match bits & status::RST {
        0 => Release::ReadAll(ch.mem.carried(slot, 1 - side)),
        _ => Release::Reset,
    };
    let named = Named { channel: ch.id, slot, side, generation: control.generation.load(Ordering::Relaxed) };
    leave_end(ch, &named, how);
    control.dir[side].prod.status.fetch_or(bits, Ordering::Release);
    // This comes before the want words are read. The sleeper's membarrier pairs with it, because
    // this process is registered.
    fence(Ordering::SeqCst);
    leave_end(ch, &named, how);
    let other = 1 - side;
    wake_slot(ch, other, &control.dir[side].want_data, slot, clients);
    wake_slot(ch, other, &control.dir[other].want_space, slot, clients);
    tell_news(ch, other, slot, clients);
}

/// Wakes a side whose peer can write all words of the connection.
fn tell_news(ch: &Channel, side: usize, slot: usize, clients: &Clients) {
    clients.tell_news(&ch.known_to, |family| ch.is_party(side, family), arena::news_of(ch.id, slot));
}

/// Makes waiters of `side` on a connection look again.
pub fn wake_side(ch: &Channel, slot: usize, side: usize, clients: &Clients) {
    let control = ch.mem.slot(slot);
    fence(Ordering::SeqCst);
    wake_slot(ch, side, &control.dir[1 - side].want_data, slot, clients);
    wake_slot(ch, side, &control.dir[side].want_space, slot, clients);
    tell_news(ch, side, slot, clients);
}

/// Status bits with which the crashed `side` leaves, as in TCP. It is a reset if that side had
/// unread bytes or was not to linger, unless the connection was over.
pub fn closing_bits(ch: &Channel, slot: usize, side: usize, sock: &Sock, unread: bool) -> u32 {
    let status = |side: usize| ch.mem.slot(slot).dir[side].prod.status.load(Ordering::Acquire);
    let (own, peer) = (status(side), status(1 - side));
    let flags = sock.flags.get();
    // (A Unix connection is over when it is closed, and does not linger.)
    let tcp = !ch.is_unix();
    let over = peer & status::RST != 0
        || (peer & status::FIN != 0 && flags.has(FlagSet::SHUT_WR))
        || (peer & (status::CLOSED | status::SHUT_BOTH) != 0 && flags.has(FlagSet::SENT_AFTER_CLOSE));
    let over = tcp && over;
    let abort = tcp && sock.option(LINGER_ON) != 0 && sock.option(LINGER_SECS) == 0;
    // The bytes that it had not read have gone over to the kernel with it.
    let unread = unread && !flags.is_drained();
    status::CLOSED
        | match over {
            true if own & (status::FIN | status::RST) != 0 => 0,
            false if unread || abort => status::RST,
            _ => status::FIN,
        }
}

/// Closes a side of all its connections, because no process is left that could.
pub fn close_all(ch: &Channel, side: usize, clients: &Clients) {
    for slot in ch.mem.touched_slots() {
        let control = ch.mem.slot(slot);
        if control.state.load(Ordering::Acquire) != slot_state::FREE
            && control.dir[side].prod.status.load(Ordering::Acquire) & status::CLOSED == 0
        {
            close_side(ch, slot, side, status::RST | status::CLOSED, clients);
        }
    }
    let all = ch.switched.borrow().all();
    for (slot, generation) in all {
        leave_end(ch, &Named { channel: ch.id, slot, side, generation }, Release::Copied);
    }
}

/// No process accepts any more: refuses new connections and resets those that were not accepted.
pub fn end_listening(ch: &Channel, clients: &Clients) {
    ch.mem.listener_closed().store(1, Ordering::SeqCst);
    // A client that publishes a SYN and then finds `listener_closed` unset has
    // published before this fence, so the loop sees it.
    heavy_fence();
    refuse_waiting(ch, clients);
}

/// Resets connections that no worker has taken. The caller has set `listener_closed` before a
/// fence.
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

/// A worker died with connections in its queue, so all accepting processes shall come and take
/// them.
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
    // The bits come first: a woken thread that sleeps again sets its bit once more, and no other thread may clear
    // it.
    let mut bits = want.take() & !FUTEX_BIT;
    // Threads on the futex are woken even without their bit, because a killed process may have cleared it without
    // waking them. (Threads on a waker look by themselves every two seconds.)
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

/// Wakes the waiter if it sleeps. Only a process of that side's own families is woken, because the
/// key in shared memory may have any value.
fn ring(ch: &Channel, side: usize, w: usize, clients: &Clients) {
    let waiter = ch.mem.waiter(side, w);
    // `ready` and `summary` are stored before `sleeping` is read; the sleeper stores `sleeping`,
    // runs a heavy fence and looks at `summary`.
    fence(Ordering::SeqCst);
    if waiter.sleeping.swap(0, Ordering::AcqRel) != 0 {
        let key = waiter.waker.load(Ordering::Relaxed);
        clients.wake(key, |family| ch.is_party(side, family), ch.id, (Waiter { side, number: w }, None));
    }
}

/// Frees the waiters of a process that has ended.
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
        // Release: the waiter is clean before another process can have it. It is freed only if it
        // still belongs to the dead process.
        let _ = waiter.waker.compare_exchange(key, 0, Ordering::Release, Ordering::Relaxed);
    }
}

/// Does a side that reads at `pos` (with `base` at offset 0 of the ring) have unread bytes?
/// `partial`: unread bytes of a record that it has begun.
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
    // The reader's view counts: the sender continues at the start of an empty ring, and the reader
    // may not have followed.
    header != 0 || (base != pos && mem.slot(slot).dir[dir].prod.rewind_from.load(Ordering::Acquire) == pos)
}
