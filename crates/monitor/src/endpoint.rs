//! The place where clients find the monitor: its socket in the file system.

use crate::knobs::Knobs;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Clients that wait to be accepted. (net.core.somaxconn allows as many by default.)
const BACKLOG: i32 = 4096;

/// How the monitor runs.
#[derive(Clone, Debug)]
pub struct Config {
    /// Its socket.
    pub socket: PathBuf,
    /// Only for the own user and root, and only while somebody uses it.
    pub private: bool,
    /// Private: exit so long after the last process went.
    pub linger: Duration,
    /// Permissions of the socket.
    pub mode: u32,
    /// A directory for what a monitor after this one takes over, where there may be one.
    pub keep: Option<PathBuf>,
    /// For all users, at most (RLIMIT_NOFILE may be lower).
    pub descriptors: u64,
    /// Bytes of shared memory for all users.
    pub memory: u64,
    pub balance: Knobs,
    /// Which users may share memory with each other.
    pub rules: crate::policy::rules::Rules,
    pub programs: Vec<crate::policy::programs::Program>,
    /// Other hosts that this host's agent links; `None`: there is to be no agent.
    pub links: Option<crate::links::Links>,
    /// What is announced to other hosts; `None`: nothing.
    pub hosts: Option<crate::hosts::Announce>,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A live monitor has the socket.
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

/// A listening socket where clients come.
pub struct Endpoint {
    pub fd: OwnedFd,
    /// None: another process has it.
    name: Option<Name>,
}

/// Its final name, and the lock that makes it ours.
struct Name {
    is_ours: bool,
    path: PathBuf,
    aside: PathBuf,
    _lock: OwnedFd,
    published: bool,
    /// The socket's file, as long as it is this process's.
    file: Option<File>,
}

/// A file, whatever it is called: device and inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct File(u64, u64);

impl File {
    /// The file that has this name now.
    pub fn at(path: &Path) -> Option<File> {
        std::fs::symlink_metadata(path).ok().map(|m| File(m.dev(), m.ino()))
    }
}

impl Endpoint {
    /// Takes the lock and publishes the socket: it has its name only once it
    /// can be connected to.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn publish(config: &Config) -> Result<Endpoint, StartError> {
        let path = &config.socket;
        let directory = match path.parent() {
            Some(d) if !d.as_os_str().is_empty() => d,
            _ => Path::new("."),
        };
        prepare_directory(directory, config.private)?;
        let lock = lock(path)?;
        let fd = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )
        .map_err(system("make a socket"))?;
        let aside = beside(path, ".new");
        // We have the lock: whatever has this name is nobody's.
        let _ = std::fs::remove_file(&aside);
        let address = SocketAddrUnix::new(&aside).map_err(system("use this socket path"))?;
        rustix::net::bind(&fd, &address).map_err(system("bind the socket"))?;
        std::fs::set_permissions(&aside, std::fs::Permissions::from_mode(config.mode))
            .map_err(system("set the permissions of the socket"))?;
        crate::wire::ask_for_senders(fd.as_fd());
        rustix::net::listen(&fd, BACKLOG).map_err(system("listen"))?;
        let file = File::at(&aside);
        let name = Some(Name { is_ours: true, path: path.clone(), aside, _lock: lock, published: false, file });
        let mut endpoint = Endpoint { fd, name };
        endpoint.show().map_err(system("rename the socket"))?;
        Ok(endpoint)
    }

    /// A socket that there is: a service manager has made it and holds it, so that clients can connect while
    /// there is no monitor; or (`own`) this process has, before it began again.
    ///
    /// # Errors
    /// It is not a listening SOCK_SEQPACKET socket with that name.
    pub fn given(fd: OwnedFd, path: &Path, own: bool) -> Result<Endpoint, StartError> {
        let name = rustix::net::getsockname(&fd).ok().and_then(|name| SocketAddrUnix::try_from(name).ok());
        let has_name = name.is_some_and(|name| name.path_bytes() == Some(path.as_os_str().as_bytes()));
        let is_one = rustix::net::sockopt::socket_type(&fd) == Ok(SocketType::SEQPACKET);
        // (Its own was bound under another name at first.)
        if !is_one || !(has_name || own) || !rustix::net::sockopt::socket_acceptconn(&fd).unwrap_or(false) {
            return Err(StartError::Given(path.to_owned()));
        }
        rustix::io::ioctl_fionbio(&fd, true).map_err(system("use the socket"))?;
        crate::wire::ask_for_senders(fd.as_fd());
        let name = match own {
            true => {
                let (path, aside, lock) = (path.to_owned(), beside(path, ".new"), lock(path)?);
                let file = File::at(&path);
                Some(Name { is_ours: true, path, aside, _lock: lock, published: true, file })
            }
            false => None,
        };
        Ok(Endpoint { fd, name })
    }

    /// The socket's file, if clients still find it under its name. The file or its directory may have been removed,
    /// replaced or mounted over.
    pub fn file(&self) -> Option<File> {
        let name = self.name.as_ref()?;
        name.file.filter(|file| File::at(name.current()) == Some(*file))
    }

    /// Does its name belong to this process?
    pub fn has_name(&self) -> bool {
        self.name.is_some()
    }

    /// The same socket, whose name this process leaves to another one.
    pub fn left_to_another(mut self) -> Endpoint {
        // (Its copy of the lock would outlive the other process.)
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

    /// Takes the name away; those who connected before are still in the
    /// backlog.
    pub fn hide(&mut self) -> std::io::Result<()> {
        let name = self.name.as_mut().ok_or(std::io::ErrorKind::PermissionDenied)?;
        std::fs::rename(&name.path, &name.aside)?;
        name.published = false;
        Ok(())
    }
}

