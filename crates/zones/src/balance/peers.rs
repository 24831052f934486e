//! The other workers' local listen sockets ("peers"): the descriptors that this process has of
//! them, the epoll instances that watch them, and the monitor's messages about them.

use super::PEER_MARK;
use crate::cow::Sparing;
use crate::listener::{close, put, used, Local, Peers, Sock, Zoned, PEERS};
use crate::number::Number;
use crate::{ctl, process};
use core::sync::atomic::{fence, Ordering};
use fsocket_abi::balance::{BALANCE_SIZE, QUEUES};
use fsocket_proto::request;
use fsocket_sys::{self as sys, cpu, Result};

const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;
/// Event flags that the kernel allows together with EPOLLEXCLUSIVE.
const BESIDE_EXCLUSIVE: u32 =
    (libc::EPOLLIN | libc::EPOLLERR | libc::EPOLLHUP | libc::EPOLLWAKEUP) as u32 | libc::EPOLLET as u32;

impl Peers {
    pub(super) fn iter(&self) -> impl Iterator<Item = &Sock> {
        let n = (self.n.load(Ordering::Acquire) as usize).min(PEERS);
        self.all[..n].iter().filter(|s| s.place.load(Ordering::Acquire) != 0)
    }

    /// Has any peer's worker exited?
    pub(super) fn any_gone(&self) -> bool {
        if !self.orphans.load(Ordering::Relaxed) {
            return false;
        }
        self.orphans.store(false, Ordering::SeqCst);
        // SeqCst: either this loop sees a worker that exits meanwhile, or `orphans` is set again.
        let any = self.iter().any(|s| s.gone.load(Ordering::SeqCst));
        if any {
            self.orphans.store(true, Ordering::Relaxed);
        }
        any
    }

    pub fn renumbered(&self, swap: &impl Fn(&Number) -> bool) -> bool {
        self.all.iter().any(|s| swap(&s.fd))
    }

    /// In a forked child: sockets and counts belong to the parent, so the child drops them.
    pub fn become_child(&self) {
        for s in self.iter() {
            s.place.store(0, Ordering::Relaxed);
            close(&s.fd);
        }
        self.n.put(0);
        if !self.map.load(Ordering::Relaxed).is_null() {
            let map = self.map.swap(core::ptr::null_mut(), Ordering::Relaxed);
            // SAFETY: a child has only this thread.
            let _ = unsafe { sys::munmap(map as *mut u8, BALANCE_SIZE) };
        }
    }

    /// The listener is closed. The mapping stays, because another thread may still read it.
    pub fn forget(&self) {
        self.map.store(core::ptr::null_mut(), Ordering::Release);
        self.last.store(0, Ordering::Relaxed);
    }
}

impl Zoned {
    /// The worker's epoll instance watches its local listen socket by now, so other workers may
    /// steal from it. They may not do so earlier, because the kernel wakes the first in the
    /// socket's wait list first.
    pub(crate) fn share(&self, l: &Local) {
        let Some(b) = self.balance() else { return };
        let place = l.place.load(Ordering::Relaxed);
        if !(1..=QUEUES as u32).contains(&place) || l.shared.swap(true, Ordering::AcqRel) {
            return;
        }
        l.looks(b);
        if !self.member().is_some_and(|m| core::ptr::eq(l, m)) {
            for w in self.watches.active().filter(|w| w.thread() != l.thread.load(Ordering::Relaxed)) {
                put_peer(w.ep(), l.fd());
            }
            let own = l.inner.load(Ordering::Relaxed);
            self.inners().filter(|inner| *inner != own).for_each(|inner| put_inner(inner, l.fd()));
        }
        let share = request::Share { group: self.group.load(Ordering::Relaxed), place };
        let _ = ctl::tell(share, Some(l.fd()));
        // Looks once for connections that came before any peer could be notified.
        l.wait_for_peers(cpu::ticks());
    }

