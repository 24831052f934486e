//! One word of a connection that its fork group shares: what the program has done, and which path it has.
//!
//! Where the connection is ([`Stage`]) is in this word alone, as far as this side is concerned; the peer's part is in its
//! status word ([`crate::channel::status`]).
//!
//! | from | method | to | when |
//! | --- | --- | --- | --- |
//! | Rings | [`Flags::begin_switch`] | Switching | this side moves the connection |
//! | Switching | [`Flags::end_switch`] | Moved, drained | the mover is done |
//! | Rings | [`Flags::follow`] | Moved, not drained | the peer has moved; the rest of the ring is read first |
//! | Rings, before it follows | [`Flags::drain`] | Rings; drained once it has moved | the rest of the ring comes once more in the kernel |
//! | any | [`Flags::poison`] | Poisoned | the peer broke the protocol, or the switch failed |

use core::sync::atomic::Ordering;
use fsocket_sync::atomic::AtomicU32;

/// A set of flags.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct FlagSet(u32);

/// Where a connection is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    Rings,
    /// A process of this fork group moves it to the kernel: the rings are its alone.
    Switching,
    /// This end goes on in a kernel socket that the monitor has; each process that holds the connection puts it behind its
    /// own descriptors. `drained`: what is in the ring all the same is no longer to be read, because this side took it
    /// along, or the peer sends it again.
    Moved {
        drained: bool,
    },
    /// The peer broke the protocol, or the switch failed: a reset.
    Poisoned,
}

impl FlagSet {
    /// O_NONBLOCK.
    pub const NONBLOCK: FlagSet = FlagSet(1);
    /// shutdown(SHUT_RD) was called.
    pub const SHUT_RD: FlagSet = FlagSet(2);
    /// shutdown(SHUT_WR) was called; FIN is sent.
    pub const SHUT_WR: FlagSet = FlagSet(4);
    /// The peer's reset was reported once.
    pub const RST_REPORTED: FlagSet = FlagSet(8);
    /// One send after the peer's close was let through.
    pub const SENT_AFTER_CLOSE: FlagSet = FlagSet(16);
    /// Non-blocking connect reported EINPROGRESS already.
    pub const CONNECTING: FlagSet = FlagSet(128);
    /// SO_RCVLOWAT is above 1.
    pub const LOWAT: FlagSet = FlagSet(1024);
    /// It was shut down when a connect that nobody had asked about again had failed: the kernel's
    /// socket never connects again after that.
    pub const DISCONNECTING: FlagSet = FlagSet(4096);
    /// The placeholder is the kernel connection that this was before, to another network namespace:
    /// it is idle, and the way back.
    pub const ACROSS: FlagSet = FlagSet(8192);
    /// TCP_USER_TIMEOUT is over.
    pub const TIMED_OUT: FlagSet = FlagSet(16384);

    const POISONED: FlagSet = FlagSet(32);
    const MOVED: FlagSet = FlagSet(256);
    const SWITCHING: FlagSet = FlagSet(512);
    const DRAINED: FlagSet = FlagSet(2048);

    /// With one of these a send looks closely at what it may do.
    const NO_PLAIN_SEND: u32 =
        Self::SHUT_WR.0 | Self::POISONED.0 | Self::RST_REPORTED.0 | Self::SENT_AFTER_CLOSE.0 | Self::MOVED.0;
    /// Likewise a receive.
    const NO_PLAIN_RECEIVE: u32 =
        Self::SHUT_RD.0 | Self::POISONED.0 | Self::SWITCHING.0 | Self::DRAINED.0 | Self::LOWAT.0;

    pub const fn or(self, other: FlagSet) -> FlagSet {
        FlagSet(self.0 | other.0)
    }
    pub const fn only(self, other: FlagSet) -> FlagSet {
        FlagSet(self.0 & other.0)
    }
    pub const fn bits(self) -> u32 {
        self.0
    }
    /// Has it one of these?
    #[inline(always)]
    pub const fn has(self, flags: FlagSet) -> bool {
        self.0 & flags.0 != 0
    }
    /// Has it all of these?
    pub const fn has_all(self, flags: FlagSet) -> bool {
        self.0 & flags.0 == flags.0
    }
    pub const fn when(self, is: bool) -> FlagSet {
        if is {
            self
        } else {
            FlagSet(0)
        }
    }

    /// Nothing that a send must look at.
    #[inline(always)]
    pub const fn sends_plainly(self) -> bool {
        self.0 & Self::NO_PLAIN_SEND == 0
    }
    /// Nothing that a receive must look at.
    #[inline(always)]
    pub const fn receives_plainly(self) -> bool {
        self.0 & Self::NO_PLAIN_RECEIVE == 0
    }

    /// A receive does not wait in the rings.
    #[inline(always)]
    pub const fn ends_receives(self) -> bool {
        self.0 & (Self::SHUT_RD.0 | Self::POISONED.0 | Self::MOVED.0) != 0
    }
    /// A send does not wait in the rings.
    #[inline(always)]
    pub const fn ends_sends(self) -> bool {
        self.0 & (Self::SHUT_WR.0 | Self::POISONED.0 | Self::MOVED.0) != 0
    }

