//! What a `poll` sleeps on stays there until it returns, as in the kernel: another thread
//! may close the number meanwhile, or make it something else.

use crate::asleep::{self, Mark};
use crate::conn::Hold;
use crate::path;
use crate::ready;
use crate::stage::{self, Path};
use crate::table::{self, Desc, Kind};
use core::mem::MaybeUninit;

/// Connections and listeners that are kept, those first in the call.
pub const MAX: usize = asleep::HOLDS;

struct One {
    /// Place in the call.
    at: usize,
    d: &'static Desc,
    kind: Kind,
    wanted: i16,
    _hold: Hold,
}

/// Kept from the first sleep on.
pub struct Kept<'a> {
    one: [MaybeUninit<One>; MAX],
    n: usize,
    taken: bool,
    mark: &'a Mark,
    held: Option<asleep::Held>,
}

impl<'a> Kept<'a> {
    /// Nothing yet. `mark` lies in the frame of the call.
    pub fn new(mark: &'a Mark) -> Kept<'a> {
        Kept { one: [const { MaybeUninit::uninit() }; MAX], n: 0, taken: false, mark, held: None }
    }

    /// Keep what is ours among `fds`; once.
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
            // Closed, and something else by now: that is the next one's business.
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
        // SAFETY: the first `n` are there.
        unsafe { core::slice::from_raw_parts(self.one.as_ptr() as *const One, self.n) }
    }

    /// What the sleep is on: what is kept, and what else is ours.
    pub fn each<'f>(&'f self, fds: &'f [libc::pollfd]) -> impl Iterator<Item = (&'static Desc, i16)> + 'f {
        let mut kept = self.all().iter().peekable();
        fds.iter().enumerate().filter_map(move |(i, p)| match kept.next_if(|o| o.at == i) {
            Some(o) => Some((o.d, p.events)),
            None => ours(p.fd).map(|d| (d, p.events)),
        })
    }

    /// Places in the call whose number is not that of what is kept any more.
    pub fn lost<'f>(&'f self, fds: &'f [libc::pollfd]) -> impl Iterator<Item = usize> + 'f {
        let gone = |o: &&One| table::lookup(fds[o.at].fd).is_none_or(|d| !core::ptr::eq(d, o.d));
        self.all().iter().filter(gone).map(|o| o.at)
    }

    /// The one connection that the call is about, if it waits for what only the peer's publications in one
    /// direction can bring.
    pub fn alone(&self, fds: &[libc::pollfd]) -> Option<&'static Desc> {
        const SPACE: i16 = libc::POLLOUT | libc::POLLWRNORM;
        match (fds, self.all()) {
            ([p], [o]) if p.events & SPACE == 0 && o.d.is_conn() && stage::of(o.d) == Path::Shm => {
                table::lookup(p.fd).filter(|d| core::ptr::eq(*d, o.d))
            }
            _ => None,
        }
    }

    /// Has something happened to what is kept that wakes a sleeper in the kernel?
    pub fn woken(&self) -> bool {
        // (The end of a listener's last number wakes nobody there.)
        let turned = |o: &One| o.kind == Kind::Shm && o.d.kind() != o.kind;
        self.all().iter().any(|o| turned(o) || pending(o.d) || events(o.d, o.wanted) != 0)
    }

    /// Follow connections without a number here whose path was switched.
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
            // SAFETY: it was there, and is not again.
            unsafe { o.assume_init_drop() }
        }
    }
}

pub(super) fn ours(fd: i32) -> Option<&'static Desc> {
    let d = table::lookup(fd)?;
    crate::listen::look_at_fork_group(fd, d);
    matches!(d.kind(), Kind::Shm | Kind::Listener | Kind::Epoll | Kind::Kernel).then_some(d)
}

pub(super) fn pending(d: &Desc) -> bool {
    d.is_conn() && stage::can_follow(d)
}

pub(super) fn events(d: &Desc, wanted: i16) -> i16 {
    let w = wanted as u16 as u32;
    match ready::events(d, w) {
        // `settle` makes it the kernel's on the next turn.
        ready::PENDING => 0,
        ev => ev as u16 as i16,
    }
}

/// Has one of them something?
pub(super) fn any(fds: &[libc::pollfd], kept: &Kept) -> bool {
    kept.each(fds).any(|(d, wanted)| events(d, wanted) != 0 || pending(d))
}
