//! The properties of a sleep that depend on the call.

use fsocket_runtime::signals;
use fsocket_shm::{cancel, waker};

/// The calls that sleep, as far as their sleeps differ from each other.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Call {
    /// `send`, `recv` and similar calls: sleeps on the futex word of one direction.
    Stream,
    /// `poll` of one connection: sleeps on the futex word of that connection.
    PollOne,
    /// `poll` of several descriptors.
    Poll,
    /// `accept` on a listener with SYN queues.
    Accept,
    /// `accept` and `poll` on local listen sockets, if nothing is over shared memory.
    Zones,
    /// A receive in the kernel on a connection that may move to shared memory.
    Candidate,
    /// A call on kernel sockets only.
    Kernel,
    /// `epoll_wait`.
    Epoll,
    /// `epoll_wait` in an instance that has nothing over shared memory.
    EpollKernel,
    /// As `EpollKernel`, in an instance with local listen sockets.
    EpollZones,
}

impl Call {
    pub(crate) const fn bit(self) -> u16 {
        1 << self as u8
    }
}

/// The effect of a signal handler on a call that sleeps.
pub enum Restart<'a> {
    /// The call ends with EINTR (`poll`, `epoll_wait`, calls with a time limit).
    Never,
    /// As calls on a socket: if all handlers have SA_RESTART and the call has no time limit, the
    /// sleep ends as if it had found nothing, and the call goes on.
    Socket,
    /// As `Socket` for a call without a time limit, unless this function returns true: the call
    /// then has something to return.
    SocketUnless(&'a dyn Fn() -> bool),
}

/// A signal mask that holds during a sleep.
#[derive(Clone, Copy)]
pub struct Mask(pub(crate) *const libc::sigset_t);

impl Mask {
    pub const NONE: Mask = Mask(core::ptr::null());
    /// # Safety
    /// `mask` is null, or the kernel may read a mask of its size there while the value is used.
    pub unsafe fn at(mask: *const libc::sigset_t) -> Mask {
        Mask(mask)
    }
    /// # Safety
    /// `mask` outlives the value.
    pub unsafe fn of(mask: &u64) -> Mask {
        Mask(core::ptr::from_ref(mask).cast())
    }
    pub fn is_none(self) -> bool {
        self.0.is_null()
    }
    /// For a call that does not sleep.
    pub fn as_ptr(self) -> *const libc::sigset_t {
        self.0
    }
}

/// Room for events of `epoll_wait`.
#[derive(Clone, Copy)]
pub struct Room(pub(crate) *mut libc::epoll_event, pub(crate) usize);

impl Room {
    /// # Safety
    /// The kernel may write `n` events at `events` while the value is used. (They need no alignment.)
    pub unsafe fn at(events: *mut libc::epoll_event, n: usize) -> Room {
        Room(events, n)
    }
}

/// How a call sleeps.
pub struct Sleep<'a> {
    pub(crate) call: Call,
    /// The program's time limit of the sleep, nanoseconds. None: no limit.
    pub(crate) left: Option<u64>,
    pub(crate) unarmed: Option<&'a mut waker::Unarmed>,
    pub(crate) own: Option<u64>,
    pub(crate) restart: Restart<'a>,
    pub(crate) has_waker: bool,
    /// An earlier sleep on the same word has reached a limit of the library.
    pub(crate) long: bool,
}

impl<'a> Sleep<'a> {
    /// `left`: the program's time limit, nanoseconds. None: no limit.
    pub fn of(call: Call, left: Option<u64>) -> Self {
        Sleep { call, left, unarmed: None, own: None, restart: Restart::Never, has_waker: false, long: false }
    }
    /// For a call whose peers cannot be asked to ring. `unarmed`: how long the call has waited in
    /// this way.
    pub fn unarmed(self, unarmed: Option<&'a mut waker::Unarmed>) -> Self {
        Sleep { unarmed, ..self }
    }
    /// Adds a limit that the caller itself wants, nanoseconds.
    pub fn at_most(self, own: Option<u64>) -> Self {
        Sleep { own, ..self }
    }
    pub fn restart(self, restart: Restart<'a>) -> Self {
        Sleep { restart, ..self }
    }
    /// Does the kernel report all events of the instance, because nothing in it is over shared
    /// memory?
    pub fn is_plain(&self) -> bool {
        matches!(self.call, Call::EpollKernel | Call::EpollZones)
    }
    /// Does the call not wait at all?
    pub fn is_look(&self) -> bool {
        self.left == Some(0)
    }

    pub(crate) fn restarts(&self) -> bool {
        match self.restart {
            Restart::Never => false,
            Restart::Socket => restarts(self.left.is_some()),
            Restart::SocketUnless(ends) => !ends() && restarts(false),
        }
    }
}

/// After EINTR: would the kernel have restarted the socket call for which the library sleeps?
/// Never if the call has a time limit (`sock_intr_errno`).
fn restarts(limited: bool) -> bool {
    !limited && !cancel::hit() && signals::all_restart()
}
