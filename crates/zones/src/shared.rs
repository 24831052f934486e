//! Listeners for which the program itself has set SO_REUSEPORT (nginx with `reuseport`, haproxy
//! by default). The program may have several listen sockets at one address, and other processes
//! may add theirs.
//!
//! If every worker already has a listen socket of its own, this socket is its local one. The
//! monitor's BPF program selects it for the CPU to which the worker is pinned. For an unpinned
//! worker the kernel's hash selects, as without the library. The library makes no socket, and a
//! connection costs no further system call. If several workers share a socket, the library makes
//! local sockets beside it, as for any listener. There is no reservation, because the program
//! lets others use its address. See ADR 24.

use super::listener::Peer;
use super::listener::{count, state, used, Local, Shared, Zoned};
use super::{cpu, watches::Who};
use crate::cow::Sparing;
use crate::{arena, ctl, pool, process, socks, stats};
use core::sync::atomic::{AtomicBool, Ordering};
use fsocket_abi::arena::{zone_accept, Counter, Reason};
use fsocket_proto::{answer, request};
use fsocket_reuseport::classic;
use fsocket_sys::{Errno, Result};

/// The program has attached a BPF program of its own, which selects among its sockets.
static OWN_SELECTOR: AtomicBool = AtomicBool::new(false);

/// Values of [`Shared::place`] that mean no place.
const NONE: u32 = 0;
const REFUSED: u32 = u32::MAX;
/// An address that the monitor does not know yet.
const UNANNOUNCED: u64 = u64::MAX;

impl Shared {
    pub fn reset(&self) {
        self.address.store(0, Ordering::Relaxed);
        self.place.store(NONE, Ordering::Relaxed);
        self.waits.store(false, Ordering::Relaxed);
        self.stop_working();
    }

    fn stop_working(&self) -> bool {
        self.worker.thread.put(0);
        self.worker.peers_since.put(0);
        self.worker.shared.load(Ordering::Relaxed) && self.worker.shared.swap(false, Ordering::AcqRel)
    }

    /// In a forked child: the place belongs to the parent, so the child has none.
    pub fn become_child(&self) {
        self.place.put(NONE);
        self.waits.put(false);
        self.stop_working();
    }

    #[inline(always)]
    fn address(&self) -> u64 {
        self.address.load(Ordering::Relaxed)
    }
}

/// Does this socket option attach a BPF program that selects among sockets?
#[inline]
pub fn is_selector(level: i32, name: i32) -> bool {
    const SO_ATTACH_REUSEPORT_CBPF: i32 = 51;
    const SO_ATTACH_REUSEPORT_EBPF: i32 = 52;
    level == libc::SOL_SOCKET && matches!(name, SO_ATTACH_REUSEPORT_CBPF | SO_ATTACH_REUSEPORT_EBPF)
}

/// The program has set such an option, so the library does not touch its sockets.
#[cold]
pub fn selects_itself() {
    if !OWN_SELECTOR.swap(true, Ordering::Relaxed) {
        for z in used().filter(|z| z.is_shared()) {
            z.off(Reason::ZoneShared);
        }
    }
}

impl Zoned {
    /// Has the program itself set SO_REUSEPORT?
    #[inline(always)]
    pub(super) fn is_shared(&self) -> bool {
        self.shared.address() != 0
    }

    /// Announces to the monitor that the program listens on a socket that shares its address. The
    /// monitor has to know all sockets at the address. False: the listener gets no zones.
    pub(super) fn announce(&self, fd: i32) -> bool {
        if OWN_SELECTOR.load(Ordering::Relaxed) {
            return false;
        }
        ctl::wanted();
        match self.ask_group(fd, true) {
            // While foreign sockets are at the address, the library asks for the group again at
            // times.
            Ok((id, _)) => self.shared.address.store(id, Ordering::Relaxed),
            Err(_) if ctl::may_come() => self.shared.address.store(UNANNOUNCED, Ordering::Relaxed),
            Err(_) => return false,
        }
        true
    }

    /// Asks the monitor for the group of `fd`, and attaches the BPF program that the monitor
    /// sends. Returns the group's number, and whether a program selects.
    pub(super) fn ask_group(&self, fd: i32, shared: bool) -> Result<(u64, bool)> {
        let (answer::Group { group }, program) = ctl::request(request::Group { own: shared }, Some(fd))?;
        let Some(program) = program else { return Ok((group, false)) };
        let attached = classic::attach_loaded(fd, program);
        let _ = fsocket_sys::close(program);
        attached?;
        self.group.store(group, Ordering::Relaxed);
        let _ = self.shared.address.compare_exchange(UNANNOUNCED, group, Ordering::Relaxed, Ordering::Relaxed);
        Ok((group, true))
    }