    /// Adds the own socket to an epoll instance. EPOLLEXCLUSIVE makes the kernel wake only one
    /// worker for a connection, and the own worker is first in the socket's wait list.
    pub(crate) fn put_local(&self, ep: i32, l: &Local, ev: &libc::epoll_event) -> Result<()> {
        if self.balance().is_none() {
            return put(ep, l.fd(), ev);
        }
        let mine = libc::epoll_event { events: ev.events & BESIDE_EXCLUSIVE | EXCLUSIVE, u64: ev.u64 };
        let add = || sys::epoll_ctl(ep, libc::EPOLL_CTL_ADD, l.fd(), Some(&mine));
        let same = l.put.swap(mine.u64 ^ (mine.events as u64) << 32, Ordering::Relaxed);
        match add() {
            // The application removed the listener and added it again, but the library had not
            // removed the local socket.
            Err(e) if e.raw() == libc::EEXIST && same == mine.u64 ^ (mine.events as u64) << 32 => return Ok(()),
            Err(e) if e.raw() == libc::EEXIST => {
                let _ = sys::epoll_ctl(ep, libc::EPOLL_CTL_DEL, l.fd(), None);
                add()?;
            }
            r => r?,
        }
        for v in self.victims(l).filter(|v| v.wakes) {
            put_peer(ep, v.fd);
        }
        Ok(())
    }

    /// The epoll instance `ep` does not watch the listener any more.
    pub(crate) fn take_out_peers(&self, ep: i32) {
        for s in self.peers.iter() {
            let _ = sys::epoll_ctl(ep, libc::EPOLL_CTL_DEL, s.fd.load(Ordering::Relaxed), None);
        }
        for l in self.locals().filter(|l| l.shared.load(Ordering::Relaxed)) {
            let _ = sys::epoll_ctl(ep, libc::EPOLL_CTL_DEL, l.fd(), None);
        }
    }

    /// Called before this process closes a local listen socket. Other processes have descriptors
    /// of the same socket, so closing does not remove it from the epoll instances; this function
    /// does.
    pub(crate) fn unshare(&self, l: &Local, fd: i32) {
        if !l.shared.swap(false, Ordering::AcqRel) {
            self.drop_peers_if_idle();
            return;
        }
        l.peers_since.store(0, Ordering::Relaxed);
        close(&l.inner);
        self.take_out_of_inner(fd);
        let lazy = l.lazy.swap(-1, Ordering::Relaxed);
        for ep in self.watches.active().map(|w| w.ep()).chain((lazy >= 0).then_some(lazy)) {
            let _ = sys::epoll_ctl(ep, libc::EPOLL_CTL_DEL, fd, None);
        }
        if lazy >= 0 {
            self.take_out_peers(lazy);
        }
        self.drop_peers_if_idle();
    }

    /// Closes the descriptors of peers if no worker of this process could steal any more. These
    /// descriptors would keep the sockets and their connections alive after their workers have
    /// exited. True: the process has closed them.
    pub(crate) fn drop_peers_if_idle(&self) -> bool {
        // Against a peer that is being added (`keep`): each side writes its own state, fences,
        // and then reads the other's. So at least one of the two sees that the last worker is
        // gone and closes the socket.
        fence(Ordering::SeqCst);
        let is_idle = self.workers().next().is_none();
        if is_idle {
            self.peers.iter().for_each(|s| self.drop_peer(s));
        }
        is_idle
    }

    pub(super) fn drop_peer(&self, s: &Sock) {
        let fd = s.fd.swap(-1, Ordering::Relaxed);
        if fd >= 0 {
            for w in self.watches.active() {
                let _ = sys::epoll_ctl(w.ep(), libc::EPOLL_CTL_DEL, fd, None);
            }
            self.take_out_of_inner(fd);
            process::close_own(fd);
        }
        s.gone.store(false, Ordering::Relaxed);
        s.place.store(0, Ordering::Release);
    }

