//! Privileged operations, behind one interface.
//!
//! The system monitor is two processes. The *broker* has the privileges, and does what this
//! interface offers. The *front* talks to clients and has all their state, but no privilege. A
//! request consists of plain values and descriptors. Where the kernel can tell a value from a
//! descriptor, the broker asks the kernel and ignores the front's value. A private monitor, and
//! the monitor of a test, is one process with the same interface. ADR 39.
//!
//! | module | concern |
//! | --- | --- |
//! | [`line`] | messages between broker and front |
//! | [`rights`] | the broker's side: checks requests and carries them out |
//! | [`split`] | makes the two processes, and ends them together |
//! | [`confine`] | how the front gives up its privileges |
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

/// Access to the privileged operations.
pub enum Broker {
    /// The broker is a part of this process.
    Here(Box<RefCell<Rights>>),
    /// The broker is another process, behind this socket.
    There(OwnedFd),
}

impl Broker {
    /// A broker in this process. `endpoint`: the socket where clients connect; `keep`, `beside`:
    /// see [`Rights::new`].
    pub fn here(endpoint: BorrowedFd<'_>, keep: Option<&Path>, beside: Option<&Path>) -> Broker {
        Broker::Here(Box::new(RefCell::new(Rights::new(endpoint, keep, beside))))
    }

    /// Sets what [`Broker::hosts`] may announce. (A broker in another process reads this from its
    /// own configuration.)
    #[must_use]
    pub fn announcing(self, what: Option<Announce>) -> Broker {
        if let Broker::Here(rights) = &self {
            rights.borrow_mut().announces = what;
        }
        self
    }

    /// See [`Rights::retire`].
    #[must_use]
    pub fn retired(self, retired: bool) -> Broker {
        if let (true, Broker::Here(rights)) = (retired, &self) {
            rights.borrow_mut().retire();
        }
        self
    }

    fn there(line: OwnedFd) -> Broker {
        Broker::There(line)
    }

