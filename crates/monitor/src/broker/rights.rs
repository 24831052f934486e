//! The broker's side. It checks each request against what the kernel says about the descriptors
//! that came with this request and with earlier ones, then carries it out.

use super::clone::{clone_as_owner, is_alone, listening};
use super::host::{self, Host};
use super::keep::Keep;
use super::kernel;
use super::line::{self, errno_of, Ask, Given};
use super::shown::Shown;
use crate::address::{V4_ANY, V6_ANY};
use crate::cpus::possible_cpus;
use crate::descriptor;
use crate::hosts::Announce;
use crate::maker::{self, Order};
use crate::netlink::Netlink;
use crate::pidfd;
use crate::sockdiag::SockDiag;
use crate::steer::{self, Steers};
use fsocket_bpf::announce::{self, Announcer};
use fsocket_bpf::closings::Closings;
use fsocket_bpf::pairs;
use fsocket_bpf::probe;
use fsocket_bpf::select::Parts;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{sockopt, AddressFamily, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType};
use std::collections::BTreeSet;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// From `enum bpf_attach_type`: sockops programs, which see events of a socket's life.
const SOCK_OPS: u32 = 3;

/// A network namespace, a port in it, and an IP address.
type Address = (u64, u16, [u8; 16]);

pub struct Rights {
    /// The name of the socket where clients connect.
    endpoint: Option<SocketAddrAny>,
    /// SO_NETNS_COOKIE of this process.
    netns: u64,
    diag: Option<SockDiag>,
    /// Users that are or were clients.
    users: BTreeSet<u32>,
    /// Addresses of the listening sockets that clients have shown, and the users they belong to.
    listeners: Shown<Address, u32>,
    /// Bound sockets that clients have shown: network namespace and port, by cookie.
    bound: Shown<u64, (u64, u16)>,
    /// Cookies of listen sockets made for processes of another user than the listener's.
    cloned: Shown<u64, ()>,
    /// Where groups of listeners are kept for the next monitor.
    keep: Option<Keep>,
    closings: Option<Closings>,
    /// The record of connections; empty while the program is being loaded.
    pairs: Option<Arc<OnceLock<Option<pairs::Parts>>>>,
    /// The announcement to other hosts that the configuration permits, and the one that is
    /// running.
    pub(super) announces: Option<Announce>,
    announcer: Option<Announcer>,
    nf_tables: Option<Netlink>,
    host: Host,
    steers: Steers,
    /// The directory where steering is recorded, and whether steering of a former monitor is to be
    /// set up again.
    steer_file: Option<(PathBuf, bool)>,
    /// See [`Rights::retire`].
    retired: bool,
}

impl Rights {
    /// `keep`: the directory of the state for the next monitor. `beside`: where to record the
    /// changes of devices that must be undone, if there is no `keep`.
    pub fn new(endpoint: BorrowedFd<'_>, keep: Option<&Path>, beside: Option<&Path>) -> Rights {
        let netns = rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .and_then(|s| descriptor::netns_cookie(s.as_fd()));
        Rights {
            endpoint: rustix::net::getsockname(endpoint).ok(),
            netns: netns.unwrap_or(0),
            diag: SockDiag::new(),
            users: BTreeSet::new(),
            listeners: Shown::new(),
            bound: Shown::new(),
            cloned: Shown::new(),
            keep: keep.map(Keep::new),
            closings: None,
            pairs: None,
            announces: None,
            announcer: None,
            nf_tables: None,
            host: Host::default(),
            steers: Steers::default(),
            steer_file: keep.or(beside).map(|dir| (dir.to_owned(), keep.is_some())),
            retired: false,
        }
    }

    /// A monitor of another ABI has taken this one's place on the host. That monitor alone steers
    /// devices and announces the host from now on.
    pub fn retire(&mut self) {
        (self.steer_file, self.retired) = (None, true);
    }

