//! Threads that close what clients have touched.
//!
//! To close a socket can take as long as its options say (SO_LINGER), to free memory as long as there is much of it, and
//! to close a file as long as its file system likes (FUSE). The loop does none of that. Each lane has its own threads, so
//! that what cannot be interrupted holds up nothing else, and within a lane users take turns.

use crate::memory::Mapping;
use crate::watchdog::Watchdog;
use crate::{ancillary, descriptor};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::Shutdown;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A signal ends each wait in a lane after this time. (A close that is interrupted has closed.)
const PATIENCE: Duration = Duration::from_micros(200);
/// Threads of the last lane stay so long without work.
const IDLE: Duration = Duration::from_secs(1);
/// Descriptors of a user that wait to be closed: beyond it nothing more is taken from that user.
const WAITING: usize = 4096;
/// The same of [`Lane::Other`]. (The library sends no such files, but for a pidfd now and then.)
const OTHERS: usize = 16;
/// After this time a thread is asked for again for which there was no place, and whether a process that was dropped has
/// received what was sent.
const AGAIN: Duration = Duration::from_secs(1);

/// Where something is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// Sockets of TCP, and control sockets: each wait ends with a signal.
    Socket,
    /// Memory: it takes time, and waits for nobody.
    Memory,
    /// Unix sockets: files that were passed and not received are closed with them, and that may never end. A thread for
    /// each user, and few.
    Unix,
    /// Anything else, in the same way.
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

/// What is left to be closed.
pub enum Remains {
    Fd(OwnedFd),
    /// A control socket: what was sent to it and not read is closed one by one. It stays open, and counts for its user,
    /// for so many descriptors until the process has received what was sent from here, or has closed its end.
    Control(OwnedFd, u64),
    Memory(Mapping),
}

#[derive(Default)]
struct Queue {
    waiting: BTreeMap<u32, VecDeque<Remains>>,
    /// Users for whom a thread is at work.
    busy: BTreeSet<u32>,
    /// The user who was served last.
    last: u32,
    threads: usize,
    idle: usize,
}

impl Queue {
    /// Of the user after the one before whom no thread serves.
    fn take(&mut self) -> Option<(u32, Remains)> {
        let after = self.last.checked_add(1).into_iter().flat_map(|next| self.waiting.range(next..));
        let uid = after.chain(self.waiting.range(..)).map(|(uid, _)| *uid).find(|uid| !self.busy.contains(uid))?;
        let waiting = self.waiting.get_mut(&uid)?;
        let first = waiting.pop_front()?;
        if waiting.is_empty() {
            self.waiting.remove(&uid);
        }
        self.last = uid;
        self.busy.insert(uid);
        Some((uid, first))
    }
}

#[derive(Default)]
struct State {
    lanes: [Queue; LANES.len()],
    /// Descriptors and mappings that there are for each user, with those that wait here.
    held: BTreeMap<u32, u64>,
    all: u64,
    /// Control sockets from which something is in flight still, and when the first of them was looked at.
    unreceived: Vec<(u32, Remains)>,
    looked: Option<Instant>,
    /// There was no thread to be had: when to ask again.
    again: Option<Instant>,
    is_over: bool,
}

impl State {
    fn keep_unreceived(&mut self, uid: u32, fd: Remains) {
        self.looked.get_or_insert_with(Instant::now);
        self.unreceived.push((uid, fd));
    }

    /// Has those looked at again for which it is time.
    fn look_again(&mut self) {
        if self.looked.is_some_and(|at| at.elapsed() >= AGAIN) {
            self.looked = None;
            for (uid, fd) in std::mem::take(&mut self.unreceived) {
                self.lanes[Lane::Socket as usize].waiting.entry(uid).or_default().push_back(fd);
            }
        }
    }
}

/// Closes for one loop, and counts what users have open there.
#[derive(Default)]
pub struct Closer {
    state: Mutex<State>,
    work: [Condvar; LANES.len()],
}

impl Closer {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The user has so many more.
    pub fn count(&self, uid: u32, more: i64) {
        let mut state = self.lock();
        let held = state.held.entry(uid).or_default();
        *held = held.saturating_add_signed(more);
        if *held == 0 {
            state.held.remove(&uid);
        }
        state.all = state.all.saturating_add_signed(more);
    }

    /// What this user has, and all users have.
    pub fn held(&self, uid: u32) -> (u64, u64) {
        let state = self.lock();
        (state.held.get(&uid).copied().unwrap_or_default(), state.all)
    }

    /// What each user has.
    pub fn by_user(&self) -> Vec<(u32, u64)> {
        self.lock().held.iter().map(|(uid, n)| (*uid, *n)).collect()
    }

    /// Whether so much of this user's waits to be closed that nothing more is taken from it.
    pub fn is_full(&self, uid: u32) -> bool {
        let state = self.lock();
        let waits = |lane: Lane| state.lanes[lane as usize].waiting.get(&uid).map_or(0, VecDeque::len);
        waits(Lane::Other) > OTHERS
            || [Lane::Socket, Lane::Memory, Lane::Unix].map(waits).iter().sum::<usize>() > WAITING
    }

    /// Threads that close, now.
    pub fn threads(&self) -> usize {
        self.lock().lanes.iter().map(|q| q.threads).sum()
    }

    /// Closes it some time. It stays counted until then.
    pub fn put(self: &Arc<Closer>, lane: Lane, uid: u32, remains: Remains) {
        let mut state = self.lock();
        state.lanes[lane as usize].waiting.entry(uid).or_default().push_back(remains);
        drop(state);
        self.needs_thread(lane);
    }

    /// Something waits in this lane: a thread is woken for it, or begun.
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
        // (No thread, by a limit of tasks: what waits counts for its user until there is one.)
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

    /// Begins the threads for which there was no place.
    pub fn begin_again_if_due(self: &Arc<Closer>) {
        let mut state = self.lock();
        if state.again.is_none_or(|at| at > Instant::now()) {
            return;
        }
        state.again = None;
        let waits = |lane: &Lane| !state.lanes[*lane as usize].waiting.is_empty();
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

    /// The next one; it waits for it. None: this thread is not needed any more.
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
            // (Users whose turn it cannot be are served by the thread that is at work for them.)
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
            if (waited || is_over) && queue.waiting.is_empty() {
                queue.threads -= 1;
                return None;
            }
        }
    }

    /// Closes a control socket. What waits in it goes first, each descriptor to its lane: the end of the socket would
    /// close them all here.
    fn drain(self: &Arc<Closer>, uid: u32, fd: &OwnedFd) {
        // Nobody sends from here on.
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

    /// No loop needs it any more: its threads end when they have done what there is.
    pub fn end(&self) {
        self.lock().is_over = true;
        self.work.iter().for_each(Condvar::notify_all);
    }
}

/// Where a descriptor is closed, by its kind, which nobody changes.
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
