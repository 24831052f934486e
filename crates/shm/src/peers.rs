//! Is the other side still there? The monitor says so; while none lives, or one that does not know
//! the other side yet, each side looks for itself, where it would otherwise wait for ever.
//!
//! Each side names the processes that hold its end, and the namespace in which
//! their numbers mean something. Only if each of them is certainly gone the end
//! is closed in their name, as the monitor would. Whatever is uncertain (another
//! namespace, a child that has not entered itself, more processes than there is
//! room for) counts as alive. A peer that lies ends nobody's connection but its
//! own.
//!
//! Sleepers are told by the kernel: pidfds of those processes lie in an epoll instance, which lies
//! in every waker, and beside the futex of a blocking call ([`beside`]).

use crate::cow::Sparing;
use crate::stage;
use crate::table::{Desc, DESCS};
use crate::{chan, conn, ctl, process, waker};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use fsocket_abi::channel::{status, Prod};
use fsocket_sync::atomic::AtomicU32 as WaitWord;
use fsocket_sys::{self as sys, Errno, Result};

/// In the place of a child that is being forked and will enter itself. If it cannot, this stays.
const EXPECTED: u32 = u32::MAX;

fn own(d: &Desc) -> &Prod {
    &d.tx().1.prod
}

/// This process has a new connection.
pub fn enter(d: &Desc) {
    let p = own(d);
    p.ns.store(process::pid_namespace(), Ordering::Relaxed);
    p.pids[0].store(process::pid(), Ordering::Relaxed);
    LOOKED.store(0, Ordering::Relaxed);
}

/// This process has a connection of the program before it (`exec`: the number
/// stands there already; `posix_spawn`: it does not).
pub fn join(d: &Desc) {
    LOOKED.store(0, Ordering::Relaxed);
    let (p, me) = (own(d), process::pid());
    if p.pids.iter().any(|n| n.load(Ordering::Acquire) == me) {
        return;
    }
    expect(d);
    settle_in(p, me);
}

/// Before a fork: another process is about to hold the connection.
pub fn expect(d: &Desc) {
    let p = own(d);
    let free = p.pids.iter().find(|n| n.compare_exchange(0, EXPECTED, Ordering::AcqRel, Ordering::Relaxed).is_ok());
    if free.is_none() {
        p.ns.store(0, Ordering::Release);
    }
}

/// In the forked child.
#[link_section = ".text.fsocket_start"]
pub fn become_child() {
    // The pidfds are the parent's, in an instance that is the parent's as well.
    for w in &WATCHED {
        if w.pid.load(Ordering::Relaxed) != 0 {
            w.forget();
        }
    }
    if waker::ENDS.load(Ordering::Relaxed) >= 0 {
        process::close_own(waker::ENDS.swap(-1, Ordering::Relaxed));
    }
    LOOKED.put(0);
    for d in (0..DESCS.len()).filter_map(|i| DESCS.get(i)).filter(|d| d.is_conn()) {
        settle_in(own(d), process::pid());
    }
}

fn settle_in(p: &Prod, me: u32) {
    if p.ns.load(Ordering::Relaxed) != process::pid_namespace() {
        p.ns.store(0, Ordering::Release);
    }
    let _ = p.pids.iter().find(|n| n.compare_exchange(EXPECTED, me, Ordering::AcqRel, Ordering::Relaxed).is_ok());
}

