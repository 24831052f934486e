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
//! | [`clone`], [`keep`], `kernel`, `host` | what the broker does: listen sockets, files and pins, questions |

pub mod clone;
pub mod confine;
mod host;
pub mod keep;
mod kernel;
pub mod line;
pub mod rights;
mod shown;
pub mod split;

use crate::ancillary::Sender;
use crate::cpus::possible_cpus;
use crate::descriptor;
use crate::hosts::Announce;
use crate::maker::Order;
use crate::sockdiag::SockDiag;
use crate::steer;
use fsocket_bpf::announce::{self, Hosts};
use fsocket_bpf::pairs::{self, Pairs};
use fsocket_bpf::select::{Parts, Select};
pub use host::found;
use line::{Ask, Given, Told};
use rights::Rights;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::cell::RefCell;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// The way to what takes a privilege.
pub enum Broker {
    /// In this process.
    Here(Box<RefCell<Rights>>),
    /// In another one.
    There(OwnedFd),
}

impl Broker {
    /// All in this process. `endpoint`: where clients come from; `keep`, `beside`: as of [`Rights::new`].
    pub fn here(endpoint: BorrowedFd<'_>, keep: Option<&Path>, beside: Option<&Path>) -> Broker {
        Broker::Here(Box::new(RefCell::new(Rights::new(endpoint, keep, beside))))
    }

