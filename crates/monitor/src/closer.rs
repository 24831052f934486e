//! Threads that close descriptors and memory which clients have touched.
//!
//! Closing a socket can take as long as its options say (SO_LINGER). Closing a file can take as
//! long as its file system wants (FUSE). Freeing memory takes longer if there is much of it. So
//! the event loop does none of this. Each kind of object has a *lane* with its own threads: an
//! object whose close cannot be interrupted delays only its own lane. Within a lane, users take
//! turns.

use crate::by_user::{ByUser, Counts};
use crate::memory::Mapping;
use crate::watchdog::Watchdog;
use crate::{ancillary, descriptor};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::Shutdown;
use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A signal ends each wait in a lane after this time. (An interrupted `close` has closed the
/// descriptor.)
const PATIENCE: Duration = Duration::from_micros(200);
/// An idle thread of the last two lanes ends after this time.
const IDLE: Duration = Duration::from_secs(1);
/// Descriptors of one user that may wait to be closed. Beyond this number the monitor takes no
/// more from that user.
const WAITING: usize = 4096;
/// The same limit for [`Lane::Other`]. (The library sends no such files, except for a pidfd now
/// and then.)
const OTHERS: usize = 16;
/// After this time the closer tries again to start a thread that could not be started. It also
/// looks again whether a dropped process has received what was sent to it.
const AGAIN: Duration = Duration::from_secs(1);

/// The lane in which an object is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// TCP sockets and control sockets. A signal ends each wait.
    Socket,
    /// Memory. Freeing it takes time but never waits.
    Memory,
    /// Unix sockets. With such a socket the kernel also closes files that were sent to it and not
    /// received, which may never end. Each user has at most one thread, and there are few threads.
    Unix,
    /// Anything else, with threads as for [`Lane::Unix`].
    Other,
}

const LANES: [Lane; 4] = [Lane::Socket, Lane::Memory, Lane::Unix, Lane::Other];

impl Lane {
    fn threads(self) -> usize {
        match self {
            Lane::Socket | Lane::Memory => 1,
            Lane::Unix | Lane::Other => 8,
        }
    }
}

/// An object that is to be closed.
pub enum Remains {
    Fd(OwnedFd),
    /// A control socket. Unread messages and their descriptors are closed one by one. The socket
    /// stays open until the process has received all that the monitor sent, or has closed its end.
    /// Until then the socket counts as this many descriptors of its user.
    Control(OwnedFd, u64),
    Memory(Mapping),
}

#[derive(Default)]
struct Queue {
    waiting: ByUser<Remains>,
    /// Users with an object that a thread is closing now.
    busy: BTreeSet<u32>,
    /// The user who was served last.
    last: u32,
    threads: usize,
    idle: usize,
}

impl Queue {
    /// Takes an object of the next user, except users whose objects a thread is closing now.
    fn take(&mut self) -> Option<(u32, Remains)> {
        let uid = self.waiting.users_after(self.last).find(|uid| !self.busy.contains(uid))?;
        let first = self.waiting.take(uid)?;
        self.last = uid;
        self.busy.insert(uid);
        Some((uid, first))
    }
}

#[derive(Default)]
struct State {
    lanes: [Queue; LANES.len()],
    /// Number of descriptors and mappings of each user, including those that wait here.
    held: Counts<u32>,
    all: u64,
    /// Control sockets whose process has not received everything yet, and when the first of them
    /// was looked at.
    unreceived: Vec<(u32, Remains)>,
    looked: Option<Instant>,
    /// When to try again to start a thread, after the system refused one.
    again: Option<Instant>,
    is_over: bool,
}

impl State {
    fn keep_unreceived(&mut self, uid: u32, fd: Remains) {
        self.looked.get_or_insert_with(Instant::now);
        self.unreceived.push((uid, fd));
    }

    /// Puts such sockets back into their lane when [`AGAIN`] has passed.
    fn look_again(&mut self) {
        if self.looked.is_some_and(|at| at.elapsed() >= AGAIN) {
            self.looked = None;
            for (uid, fd) in std::mem::take(&mut self.unreceived) {
                self.lanes[Lane::Socket as usize].waiting.add(uid, fd);
            }
        }
    }
}

/// Closes objects for one event loop, and counts what each user has open in that loop.
#[derive(Default)]
pub struct Closer {
    state: Mutex<State>,
    work: [Condvar; LANES.len()],
}

impl Closer {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds to the number of this user's open objects.
    pub fn count(&self, uid: u32, more: i64) {
        let mut state = self.lock();
        state.held.change(uid, more);
        state.all = state.all.saturating_add_signed(more);
    }

    /// The number of open objects of this user, and of all users.
    pub fn held(&self, uid: u32) -> (u64, u64) {
        let state = self.lock();
        (state.held.of(uid), state.all)
    }

    /// The number of open objects of each user.
    pub fn by_user(&self) -> Vec<(u32, u64)> {
        self.lock().held.iter().collect()
    }

    /// Whether so many of this user's objects wait to be closed that the monitor must take no more
    /// from that user.
    pub fn is_full(&self, uid: u32) -> bool {
        let state = self.lock();
        let waits = |lane: Lane| state.lanes[lane as usize].waiting.waiting(uid);
        waits(Lane::Other) > OTHERS
            || [Lane::Socket, Lane::Memory, Lane::Unix].map(waits).iter().sum::<usize>() > WAITING
    }

    /// Number of threads now.
    pub fn threads(&self) -> usize {
        self.lock().lanes.iter().map(|q| q.threads).sum()
    }

