//! The place where clients find the monitor: its socket in the file system.

pub mod lock;

use crate::knobs::Knobs;
use fsocket_proto::paths;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

/// Clients that may wait to be accepted. (net.core.somaxconn allows as many by default.)
const BACKLOG: i32 = 4096;

/// Longest path of a socket, in bytes.
const PATH: usize = 107;

/// How the monitor runs.
#[derive(Clone, Debug)]
pub struct Config {
    /// The socket's path, as given to commands and programs. The socket itself is at [`named`] of
    /// it.
    pub socket: PathBuf,
    /// The monitor serves only its own user and root, and only while a program uses it.
    pub private: bool,
    /// A monitor of another ABI has taken this one's place on the host. This monitor stays for the
    /// programs that it serves, and ends with the last of them.
    pub retired: bool,
    /// A private or retired monitor exits this long after its last process has gone.
    pub linger: Duration,
    /// Permissions of the socket.
    pub mode: u32,
    /// The directory of the state that the next monitor takes over; `None`: no monitor follows.
    pub keep: Option<PathBuf>,
    /// Descriptors for all users together, at most. (RLIMIT_NOFILE may be lower.)
    pub descriptors: u64,
    /// Bytes of shared memory for all users together.
    pub memory: u64,
    pub balance: Knobs,
    /// Which users may share memory with each other.
    pub rules: crate::policy::rules::Rules,
    pub programs: Vec<crate::policy::programs::Program>,
    /// Other hosts to which this host's agent has links; `None`: there is no agent.
    pub links: Option<crate::links::Links>,
    /// The announcement to other hosts; `None`: this host announces nothing.
    pub hosts: Option<crate::hosts::Announce>,
}

impl Config {
    /// Whether the monitor ends when no program needs it.
    pub fn is_temporary(&self) -> bool {
        self.private || self.retired
    }
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A running monitor has the socket.
    #[error("a monitor is already running at {}", .0.display())]
    AlreadyRunning(PathBuf),
    #[error("the socket that was passed is not a listening SOCK_SEQPACKET socket at {}", .0.display())]
    Given(PathBuf),
    #[error("{}: {reason}", .path.display())]
    Directory { path: PathBuf, reason: String },
    #[error("cannot serve metrics at {address}")]
    Metrics { address: std::net::SocketAddr, source: std::io::Error },
    #[error("cannot {what}")]
    System { what: &'static str, source: std::io::Error },
}

fn system<E: Into<std::io::Error>>(what: &'static str) -> impl FnOnce(E) -> StartError {
    move |e| StartError::System { what, source: e.into() }
}

/// The listening socket where clients connect.
pub struct Endpoint {
    pub fd: OwnedFd,
    /// For monitors that serve all users: the file of the locks that monitors of several ABIs
    /// share ([`crate::shm::ports`]).
    pub leases: Option<OwnedFd>,
    /// `None`: another process removes the name.
    name: Option<Name>,
}

/// The path of the socket for a monitor of this ABI.
pub fn named(socket: &Path) -> PathBuf {
    let mut room = [0; PATH];
    let own = paths::versioned(socket.as_os_str().as_bytes(), fsocket_abi::VERSION, &mut room).map(OsStr::from_bytes);
    own.map_or_else(|| socket.to_owned(), PathBuf::from)
}

/// When set, the socket keeps its name when this process ends.
#[derive(Clone, Default)]
pub struct Leave(Arc<AtomicBool>);

impl Leave {
    /// From here on another process has the socket and its name.
    pub fn to_another(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The final path of the socket, and the lock that reserves the path.
struct Name {
    is_ours: bool,
    left: Leave,
    path: PathBuf,
    /// A symbolic link at the configured path. It leads to the monitor that started last.
    link: PathBuf,
    aside: PathBuf,
    lock: OwnedFd,
    published: bool,
    /// The socket's file, while it belongs to this process.
    file: Option<File>,
}

/// Identifies a file independently of its name: device and inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct File(u64, u64);

impl File {
    /// The file that has this name now.
    pub fn at(path: &Path) -> Option<File> {
        std::fs::symlink_metadata(path).ok().map(|m| File(m.dev(), m.ino()))
    }
}

impl Endpoint {
    /// Takes the lock, makes the socket, and gives it its name when clients can connect to it.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn publish(config: &Config) -> Result<Endpoint, StartError> {
        let path = &named(&config.socket);
        let directory = match path.parent() {
            Some(d) if !d.as_os_str().is_empty() => d,
            _ => Path::new("."),
        };
        prepare_directory(directory, config.private)?;
        let lock = lock::take(path).map_err(system("open the lock file"))?;
        let lock = lock.ok_or_else(|| StartError::AlreadyRunning(path.clone()))?;
        let fd = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )
        .map_err(system("make a socket"))?;
        let mut name = Name::new(path.clone(), &config.socket, lock);
        let aside = &name.aside;
        // This process holds the lock, so a file with this name is a leftover.
        let _ = std::fs::remove_file(aside);
        let address = SocketAddrUnix::new(aside).map_err(system("use this socket path"))?;
        rustix::net::bind(&fd, &address).map_err(system("bind the socket"))?;
        std::fs::set_permissions(aside, std::fs::Permissions::from_mode(config.mode))
            .map_err(system("set the permissions of the socket"))?;
        crate::wire::ask_for_senders(fd.as_fd());
        rustix::net::listen(&fd, BACKLOG).map_err(system("listen"))?;
        name.file = File::at(aside);
        let leases = leases(config);
        let mut endpoint = Endpoint { fd, leases, name: Some(name) };
        endpoint.show().map_err(system("rename the socket"))?;
        endpoint.name.iter().for_each(Name::link);
        Ok(endpoint)
    }