    /// What [`Broker::hosts`] may announce. (Another process has it from its own configuration.)
    #[must_use]
    pub fn announcing(self, what: Option<Announce>) -> Broker {
        if let Broker::Here(rights) = &self {
            rights.borrow_mut().announces = what;
        }
        self
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
            Broker::Here(rights) => rights.borrow_mut().handle(ask, fds),
            Broker::There(line) => {
                line::send(line.as_fd(), &ask.raw(), fds).unwrap_or_else(|_| gone());
                let Ok(Some((told, fds))) = line::receive::<Told>(line.as_fd()) else { gone() };
                let fds = fds?;
                match told.error {
                    0 => Ok(Given { number: told.number, fds }),
                    e => Err(Errno::from_raw_os_error(e as i32)),
                }
            }
        }
    }

    /// Shows a descriptor. When it returns the broker has it no more: its owner may close it and
    /// expect its address to be free.
    fn show(&self, what: Ask, fd: BorrowedFd<'_>) {
        if let Err(e) = self.ask(what, &[fd]) {
            tracing::debug!(?what, "not taken note of: {e}");
        }
    }

    /// A client has come, over this control socket.
    pub fn user(&self, control: BorrowedFd<'_>) {
        self.show(Ask::User, control);
    }

    /// A client has shown this listening socket.
    pub fn listener(&self, fd: BorrowedFd<'_>) {
        self.show(Ask::Listener, fd);
    }

    /// A client has shown this socket, which is bound.
    pub fn bound(&self, fd: BorrowedFd<'_>) {
        self.show(Ask::Bound, fd);
    }

    /// [`crate::maker::connection`]. `shown`: a TCP socket of that network namespace, where it is not
    /// the monitor's own.
    ///
    /// # Errors
    /// As there; EPERM: no client has shown what would allow it.
    pub fn connection(&self, order: &Order, netns: u64, shown: Option<BorrowedFd<'_>>) -> Result<[OwnedFd; 2], Errno> {
        let given = self.ask(Ask::Connection { order: *order, netns }, shown.as_slice())?;
        given.fds.try_into().map_err(|_| Errno::PROTO)
    }

    /// [`crate::maker::dial`].
    ///
    /// # Errors
    /// As of [`Broker::connection`].
    pub fn dial(&self, order: &Order, netns: u64, shown: Option<BorrowedFd<'_>>) -> Result<OwnedFd, Errno> {
        self.ask(Ask::Dial { order: *order, netns }, shown.as_slice())?.fd()
    }

    /// Another listen socket like `global`, for the client of a control socket.
    ///
    /// # Errors
    /// EPERM: it may not have one.
    pub fn clone_listener(
        &self,
        global: BorrowedFd<'_>,
        control: BorrowedFd<'_>,
        reservation: bool,
    ) -> Result<OwnedFd, Errno> {
        self.ask(Ask::Clone { reservation }, &[global, control])?.fd()
    }

    /// The selector for a group of listeners, for as many CPUs as the machine may have. `kept`: as
    /// another monitor has left it, and for the next one, if that can be had.
    ///
    /// # Errors
    /// It cannot be had; why is in the log.
    pub fn selector(&self, group: u64, kept: bool) -> Result<Select, Errno> {
        let given = self.ask(Ask::Selector { group, kept }, &[])?;
        let [program, sockets, slots, selections, balances, waker] = given.fds.try_into().map_err(|_| Errno::PROTO)?;
        let parts = Parts { program, sockets, slots, selections, balances, waker };
        Select::of(parts, possible_cpus()).map_err(|_| Errno::OPNOTSUPP)
    }

    /// A group is not kept any more.
    pub fn forget(&self, group: u64) {
        let _ = self.ask(Ask::Forget { group }, &[]);
    }

    /// What was kept of groups.
    pub fn kept(&self) -> Option<Vec<u8>> {
        line::read(self.ask(Ask::Kept, &[]).ok()?.fd().ok()?.as_fd()).ok()
    }

    /// Keeps this instead.
    ///
    /// # Errors
    /// Of files.
    pub fn keep(&self, text: &[u8]) -> Result<(), Errno> {
        self.ask(Ask::Keep, &[line::text(text)?.as_fd()]).map(drop)
    }

    /// No monitor comes after this one.
    pub fn leave_nothing(&self) {
        let _ = self.ask(Ask::Leave, &[]);
    }

    /// To be mapped: how many listening sockets have stopped to listen, by port.
    ///
    /// # Errors
    /// It cannot be had; why is in the log.
    pub fn closings(&self) -> Result<OwnedFd, Errno> {
        self.ask(Ask::Closings, &[])?.fd()
    }

    /// Which sockets are the ends of one connection, from now on.
    ///
    /// # Errors
    /// It cannot be had; why is in the log.
    pub fn pairs(&self) -> Result<Pairs, Errno> {
        let [peers, watched, ended, reasons] = self.ask(Ask::Pairs, &[])?.fds.try_into().map_err(|_| Errno::PROTO)?;
        Pairs::of(pairs::Parts { peers, watched, ended, reasons }).map_err(|_| Errno::OPNOTSUPP)
    }

    /// Announces this host to others, as the configuration wants it; what they say of themselves.
    ///
    /// # Errors
    /// Why it cannot be had.
    pub fn hosts(&self) -> Result<Hosts, String> {
        let given = self.ask(Ask::Hosts, &[]).map_err(|e| e.to_string())?;
        if given.number != 0 {
            let text = given.fd().and_then(|fd| line::read(fd.as_fd())).map_err(|e| e.to_string())?;
            return Err(String::from_utf8_lossy(&text).into_owned());
        }
        let [sockets, hosts, reasons] = given.fds.try_into().map_err(|_| Errno::PROTO.to_string())?;
        Ok(Hosts::of(announce::Parts { sockets, hosts, reasons }))
    }

    /// A line to sock_diag where that socket is.
    ///
    /// # Errors
    /// EXDEV: the monitor may not enter it.
    pub fn diag(&self, socket: BorrowedFd<'_>) -> Result<SockDiag, Errno> {
        self.ask(Ask::Diag, &[socket])?.fd().map(SockDiag::on)
    }

    /// Inode number of a socket's network namespace; `None`: we may not know.
    pub fn netns_inode(&self, socket: BorrowedFd<'_>) -> Option<u64> {
        self.ask(Ask::Inode, &[socket]).ok().map(|g| g.number)
    }

    /// The executable of a process.
    pub fn exe(&self, pid: u32, pidfd: Option<BorrowedFd<'_>>) -> Option<PathBuf> {
        let given = self.ask(Ask::Exe { pid }, pidfd.as_slice()).ok()?;
        Some(OsString::from_vec(line::read(given.fd().ok()?.as_fd()).ok()?).into())
    }

    /// A socket that is readable when the rules of nf_tables change.
    ///
    /// # Errors
    /// Of the calls.
    pub fn rules(&self) -> Result<OwnedFd, Errno> {
        self.ask(Ask::Rules, &[])?.fd()
    }

    /// Whether nf_tables has chains that local packets pass.
    ///
    /// # Errors
    /// It does not answer.
    pub fn has_chains(&self) -> Result<bool, Errno> {
        self.ask(Ask::Chains, &[]).map(|g| g.number != 0)
    }

    /// A socket that is readable when policies of IPsec change.
    ///
    /// # Errors
    /// Of the calls.
    pub fn xfrm_events(&self) -> Result<OwnedFd, Errno> {
        self.ask(Ask::Xfrm, &[])?.fd()
    }

    /// Which kinds of policy ([`found`]) this host has, and the network namespace of a TCP socket.
    ///
    /// # Errors
    /// We may not know.
    pub fn has(&self, socket: BorrowedFd<'_>) -> Result<u64, Errno> {
        self.ask(Ask::Host, &[socket]).map(|g| g.number)
    }

    /// Whether programs of one of these types (below 64) are in force for a cgroup; `None`: not known.
    pub fn has_programs(&self, cgroup: BorrowedFd<'_>, kinds: &[u32]) -> Option<bool> {
        let kinds = kinds.iter().fold(0, |kinds, kind| kinds | 1 << kind);
        self.ask(Ask::Programs { kinds }, &[cgroup]).ok().map(|g| g.number != 0)
    }

    /// Does what the client of a control socket asks for about steering. `sender`: of the request.
    ///
    /// # Errors
    /// EPERM: it has not the right to.
    pub fn steer(&self, request: &[u8], control: BorrowedFd<'_>, sender: &Sender) -> Result<steer::Done, Errno> {
        let (text, peer) = (line::text(request)?, descriptor::peer(control)?);
        match &sender.pidfd {
            Some(pidfd) => self.ask(Ask::Steer, &[text.as_fd(), control, pidfd.as_fd()])?.read(),
            // A process that sends now has not given its number to another one yet.
            None if sender.pid == peer.0 => self.ask(Ask::Steer, &[text.as_fd(), control])?.read(),
            None => Err(Errno::PERM),
        }
    }

    /// The rest of steering; a failure changes nothing.
    pub fn steer_also(&self, what: &steer::Also) -> steer::Done {
        let request = serde_json::to_vec(what).ok().and_then(|text| line::text(&text).ok());
        let done = request.and_then(|text| self.ask(Ask::SteerAlso, &[text.as_fd()]).ok()?.read().ok());
        done.unwrap_or_default()
    }
}

/// One half does not live without the other.
fn gone() -> ! {
    tracing::error!("the broker is gone");
    std::process::exit(1)
}
