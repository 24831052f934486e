//! Types of fields that are not just a number.

use crate::packet::{wire, Wire};
use fsocket_abi::arena::COUNTERS;
use fsocket_abi::channel::{SLOTS, WAITERS};

/// One end of a connection in a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// Index of the slot, below [`SLOTS`].
    pub slot: usize,
    /// `CLIENT` or `SERVER` of [`fsocket_abi::channel`].
    pub side: usize,
}

impl Wire<u64> for End {
    #[inline]
    fn to_wire(self) -> u64 {
        self.slot as u64 | (self.side as u64) << 32
    }
    #[inline]
    fn from_wire(word: u64) -> Option<End> {
        let end = End { slot: word as u32 as usize, side: (word >> 32) as usize };
        (end.slot < SLOTS && end.side < 2).then_some(end)
    }
}

/// `CLIENT` or `SERVER` of [`fsocket_abi::channel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Side(pub usize);

impl Wire<u64> for Side {
    #[inline]
    fn to_wire(self) -> u64 {
        self.0 as u64
    }
    #[inline]
    fn from_wire(word: u64) -> Option<Side> {
        usize::try_from(word).ok().filter(|side| *side < 2).map(Side)
    }
}

/// A waiter of a channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Waiter {
    /// The side of the channel on which the thread waits.
    pub side: usize,
    /// Index of the waiter, below [`WAITERS`].
    pub number: usize,
}

impl Wire<u64> for Waiter {
    #[inline]
    fn to_wire(self) -> u64 {
        (self.side as u64) << 8 | self.number as u64
    }
    #[inline]
    fn from_wire(word: u64) -> Option<Waiter> {
        let waiter = Waiter { side: (word >> 8) as usize, number: word as usize & 0xff };
        (waiter.side < 2 && waiter.number < WAITERS).then_some(waiter)
    }
}

/// A counter (an index of [`COUNTERS`]) and how much it has grown. At most 2^56 - 1 is reported at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    pub counter: usize,
    pub n: u64,
}

/// Number of low bits that hold the amount.
const COUNTED_BITS: u32 = 56;

impl Wire<u64> for Option<Counted> {
    #[inline]
    fn to_wire(self) -> u64 {
        let Some(Counted { counter, n }) = self else { return 0 };
        let most = (1 << COUNTED_BITS) - 1;
        (counter as u64 + 1) << COUNTED_BITS | if n < most { n } else { most }
    }
    #[inline]
    fn from_wire(word: u64) -> Option<Option<Counted>> {
        let Some(counter) = ((word >> COUNTED_BITS) as usize).checked_sub(1) else {
            return (word == 0).then_some(None);
        };
        let n = word & ((1 << COUNTED_BITS) - 1);
        (counter < COUNTERS.len()).then_some(Some(Counted { counter, n }))
    }
}

impl Wire<[u64; 4]> for [Option<Counted>; 4] {
    #[inline]
    fn to_wire(self) -> [u64; 4] {
        self.map(Wire::to_wire)
    }
    #[inline]
    fn from_wire(words: [u64; 4]) -> Option<Self> {
        let [a, b, c, d] = words.map(<Option<Counted>>::from_wire);
        Some([a?, b?, c?, d?])
    }
}

/// Actions at the other side's end: bits of [`act`](crate::switch::act), which also gives their
/// order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Acts(pub u32);

impl Wire<u32> for Acts {
    #[inline]
    fn to_wire(self) -> u32 {
        self.0
    }
    #[inline]
    fn from_wire(bits: u32) -> Option<Acts> {
        (bits & !crate::switch::act::ALL == 0).then_some(Acts(bits))
    }
}

wire! {
    values
    /// The order in a [`Switch`](crate::request::Switch). The monitor makes the sockets, and no
    /// process ever gets the other side's end. (A process that holds a socket bound to a port
    /// would keep that port.)
    Switching: u64 {
        /// Make both ends. fd: any TCP socket in the connection's network namespace, by which the
        /// monitor finds the namespace. The answer has the requester's end.
        Make = 0,
        /// Do the actions of the field `acts` at the other side's end, on behalf of that side.
        Act = 1,
        /// fd: the requester's end of an ordinary loopback connection. The requester has made it
        /// after EXDEV.
        OwnReady = 2,
        /// fd: the other side's end of that connection.
        OtherReady = 3,
        /// fd: a new TCP socket that replaces the requester's end. The other side gets no end.
        Alone = 4,
        /// The connection is not accepted yet: connect the client's end to the kernel's listener.
        /// The server's side sends this; fd as for `Make`. Errno EINPROGRESS: ask again in a
        /// moment.
        Dial = 5,
        /// fd: the requester's end of a Unix connection that has moved to shared memory. The
        /// monitor keeps a copy of it until one side moves the connection back or both have
        /// closed it.
        Keep = 6,
        /// The requester moves such a Unix connection back to the kernel; used in place of
        /// `Make`. Errno ENOENT: the monitor has no copy of the other side's end.
        Return = 7,
    }
}

wire! {
    values
    /// The work of a process for a listener.
    Work: u64 {
        /// The process waits for connections, and may accept them.
        Looks = 0,
        /// The process has accepted all connections that waited in the kernel's queue. From now
        /// on it accepts over shared memory.
        Accepts = 2,
    }
}

wire! {
    values
    /// The condition under which a listener leaves shared memory.
    Unpublishing: u64 {
        /// For good, even if other processes hold the listener.
        ForGood = 0,
        /// Only if no other process holds the listener. If unknown processes may hold it
        /// ([`Unpublishing::UnlessServed`]): only if no other process works for it.
        IfLast = 1,
        /// Processes that the monitor does not know may hold the listener. From now on it stays
        /// in shared memory only while it has workers.
        UnlessServed = 2,
    }
}

wire! {
    values
    /// The fate of a descriptor that goes to another process.
    Passing: u64 {
        /// This process sends the socket to another process, and keeps its own descriptor.
        Sent = 0,
        /// The socket was not sent after all.
        NotSent = 1,
        /// This process has received the socket.
        Arrived = 2,
        /// This process has closed its last descriptor of the socket.
        Released = 3,
        /// Processes that do not report to the monitor have the socket: forked children, and
        /// readers that only peek at a message.
        Shared = 4,
    }
}