    /// Uses an existing socket. Either a service manager has made and keeps it, so that clients
    /// can connect while no monitor runs. Or (`own`) this process has made the socket, before it
    /// executed itself again.
    ///
    /// # Errors
    /// It is not a listening SOCK_SEQPACKET socket with that name.
    pub fn given(fd: OwnedFd, config: &Config, own: bool) -> Result<Endpoint, StartError> {
        let path = config.socket.as_path();
        let name = rustix::net::getsockname(&fd).ok().and_then(|name| SocketAddrUnix::try_from(name).ok());
        let own_path = named(path);
        let is_its = |bytes: &[u8]| [path, &own_path].iter().any(|path| path.as_os_str().as_bytes() == bytes);
        let has_name = name.is_some_and(|name| name.path_bytes().is_some_and(is_its));
        let is_one = rustix::net::sockopt::socket_type(&fd) == Ok(SocketType::SEQPACKET);
        // (A socket that this process made was bound under another name at first.)
        if !is_one || !(has_name || own) || !rustix::net::sockopt::socket_acceptconn(&fd).unwrap_or(false) {
            return Err(StartError::Given(path.to_owned()));
        }
        rustix::io::ioctl_fionbio(&fd, true).map_err(system("use the socket"))?;
        crate::wire::ask_for_senders(fd.as_fd());
        let name = match own {
            true => {
                let lock = lock::inherit(&own_path).map_err(system("open the lock file"))?;
                let lock = lock.ok_or_else(|| StartError::AlreadyRunning(path.to_owned()))?;
                let mut name = Name::new(own_path, path, lock);
                (name.published, name.file) = (true, File::at(&name.path));
                Some(name)
            }
            false => None,
        };
        Ok(Endpoint { fd, leases: leases(config), name })
    }

    /// The socket's file, if clients still find it under its name. Another process may have
    /// removed, replaced or mounted over the file or its directory.
    pub fn file(&self) -> Option<File> {
        let name = self.name.as_ref()?;
        name.file.filter(|file| File::at(name.current()) == Some(*file))
    }

    /// The means to leave the name to another process; `None`: the name does not belong to this
    /// process.
    pub fn own_name(&self) -> Option<Leave> {
        self.name.as_ref().map(|name| name.left.clone())
    }

    /// Writes into the lock file which process holds the lock.
    pub fn sign(&self, retired: bool) {
        self.name.iter().for_each(|name| lock::sign(&name.lock, retired));
    }