    /// The private epoll instances of workers that sleep in `poll` or `accept`.
    fn inners(&self) -> impl Iterator<Item = i32> + '_ {
        self.locals().map(|l| l.inner.load(Ordering::Acquire)).filter(|fd| *fd >= 0)
    }

    fn take_out_of_inner(&self, fd: i32) {
        for inner in self.inners() {
            let _ = sys::epoll_ctl(inner, libc::EPOLL_CTL_DEL, fd, None);
        }
    }

    /// For a worker that sleeps in `poll` or `accept`: a descriptor that becomes readable when a
    /// peer's queue may need help. -1: the worker looks at the queues without it, or has no
    /// peers.
    pub fn peers_fd(&self) -> i32 {
        let Some(l) = self.own().filter(|l| self.balance_of(l).is_some()) else { return -1 };
        if l.is_waiting_for_peers() {
            return -1;
        }
        let inner = l.inner.load(Ordering::Acquire);
        if inner >= 0 {
            return inner;
        }
        let made = crate::making::making(|| sys::epoll_create1(libc::EPOLL_CLOEXEC).map(process::high_fd));
        let Ok(fd) = made else { return -1 };
        // Only the worker's own thread makes this instance; peers that join later are added to
        // it.
        l.inner.store(fd, Ordering::Release);
        for v in self.victims(l).filter(|v| v.wakes) {
            put_inner(fd, v.fd);
        }
        fd
    }
}

pub(super) fn put_peer(ep: i32, fd: i32) {
    let ev = libc::epoll_event { events: (libc::EPOLLIN | libc::EPOLLET) as u32 | EXCLUSIVE, u64: PEER_MARK };
    let _ = sys::epoll_ctl(ep, libc::EPOLL_CTL_ADD, fd, Some(&ev));
}

fn put_inner(inner: i32, fd: i32) {
    let ev = libc::epoll_event { events: libc::EPOLLIN as u32 | EXCLUSIVE, u64: PEER_MARK };
    let _ = sys::epoll_ctl(inner, libc::EPOLL_CTL_ADD, fd, Some(&ev));
}

/// Handles [`fsocket_proto::notice::Peer`], which hands over a peer's socket. Owns the descriptor
/// `fd`.
pub fn came(group: u64, place: u64, fd: i32) {
    if !keep(group, place, fd) {
        let _ = sys::close(fd);
        tell_closed(group);
    }
}

/// Tells the monitor that this process has closed its descriptor of a peer's socket. If the
/// peer's worker has exited, that may have been the last descriptor, and the kernel has moved the
/// connections.
pub(super) fn tell_closed(group: u64) {
    let _ = ctl::tell(request::PeerClosed { group }, None);
}

/// Keeps a peer's socket until its worker has exited, or no worker of this process is left.
/// False: the socket was not kept.
fn keep(group: u64, place: u64, fd: i32) -> bool {
    let Some(z) = used().find(|z| z.group.load(Ordering::Relaxed) == group && z.balance().is_some()) else {
        return false;
    };
    let Some(i) = z.peers.all.iter().position(|s| s.place.load(Ordering::Relaxed) == 0) else { return false };
    // The last worker may have given up its own socket while this message was in flight.
    if place == 0 || place > QUEUES as u64 || z.workers().next().is_none() {
        return false;
    }
    let s = &z.peers.all[i];
    let fd = process::high_fd(fd);
    s.fd.store(fd, Ordering::Relaxed);
    s.gone.store(false, Ordering::Relaxed);
    s.place.store(place as u32, Ordering::Release);
    z.peers.n.fetch_max(i as u32 + 1, Ordering::AcqRel);
    if !z.is_shared() {
        z.watches.active().for_each(|w| put_peer(w.ep(), fd));
        z.inners().for_each(|inner| put_inner(inner, fd));
    }
    if z.drop_peers_if_idle() {
        tell_closed(group);
    }
    true
}

/// Handles [`fsocket_proto::notice::PeerGone`]: the worker with this place has exited.
pub fn went(group: u64, place: u64) {
    for z in used().filter(|z| z.group.load(Ordering::Relaxed) == group) {
        for s in z.peers.iter().filter(|s| s.place.load(Ordering::Relaxed) as u64 == place) {
            s.gone.store(true, Ordering::SeqCst);
            z.peers.orphans.store(true, Ordering::SeqCst);
        }
        for l in z.workers() {
            l.look_at_once();
        }
    }
}