impl Name {
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
        // (Another monitor may have the name by now.)
        if self.is_ours && (self.file.is_none() || File::at(self.current()) == self.file) {
            let _ = std::fs::remove_file(self.current());
        }
    }
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn prepare_directory(path: &Path, private: bool) -> Result<(), StartError> {
    let bad = |reason: String| StartError::Directory { path: path.to_owned(), reason };
    let mode = if private { 0o700 } else { 0o755 };
    // The last component only: what is above is the administrator's, or the user's, to make.
    match std::fs::DirBuilder::new().mode(mode).create(path) {
        Ok(()) => {}
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
        Err(e) => return Err(bad(e.to_string())),
    }
    let anybodys = || std::fs::metadata(path).is_ok_and(|m| m.mode() & 0o002 != 0);
    if !private && anybodys() {
        return Err(bad("can be written to by anybody".into()));
    }
    if private {
        // Not through a link: somebody else may have put one there.
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

/// The lock that makes a socket's path ours.
pub fn lock_file(socket: &Path) -> PathBuf {
    beside(socket, ".lock")
}

/// The lock file stays: removing it would let two monitors lock two files of
/// the same name.
fn lock(socket: &Path) -> Result<OwnedFd, StartError> {
    let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let fd =
        rustix::fs::open(lock_file(socket), flags, Mode::RUSR | Mode::WUSR).map_err(system("open the lock file"))?;
    // Its holder may be about to exit or about to listen: give it a moment.
    for _ in 0..100 {
        match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(fd),
            Err(Errno::AGAIN) if is_live(socket) => return Err(StartError::AlreadyRunning(socket.to_owned())),
            Err(Errno::AGAIN | Errno::INTR) => std::thread::sleep(Duration::from_millis(20)),
            Err(e) => return Err(system("lock the lock file")(e)),
        }
    }
    Err(StartError::AlreadyRunning(socket.to_owned()))
}

fn is_live(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connect = || -> Result<(), Errno> {
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        rustix::net::connect(fd.as_fd(), &SocketAddrUnix::new(path)?)
    };
    // EAGAIN: its backlog is full, so it lives.
    matches!(connect(), Ok(()) | Err(Errno::AGAIN))
}

/// A descriptor to give up for a moment when there is no other.
pub fn spare() -> Option<OwnedFd> {
    rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).ok()
}