/// This process closes the connection; processes of the fork group may go on.
pub fn leave(d: &Desc) {
    let me = process::pid();
    for n in &own(d).pids {
        let _ = n.compare_exchange(me, 0, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// While no monitor lives: close the connection in the name of the other side if
/// nobody is there any more. Called before and between sleeps.
pub fn look(d: &'static Desc) {
    if is_unwatched() {
        look_if_ended();
        look_at(d);
    }
}

/// The same for every connection of this process, a few times a second at most, and when a process that
/// holds the other end of one has ended.
pub fn look_at_all() {
    const EVERY_US: u64 = 100_000;
    if !is_unwatched() {
        return;
    }
    let now = sys::cpu::ticks();
    if !look_if_ended() && now.wrapping_sub(LOOKED.load(Ordering::Relaxed)) >= EVERY_US * sys::cpu::ticks_per_us() {
        LOOKED.store(now, Ordering::Relaxed);
        each(look_at);
    }
}

/// Does nobody say of some peer that it has died?
pub fn is_unwatched() -> bool {
    ctl::dead() || ctl::any_half()
}

/// The same for the other side of one connection.
fn is_unwatched_of(d: &Desc) -> bool {
    let half = || chan::of(d).is_some_and(|c| c.is_half());
    ctl::dead() || ctl::any_half() && half()
}

/// When all connections were last looked at, ticks; 0: there is a new one.
static LOOKED: AtomicU64 = AtomicU64::new(0);

fn each(f: impl Fn(&'static Desc)) {
    (0..DESCS.len()).filter_map(|i| DESCS.get(i)).for_each(f);
}

fn look_at(d: &'static Desc) {
    if !d.is_conn() || stage::of(d) != stage::Path::Shm || !is_unwatched_of(d) {
        return;
    }
    let (_, tx, h) = d.tx();
    let p = &d.rx().1.prod;
    let over = status::CLOSED | status::RST | status::MIGRATING | status::MIGRATED;
    if p.status.load(Ordering::Acquire) & over != 0 || !gone(p) {
        return;
    }
    // As the kernel: what the dead had not read makes it a reset.
    let unread = fsocket_ring::unread(tx, h) != 0;
    let bits = status::CLOSED | if unread { status::RST } else { status::FIN };
    p.status.fetch_or(bits, Ordering::AcqRel);
    conn::wake_own(d);
}

fn gone(p: &Prod) -> bool {
    let ns = p.ns.load(Ordering::Acquire);
    if ns == 0 || ns != process::pid_namespace() {
        return false;
    }
    let mut any = false;
    for n in &p.pids {
        match n.load(Ordering::Acquire) {
            0 => continue,
            pid if pid <= i32::MAX as u32 && has_ended(pid) => any = true,
            _ => return false,
        }
    }
    any
}

/// A process that holds the other end of a connection, or says so.
struct Watched {
    /// 0: nobody.
    pid: AtomicU32,
    fd: AtomicI32,
    ended: AtomicBool,
}

impl Watched {
    fn forget(&self) {
        self.ended.store(false, Ordering::Relaxed);
        let fd = self.fd.swap(-1, Ordering::AcqRel);
        if fd >= 0 {
            process::close_own(fd);
        }
        self.pid.store(0, Ordering::Release);
    }
}

/// A process has one of `NEAR` places from that of its number on. Processes without a place are looked at
/// between pieces of sleeps.
const NEAR: usize = 8;
static WATCHED: [Watched; 512] =
    [const { Watched { pid: AtomicU32::new(0), fd: AtomicI32::new(-1), ended: AtomicBool::new(false) } }; 512];

/// The epoll instance with the pidfds, made on first use.
fn make_instance() -> Option<i32> {
    if let Some(fd) = waker::ends() {
        return Some(fd);
    }
    let fd = crate::making::making(|| sys::epoll_create1(libc::EPOLL_CLOEXEC).map(process::high_fd)).ok()?;
    match waker::ENDS.compare_exchange(-1, fd, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {
            waker::all_hear(fd);
            Some(fd)
        }
        Err(other) => {
            process::close_own(fd);
            Some(other)
        }
    }
}

/// Some of them have ended: look whose connections those were. False: none has.
fn look_if_ended() -> bool {
    const AT_ONCE: usize = 16;
    let Some(instance) = waker::ends() else { return false };
    let mut events = [libc::epoll_event { events: 0, u64: 0 }; AT_ONCE];
    let mut any = false;
    loop {
        // SAFETY: room for AT_ONCE events.
        let n = unsafe { sys::epoll_wait(instance, events.as_mut_ptr(), AT_ONCE as i32, Some(0), core::ptr::null()) };
        let n = n.unwrap_or(0).min(AT_ONCE);
        for e in &events[..n] {
            any = true;
            if let Some(w) = WATCHED.get(e.u64 as usize) {
                w.ended.store(true, Ordering::Release);
            }
        }
        if n < AT_ONCE {
            break;
        }
    }
    if any {
        each(look_at);
        WATCHED.iter().filter(|w| w.ended.swap(false, Ordering::AcqRel)).for_each(Watched::forget);
    }
    any
}

/// Has a process ended? It is watched from now on.
fn has_ended(pid: u32) -> bool {
    let first = pid as usize % WATCHED.len();
    let near = || (first..first + NEAR).map(|i| i % WATCHED.len());
    if let Some(i) = near().find(|i| WATCHED[*i].pid.load(Ordering::Acquire) == pid) {
        return WATCHED[i].ended.load(Ordering::Acquire);
    }
    // SAFETY: no memory is involved.
    let pidfd = unsafe { sys::raw(libc::SYS_pidfd_open, [pid as usize, 0, 0, 0, 0, 0]) };
    let Ok(pidfd) = pidfd.map(|fd| fd as i32) else { return sys::kill(pid as i32, 0) == Err(Errno::ESRCH) };
    let mut p = libc::pollfd { fd: pidfd, events: libc::POLLIN, revents: 0 };
    // Also if nobody has waited for it yet: its number is still there, its sockets would not be.
    // SAFETY: one pollfd.
    let ended = unsafe { sys::ppoll(&mut p, 1, Some(0), core::ptr::null()) } == Ok(1);
    let free = |i: &usize| WATCHED[*i].pid.compare_exchange(0, pid, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    if !ended {
        if let Some((instance, i)) = make_instance().and_then(|instance| Some((instance, near().find(free)?))) {
            // The peer chooses the numbers, and so how many there are: the program's own descriptors keep
            // their room.
            match process::high_copy(pidfd) {
                Some(copy) => watch(instance, i, copy),
                None => WATCHED[i].forget(),
            }
        }
    }
    let _ = sys::close(pidfd);
    ended
}

/// The monitor says of all peers when they die: a number may be another process's when it is next asked for.
pub fn leave_to_monitor() {
    if !is_unwatched() && waker::ends().is_some() {
        WATCHED.iter().filter(|w| w.fd.load(Ordering::Relaxed) >= 0).for_each(Watched::forget);
    }
}

fn watch(instance: i32, i: usize, pidfd: i32) {
    WATCHED[i].fd.store(pidfd, Ordering::Release);
    let ev = libc::epoll_event { events: (libc::EPOLLIN | libc::EPOLLET) as u32, u64: i as u64 };
    if sys::epoll_ctl(instance, libc::EPOLL_CTL_ADD, pidfd, Some(&ev)).is_err() {
        WATCHED[i].forget();
    }
}

/// A sleep on a futex that ends when one of them does ([`sys::beside`]): a descriptor, to be given back to
/// [`not_beside`]. None: there is none, or so many threads sleep so that the program may lack descriptors.
pub fn beside(word: &WaitWord, expected: u32) -> Option<i32> {
    const MOST: u32 = 64;
    let instance = waker::ends().filter(|_| is_unwatched() && !NONE.load(Ordering::Relaxed))?;
    if BESIDE.fetch_add(1, Ordering::Relaxed) >= MOST {
        BESIDE.fetch_sub(1, Ordering::Relaxed);
        return None;
    }
    match sys::beside::ring(word, expected, instance) {
        Ok(fd) => Some(process::high_fd(fd)),
        Err(e) => {
            BESIDE.fetch_sub(1, Ordering::Relaxed);
            NONE.store(!matches!(e, Errno::EMFILE | Errno::ENOMEM), Ordering::Relaxed);
            None
        }
    }
}

/// Threads that sleep so.
static BESIDE: AtomicU32 = AtomicU32::new(0);
/// The kernel has no such sleep.
static NONE: AtomicBool = AtomicBool::new(false);

/// Errors: EINTR, ETIMEDOUT.
pub fn sleep_beside(ring: i32, ns: u64) -> Result<()> {
    match sys::beside::wait(ring, ns) {
        Err(e) if !matches!(e, Errno::EINTR | Errno::ETIMEDOUT) => {
            NONE.store(true, Ordering::Relaxed);
            Ok(())
        }
        r => r,
    }
}

pub fn not_beside(ring: i32) {
    process::close_own(ring);
    BESIDE.fetch_sub(1, Ordering::Relaxed);
}

/// A descriptor of these got another number.
pub fn renumbered(old: i32, new: i32) -> bool {
    let swap = |fd: &AtomicI32| fd.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    swap(&waker::ENDS) || WATCHED.iter().any(|w| swap(&w.fd))
}
