//! One word for a connection, shared by its fork group: what the program has done, and which path
//! the connection uses.
//!
//! For this side, only this word says on which path the connection is; the peer's part is in its
//! status word ([`crate::channel::status`]). Only [`crate::path_switch`] reads and writes the bits
//! for the path.
//!
//! | from | method | to | when |
//! | --- | --- | --- | --- |
//! | Rings | [`Flags::begin_switch`] | Switching | this side moves the connection |
//! | Switching | [`Flags::end_switch`] | Moved, drained | the mover has finished |
//! | Rings | [`Flags::follow`] | Moved, not drained | the peer has moved; this side first reads the rest of the ring |
//! | Rings, before it follows | [`Flags::drain`] | Rings; drained once it has moved | the rest of the ring comes again in the kernel |
//! | any | [`Flags::poison`] | Poisoned | the peer broke the protocol, or the switch failed |

use core::sync::atomic::Ordering;
use fsocket_sync::atomic::AtomicU32;

/// A set of flags.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct FlagSet(u32);

/// On which path a connection is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stage {
    Rings,
    /// A process of this fork group moves the connection to the kernel, and only that process may
    /// use the rings.
    Switching,
    /// This end continues in a kernel socket, which the monitor keeps. Each process that holds the
    /// connection puts this socket behind its own descriptors.
    Moved,
    /// The peer broke the protocol, or the switch failed: the program gets a reset.
    Poisoned,
}

impl FlagSet {
    /// The program has set O_NONBLOCK.
    pub const NONBLOCK: FlagSet = FlagSet(1);
    /// The program has called shutdown(SHUT_RD).
    pub const SHUT_RD: FlagSet = FlagSet(2);
    /// The program has called shutdown(SHUT_WR), and FIN is sent.
    pub const SHUT_WR: FlagSet = FlagSet(4);
    /// The peer's reset was reported to the program once.
    pub const RST_REPORTED: FlagSet = FlagSet(8);
    /// One send after the peer's close has succeeded, as in the kernel.
    pub const SENT_AFTER_CLOSE: FlagSet = FlagSet(16);
    /// A non-blocking connect has reported EINPROGRESS.
    pub const CONNECTING: FlagSet = FlagSet(128);
    /// The program has set SO_RCVLOWAT above 1.
    pub const LOWAT: FlagSet = FlagSet(1024);
    /// The program shut the socket down after a connect had failed and before it asked for the
    /// result. After that the kernel's socket can never connect again.
    pub const DISCONNECTING: FlagSet = FlagSet(4096);
    /// The placeholder is the former kernel connection to another network namespace. It is idle,
    /// and serves if the connection returns to the kernel.
    pub const ACROSS: FlagSet = FlagSet(8192);
    /// The connection has ended because of TCP_USER_TIMEOUT.
    pub const TIMED_OUT: FlagSet = FlagSet(16384);

    const POISONED: FlagSet = FlagSet(32);
    const MOVED: FlagSet = FlagSet(256);
    const SWITCHING: FlagSet = FlagSet(512);
    const DRAINED: FlagSet = FlagSet(2048);

    /// If one of these is set, a send must check further whether it may send.
    const NO_PLAIN_SEND: u32 =
        Self::SHUT_WR.0 | Self::POISONED.0 | Self::RST_REPORTED.0 | Self::SENT_AFTER_CLOSE.0 | Self::MOVED.0;
    /// If one of these is set, a receive must check further.
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
    #[cfg(test)]
    pub(crate) const fn from_bits(bits: u32) -> FlagSet {
        FlagSet(bits)
    }
    /// Is at least one of these flags set?
    #[inline(always)]
    pub const fn has(self, flags: FlagSet) -> bool {
        self.0 & flags.0 != 0
    }
    /// Are all of these flags set?
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

    /// Is no flag set that a send must check?
    #[inline(always)]
    pub const fn sends_plainly(self) -> bool {
        self.0 & Self::NO_PLAIN_SEND == 0
    }
    /// Is no flag set that a receive must check?
    #[inline(always)]
    pub const fn receives_plainly(self) -> bool {
        self.0 & Self::NO_PLAIN_RECEIVE == 0
    }