    /// Enters the monitor's group with the program's own socket. While foreign sockets are at the
    /// address, no BPF program selects. A foreign socket may belong to a sibling that has not
    /// announced it yet; the sibling then gets the program. This process takes its place at once
    /// all the same, because later its worker may sleep where no message can make it ask again.
    fn enter_own_group(&self, fd: i32) -> Result<()> {
        let (id, selects) = self.ask_group(fd, true)?;
        self.group.store(id, Ordering::Relaxed);
        self.shared.waits.store(!selects, Ordering::Relaxed);
        if !selects {
            count(Reason::ZoneShared);
        }
        Ok(())
    }

    /// Asks for the selecting program again if it was missing, because foreign sockets may have
    /// gone. One socket of the address is enough, and any thread may do this.
    pub(super) fn ask_for_program(&self) {
        if self.shared.waits.load(Ordering::Relaxed) {
            let got = self.ask_group(self.fd.load(Ordering::Relaxed), true);
            self.shared.waits.store(!matches!(got, Ok((_, true))), Ordering::Relaxed);
        }
    }

    /// Does the calling thread need only the program's own socket, and no local one beside it? If
    /// the thread is pinned, the program's socket counts as its local socket from now on.
    #[inline]
    pub(super) fn is_member(&self, fd: i32) -> bool {
        if !self.is_shared() || self.state() == state::OFF || self.is_active() {
            return false;
        }
        let mine = self.is_single() && !self.inherited.load(Ordering::Relaxed) || self.has_siblings();
        let place = self.shared.place.load(Ordering::Relaxed);
        match (mine, place) {
            (true, NONE) => self.become_member(fd),
            (true, REFUSED) if ctl::may_come() => {
                ctl::wanted();
                if !ctl::dead() {
                    self.ask_again();
                    self.become_member(fd);
                }
            }
            (false, NONE | REFUSED) | (true, _) => {}
            // A second worker waits on this socket, so both get local sockets.
            (false, _) => self.leave_membership(),
        }
        // Another thread may have made a local socket meanwhile.
        mine && !self.is_active()
    }

    /// Has this process (or had its parent) other sockets at the same address?
    fn has_siblings(&self) -> bool {
        let address = self.shared.address();
        used().filter(|z| z.shared.address() == address).nth(1).is_some()
    }

    #[cold]
    fn become_member(&self, fd: i32) {
        let Ok(_l) = self.change.lock() else { return };
        // Another thread may have made a local socket meanwhile, and would not check again.
        if self.shared.place.load(Ordering::Relaxed) != NONE || self.is_active() {
            return;
        }
        let done = self.enter(fd);
        self.shared.place.store(done.unwrap_or(REFUSED), Ordering::Release);
        match done {
            Ok(place) => {
                self.share_member(fd, place, process::thread());
                socks::arena();
                stats::count(Counter::ZoneJoin);
            }
            Err(why) => count(why),
        }
    }

    /// Takes a place in the monitor's group. Fails if the thread is not pinned (and may not be
    /// pinned), or if the monitor has no place.
    fn enter(&self, fd: i32) -> core::result::Result<u32, Reason> {
        let pinned = cpu::pinned(Who::me().tid);
        let assigned = cpu::assigned(self.inherited.load(Ordering::Relaxed));
        if pinned.is_none() && !assigned {
            return Err(Reason::ZoneUnpinned);
        }
        ctl::wanted();
        if self.group.load(Ordering::Relaxed) == 0 {
            self.enter_own_group(fd).map_err(|_| Reason::ZoneShared)?;
        }
        let (answer, _) = ctl::request(self.local(pinned), Some(fd)).map_err(|_| Reason::ZoneResource)?;
        let answer::Local { place, cpu, .. } = answer;
        self.shared.cpu.store(cpu, Ordering::Relaxed);
        if pinned.is_none() && !cpu::pin_to(cpu) {
            self.tell_left(place, false);
            return Err(Reason::ZoneUnpinned);
        }
        Ok(place)
    }

    fn local(&self, cpu: Option<u32>) -> request::Local {
        request::Local { group: self.group.load(Ordering::Relaxed), cpu, on_trial: false }
    }

    pub(super) fn leave_membership(&self) {
        let place = self.shared.place.swap(NONE, Ordering::AcqRel);
        let shared = self.shared.stop_working();
        if shared {
            self.drop_peers_if_idle();
        }
        if !matches!(place, NONE | REFUSED) {
            self.tell_left(place, shared);
        }
    }