    /// Hands over an object to be closed later. It counts for its user until then.
    pub fn put(self: &Arc<Closer>, lane: Lane, uid: u32, remains: Remains) {
        let mut state = self.lock();
        state.lanes[lane as usize].waiting.add(uid, remains);
        drop(state);
        self.needs_thread(lane);
    }

    /// Wakes or starts a thread for this lane, because an object waits there.
    fn needs_thread(self: &Arc<Closer>, lane: Lane) {
        let mut state = self.lock();
        let queue = &mut state.lanes[lane as usize];
        if queue.idle > 0 {
            return self.work[lane as usize].notify_one();
        }
        if queue.threads >= lane.threads() {
            return;
        }
        queue.threads += 1;
        drop(state);
        let this = self.clone();
        let begun = std::thread::Builder::new().name("close".into()).stack_size(128 * 1024);
        // (If a limit of tasks forbids the thread, the objects wait and still count for their
        // user.)
        if begun.spawn(move || this.work(lane)).is_err() {
            let mut state = self.lock();
            state.lanes[lane as usize].threads -= 1;
            state.again.get_or_insert_with(|| Instant::now() + AGAIN);
        }
    }

    /// When to call [`Self::begin_again_if_due`].
    pub fn next_attempt(&self) -> Option<Instant> {
        self.lock().again
    }

    /// Tries again to start the threads that could not be started.
    pub fn begin_again_if_due(self: &Arc<Closer>) {
        let mut state = self.lock();
        if state.again.is_none_or(|at| at > Instant::now()) {
            return;
        }
        state.again = None;
        let waits = |lane: &Lane| state.lanes[*lane as usize].waiting.users().next().is_some();
        let lanes: Vec<_> = LANES.into_iter().filter(waits).collect();
        drop(state);
        lanes.into_iter().for_each(|lane| self.needs_thread(lane));
    }

    fn work(self: Arc<Closer>, lane: Lane) {
        let watchdog = Watchdog::every(PATIENCE).ok();
        while let Some((uid, remains)) = self.next(lane, watchdog.as_ref()) {
            if let Some(dog) = &watchdog {
                dog.arm();
            }
            let counted = match remains {
                Remains::Control(fd, counts) => {
                    self.drain(uid, &fd);
                    match descriptor::is_received(fd.as_fd()) {
                        true => counts,
                        false => {
                            self.lock().keep_unreceived(uid, Remains::Control(fd, counts));
                            0
                        }
                    }
                }
                Remains::Fd(_) | Remains::Memory(_) => {
                    drop(remains);
                    1
                }
            };
            self.lock().lanes[lane as usize].busy.remove(&uid);
            self.count(uid, -(counted as i64));
        }
    }

    /// Waits for the next object. `None`: this thread is not needed any more.
    fn next(&self, lane: Lane, watchdog: Option<&Watchdog>) -> Option<(u32, Remains)> {
        let mut state = self.lock();
        loop {
            if lane == Lane::Socket {
                state.look_again();
            }
            let queue = &mut state.lanes[lane as usize];
            if let Some(next) = queue.take() {
                return Some(next);
            }
            // (If objects of a busy user wait, the thread that works for that user takes them
            // later.)
            let is_kept = matches!(lane, Lane::Socket | Lane::Memory) && !state.is_over;
            if let Some(dog) = watchdog {
                dog.disarm();
            }
            state.lanes[lane as usize].idle += 1;
            let looks = lane == Lane::Socket && !state.is_over && !state.unreceived.is_empty();
            let limit = match is_kept {
                true if looks => AGAIN,
                true => Duration::MAX,
                false => IDLE,
            };
            let (again, waited) = match limit {
                Duration::MAX => (self.work[lane as usize].wait(state).unwrap_or_else(PoisonError::into_inner), false),
                limit => {
                    let (state, waited) =
                        self.work[lane as usize].wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner);
                    (state, waited.timed_out())
                }
            };
            state = again;
            let is_over = state.is_over;
            let queue = &mut state.lanes[lane as usize];
            queue.idle -= 1;
            if looks {
                continue;
            }
            if (waited || is_over) && queue.waiting.users().next().is_none() {
                queue.threads -= 1;
                return None;
            }
        }
    }

    /// Prepares a control socket for its end. Receives the messages in it and hands each of their
    /// descriptors to its lane. Otherwise closing the socket would close all of them in this
    /// thread.
    fn drain(self: &Arc<Closer>, uid: u32, fd: &OwnedFd) {
        // From here on nobody can send to this socket.
        let _ = rustix::net::shutdown(fd, Shutdown::Both);
        while let Ok(got) = ancillary::receive(fd.as_fd(), &mut [0; 1]) {
            let is_end = got.is_end();
            for fd in got.fds {
                self.count(uid, 1);
                self.put(lane_of(fd.as_fd()), uid, Remains::Fd(fd));
            }
            if is_end {
                break;
            }
        }
    }

    /// Tells the threads to end when all waiting objects are closed: no event loop needs them any
    /// more.
    pub fn end(&self) {
        self.lock().is_over = true;
        self.work.iter().for_each(Condvar::notify_all);
    }
}

/// The lane for a descriptor. It depends on the kind of the file, which cannot change.
pub fn lane_of(fd: BorrowedFd<'_>) -> Lane {
    if crate::descriptor::is_tcp(fd) {
        Lane::Socket
    } else if rustix::fs::fcntl_get_seals(fd).is_ok() {
        Lane::Memory
    } else if crate::descriptor::is_unix(fd) {
        Lane::Unix
    } else {
        Lane::Other
    }
}
