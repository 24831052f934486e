//! Makes the two processes before there is any thread, and ends them together.
//!
//! The broker is the process that was started. So the service manager watches the broker, and when
//! the broker has ended, the socket's name and the steered devices are cleaned up. When the broker
//! dies, the kernel kills the front (PR_SET_PDEATHSIG). When the front ends, the broker ends.

use super::line::{self, Ask, Given, Told};
use super::rights::Rights;
use super::Broker;
use crate::endpoint::{Config, Endpoint};
use crate::foreign::ForeignFd;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};
use std::path::Path;

/// Seconds that a front may take to end after it has closed its socket to the broker.
const PATIENCE: i64 = 2;

/// Which of the two processes this one is now.
pub enum Half {
    Front { endpoint: Endpoint, broker: Broker },
    Broker(Service),
}

/// The broker's state.
pub struct Service {
    endpoint: Endpoint,
    line: OwnedFd,
    front: Pid,
    pidfd: OwnedFd,
}

/// Whether this process has a privilege that must be kept from the process that talks to clients.
pub fn is_due() -> bool {
    super::confine::capabilities() != 0
}

/// Forks the front. To be called while there is only one thread.
///
/// # Errors
/// Those of the system calls.
pub fn split(endpoint: Endpoint) -> std::io::Result<Half> {
    let (ours, theirs) = pair()?;
    let broker = rustix::process::getpid();
    // SAFETY: there is no other thread, so no lock can be held by a thread that the child lacks.
    match unsafe { libc::fork() } {
        -1 => Err(std::io::Error::last_os_error()),
        0 => {
            drop(ours);
            super::confine::drop_privileges()?;
            // To be done after privileges were dropped: the kernel clears this setting when
            // credentials change.
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            if rustix::process::getppid() != Some(broker) {
                std::process::exit(1);
            }
            Ok(Half::Front { endpoint: endpoint.left_to_another(), broker: Broker::there(theirs) })
        }
        pid => {
            let front = Pid::from_raw(pid).ok_or(Errno::SRCH)?;
            let pidfd = rustix::process::pidfd_open(front, PidfdFlags::empty())?;
            Ok(Half::Broker(Service { endpoint, line: ours, front, pidfd }))
        }
    }
}

fn pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

impl Broker {
    /// A broker as in two processes, but in a thread of this one: for tests.
    ///
    /// # Errors
    /// Those of the system calls.
    pub fn beside(endpoint: BorrowedFd<'_>, keep: Option<&Path>) -> std::io::Result<Broker> {
        let (ours, theirs) = pair()?;
        let (endpoint, keep) = (endpoint.try_clone_to_owned()?, keep.map(Path::to_owned));
        std::thread::Builder::new().name("broker".into()).spawn(move || {
            let mut rights = Rights::new(endpoint.as_fd(), keep.as_deref(), None);
            drop(endpoint);
            while serve(&mut rights, ours.as_fd()) {}
        })?;
        Ok(Broker::there(theirs))
    }
}

/// Answers one request. False: the front has closed the socket.
fn serve(rights: &mut Rights, line: BorrowedFd<'_>) -> bool {
    let Ok(Some((ask, fds))) = line::receive::<Ask>(line) else { return false };
    // The front keeps its copies until the answer comes, so closing these descriptors is never the
    // last close of a socket.
    let done = fds.and_then(|fds| {
        let shown: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        rights.handle(ask, &shown)
    });
    if let Err(e) = &done {
        tracing::debug!(?ask, "refused: {e}");
    }
    let error = done.as_ref().map_or_else(|e| e.raw_os_error(), |_| 0);
    let Given { number, fds } = done.unwrap_or_default();
    // A client may receive and close its socket before this function returns. Then the close here
    // is the last one, and [`ForeignFd`] makes sure that it does not take long.
    let fds: Vec<ForeignFd> = fds.into_iter().map(|fd| ForeignFd::new(fd, 0)).collect();
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(ForeignFd::as_fd).collect();
    line::send(line, &Told { error, number }, &fds).is_ok()
}

impl Service {
    /// Serves until the front has ended, and returns the exit status of the front. When `stop` is
    /// readable and `ends` returns true, both processes end. `ended` is called before the broker
    /// gives anything up.
    ///
    /// # Errors
    /// Those of `poll`.
    pub fn run(
        self,
        config: &Config,
        stop: BorrowedFd<'_>,
        mut ends: impl FnMut() -> bool,
        ended: impl FnOnce(),
    ) -> std::io::Result<i32> {
        let Service { endpoint, line, front, pidfd } = self;
        let mut rights = Rights::new(endpoint.fd.as_fd(), config.keep.as_deref(), config.socket.parent());
        rights.announces = config.hosts.clone();
        if config.retired {
            rights.retire();
        }
        let mut open = true;
        loop {
            let line_events = if open { PollFlags::IN } else { PollFlags::empty() };
            let mut fds = [
                PollFd::new(&pidfd, PollFlags::IN),
                PollFd::from_borrowed_fd(stop, PollFlags::IN),
                PollFd::new(&line, line_events),
            ];
            let limit = Timespec { tv_sec: PATIENCE, tv_nsec: 0 };
            // (A closed socket would always be ready, so it is not polled any more.)
            let watched = if open { 3 } else { 2 };
            match poll(&mut fds[..watched], (!open).then_some(&limit)) {
                // The front has closed its socket but does not end.
                Ok(0) => rustix::process::pidfd_send_signal(&pidfd, Signal::KILL)?,
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
            let ready = fds.each_ref().map(|fd| !fd.revents().is_empty());
            if ready[0] {
                let status = rustix::process::waitid(WaitId::Pid(front), WaitIdOptions::EXITED)?;
                ended();
                return Ok(status.and_then(|s| s.exit_status()).unwrap_or(1));
            }
            if ready[1] && ends() {
                rustix::process::pidfd_send_signal(&pidfd, Signal::TERM)?;
            }
            if ready[2] && open {
                open = serve(&mut rights, line.as_fd());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::SendFlags;

    /// If the front sends anything else, it is broken or taken over. Then the broker ends, and the
    /// front with it.
    #[test]
    fn what_is_no_request_ends_the_line() {
        let (ours, theirs) = pair().unwrap();
        let mut rights = Rights::new(theirs.as_fd(), None, None);
        let mut goes_on = |message: &str| {
            rustix::net::send(&theirs, message.as_bytes(), SendFlags::empty()).unwrap();
            serve(&mut rights, ours.as_fd())
        };
        assert!(goes_on("\"Leave\"") && goes_on(&format!("\"Leave\"{:900}", "")));
        for bad in ["1", "\"Nothing\"", "{\"Clone\":{}}", &format!("\"Leave\"{:2000}", ""), &"[".repeat(1000)] {
            assert!(!goes_on(bad), "{bad}");
        }
    }
}
