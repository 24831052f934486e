//! One connection as seen by a fork group. It is in the arena that the group shares.
//!
//! Every process of the group may change it at any time, so each method reads a field only once.
//! The monitor treats it as data from an untrusted program.
//!
//! | state | method | next | caller |
//! | --- | --- | --- | --- |
//! | free | [`Sock::claim`] | open | the process that begins a connection |
//! | open | [`Sock::begin_close`] | closing | the last holder, which ends the connection |
//! | open, closing | [`Sock::free`] | free | the same process, or the monitor for a group that has died |

use crate::flags::Flags;
use crate::half::Half;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use fsocket_sync::atomic::{AtomicI32, AtomicU16, AtomicU32, AtomicU64, AtomicU8};

/// The most processes that hold one socket and are known after a crash.
pub const HOLDERS: usize = 7;
/// The number of recorded integer options. The library assigns their indices, except the next two.
pub const OPTIONS: usize = 24;
/// Indices of SO_LINGER: on, and seconds. The monitor uses them when it closes the sockets of a
/// dead process.
pub const LINGER_ON: usize = 22;
pub const LINGER_SECS: usize = 23;

const FREE: u32 = 0;
const OPEN: u32 = 1;
const CLOSING: u32 = 2;

/// Fields that are used together share a cache line.
#[repr(C, align(64))]
pub struct Sock {
    state: AtomicU32,
    pub flags: Flags,
    channel: AtomicU32,
    slot: AtomicU32,
    side: AtomicU32,
    error: AtomicI32,
    family: AtomicU16,
    local_port: AtomicU16,
    peer_port: AtomicU16,
    _pad: u16,
    local: [AtomicU8; 16],
    peer: [AtomicU8; 16],
    holders: [AtomicU64; HOLDERS],
    extra_holders: AtomicU32,
    blocked_sends: AtomicU32,
    receive_timeout: AtomicU64,
    send_timeout: AtomicU64,
    options: [AtomicI32; OPTIONS],
    edges: AtomicU32,
    _pad2: u32,
    placeholder: AtomicU64,
    pub tx: Half,
    pub rx: Half,
}

/// The place of a connection in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    pub channel: u32,
    pub slot: usize,
    /// [`crate::channel::CLIENT`] or [`crate::channel::SERVER`].
    pub side: usize,
}

/// An IPv6 or v4-mapped address, and a port.
pub type Name = ([u8; 16], u16);

fn name(ip: &[AtomicU8; 16], port: &AtomicU16) -> Name {
    (core::array::from_fn(|i| ip[i].load(Relaxed)), port.load(Relaxed))
}

fn set_name((ip, port): (&[AtomicU8; 16], &AtomicU16), to: &Name) {
    for (byte, new) in ip.iter().zip(to.0) {
        byte.store(new, Relaxed);
    }
    port.store(to.1, Relaxed);
}

impl Sock {
    /// Takes the socket if it is free. Its fields still have the values of its last user.
    pub fn claim(&self) -> bool {
        self.state.compare_exchange(FREE, OPEN, AcqRel, Relaxed).is_ok()
    }
    /// Begins to end the connection. False: another process does so.
    pub fn begin_close(&self) -> bool {
        self.state.compare_exchange(OPEN, CLOSING, AcqRel, Relaxed).is_ok()
    }
    pub fn free(&self) {
        self.state.store(FREE, Release);
    }
    pub fn is_free(&self) -> bool {
        self.state.load(Acquire) == FREE
    }
    pub fn is_open(&self) -> bool {
        self.state.load(Acquire) == OPEN
    }

    /// The place as the arena has it: slot and side are unchecked.
    pub fn place(&self) -> Place {
        Place {
            channel: self.channel.load(Relaxed),
            slot: self.slot.load(Relaxed) as usize,
            side: self.side.load(Relaxed) as usize,
        }
    }
    pub fn channel(&self) -> u32 {
        self.channel.load(Relaxed)
    }

    pub fn family(&self) -> u16 {
        self.family.load(Relaxed)
    }
    pub fn local(&self) -> Name {
        name(&self.local, &self.local_port)
    }
    pub fn peer(&self) -> Name {
        name(&self.peer, &self.peer_port)
    }
    pub fn set_names(&self, family: u16, local: &Name, peer: &Name) {
        self.family.store(family, Relaxed);
        set_name((&self.local, &self.local_port), local);
        set_name((&self.peer, &self.peer_port), peer);
    }

    /// Begins a connection at `place`, which has no holder yet.
    pub fn begin(&self, place: Place) {
        self.channel.store(place.channel, Relaxed);
        self.slot.store(place.slot as u32, Relaxed);
        self.side.store(place.side as u32, Relaxed);
        self.error.store(0, Relaxed);
        self.blocked_sends.store(0, Relaxed);
        self.edges.store(0, Relaxed);
        self.extra_holders.store(0, Relaxed);
        self.holders.iter().for_each(|h| h.store(0, Relaxed));
    }