    pub const fn stage(self) -> Stage {
        if self.has(Self::POISONED) {
            Stage::Poisoned
        } else if self.has(Self::SWITCHING) {
            Stage::Switching
        } else if self.has(Self::MOVED) {
            Stage::Moved { drained: self.has(Self::DRAINED) }
        } else {
            Stage::Rings
        }
    }
    #[inline(always)]
    pub const fn is_poisoned(self) -> bool {
        self.has(Self::POISONED)
    }
    /// The rings are the mover's alone.
    #[inline(always)]
    pub const fn is_switching(self) -> bool {
        self.has(Self::SWITCHING)
    }
    /// This side has left the rings, or is about to; also if it was poisoned since.
    #[inline(always)]
    pub const fn has_left(self) -> bool {
        self.has(Self::MOVED)
    }
    /// What is in the ring is not to be read.
    #[inline(always)]
    pub const fn is_drained(self) -> bool {
        self.has(Self::DRAINED)
    }
}

/// The word.
#[repr(transparent)]
pub struct Flags(AtomicU32);

impl Flags {
    #[inline(always)]
    pub fn get(&self) -> FlagSet {
        FlagSet(self.0.load(Ordering::Relaxed))
    }
    /// After it the reader sees what a mover or another process did before it set a flag.
    pub fn look(&self) -> FlagSet {
        // Acquire: pairs with the releases below.
        FlagSet(self.0.load(Ordering::Acquire))
    }
    /// A new connection.
    pub fn begin(&self, flags: FlagSet) {
        self.0.store(flags.0, Ordering::Relaxed);
    }
    /// Returns what there was before.
    pub fn set(&self, flags: FlagSet) -> FlagSet {
        FlagSet(self.0.fetch_or(flags.0, Ordering::AcqRel))
    }
    /// Returns what there was before.
    pub fn clear(&self, flags: FlagSet) -> FlagSet {
        FlagSet(self.0.fetch_and(!flags.0, Ordering::AcqRel))
    }

    /// Rings to Switching. False: another process of the fork group was faster.
    pub fn begin_switch(&self) -> bool {
        !self.set(FlagSet::MOVED.or(FlagSet::SWITCHING).or(FlagSet::DRAINED)).has_left()
    }
    /// Switching to Moved: all that the mover did is done.
    pub fn end_switch(&self) {
        self.clear(FlagSet::SWITCHING);
    }
    /// Rings to Moved: the peer has moved, and this side goes after it.
    pub fn follow(&self) {
        self.set(FlagSet::MOVED);
    }
    /// What is in the ring is not to be read: it comes once more in the kernel.
    pub fn drain(&self) {
        self.set(FlagSet::DRAINED);
    }
    /// To Poisoned. False: it was before.
    pub fn poison(&self) -> bool {
        !self.set(FlagSet::POISONED).is_poisoned()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn word() -> Flags {
        Flags(AtomicU32::new(0))
    }

    #[test]
    fn one_of_two_movers_begins() {
        let f = word();
        assert_eq!(f.get().stage(), Stage::Rings);
        assert!(f.begin_switch() && !f.begin_switch());
        assert_eq!(f.get().stage(), Stage::Switching);
        f.end_switch();
        assert_eq!(f.get().stage(), Stage::Moved { drained: true });
        assert!(!f.begin_switch());
    }

    #[test]
    fn who_follows_reads_the_ring_first() {
        let f = word();
        f.follow();
        assert_eq!(f.get().stage(), Stage::Moved { drained: false });
        assert!(f.get().receives_plainly() && !f.get().sends_plainly());
        f.drain();
        assert_eq!(f.get().stage(), Stage::Moved { drained: true });
        assert!(!f.get().receives_plainly());
    }

    #[test]
    fn nothing_follows_a_reset() {
        for before in [|_: &Flags| (), |f: &Flags| assert!(f.begin_switch()), |f: &Flags| f.follow()] {
            let f = word();
            before(&f);
            assert!(f.poison() && !f.poison());
            assert_eq!(f.get().stage(), Stage::Poisoned);
            f.end_switch();
            assert_eq!(f.get().stage(), Stage::Poisoned);
            assert!(!f.get().receives_plainly() && !f.get().sends_plainly());
        }
    }

    #[test]
    fn flags_of_the_program_say_nothing_about_the_path() {
        let f = word();
        let all = [
            FlagSet::NONBLOCK,
            FlagSet::SHUT_RD,
            FlagSet::SHUT_WR,
            FlagSet::RST_REPORTED,
            FlagSet::SENT_AFTER_CLOSE,
            FlagSet::CONNECTING,
            FlagSet::LOWAT,
            FlagSet::DISCONNECTING,
            FlagSet::ACROSS,
            FlagSet::TIMED_OUT,
        ];
        for flag in all {
            assert!(!f.set(flag).has(flag));
            assert_eq!(f.get().stage(), Stage::Rings);
        }
        for flag in all {
            assert!(f.clear(flag).has(flag));
        }
        assert_eq!(f.get(), FlagSet::default());
    }
}
