//! While a `poll` sleeps on connections and listeners, it keeps them alive until it returns, as
//! the kernel does. Another thread may close the descriptor meanwhile, or open another file under
//! it.

use crate::asleep::{self, Mark};
use crate::conn::Hold;
use crate::path;
use crate::ready;
use crate::table::{self, Desc, Kind};
use core::mem::MaybeUninit;
use fsocket_abi::path_switch::{Event, Next};

/// Maximum number of connections and listeners that are kept: those that come first in the call.
pub const MAX: usize = asleep::HOLDS;

struct One {
    /// Index in the call's array.
    at: usize,
    d: &'static Desc,
    kind: Kind,
    wanted: i16,
    _hold: Hold,
}

/// The kept descriptions. They are kept from the first sleep on.
pub struct Kept<'a> {
    one: [MaybeUninit<One>; MAX],
    n: usize,
    taken: bool,
    mark: &'a Mark,
    held: Option<asleep::Held>,
}

impl<'a> Kept<'a> {
    /// Keeps nothing yet. `mark` is on the stack of the call.
    pub fn new(mark: &'a Mark) -> Kept<'a> {
        Kept { one: [const { MaybeUninit::uninit() }; MAX], n: 0, taken: false, mark, held: None }
    }

    /// Keeps the library's descriptions among `fds`. A second call does nothing.
    pub fn take(&mut self, fds: &[libc::pollfd]) {
        if core::mem::replace(&mut self.taken, true) {
            return;
        }
        for (at, p) in fds.iter().enumerate() {
            let Some(d) = ours(p.fd).filter(|d| matches!(d.kind(), Kind::Shm | Kind::Listener)) else { continue };
            if self.n == MAX {
                break;
            }
            let Some(hold) = Hold::unless_gone(d) else { continue };
            // Skips a descriptor that was closed and refers to another file by now.
            if table::lookup(p.fd).is_some_and(|now| core::ptr::eq(now, d)) {
                self.one[self.n].write(One { at, d, kind: d.kind(), wanted: p.events, _hold: hold });
                self.n += 1;
            }
        }
        if self.n > 0 {
            self.held = asleep::holds(self.all().iter().map(|o| o.d.index()), self.mark);
        }
    }

    pub fn any(&self) -> bool {
        self.n > 0
    }

    fn all(&self) -> &[One] {
        // SAFETY: the first `n` entries are written.
        unsafe { core::slice::from_raw_parts(self.one.as_ptr() as *const One, self.n) }
    }

    /// The descriptions on which the call sleeps: the kept ones, and the library's remaining ones
    /// among `fds`.
    pub fn each<'f>(&'f self, fds: &'f [libc::pollfd]) -> impl Iterator<Item = (&'static Desc, i16)> + 'f {
        let mut kept = self.all().iter().peekable();
        fds.iter().enumerate().filter_map(move |(i, p)| match kept.next_if(|o| o.at == i) {
            Some(o) => Some((o.d, p.events)),
            None => ours(p.fd).map(|d| (d, p.events)),
        })
    }

    /// Indices in the call whose descriptor no longer refers to the kept description.
    pub fn lost<'f>(&'f self, fds: &'f [libc::pollfd]) -> impl Iterator<Item = usize> + 'f {
        let gone = |o: &&One| table::lookup(fds[o.at].fd).is_none_or(|d| !core::ptr::eq(d, o.d));
        self.all().iter().filter(gone).map(|o| o.at)
    }

    /// The only connection of the call, if a publication of the peer in the receiving direction
    /// is the only thing that can bring the awaited events.
    pub fn alone(&self, fds: &[libc::pollfd]) -> Option<&'static Desc> {
        const SPACE: i16 = libc::POLLOUT | libc::POLLWRNORM;
        match (fds, self.all()) {
            ([p], [o]) if p.events & SPACE == 0 && o.d.is_in_rings() => {
                table::lookup(p.fd).filter(|d| core::ptr::eq(*d, o.d))
            }
            _ => None,
        }
    }

    /// Has an event come for a kept description that would wake a thread asleep in the kernel?
    pub fn woken(&self) -> bool {
        // (Closing a listener's last descriptor wakes no thread in the kernel.)
        let turned = |o: &One| o.kind == Kind::Shm && o.d.kind() != o.kind;
        self.all().iter().any(|o| turned(o) || pending(o.d) || events(o.d, o.wanted) != 0)
    }

    /// Follows kept connections that have changed their path. Some may have no descriptor any
    /// more.
    pub fn settle(&self) {
        for o in self.all().iter().filter(|o| pending(o.d)) {
            let _ = path::follow(o.d);
        }
    }
}

impl Drop for Kept<'_> {
    fn drop(&mut self) {
        if let Some(h) = self.held.take() {
            asleep::let_go(h);
        }
        for o in &mut self.one[..core::mem::take(&mut self.n)] {
            // SAFETY: `take` has written the first `n` entries, and each is dropped only here,
            // once.
            unsafe { o.assume_init_drop() }
        }
    }
}

/// The description of `fd`, unless the kernel alone serves it. Connections that stay on kernel
/// TCP are left out, so a `poll` of such connections is one system call.
pub(super) fn ours(fd: i32) -> Option<&'static Desc> {
    let d = table::lookup(fd)?;
    crate::listen::look_at_fork_group(fd, d);
    match d.kind() {
        Kind::Shm | Kind::Listener | Kind::Epoll => Some(d),
        Kind::Kernel => (!d.kernel().stays_everywhere()).then_some(d),
        _ => None,
    }
}

pub(super) fn pending(d: &Desc) -> bool {
    d.path_state().next(Event::Look) == Next::Follow
}

pub(super) fn events(d: &Desc, wanted: i16) -> i16 {
    let w = wanted as u16 as u32;
    match ready::events(d, w) {
        // `settle` follows the path in the next pass.
        ready::PENDING => 0,
        ev => ev as u16 as i16,
    }
}

/// Has any of the descriptions an event?
pub(super) fn any(fds: &[libc::pollfd], kept: &Kept) -> bool {
    kept.each(fds).any(|(d, wanted)| events(d, wanted) != 0 || pending(d))
}
