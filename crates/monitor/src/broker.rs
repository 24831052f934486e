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
use crate::sockdiag::SockDiag;
use crate::steer;
use crate::zones::possible_cpus;
use fsocket_bpf::select::{Parts, Select};
use line::{Ask, Told};
use rights::Rights;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::cell::RefCell;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

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
    /// The selector of a group of listeners (its number): program and maps; with what is kept (flag 1).
    pub const SELECTOR: u32 = 7;
    /// Removes what is kept of a group.
    pub const FORGET: u32 = 8;
    /// What the monitor before this one has kept of its groups.
    pub const KEPT: u32 = 9;
    /// Keeps it for the one after this.
    pub const KEEP: u32 = 10;
    /// Nothing is kept.
    pub const LEAVE: u32 = 11;
    /// The count of listeners that have ended.
    pub const CLOSINGS: u32 = 12;
    /// A line to sock_diag, in the network namespace of a socket.
    pub const DIAG: u32 = 13;
    /// Number of a socket's network namespace.
    pub const INODE: u32 = 14;
    /// The executable of a process: its pidfd, or else its number.
    pub const EXE: u32 = 15;
    /// A socket that tells when nf_tables changes.
    pub const RULES: u32 = 16;
    /// Whether nf_tables has chains that local packets pass.
    pub const CHAINS: u32 = 17;
    /// How many programs of a type are in force for a cgroup.
    pub const PROGRAMS: u32 = 18;
    /// What `fastsocket steer` asks for: the request, the control socket of who asks.
    pub const STEER: u32 = 19;
    /// The rest of steering ([`crate::steer::Also`]).
    pub const STEER_ALSO: u32 = 20;
    /// Whether there are tables of iptables of old.
    pub const TABLES: u32 = 21;
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

    fn number(number: u64) -> Given {
        Given { number, fds: Vec::new() }
    }

    fn json(what: &impl serde::Serialize) -> Result<Given, Errno> {
        let text = serde_json::to_vec(what).map_err(|_| Errno::NOMEM)?;
        line::text(&text).map(Given::one)
    }

    fn read<T: serde::de::DeserializeOwned>(self) -> Result<T, Errno> {
        serde_json::from_slice(&line::read(self.fd()?.as_fd())?).map_err(|_| Errno::PROTO)
    }

    /// The only descriptor.
    fn fd(self) -> Result<OwnedFd, Errno> {
        self.fds.into_iter().next().ok_or(Errno::PROTO)
    }
}

pub(crate) fn errno_of(e: std::io::Error) -> Errno {
    e.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}

