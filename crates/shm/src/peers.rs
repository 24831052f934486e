//! Detects that the other side of a connection has died. Normally the monitor reports that. While
//! no monitor lives, or the monitor does not know the other side yet, each side checks by itself
//! where it would otherwise wait for ever.
//!
//! Each side publishes the process numbers that hold its end, and the PID namespace of these
//! numbers. Only if all of them have certainly ended does the other side close the end on their
//! behalf, as the monitor would. Unclear cases count as alive: another namespace, a child that has
//! not entered its number yet, more processes than there is room for. A peer that lies harms only
//! its own connection.
//!
//! To wake sleepers, pidfds of those processes are in an epoll instance. Every waker watches that
//! instance, and so does a blocking call beside its futex ([`beside`]).

use crate::cow::Sparing;
use crate::table::{Desc, DESCS};
use crate::{chan, conn, ctl, process, waker};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use fsocket_abi::channel::{status, Prod};
use fsocket_sync::atomic::AtomicU32 as WaitWord;
use fsocket_sys::{self as sys, Errno, Result};

/// Stands for a child that is being forked and will enter its own number. If the child cannot do
/// that, this value stays.
const EXPECTED: u32 = u32::MAX;

fn own(d: &Desc) -> &Prod {
    &d.tx().1.prod
}

/// Enters this process as the holder of a new connection.
pub fn enter(d: &Desc) {
    let p = own(d);
    p.ns.store(process::pid_namespace(), Ordering::Relaxed);
    p.pids[0].store(process::pid(), Ordering::Relaxed);
    LOOKED.store(0, Ordering::Relaxed);
}

/// Enters this process as a holder of a connection that it inherited. (After `exec` its number is
/// there already, after `posix_spawn` it is not.)
pub fn join(d: &Desc) {
    LOOKED.store(0, Ordering::Relaxed);
    let (p, me) = (own(d), process::pid());
    if p.pids.iter().any(|n| n.load(Ordering::Acquire) == me) {
        return;
    }
    expect(d);
    settle_in(p, me);
}

/// Called before a fork: reserves an entry for the child, which will hold the connection, too.
pub fn expect(d: &Desc) {
    let p = own(d);
    let free = p.pids.iter().find(|n| n.compare_exchange(0, EXPECTED, Ordering::AcqRel, Ordering::Relaxed).is_ok());
    if free.is_none() {
        p.ns.store(0, Ordering::Release);
    }
}

