//! Types of fields that are more than a number.

use crate::packet::{wire, Wire};
use fsocket_abi::arena::COUNTERS;
use fsocket_abi::channel::{SLOTS, WAITERS};

/// One end of a connection in a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// Below [`SLOTS`].
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
    /// The side on which it waits.
    pub side: usize,
    /// Below [`WAITERS`].
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

/// A counter (an index of [`COUNTERS`]) and how much it has grown. No more than 2^56 - 1 is told at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    pub counter: usize,
    pub n: u64,
}

/// Bits of a word that hold the number.
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

/// Actions at the other side's end, in this order: bits of [`act`](crate::switch::act).
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
    /// The order in a [`Switch`](crate::request::Switch). The monitor makes the sockets, and no process is ever given the
    /// other side's end: an explicitly bound socket keeps its port for the process that holds the socket.
    Switching: u64 {
        /// Make both ends. fd: any TCP socket of the connection's network namespace, which says only where that is. The
        /// answer has the requester's end.
        Make = 0,
        /// Do something at the other side's end, in that side's name: the field `acts`.
        Act = 1,
        /// fd: the requester's end of an ordinary connection that the requester has made after EXDEV.
        OwnReady = 2,
        /// fd: the other side's end of that connection.
        OtherReady = 3,
        /// fd: a fresh TCP socket in place of the requester's end. The other side gets none.
        Alone = 4,
        /// Nobody has accepted the connection: connect the client's end to the kernel's listener. From the server's side;
        /// fd as for `Make`. Errno EINPROGRESS: ask again in a moment.
        Dial = 5,
    }
}

wire! {
    values
    /// The part of a process that works for a listener.
    Work: u64 {
        /// It waits for connections, and may accept them.
        Looks = 0,
        /// It wants the channels only, to empty their queues.
        Leaves = 1,
        /// It has accepted all that waited in the kernel's queue, and goes on in shared memory.
        Accepts = 2,
    }
}

wire! {
    values
    /// How a listener leaves shared memory.
    Unpublishing: u64 {
        /// For good, also where other processes hold it.
        ForGood = 0,
        /// Only if no other process holds it. If the listener is held elsewhere ([`Unpublishing::UnlessServed`]), only if
        /// no other process works for it.
        IfLast = 1,
        /// Processes that the monitor does not know may hold it: from now on it is in shared memory as long as a process
        /// works for it.
        UnlessServed = 2,
    }
}

wire! {
    values
    /// The fate of a descriptor that goes to another process.
    Passing: u64 {
        /// This process sends it, and keeps its own.
        Sent = 0,
        /// It was not sent after all.
        NotSent = 1,
        /// This process has received it.
        Arrived = 2,
        /// This process has closed its last one.
        Released = 3,
        /// Processes have it that do not report it: forked children, and readers that only peek at a message.
        Shared = 4,
    }
}