impl Broker {
    /// All in this process. `endpoint`: where clients come from; `keep`, `beside`: as of [`Rights::new`].
    pub fn here(endpoint: BorrowedFd<'_>, keep: Option<&Path>, beside: Option<&Path>) -> Broker {
        Broker::Here(Box::new(RefCell::new(Rights::new(endpoint, keep, beside))))
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

    fn plain(&self, op: u32, number: u64) -> Result<Given, Errno> {
        self.ask(Ask { number, ..Ask::new(op) }, &[])
    }

    /// The selector for a group of listeners, for as many CPUs as the machine may have. `kept`: as
    /// another monitor has left it, and for the next one, if that can be had.
    ///
    /// # Errors
    /// It cannot be had; why is in the log.
    pub fn selector(&self, group: u64, kept: bool) -> Result<Select, Errno> {
        let given = self.ask(Ask { number: group, flags: kept.into(), ..Ask::new(op::SELECTOR) }, &[])?;
        let [program, sockets, slots, selections, balances, bell] = given.fds.try_into().map_err(|_| Errno::PROTO)?;
        let parts = Parts { program, sockets, slots, selections, balances, bell };
        Select::of(parts, possible_cpus()).map_err(|_| Errno::OPNOTSUPP)
    }

    /// A group is not kept any more.
    pub fn forget(&self, group: u64) {
        let _ = self.plain(op::FORGET, group);
    }

    /// What was kept of groups.
    pub fn kept(&self) -> Option<Vec<u8>> {
        line::read(self.plain(op::KEPT, 0).ok()?.fd().ok()?.as_fd()).ok()
    }

    /// Keeps this instead.
    ///
    /// # Errors
    /// Of files.
    pub fn keep(&self, text: &[u8]) -> Result<(), Errno> {
        self.ask(Ask::new(op::KEEP), &[line::text(text)?.as_fd()]).map(drop)
    }

    /// No monitor comes after this one.
    pub fn leave_nothing(&self) {
        let _ = self.plain(op::LEAVE, 0);
    }

    /// To be mapped: how many listening sockets have stopped to listen, by port.
    ///
    /// # Errors
    /// It cannot be had; why is in the log.
    pub fn closings(&self) -> Result<OwnedFd, Errno> {
        self.plain(op::CLOSINGS, 0)?.fd()
    }

    /// A line to sock_diag where that socket is.
    ///
    /// # Errors
    /// EXDEV: the monitor may not enter it.
    pub fn diag(&self, socket: BorrowedFd<'_>) -> Result<SockDiag, Errno> {
        self.ask(Ask::new(op::DIAG), &[socket])?.fd().map(SockDiag::on)
    }

    /// Inode number of a socket's network namespace; `None`: we may not know.
    pub fn netns_inode(&self, socket: BorrowedFd<'_>) -> Option<u64> {
        self.ask(Ask::new(op::INODE), &[socket]).ok().map(|g| g.number)
    }

    /// The executable of a process.
    pub fn exe(&self, pid: u32, pidfd: Option<BorrowedFd<'_>>) -> Option<PathBuf> {
        let given = self.ask(Ask { number: pid.into(), ..Ask::new(op::EXE) }, pidfd.as_slice()).ok()?;
        Some(OsString::from_vec(line::read(given.fd().ok()?.as_fd()).ok()?).into())
    }

    /// A socket that is readable when the rules of nf_tables change.
    ///
    /// # Errors
    /// Of the calls.
    pub fn rules(&self) -> Result<OwnedFd, Errno> {
        self.plain(op::RULES, 0)?.fd()
    }

    /// Whether nf_tables has chains that local packets pass.
    ///
    /// # Errors
    /// It does not answer.
    pub fn has_chains(&self) -> Result<bool, Errno> {
        self.plain(op::CHAINS, 0).map(|g| g.number != 0)
    }

    /// Whether there are tables of iptables of old.
    ///
    /// # Errors
    /// None that the broker gives.
    pub fn has_tables(&self) -> Result<bool, Errno> {
        self.plain(op::TABLES, 0).map(|g| g.number != 0)
    }

    /// How many programs of this type are in force for a cgroup; `None`: not known.
    pub fn programs(&self, cgroup: BorrowedFd<'_>, kind: u32) -> Option<u64> {
        self.ask(Ask { number: kind.into(), ..Ask::new(op::PROGRAMS) }, &[cgroup]).ok().map(|g| g.number)
    }

    /// Does what the client of a control socket asks for about steering.
    ///
    /// # Errors
    /// EPERM: it has not the right to.
    pub fn steer(&self, request: &[u8], control: BorrowedFd<'_>) -> Result<steer::Done, Errno> {
        self.ask(Ask::new(op::STEER), &[line::text(request)?.as_fd(), control])?.read()
    }

    /// The rest of steering; a failure changes nothing.
    pub fn steer_also(&self, what: &steer::Also) -> steer::Done {
        let request = serde_json::to_vec(what).ok().and_then(|text| line::text(&text).ok());
        let done = request.and_then(|text| self.ask(Ask::new(op::STEER_ALSO), &[text.as_fd()]).ok()?.read().ok());
        done.unwrap_or_default()
    }
}

/// One half does not live without the other.
fn gone() -> ! {
    tracing::error!("the broker is gone");
    std::process::exit(1)
}