    /// The pending SO_ERROR, or 0.
    pub fn error(&self) -> i32 {
        self.error.load(Relaxed)
    }
    pub fn set_error(&self, errno: i32) {
        self.error.store(errno, Release);
    }
    /// Takes the pending error, which is reported once.
    pub fn take_error(&self) -> i32 {
        self.error.swap(0, AcqRel)
    }

    /// Nonces of the processes that have a descriptor of the connection, in any order; 0: none.
    pub fn holders(&self) -> impl Iterator<Item = u64> + '_ {
        self.holders.iter().map(|h| h.load(Acquire))
    }
    pub fn is_held_by(&self, nonce: u64) -> bool {
        self.holders().any(|h| h == nonce)
    }
    /// Does any process hold the connection, also one for which there was no room? SeqCst: if two
    /// processes let go at the same time, at least one sees that no holder is left.
    pub fn is_held(&self) -> bool {
        self.extra_holders.load(SeqCst) != 0 || self.holders.iter().any(|h| h.load(SeqCst) != 0)
    }
    /// Do several processes hold the connection?
    pub fn is_shared(&self) -> bool {
        self.extra_holders.load(Relaxed) != 0 || self.holders.iter().filter(|h| h.load(Relaxed) != 0).count() > 1
    }
    /// Adds a holder. False: there is no room for it.
    pub fn add_holder(&self, nonce: u64) -> bool {
        let free = |h: &AtomicU64| h.load(Relaxed) == 0 && h.compare_exchange(0, nonce, AcqRel, Relaxed).is_ok();
        self.holders.iter().any(free)
    }
    /// Counts a holder for which there is no room. If that process dies, the connection stays open
    /// for ever.
    pub fn add_extra_holder(&self) {
        self.extra_holders.fetch_add(1, AcqRel);
    }
    /// Removes a holder from all entries: a nonce may be there twice. True: it was a holder.
    pub fn remove_holder(&self, nonce: u64) -> bool {
        let out = |h: &AtomicU64| h.compare_exchange(nonce, 0, SeqCst, Relaxed).is_ok();
        self.holders.iter().fold(false, |held, h| out(h) | held)
    }

    /// SO_RCVTIMEO in nanoseconds; 0: none.
    pub fn receive_timeout(&self) -> u64 {
        self.receive_timeout.load(Relaxed)
    }
    pub fn set_receive_timeout(&self, ns: u64) {
        self.receive_timeout.store(ns, Relaxed);
    }
    /// SO_SNDTIMEO in nanoseconds; 0: none.
    pub fn send_timeout(&self) -> u64 {
        self.send_timeout.load(Relaxed)
    }
    pub fn set_send_timeout(&self, ns: u64) {
        self.send_timeout.store(ns, Relaxed);
    }

    /// The value of a recorded option. The index is below [`OPTIONS`].
    pub fn option(&self, i: usize) -> i32 {
        self.options[i].load(Relaxed)
    }
    pub fn set_option(&self, i: usize, value: i32) {
        self.options[i].store(value, Relaxed);
    }
    pub fn set_options(&self, values: [i32; OPTIONS]) {
        self.options.iter().zip(values).for_each(|(o, v)| o.store(v, Relaxed));
    }

    /// Counts events that are an edge for epoll although no state has changed: a shutdown of a
    /// direction that is shut down already.
    pub fn edges(&self) -> u32 {
        self.edges.load(Relaxed)
    }
    pub fn note_edge(&self) {
        self.edges.fetch_add(1, Relaxed);
    }
    /// Counts sends that found no space. After each of them, every waiter for EPOLLOUT gets one
    /// more edge.
    pub fn blocked_sends(&self) -> u32 {
        self.blocked_sends.load(Relaxed)
    }
    pub fn note_blocked_send(&self) {
        self.blocked_sends.fetch_add(1, Relaxed);
    }

    /// SO_COOKIE of the placeholder, written before an `exec`: the program that has this socket
    /// afterwards has the connection.
    pub fn placeholder(&self) -> u64 {
        self.placeholder.load(Relaxed)
    }
    pub fn set_placeholder(&self, cookie: u64) {
        self.placeholder.store(cookie, Relaxed);
    }
}

#[cfg(not(loom))]
const _: () = {
    use core::mem::{offset_of, size_of};
    assert!(offset_of!(Sock, holders) == 64);
    assert!(offset_of!(Sock, tx) == 256 && offset_of!(Sock, rx) == 384);
    assert!(size_of::<Sock>() == 512);
};