    /// Must a receive not wait in the rings?
    #[inline(always)]
    pub const fn ends_receives(self) -> bool {
        self.0 & (Self::SHUT_RD.0 | Self::POISONED.0 | Self::MOVED.0) != 0
    }
    /// Must a send not wait in the rings?
    #[inline(always)]
    pub const fn ends_sends(self) -> bool {
        self.0 & (Self::SHUT_WR.0 | Self::POISONED.0 | Self::MOVED.0) != 0
    }

    #[inline(always)]
    pub(crate) const fn stage(self) -> Stage {
        if self.has(Self::POISONED) {
            Stage::Poisoned
        } else if self.has(Self::SWITCHING) {
            Stage::Switching
        } else if self.has(Self::MOVED) {
            Stage::Moved
        } else {
            Stage::Rings
        }
    }
    #[inline(always)]
    pub const fn is_poisoned(self) -> bool {
        self.has(Self::POISONED)
    }
    /// Does the mover alone use the rings? True also if the connection was poisoned since.
    pub(crate) const fn is_switching(self) -> bool {
        self.has(Self::SWITCHING)
    }
    /// Has this side left the rings, or is it about to? True also if the connection was poisoned
    /// since.
    #[inline(always)]
    pub(crate) const fn has_left(self) -> bool {
        self.has(Self::MOVED)
    }
    /// Must the bytes in the ring not be read? (This side has taken them along, or the peer sends
    /// them again.)
    #[inline(always)]
    pub const fn is_drained(self) -> bool {
        self.has(Self::DRAINED)
    }
}

/// The shared word of flags.
#[cfg_attr(loom, derive(Default))]
#[repr(transparent)]
pub struct Flags(AtomicU32);

impl Flags {
    #[inline(always)]
    pub fn get(&self) -> FlagSet {
        FlagSet(self.0.load(Ordering::Relaxed))
    }
    /// The flags. The caller then also sees what a mover or another process did before it set a
    /// flag.
    pub fn look(&self) -> FlagSet {
        // Acquire: pairs with the releases in the methods below.
        FlagSet(self.0.load(Ordering::Acquire))
    }
    /// Sets the flags of a new connection.
    pub fn begin(&self, flags: FlagSet) {
        self.0.store(flags.0, Ordering::Relaxed);
    }
    /// Sets these flags. Returns the former ones.
    pub fn set(&self, flags: FlagSet) -> FlagSet {
        FlagSet(self.0.fetch_or(flags.0, Ordering::AcqRel))
    }
    /// Clears these flags. Returns the former ones.
    pub fn clear(&self, flags: FlagSet) -> FlagSet {
        FlagSet(self.0.fetch_and(!flags.0, Ordering::AcqRel))
    }

    /// Rings to Switching. False: another process of the fork group was faster.
    pub(crate) fn begin_switch(&self) -> bool {
        !self.set(FlagSet::MOVED.or(FlagSet::SWITCHING).or(FlagSet::DRAINED)).has_left()
    }
    /// Switching to Moved, when the mover has finished.
    pub(crate) fn end_switch(&self) {
        self.clear(FlagSet::SWITCHING);
    }
    /// Rings to Moved: this side follows the peer, which has moved
    /// ([`crate::path_switch::Step::Resend`]).
    pub(crate) fn follow(&self) {
        self.set(FlagSet::MOVED);
    }
    /// Marks the bytes in the ring as not to be read, because they come again in the kernel.
    pub(crate) fn drain(&self) {
        self.set(FlagSet::DRAINED);
    }
    /// Any stage to Poisoned. False: it was poisoned before.
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
        assert_eq!(f.get().stage(), Stage::Moved);
        assert!(f.get().is_drained());
        assert!(!f.begin_switch());
    }

    #[test]
    fn who_follows_reads_the_ring_first() {
        let f = word();
        f.follow();
        assert_eq!(f.get().stage(), Stage::Moved);
        assert!(f.get().receives_plainly() && !f.get().sends_plainly() && !f.get().is_drained());
        f.drain();
        assert_eq!(f.get().stage(), Stage::Moved);
        assert!(!f.get().receives_plainly() && f.get().is_drained());
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