    /// Checks a request and carries it out.
    ///
    /// # Errors
    /// EPERM, EINVAL: refused. Else those of the operation.
    // Long: one arm for each operation of the broker, so that all of them are seen at once.
    pub fn handle(&mut self, ask: Ask, fds: &[BorrowedFd<'_>]) -> Result<Given, Errno> {
        let fd = || fds.first().copied().ok_or(Errno::BADF);
        let second = || fds.get(1).copied().ok_or(Errno::BADF);
        match ask {
            Ask::User => self.user(fd()?),
            Ask::Listener => self.listener(fd()?),
            Ask::Bound => self.shown_bound(fd()?),
            Ask::Connection { order, netns } => self.connection(order, netns, fds),
            Ask::Dial { order, netns } => self.dial(order, netns, fds),
            Ask::Clone { reservation } => self.clone_listener(fd()?, second()?, reservation),
            Ask::Selector { group, kept } => self.selector(group, kept),
            Ask::Forget { group } => {
                self.keep.iter().for_each(|k| k.forget(group));
                Ok(Given::default())
            }
            Ask::Kept => line::text(&self.kept()?.read().map_err(errno_of)?).map(Given::one),
            Ask::Keep => {
                let text = line::read(fd()?)?;
                self.kept()?.write(&text).map_err(errno_of).map(|()| Given::default())
            }
            Ask::Leave => {
                self.keep.take().iter().for_each(Keep::leave_nothing);
                self.steers.leave_nothing();
                Ok(Given::default())
            }
            Ask::Closings => self.closings(),
            Ask::Pairs => self.pairs(),
            Ask::Hosts => self.announced(),
            Ask::Diag => {
                let there = maker::namespace_to_look(fd()?)?;
                maker::apart(Some(there.as_fd()), SockDiag::open).map(|diag| Given::one(diag.into()))
            }
            Ask::Inode => descriptor::netns_inode(fd()?).map(Given::number).ok_or(Errno::PERM),
            Ask::Exe { pid } => executable(pid, fds.first().copied()),
            Ask::Xfrm => host::xfrm_events().map(Given::one),
            Ask::Rules => kernel::rules().map(Given::one),
            Ask::Chains => self.chains(),
            Ask::Host => self.host.has(fd()?).map(Given::number),
            Ask::Programs { kinds } => self.programs(fd()?, kinds),
            Ask::Steer => self.steer(fd()?, second()?, fds.get(2).copied()),
            Ask::SteerAlso => self.steer_also(fd()?),
        }
    }

    fn user(&mut self, control: BorrowedFd<'_>) -> Result<Given, Errno> {
        let uid = self.user_of(control)?;
        self.users.insert(uid);
        Ok(Given::default())
    }

    fn shown_bound(&mut self, fd: BorrowedFd<'_>) -> Result<Given, Errno> {
        let port = descriptor::bound_port(fd)?;
        self.bound.insert(sockopt::socket_cookie(fd)?, (descriptor::netns_cookie(fd)?, port));
        Ok(Given::default())
    }

    fn connection(&mut self, order: Order, netns: u64, fds: &[BorrowedFd<'_>]) -> Result<Given, Errno> {
        let (mut order, place, is_taken) = self.checked(order, netns, fds)?;
        // If another user listens at the server's address now, the connection gets other ports
        // than the named ones.
        order.named &= !is_taken;
        let fds = maker::connection(&order, place.as_ref().map(AsFd::as_fd))?;
        Ok(Given { number: 0, fds: fds.into() })
    }

    fn dial(&mut self, order: Order, netns: u64, fds: &[BorrowedFd<'_>]) -> Result<Given, Errno> {
        let (order, place, is_taken) = self.checked(order, netns, fds)?;
        if is_taken {
            return Err(Errno::PERM);
        }
        maker::dial(&order, place.as_ref().map(AsFd::as_fd)).map(Given::one)
    }

    fn selector(&self, group: u64, kept: bool) -> Result<Given, Errno> {
        let pins = self.keep.as_ref().filter(|_| kept).and_then(|k| k.folder(group));
        let parts = Parts::load(possible_cpus(), pins.as_deref()).map_err(|e| {
            tracing::warn!("zones use the classic selector: {e}");
            Errno::OPNOTSUPP
        })?;
        let Parts { program, sockets, slots, selections, balances, waker } = parts;
        Ok(Given { number: 0, fds: vec![program, sockets, slots, selections, balances, waker] })
    }

    fn kept(&self) -> Result<&Keep, Errno> {
        self.keep.as_ref().ok_or(Errno::NOENT)
    }

    fn closings(&mut self) -> Result<Given, Errno> {
        if self.closings.is_none() {
            self.closings = Some(Closings::start().map_err(|why| {
                tracing::warn!(%why, "listeners closed past the library are noticed late");
                Errno::OPNOTSUPP
            })?);
        }
        let page = self.closings.as_ref().ok_or(Errno::OPNOTSUPP)?.page();
        page.try_clone_to_owned().map_err(errno_of).map(Given::one)
    }

    fn pairs(&mut self) -> Result<Given, Errno> {
        let parts = self.pairs.get_or_insert_with(host::record_pairs).get().ok_or(Errno::AGAIN)?;
        let parts = parts.as_ref().ok_or(Errno::OPNOTSUPP)?.try_clone().map_err(|_| Errno::MFILE)?;
        let pairs::Parts { peers, watched, ended, reasons } = parts;
        Ok(Given { number: 0, fds: vec![peers, watched, ended, reasons] })
    }

    fn announced(&mut self) -> Result<Given, Errno> {
        if self.announces.is_none() {
            return Err(Errno::PERM);
        }
        match self.hosts() {
            Ok(announce::Parts { sockets, hosts, reasons }) => {
                Ok(Given { number: 0, fds: vec![sockets, hosts, reasons] })
            }
            Err(why) => Ok(Given { number: 1, fds: vec![line::text(why.to_string().as_bytes())?] }),
        }
    }

    fn chains(&mut self) -> Result<Given, Errno> {
        if self.nf_tables.is_none() {
            self.nf_tables = Some(kernel::questions()?);
        }
        let found = kernel::has_chains(self.nf_tables.as_mut().ok_or(Errno::IO)?)?;
        Ok(Given::number(found.into()))
    }

    fn programs(&self, cgroup: BorrowedFd<'_>, kinds: u64) -> Result<Given, Errno> {
        // (The sockops program that announces this host is not counted. The broker has attached
        // it, or the broker of the monitor that took this one's place.)
        let ours =
            |kind: &u32| *kind == SOCK_OPS && (self.announcer.is_some() || self.retired && self.announces.is_some());
        let mut kinds = (0..u64::BITS).filter(|kind| kinds >> kind & 1 != 0 && !ours(kind));
        let found = kinds.try_fold(0, |found: u32, kind| host::in_force(cgroup, kind).map(|n| found.saturating_add(n)));
        found.map(|n| Given::number(n.into())).ok_or(Errno::PERM)
    }

    /// `control`: the socket of the process that has connected. `sender`: the pidfd of the process
    /// that has sent this request.
    fn steer(
        &mut self,
        text: BorrowedFd<'_>,
        control: BorrowedFd<'_>,
        sender: Option<BorrowedFd<'_>>,
    ) -> Result<Given, Errno> {
        let request = serde_json::from_slice(&line::read(text)?).map_err(|_| Errno::INVAL)?;
        let sends = sender.is_none_or(pidfd::may_administer);
        if self.retired || self.user_of(control)? != 0 || !sends || !has_administrator(control)? {
            return Err(Errno::PERM);
        }
        Given::json(&self.steers.steer(request, control))
    }

    fn steer_also(&mut self, text: BorrowedFd<'_>) -> Result<Given, Errno> {
        let what = serde_json::from_slice(&line::read(text)?).map_err(|_| Errno::INVAL)?;
        if let (steer::Also::Begin, Some((file, again))) = (&what, self.steer_file.take()) {
            self.steers.take_over(&file, self.netns, again);
        }
        Given::json(&self.steers.also(what))
    }

    fn hosts(&mut self) -> fsocket_bpf::Result<announce::Parts> {
        let Some(Announce { cgroup, number }) = &self.announces else {
            return Err(probe::Missing::Permission.into());
        };
        if self.announcer.is_none() {
            let root = probe::cgroup2()?;
            let below = cgroup.as_deref().map_or(Path::new(""), |c| c.strip_prefix("/").unwrap_or(c));
            self.announcer = Some(Announcer::start(&root.join(below), *number)?);
        }
        self.announcer.as_ref().map_or(Err(probe::Missing::Permission.into()), Announcer::parts)
    }

    /// The user of a client. The socket must have come over the endpoint, or be one end of a
    /// socket pair. In both cases the kernel has recorded the user. A socket that is connected to
    /// another server is refused: it has that server's user, and its peer has a name.
    fn user_of(&self, fd: BorrowedFd<'_>) -> Result<u32, Errno> {
        if !descriptor::is_control_socket(fd) {
            return Err(Errno::INVAL);
        }
        let own = rustix::net::getsockname(fd)?;
        // (With SO_PASSCRED, the kernel gives an end of a pair an abstract name when that end
        // sends.)
        let is_pair =
            || !has_path(&own) && rustix::net::getpeername(fd).is_ok_and(|p| p.is_some_and(|p| is_unnamed(&p)));
        if Some(&own) != self.endpoint.as_ref() && !is_pair() {
            return Err(Errno::PERM);
        }
        descriptor::peer(fd).map(|(_, uid)| uid)
    }

    fn listener(&mut self, fd: BorrowedFd<'_>) -> Result<Given, Errno> {
        let info = descriptor::listening(fd)?;
        let owner = rustix::fs::fstat(fd)?.st_uid;
        self.listeners.insert((info.netns, info.addr.port, info.addr.ip), owner);
        Ok(Given::default())
    }

    /// Checks an order against the descriptors that were shown. Both users must be clients, and
    /// the server's address must be that of a shown listener. The client's port must be free, or
    /// the port of a shown socket. Returns the permitted order, the network namespace if it is
    /// another one, and whether another user listens at that address now.
    fn checked(
        &mut self,
        mut order: Order,
        netns: u64,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Order, Option<OwnedFd>, bool), Errno> {
        let (client, server) = (&order.client, &order.server);
        if !self.users.contains(&client.uid) || !self.users.contains(&server.uid) {
            return Err(Errno::PERM);
        }
        let at = |ip| self.listeners.get(&(netns, server.port, ip));
        let owner = *at(server.ip).or_else(|| at(V4_ANY)).or_else(|| at(V6_ANY)).ok_or(Errno::PERM)?;
        let place = match netns == self.netns {
            true => None,
            false => Some(maker::namespace_of(*fds.first().ok_or(Errno::BADF)?, netns)?),
        };
        let whose = |diag: &mut Option<SockDiag>| diag.as_mut().and_then(|d| d.listener_of(&server.ip, server.port));
        let now = match &place {
            None => whose(&mut self.diag),
            Some(place) => maker::apart(Some(place.as_fd()), || Ok(whose(&mut SockDiag::new())))?,
        };
        let bound = order.holder.and_then(|cookie| self.bound.get(&cookie));
        if bound != Some(&(netns, client.port)) {
            order.holder = None;
        }
        Ok((order, place, now.is_some_and(|uid| uid != owner)))
    }

    fn clone_listener(
        &mut self,
        global: BorrowedFd<'_>,
        control: BorrowedFd<'_>,
        reservation: bool,
    ) -> Result<Given, Errno> {
        let uid = self.user_of(control)?;
        listening(global)?;
        let owner = rustix::fs::fstat(global)?.st_uid;
        let stranger = uid != 0 && uid != owner;
        let netns = descriptor::netns_cookie(global)?;
        let place = match netns == self.netns {
            true => None,
            false => Some(maker::namespace_of(global, netns).map_err(|_| Errno::PERM)?),
        };
        let ours = &self.cloned;
        let made = maker::apart(place.as_ref().map(AsFd::as_fd), || {
            if stranger && !is_alone(global, |cookie| ours.get(&cookie).is_some())? {
                return Err(Errno::PERM);
            }
            clone_as_owner(global, reservation)
        });
        let made = made.map_err(|e| if e == Errno::XDEV { Errno::PERM } else { e })?;
        if stranger {
            self.cloned.insert(sockopt::socket_cookie(&made)?, ());
        }
        Ok(Given::one(made))
    }
}

/// The executable of the process behind the pidfd `shown`, or else of the process with this
/// number.
fn executable(pid: u32, shown: Option<BorrowedFd<'_>>) -> Result<Given, Errno> {
    let pid = match shown {
        Some(fd) => pidfd::pid_of(fd).ok_or(Errno::INVAL)?,
        None if pid == 0 => return Err(Errno::INVAL),
        None => pid,
    };
    let exe = std::fs::read_link(format!("/proc/{pid}/exe")).map_err(errno_of)?;
    if shown.is_some_and(|fd| !pidfd::is_alive(fd)) {
        return Err(Errno::SRCH);
    }
    line::text(exe.as_os_str().as_bytes()).map(Given::one)
}

/// Whether the process that has connected this socket may administer the network.
fn has_administrator(control: BorrowedFd<'_>) -> Result<bool, Errno> {
    match pidfd::of_peer(control) {
        Ok(peer) => Ok(pidfd::may_administer(peer.as_fd())),
        // (Before Linux 6.5. The front has checked that the process that connected has also sent
        // the request.)
        Err(Errno::NOPROTOOPT) => Ok(descriptor::may_administer(descriptor::peer(control)?.0)),
        Err(_) => Ok(false),
    }
}

fn is_unnamed(name: &SocketAddrAny) -> bool {
    // The name has an address family and nothing else.
    name.address_family() == AddressFamily::UNIX && name.addr_len() as usize <= size_of::<u16>()
}

fn has_path(name: &SocketAddrAny) -> bool {
    SocketAddrUnix::try_from(name.clone()).map_or(true, |name| name.path().is_some_and(|p| !p.is_empty()))
}