    /// Sends a request to the broker, and waits for the answer.
    ///
    /// # Errors
    /// The broker's errno.
    pub fn ask(&self, ask: Ask, fds: &[BorrowedFd<'_>]) -> Result<Given, Errno> {
        match self {
            Broker::Here(rights) => rights.borrow_mut().handle(ask, fds),
            Broker::There(line) => {
                line::send(line.as_fd(), &ask, fds).unwrap_or_else(|_| gone());
                let Ok(Some((told, fds))) = line::receive::<Told>(line.as_fd()) else { gone() };
                let fds = fds?;
                match told.error {
                    0 => Ok(Given { number: told.number, fds }),
                    e => Err(Errno::from_raw_os_error(e)),
                }
            }
        }
    }

    /// Shows a descriptor to the broker. When this returns, the broker has closed its copy. So the
    /// owner may close the descriptor and expect its address to be free.
    fn show(&self, what: Ask, fd: BorrowedFd<'_>) {
        if let Err(e) = self.ask(what, &[fd]) {
            tracing::debug!(?what, "not taken note of: {e}");
        }
    }

    /// Tells the broker that a client has connected, over this control socket.
    pub fn user(&self, control: BorrowedFd<'_>) {
        self.show(Ask::User, control);
    }

    /// Tells the broker that a client has shown this listening socket.
    pub fn listener(&self, fd: BorrowedFd<'_>) {
        self.show(Ask::Listener, fd);
    }

    /// Tells the broker that a client has shown this bound socket.
    pub fn bound(&self, fd: BorrowedFd<'_>) {
        self.show(Ask::Bound, fd);
    }

    /// See [`crate::maker::connection`]. `shown`: a TCP socket of the network namespace `netns`,
    /// unless that namespace is the broker's.
    ///
    /// # Errors
    /// Those of [`crate::maker::connection`]. EPERM: no client has shown a descriptor that allows
    /// the connection.
    pub fn connection(&self, order: &Order, netns: u64, shown: Option<BorrowedFd<'_>>) -> Result<[OwnedFd; 2], Errno> {
        let given = self.ask(Ask::Connection { order: *order, netns }, shown.as_slice())?;
        given.fds.try_into().map_err(|_| Errno::PROTO)
    }

    /// See [`crate::maker::dial`].
    ///
    /// # Errors
    /// Those of [`Broker::connection`].
    pub fn dial(&self, order: &Order, netns: u64, shown: Option<BorrowedFd<'_>>) -> Result<OwnedFd, Errno> {
        self.ask(Ask::Dial { order: *order, netns }, shown.as_slice())?.fd()
    }

    /// Makes another listen socket like `global`, for the client of a control socket.
    ///
    /// # Errors
    /// EPERM: the client may not have such a socket.
    pub fn clone_listener(
        &self,
        global: BorrowedFd<'_>,
        control: BorrowedFd<'_>,
        reservation: bool,
    ) -> Result<OwnedFd, Errno> {
        self.ask(Ask::Clone { reservation }, &[global, control])?.fd()
    }

    /// Gets the selector for a group of listeners, with room for all possible CPUs. `kept`: the
    /// selector that a former monitor has left, if there is one; and it stays for the next
    /// monitor, if possible.
    ///
    /// # Errors
    /// The broker cannot load the selector. Its log says why.
    pub fn selector(&self, group: u64, kept: bool) -> Result<Select, Errno> {
        let given = self.ask(Ask::Selector { group, kept }, &[])?;
        let [program, sockets, slots, selections, balances, waker] = given.fds.try_into().map_err(|_| Errno::PROTO)?;
        let parts = Parts { program, sockets, slots, selections, balances, waker };
        Select::of(parts, possible_cpus()).map_err(|_| Errno::OPNOTSUPP)
    }

    /// Removes what is kept of a group for the next monitor.
    pub fn forget(&self, group: u64) {
        let _ = self.ask(Ask::Forget { group }, &[]);
    }

    /// The state of groups that the former monitor has kept.
    pub fn kept(&self) -> Option<Vec<u8>> {
        line::read(self.ask(Ask::Kept, &[]).ok()?.fd().ok()?.as_fd()).ok()
    }

    /// Keeps this state of groups for the next monitor, in place of the former state.
    ///
    /// # Errors
    /// Those of file operations.
    pub fn keep(&self, text: &[u8]) -> Result<(), Errno> {
        self.ask(Ask::Keep, &[line::text(text)?.as_fd()]).map(drop)
    }

    /// Removes the kept state, because no monitor will follow this one.
    pub fn leave_nothing(&self) {
        let _ = self.ask(Ask::Leave, &[]);
    }

    /// A page to be mapped: counts, for each port, the sockets that have stopped listening.
    ///
    /// # Errors
    /// The broker cannot load the BPF program. Its log says why.
    pub fn closings(&self) -> Result<OwnedFd, Errno> {
        self.ask(Ask::Closings, &[])?.fd()
    }

    /// The record of which sockets are the two ends of one connection, for connections made from
    /// now on.
    ///
    /// # Errors
    /// The broker cannot load the BPF program. Its log says why.
    pub fn pairs(&self) -> Result<Pairs, Errno> {
        let [peers, watched, ended, reasons] = self.ask(Ask::Pairs, &[])?.fds.try_into().map_err(|_| Errno::PROTO)?;
        Pairs::of(pairs::Parts { peers, watched, ended, reasons }).map_err(|_| Errno::OPNOTSUPP)
    }

    /// Announces this host to other hosts, as configured. The result has what other hosts have
    /// announced.
    ///
    /// # Errors
    /// The reason why the announcement is impossible.
    pub fn hosts(&self) -> Result<Hosts, String> {
        let given = self.ask(Ask::Hosts, &[]).map_err(|e| e.to_string())?;
        if given.number != 0 {
            let text = given.fd().and_then(|fd| line::read(fd.as_fd())).map_err(|e| e.to_string())?;
            return Err(String::from_utf8_lossy(&text).into_owned());
        }
        let [sockets, hosts, reasons] = given.fds.try_into().map_err(|_| Errno::PROTO.to_string())?;
        Ok(Hosts::of(announce::Parts { sockets, hosts, reasons }))
    }

    /// A sock_diag socket in the network namespace of `socket`.
    ///
    /// # Errors
    /// EXDEV: the monitor may not enter that namespace.
    pub fn diag(&self, socket: BorrowedFd<'_>) -> Result<SockDiag, Errno> {
        self.ask(Ask::Diag, &[socket])?.fd().map(SockDiag::on)
    }

    /// Inode number of a socket's network namespace; `None`: the broker may not read it.
    pub fn netns_inode(&self, socket: BorrowedFd<'_>) -> Option<u64> {
        self.ask(Ask::Inode, &[socket]).ok().map(|g| g.number)
    }

    /// Path of a process's executable.
    pub fn exe(&self, pid: u32, pidfd: Option<BorrowedFd<'_>>) -> Option<PathBuf> {
        let given = self.ask(Ask::Exe { pid }, pidfd.as_slice()).ok()?;
        Some(OsString::from_vec(line::read(given.fd().ok()?.as_fd()).ok()?).into())
    }

    /// A socket that is readable when the rules of nf_tables change.
    ///
    /// # Errors
    /// Those of the system calls.
    pub fn rules(&self) -> Result<OwnedFd, Errno> {
        self.ask(Ask::Rules, &[])?.fd()
    }

    /// Whether nf_tables has chains through which local packets pass.
    ///
    /// # Errors
    /// nf_tables does not answer.
    pub fn has_chains(&self) -> Result<bool, Errno> {
        self.ask(Ask::Chains, &[]).map(|g| g.number != 0)
    }

    /// A socket that is readable when policies of IPsec change.
    ///
    /// # Errors
    /// Those of the system calls.
    pub fn xfrm_events(&self) -> Result<OwnedFd, Errno> {
        self.ask(Ask::Xfrm, &[])?.fd()
    }

    /// Which kinds of policy ([`found`]) apply on this host, or in the network namespace of a TCP
    /// socket.
    ///
    /// # Errors
    /// The broker may not find out.
    pub fn has(&self, socket: BorrowedFd<'_>) -> Result<u64, Errno> {
        self.ask(Ask::Host, &[socket]).map(|g| g.number)
    }

    /// Whether BPF programs of one of these types (numbers below 64) are in force for a cgroup;
    /// `None`: unknown.
    pub fn has_programs(&self, cgroup: BorrowedFd<'_>, kinds: &[u32]) -> Option<bool> {
        let kinds = kinds.iter().fold(0, |kinds, kind| kinds | 1 << kind);
        self.ask(Ask::Programs { kinds }, &[cgroup]).ok().map(|g| g.number != 0)
    }

    /// Carries out a request about steering from the client of a control socket. `sender`: the
    /// process that sent the request.
    ///
    /// # Errors
    /// EPERM: the client lacks the right.
    pub fn steer(&self, request: &[u8], control: BorrowedFd<'_>, sender: &Sender) -> Result<steer::Done, Errno> {
        let (text, peer) = (line::text(request)?, descriptor::peer(control)?);
        match &sender.pidfd {
            Some(pidfd) => self.ask(Ask::Steer, &[text.as_fd(), control, pidfd.as_fd()])?.read(),
            // The sender has no pidfd (before Linux 6.5). The process is sending now, so its
            // number is valid.
            None if sender.pid == peer.0 => self.ask(Ask::Steer, &[text.as_fd(), control])?.read(),
            None => Err(Errno::PERM),
        }
    }

    /// Other operations of steering. If the operation fails, nothing changes.
    pub fn steer_also(&self, what: &steer::Also) -> steer::Done {
        let request = serde_json::to_vec(what).ok().and_then(|text| line::text(&text).ok());
        let done = request.and_then(|text| self.ask(Ask::SteerAlso, &[text.as_fd()]).ok()?.read().ok());
        done.unwrap_or_default()
    }
}

/// Ends this process: the front cannot work without the broker.
fn gone() -> ! {
    tracing::error!("the broker is gone");
    std::process::exit(1)
}
