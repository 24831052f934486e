//! What takes a privilege, behind one interface.
//!
//! The system monitor is two processes. The *broker* has the privileges, and does what this interface
//! says; the *front* talks to clients, has all state of theirs, and no privilege. A request is plain
//! values and descriptors, and the broker believes none of the values where the kernel can say by
//! the descriptors. A private monitor, and the monitor of a test, is one process with
//! the same interface. ADR 39.
//!
//! | module | concern |
//! | --- | --- |
//! | [`line`] | messages between the two |
//! | [`rights`] | the broker's side: checks, and does |
//! | [`split`] | makes the two processes, and ends them together |
//! | [`confine`] | what the front gives up |

pub mod confine;
pub mod line;
pub mod rights;
pub mod split;

use crate::descriptor::Attached;
use crate::maker::Order;
use line::{Ask, Told};
use rights::Rights;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::cell::RefCell;

/// What can be asked for.
pub mod op {
    /// The user of a control socket is served.
    pub const USER: u32 = 1;
    /// A listening socket was shown.
    pub const LISTENER: u32 = 2;
    /// A bound socket was shown.
    pub const BOUND: u32 = 3;
    /// Both ends of a connection.
    pub const CONNECTION: u32 = 4;
    /// A socket that connects to a listener.
    pub const DIAL: u32 = 5;
    /// Another listen socket; fds: the one there is, the control socket of who asks.
    pub const CLONE: u32 = 6;
}

/// The way to what takes a privilege.
pub enum Broker {
    /// In this process.
    Here(Box<RefCell<Rights>>),
    /// In another one.
    There(OwnedFd),
}

/// An answer.
#[derive(Default)]
pub struct Given {
    pub number: u64,
    pub fds: Vec<OwnedFd>,
}

impl Given {
    fn one(fd: OwnedFd) -> Given {
        Given { number: 0, fds: vec![fd] }
    }

    /// The only descriptor.
    fn fd(self) -> Result<OwnedFd, Errno> {
        self.fds.into_iter().next().ok_or(Errno::PROTO)
    }
}

impl Broker {
    /// All in this process. `endpoint`: where clients come from.
    pub fn here(endpoint: BorrowedFd<'_>) -> Broker {
        Broker::Here(Box::new(RefCell::new(Rights::new(endpoint))))
    }

    fn there(line: OwnedFd) -> Broker {
        Broker::There(line)
    }

    /// Asks, and waits for the answer.
    ///
    /// # Errors
    /// What the broker says.
    pub fn ask(&self, ask: Ask, fds: &[BorrowedFd<'_>]) -> Result<Given, Errno> {
        match self {
            Broker::Here(rights) => rights.borrow_mut().handle(&ask, fds),
            Broker::There(line) => {
                line::send(line.as_fd(), &ask, fds).unwrap_or_else(|_| gone());
                let Ok(Some((told, fds))) = line::receive::<Told>(line.as_fd()) else { gone() };
                let fds = fds?.into_iter().map(Attached::keep).collect();
                match told.error {
                    0 => Ok(Given { number: told.number, fds }),
                    e => Err(Errno::from_raw_os_error(e as i32)),
                }
            }
        }
    }

    /// Shows a descriptor. When it returns the broker has it no more: its owner may close it and
    /// expect its address to be free.
    fn show(&self, op: u32, fd: BorrowedFd<'_>) {
        if let Err(e) = self.ask(Ask::new(op), &[fd]) {
            tracing::debug!(op, "not taken note of: {e}");
        }
    }

    /// A client has come, over this control socket.
    pub fn user(&self, control: BorrowedFd<'_>) {
        self.show(op::USER, control);
    }

    /// A client has shown this listening socket.
    pub fn listener(&self, fd: BorrowedFd<'_>) {
        self.show(op::LISTENER, fd);
    }

    /// A client has shown this socket, which is bound.
    pub fn bound(&self, fd: BorrowedFd<'_>) {
        self.show(op::BOUND, fd);
    }

    /// [`crate::maker::connection`]. `shown`: a TCP socket of that network namespace, where it is not
    /// the monitor's own.
    ///
    /// # Errors
    /// As there; EPERM: no client has shown what would allow it.
    pub fn connection(&self, order: &Order, netns: u64, shown: Option<BorrowedFd<'_>>) -> Result<[OwnedFd; 2], Errno> {
        let given = self.ask(Ask::of(op::CONNECTION, order, netns), shown.as_slice())?;
        given.fds.try_into().map_err(|_| Errno::PROTO)
    }

    /// [`crate::maker::dial`].
    ///
    /// # Errors
    /// As of [`Broker::connection`].
    pub fn dial(&self, order: &Order, netns: u64, shown: Option<BorrowedFd<'_>>) -> Result<OwnedFd, Errno> {
        self.ask(Ask::of(op::DIAL, order, netns), shown.as_slice())?.fd()
    }

    /// Another listen socket like `global`, for the client of a control socket.
    ///
    /// # Errors
    /// EPERM: it may not have one.
    pub fn clone_listener(
        &self,
        global: BorrowedFd<'_>,
        control: BorrowedFd<'_>,
        guard: bool,
    ) -> Result<OwnedFd, Errno> {
        self.ask(Ask { number: guard.into(), ..Ask::new(op::CLONE) }, &[global, control])?.fd()
    }
}

/// One half does not live without the other.
fn gone() -> ! {
    tracing::error!("the broker is gone");
    std::process::exit(1)
}