    /// The same socket, but another process removes its name.
    pub fn left_to_another(mut self) -> Endpoint {
        // (The front must not keep a copy of the lock: the lock would stay held while the front
        // outlives the broker.)
        if let Some(name) = &mut self.name {
            name.is_ours = false;
        }
        self.name = None;
        self
    }

    /// Gives the socket its name: new clients find it.
    pub fn show(&mut self) -> std::io::Result<()> {
        let name = self.name.as_mut().ok_or(std::io::ErrorKind::PermissionDenied)?;
        std::fs::rename(&name.aside, &name.path)?;
        name.published = true;
        Ok(())
    }

    /// Takes the name away. Clients that connected before are still in the backlog.
    pub fn hide(&mut self) -> std::io::Result<()> {
        let name = self.name.as_mut().ok_or(std::io::ErrorKind::PermissionDenied)?;
        std::fs::rename(&name.path, &name.aside)?;
        name.published = false;
        Ok(())
    }
}

impl Name {
    fn new(path: PathBuf, link: &Path, lock: OwnedFd) -> Name {
        let (link, aside) = (link.to_owned(), beside(&path, ".new"));
        Name { is_ours: true, left: Leave::default(), path, link, aside, lock, published: false, file: None }
    }

    /// Makes the configured path lead to this monitor's socket.
    fn link(&self) {
        let Some(to) = self.path.file_name().filter(|_| self.link != self.path) else { return };
        let new = beside(&self.link, ".link");
        let _ = std::fs::remove_file(&new);
        let made = std::os::unix::fs::symlink(to, &new).and_then(|()| std::fs::rename(&new, &self.link));
        if let Err(e) = made {
            tracing::warn!("{}: {e}", self.link.display());
        }
    }

    fn unlink(&self) {
        if std::fs::read_link(&self.link).is_ok_and(|to| Some(to.as_os_str()) == self.path.file_name()) {
            let _ = std::fs::remove_file(&self.link);
        }
    }

    fn current(&self) -> &Path {
        if self.published {
            &self.path
        } else {
            &self.aside
        }
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        // (Another monitor may have taken the name by now.)
        if self.is_ours
            && !self.left.0.load(Ordering::Relaxed)
            && (self.file.is_none() || File::at(self.current()) == self.file)
        {
            let _ = std::fs::remove_file(self.current());
            self.unlink();
        }
    }
}

/// Opens the file for [`Endpoint::leases`]. (On failure, the monitor works as if no other one
/// existed.)
fn leases(config: &Config) -> Option<OwnedFd> {
    if config.private {
        return None;
    }
    let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = config.socket.with_file_name("leases");
    rustix::fs::open(&file, flags, Mode::RUSR | Mode::WUSR)
        .inspect_err(|e| tracing::warn!("{}: {e}", file.display()))
        .ok()
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn prepare_directory(path: &Path, private: bool) -> Result<(), StartError> {
    let bad = |reason: String| StartError::Directory { path: path.to_owned(), reason };
    let mode = if private { 0o700 } else { 0o755 };
    // Only the last directory of the path is made. The administrator or the user must make those
    // above.
    match std::fs::DirBuilder::new().mode(mode).create(path) {
        Ok(()) => {}
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
        Err(e) => return Err(bad(e.to_string())),
    }
    let anybodys = || std::fs::metadata(path).is_ok_and(|m| m.mode() & 0o002 != 0);
    if !private && anybodys() {
        return Err(bad("can be written by all users".into()));
    }
    if private {
        // A symbolic link is not followed: another user may have put it there.
        let meta = std::fs::symlink_metadata(path).map_err(|e| bad(e.to_string()))?;
        if !meta.is_dir() {
            return Err(bad("not a directory".into()));
        }
        if meta.uid() != rustix::process::geteuid().as_raw() {
            return Err(bad("belongs to another user".into()));
        }
        if meta.mode() & 0o077 != 0 {
            return Err(bad("is open to other users".into()));
        }
    }
    Ok(())
}

/// The path of the lock file that reserves a socket's path.
pub fn lock_file(socket: &Path) -> PathBuf {
    lock::file(&named(socket))
}

/// A spare descriptor, which is closed for a moment when a descriptor is needed and none is free.
pub fn spare() -> Option<OwnedFd> {
    rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).ok()
}