/// Called in the forked child: enters its number in the reserved entries.
#[link_section = ".text.fsocket_start"]
pub fn become_child() {
    // The pidfds and their epoll instance belong to the parent.
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

/// Removes this process as a holder, because it closes the connection. Other processes of the fork
/// group may keep the connection.
pub fn leave(d: &Desc) {
    let me = process::pid();
    for n in &own(d).pids {
        let _ = n.compare_exchange(me, 0, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// While no monitor watches the peer: closes the connection on behalf of the other side if no
/// process is left there. Called before a sleep and between the pieces of a sleep.
pub fn look(d: &'static Desc) {
    if is_unwatched() {
        look_if_ended();
        look_at(d);
    }
}

/// Like [`look`], for every connection of this process. Looks a few times a second at most, and
/// after a process that holds another end has ended.
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

/// Is there a peer whose death no monitor would report?
pub fn is_unwatched() -> bool {
    ctl::dead() || ctl::any_half()
}

/// Is the other side of this connection such a peer?
fn is_unwatched_of(d: &Desc) -> bool {
    let half = || chan::of(d).is_some_and(|c| c.is_half());
    ctl::dead() || ctl::any_half() && half()
}

/// When all connections were last looked at, in ticks; 0: there is a new connection.
static LOOKED: AtomicU64 = AtomicU64::new(0);

fn each(f: impl Fn(&'static Desc)) {
    (0..DESCS.len()).filter_map(|i| DESCS.get(i)).for_each(f);
}

fn look_at(d: &'static Desc) {
    if !d.is_in_rings() || !is_unwatched_of(d) {
        return;
    }
    let (_, tx, h) = d.tx();
    let p = &d.rx().1.prod;
    let peer = d.peer_status();
    if peer.has_ended() || peer.has_begun_to_move() || !gone(p) {
        return;
    }
    // As in the kernel, unread bytes at the dead side turn its close into a reset.
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

/// A process that holds the other end of a connection, or claims to.
struct Watched {
    /// 0: free.
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

/// A process number is stored in one of the `NEAR` places that follow its hash. If these are
/// taken, the process is polled between pieces of sleeps.
const NEAR: usize = 8;
static WATCHED: [Watched; 512] =
    [const { Watched { pid: AtomicU32::new(0), fd: AtomicI32::new(-1), ended: AtomicBool::new(false) } }; 512];

/// The epoll instance with the pidfds. The first call creates it.
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

/// Finds processes that have ended, and checks their connections. False: none has ended.
fn look_if_ended() -> bool {
    const AT_ONCE: usize = 16;
    let Some(instance) = waker::ends() else { return false };
    let mut events = [libc::epoll_event { events: 0, u64: 0 }; AT_ONCE];
    let mut any = false;
    loop {
        // SAFETY: `events` has room for AT_ONCE events.
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

/// Has the process ended? If not, its pidfd is watched from now on.
fn has_ended(pid: u32) -> bool {
    let first = pid as usize % WATCHED.len();
    let near = || (first..first + NEAR).map(|i| i % WATCHED.len());
    if let Some(i) = near().find(|i| WATCHED[*i].pid.load(Ordering::Acquire) == pid) {
        return WATCHED[i].ended.load(Ordering::Acquire);
    }
    // SAFETY: the system call reads and writes no memory of this process.
    let pidfd = unsafe { sys::raw(libc::SYS_pidfd_open, [pid as usize, 0, 0, 0, 0, 0]) };
    let Ok(pidfd) = pidfd.map(|fd| fd as i32) else { return sys::kill(pid as i32, 0) == Err(Errno::ESRCH) };
    let mut p = libc::pollfd { fd: pidfd, events: libc::POLLIN, revents: 0 };
    // This includes a zombie: its number still exists, but its sockets do not.
    // SAFETY: the pointer and the count describe one local `pollfd`.
    let ended = unsafe { sys::ppoll(&mut p, 1, Some(0), core::ptr::null()) } == Ok(1);
    let free = |i: &usize| WATCHED[*i].pid.compare_exchange(0, pid, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    if !ended {
        if let Some((instance, i)) = make_instance().and_then(|instance| Some((instance, near().find(free)?))) {
            // The peer chooses how many numbers there are. So the copy must not use descriptors
            // that the program itself needs.
            match process::high_copy(pidfd) {
                Some(copy) => watch(instance, i, copy),
                None => WATCHED[i].forget(),
            }
        }
    }
    let _ = sys::close(pidfd);
    ended
}

/// Closes all pidfds, because the monitor reports deaths again. (A number may belong to another
/// process later.)
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

/// A descriptor for a futex sleep that also ends when a watched process ends ([`sys::beside`]).
/// The caller must return it to [`not_beside`]. None: the kernel does not support that, or so many
/// threads sleep in this way that the program might lack descriptors.
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

/// Number of threads that sleep in this way.
static BESIDE: AtomicU32 = AtomicU32::new(0);
/// The kernel does not support sleeps by [`beside`].
static NONE: AtomicBool = AtomicBool::new(false);

/// Sleeps on a descriptor of [`beside`]. Errors: EINTR, ETIMEDOUT.
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

/// The library has moved a descriptor from `old` to `new`. True: it belongs to this module.
pub fn renumbered(old: i32, new: i32) -> bool {
    let swap = |fd: &AtomicI32| fd.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    swap(&waker::ENDS) || WATCHED.iter().any(|w| swap(&w.fd))
}
