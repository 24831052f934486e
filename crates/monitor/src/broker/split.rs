//! The two processes: made before there is any thread, and ended together.
//!
//! The broker is the one that was started: what starts and stops `fastsocketd` knows it, and what it
//! holds (the socket's name, steered devices) is back in order when it has ended. The front dies with
//! it by the kernel (PR_SET_PDEATHSIG); the broker ends when the front does.

use super::line::{self, Given, RawAsk, Told};
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

/// A front that has closed the line may take so long to end, in seconds.
const PATIENCE: i64 = 2;

/// Which of the two this process is now.
pub enum Half {
    Front { endpoint: Endpoint, broker: Broker },
    Broker(Service),
}

/// What the broker works with.
pub struct Service {
    endpoint: Endpoint,
    line: OwnedFd,
    front: Pid,
    pidfd: OwnedFd,
}

/// Whether this process has a privilege to be kept from those who talk to clients.
pub fn is_due() -> bool {
    super::confine::capabilities() != 0
}

/// Makes the front. To be called while there is no other thread.
///
/// # Errors
/// Of the calls.
pub fn split(endpoint: Endpoint) -> std::io::Result<Half> {
    let (ours, theirs) = pair()?;
    let broker = rustix::process::getpid();
    // SAFETY: there is no other thread that could hold a lock.
    match unsafe { libc::fork() } {
        -1 => Err(std::io::Error::last_os_error()),
        0 => {
            drop(ours);
            super::confine::drop_privileges()?;
            // After that: the kernel forgets it where credentials change.
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
    /// As two processes have it, but with a thread for the broker: for tests.
    ///
    /// # Errors
    /// Of the calls.
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

/// Answers one request. False: nobody asks any more.
fn serve(rights: &mut Rights, line: BorrowedFd<'_>) -> bool {
    let Ok(Some((ask, fds))) = line::receive::<RawAsk>(line) else { return false };
    // The front has each of them until it is answered: to close them here is never the last close.
    let done = fds.and_then(|fds| {
        let shown: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        rights.handle(ask.ask()?, &shown)
    });
    if let Err(e) = &done {
        tracing::debug!(?ask, "refused: {e}");
    }
    let error = done.as_ref().map_or_else(|e| e.raw_os_error() as u32, |_| 0);
    let Given { number, fds } = done.unwrap_or_default();
    // A client may have its end, and have closed it, before this function ends.
    let fds: Vec<ForeignFd> = fds.into_iter().map(|fd| ForeignFd::new(fd, 0)).collect();
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(ForeignFd::as_fd).collect();
    line::send(line, &Told { error, number, ..Told::default() }, &fds).is_ok()
}

impl Service {
    /// Serves until the front has ended; its exit status. `stop`: readable when both should end, if `ends` says
    /// so. `ended` comes before anything is given up.
    ///
    /// # Errors
    /// Of `poll`.
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
        let mut open = true;
        loop {
            let line_events = if open { PollFlags::IN } else { PollFlags::empty() };
            let mut fds = [
                PollFd::new(&pidfd, PollFlags::IN),
                PollFd::from_borrowed_fd(stop, PollFlags::IN),
                PollFd::new(&line, line_events),
            ];
            let limit = Timespec { tv_sec: PATIENCE, tv_nsec: 0 };
            // (Once the line is closed only the other two count.)
            let watched = if open { 3 } else { 2 };
            match poll(&mut fds[..watched], (!open).then_some(&limit)) {
                // It has nothing to do here any more.
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
