//! A receive on a kernel connection that may move to shared memory while the receive sleeps.

use crate::table::{Desc, Kind};
use crate::wait::{self, Call, Deadline, Mask, Restart, Sleep, Sleeper, Source};
use core::sync::atomic::{fence, Ordering};
use fsocket_sync::block::{block, Wait};
use fsocket_sys::{self as sys, Errno, Result};

/// Called before a receive that may sleep. Sleeps in a way in which the connection can move.
///
/// # Errors
/// EINTR: a signal has ended the wait. EAGAIN: the time of SO_RCVTIMEO is over. (A receive that goes on elsewhere
/// begins its time again.)
pub(super) fn wait(fd: i32, d: &Desc) -> Result<()> {
    // Further receives sleep inside the kernel, as do those before the first try.
    if !d.kernel().may_wait() {
        return Ok(());
    }
    let Some(limit) = limit(fd, d) else {
        d.kernel().allow_waits(0);
        return Ok(());
    };
    let nothing = libc::pollfd { fd: -1, events: 0, revents: 0 };
    let until = Deadline::of_option(limit);
    block(&mut InKernel { fd, d, until, p: [nothing; 1 + wait::BESIDE], sleeper: None })
}

/// A receive that sleeps on the kernel's socket until the connection moves.
struct InKernel<'a> {
    fd: i32,
    d: &'a Desc,
    until: Deadline,
    p: [libc::pollfd; 1 + wait::BESIDE],
    sleeper: Option<Sleeper>,
}

impl InKernel<'_> {
    fn has_gone(&self) -> bool {
        self.d.kind() != Kind::Kernel
    }
}

impl Wait for InKernel<'_> {
    type Woken = Result<usize>;
    type End = Result<()>;

    fn arm(&mut self) {
        self.sleeper = Sleeper::new();
        // The sleeper exists before the look; `went_over` changes the kind first and then wakes
        // the sleepers.
        fence(Ordering::SeqCst);
    }

    fn look(&mut self) -> Option<Result<()>> {
        (self.sleeper.is_none() || self.has_gone() || self.d.kernel().stays()).then_some(Ok(()))
    }

    fn sleep(&mut self) -> Result<usize> {
        self.p[0] = libc::pollfd { fd: self.fd, events: libc::POLLIN, revents: 0 };
        let source = Source::Set { fds: &mut self.p, sleeper: self.sleeper.as_mut(), mask: Mask::NONE };
        wait::sleep(source, Sleep::of(Call::Candidate, self.until.left()).restart(Restart::Socket))
    }

    fn disarm(&mut self) {
        if let Some(s) = self.sleeper.take() {
            s.end(|_| ());
        }
    }

    fn on_wake(&mut self, woken: Result<usize>) -> Option<Result<()>> {
        wait::heed(&self.p);
        if self.p[0].revents != 0 || self.has_gone() {
            return Some(Ok(()));
        }
        match woken {
            Ok(_) if self.until.is_over() => Some(Err(Errno::EAGAIN)),
            Ok(_) => None,
            Err(Errno::EINTR) => Some(Err(Errno::EINTR)),
            Err(_) => Some(Ok(())),
        }
    }
}

/// The time that SO_RCVTIMEO gives a receive, nanoseconds; 0: for ever. None: the receive does not wait, or its limit
/// is not known.
fn limit(fd: i32, d: &Desc) -> Option<u64> {
    let flags = sys::fcntl(fd, libc::F_GETFL, 0).ok()?;
    let limit = sys::time_option(fd, libc::SO_RCVTIMEO).ok()?;
    let kept = d.options().receive_timeout();
    (flags & libc::O_NONBLOCK == 0 && (kept == 0 || kept == limit)).then_some(limit)
}