    /// Is the program's own socket the local socket of a worker?
    pub(super) fn has_member(&self) -> bool {
        !matches!(self.shared.place.load(Ordering::Relaxed), NONE | REFUSED)
    }

    /// [`Zoned::announce_again`] for the program's own socket.
    pub(super) fn enter_again(&self, fd: i32) {
        let cpu = self.shared.cpu.load(Ordering::Relaxed);
        let entered = self.enter_own_group(fd).and_then(|()| ctl::request(self.local(Some(cpu)), Some(fd)));
        self.shared.place.store(entered.map_or(REFUSED, |(answer, _)| answer.place), Ordering::Release);
        if let Ok((answer::Local { place, .. }, _)) = entered {
            self.map_balance_again();
            self.share_member(fd, place, self.shared.worker.thread.load(Ordering::Relaxed));
        }
    }

    /// Lets other workers of the fork group steal from the program's own socket, and its worker
    /// from theirs.
    fn share_member(&self, fd: i32, place: u32, thread: u64) {
        self.map_balance();
        let l = &self.shared.worker;
        l.fd.store(fd, Ordering::Relaxed);
        l.cpu.store(self.shared.cpu.load(Ordering::Relaxed), Ordering::Relaxed);
        l.place.store(place, Ordering::Relaxed);
        l.fair.store(0, Ordering::Relaxed);
        l.peers_since.store(0, Ordering::Relaxed);
        l.thread.store(thread, Ordering::Release);
        self.share(l);
    }

    /// The worker that has the program's own socket as its local one, if others may steal from
    /// it.
    pub(super) fn member(&self) -> Option<&Local> {
        let l = &self.shared.worker;
        l.shared.load(Ordering::Acquire).then_some(l)
    }

    /// As [`Zoned::member`], if that worker is the calling thread.
    pub(super) fn own_member(&self) -> Option<&Local> {
        self.member().filter(|l| l.thread.load(Ordering::Relaxed) == process::thread())
    }

    /// Workers of this process that have other sockets at the same address.
    pub(super) fn sibling_members<'a>(&'a self, l: &'a Local) -> impl Iterator<Item = &'static Local> + 'a {
        let address = self.shared.address();
        let siblings = used().filter(move |z| address != 0 && z.shared.address() == address);
        siblings.filter_map(Zoned::member).filter(move |o| !core::ptr::eq(*o, l))
    }

    /// `accept` on the program's own socket. Tries the peers' queues if its own queue is empty,
    /// or if it is the turn of a busy peer.
    pub(super) fn accept_member(&self, fd: i32, peer: Peer) -> Result<i32> {
        let Some(l) = self.own_member() else { return peer.accept(fd).inspect(|n| self.member_took(*n)) };
        if let Some(r) = self.take_for_balance(l, peer) {
            return r;
        }
        if self.is_found_empty(l, fd, peer) && super::listener::is_nonblocking(fd) {
            return self.take_from_peers(peer).unwrap_or(Err(Errno::EAGAIN));
        }
        match peer.accept(fd) {
            Ok(n) => {
                l.had(true);
                self.took_own(l);
                self.member_took(n);
                Ok(n)
            }
            // The socket is non-blocking.
            Err(Errno::EAGAIN) => {
                l.had(false);
                self.take_from_peers(peer).unwrap_or(Err(Errno::EAGAIN))
            }
            Err(e) => Err(e),
        }
    }

    fn member_took(&self, n: i32) {
        stats::count(Counter::AcceptKernel);
        self.returned();
        pool::kernel_allocated(n);
    }

    /// Tells the monitor that a worker has left its place. `wait`: returns only after the monitor
    /// has closed its own descriptor of the socket, so that the address is free once the program
    /// has closed the listener.
    pub(super) fn tell_left(&self, place: u32, wait: bool) {
        let m = request::Left { group: self.group.load(Ordering::Relaxed), place };
        if !wait || matches!(ctl::request(m, None), Err(Errno::EAGAIN)) {
            let _ = ctl::tell(m, None);
        }
    }

    /// Other sockets have joined or left the address, so a refused worker may ask again.
    pub(super) fn ask_again(&self) {
        let _ = self.shared.place.compare_exchange(REFUSED, NONE, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Counts a connection that was accepted from the program's own socket, which may count as a
    /// local socket.
    pub(super) fn count_member(&self) {
        if !self.is_shared() {
            return;
        }
        match self.shared.place.load(Ordering::Relaxed) {
            NONE | REFUSED => stats::count(Counter::AcceptGlobal),
            _ => {
                stats::count(Counter::AcceptLocal);
                arena::count_accept(self.shared.cpu.load(Ordering::Relaxed), zone_accept::LOCAL);
            }
        }
    }
}
