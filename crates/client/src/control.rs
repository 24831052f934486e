//! The client's side of the monitor's socket.

use anyhow::{anyhow, bail, Context, Result};
use fsocket_proto::report::Report;
use fsocket_proto::{answer, operate, paths, request, steer, Asks, Msg, MSG_SIZE};
use rustix::event::{poll, PollFd, PollFlags};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs;
use rustix::io::{retry_on_intr, Errno};
use rustix::net::{self, AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

/// Maximum number of bytes of a socket's path.
const SOCKET_PATH: usize = 107;

/// Connects to the monitor with this program's ABI at `path`, or else to a monitor with another ABI. EAGAIN: a
/// monitor listens, but its queue was full for the whole time limit.
pub fn connect(path: &Path, flags: SocketFlags) -> std::result::Result<OwnedFd, Errno> {
    match connect_to(&named(path), flags) {
        Err(e) if is_absent(e) => connect_to(path, flags),
        done => done,
    }
}

/// Path of the socket of a monitor with this program's ABI that was told to listen at `path`.
pub fn named(path: &Path) -> PathBuf {
    let mut room = [0; SOCKET_PATH];
    let own = paths::versioned(path.as_os_str().as_bytes(), fsocket_abi::VERSION, &mut room).map(OsStr::from_bytes);
    own.map_or_else(|| path.to_owned(), PathBuf::from)
}

/// Monitors with other ABIs beside the one at `path`, sorted by ABI. After an upgrade the old monitor stays for the
/// programs that it serves.
pub fn others(path: &Path) -> Vec<(u32, PathBuf)> {
    let (stem, extension) = (path.file_stem().unwrap_or_default(), path.extension());
    let abi = |file: &Path| {
        let number = file.file_stem()?.as_bytes().strip_prefix(stem.as_bytes())?.strip_prefix(b"-")?;
        let abi: u32 = std::str::from_utf8(number).ok()?.parse().ok()?;
        (file.extension() == extension && abi != fsocket_abi::VERSION && probe_at(file).is_ok()).then_some(abi)
    };
    let files = path.parent().and_then(|directory| std::fs::read_dir(directory).ok()).into_iter().flatten().flatten();
    let mut all: Vec<_> = files.map(|f| f.path()).filter_map(|file| Some((abi(&file)?, file))).collect();
    all.sort();
    all
}

fn connect_to(path: &Path, flags: SocketFlags) -> std::result::Result<OwnedFd, Errno> {
    let fd = net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags | SocketFlags::CLOEXEC, None)?;
    for wait in [net::sockopt::Timeout::Send, net::sockopt::Timeout::Recv] {
        net::sockopt::set_socket_timeout(&fd, wait, Some(answer_limit()))?;
    }
    let address = SocketAddrUnix::new(path)?;
    retry_on_intr(|| net::connect(&fd, &address))?;
    Ok(fd)
}

/// Does a monitor listen at `path`? Returns the uid of the monitor; None: it listens, but its uid is unknown.
pub fn probe(path: &Path) -> std::result::Result<Option<u32>, Errno> {
    user(connect(path, SocketFlags::NONBLOCK))
}

/// As [`probe`], for exactly this socket, which belongs to one ABI ([`named`]).
pub fn probe_at(path: &Path) -> std::result::Result<Option<u32>, Errno> {
    user(connect_to(path, SocketFlags::NONBLOCK))
}

fn user(connected: std::result::Result<OwnedFd, Errno>) -> std::result::Result<Option<u32>, Errno> {
    match connected {
        Ok(fd) => Ok(net::sockopt::socket_peercred(&fd).ok().map(|c| c.uid.as_raw())),
        Err(Errno::AGAIN) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Waits until the monitor answers, at most for `limit`. A monitor that has just started listens before it can
/// serve.
pub fn await_answer(path: &Path, limit: Duration) {
    let Ok(socket) = connect(path, SocketFlags::NONBLOCK) else { return };
    let ask = Msg::from(request::Report { reset: false, brief: true }).numbered(1);
    if let (Ok(_), Ok(limit)) = (net::send(&socket, ask.as_bytes(), SendFlags::NOSIGNAL), limit.try_into()) {
        let _ = poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&limit));
    }
}

/// Does the error mean that no process listens? (Another error means that a process listens, but refuses to talk.)
pub fn is_absent(e: Errno) -> bool {
    matches!(e, Errno::NOENT | Errno::CONNREFUSED | Errno::NOTDIR)
}

/// Path that the environment names, if any.
pub fn from_env() -> Option<PathBuf> {
    std::env::var_os(paths::ENV_SOCKET).filter(|v: &OsString| !v.is_empty()).map(PathBuf::from)
}

/// Path of the socket of this user's private monitor, which all programs of the user share. The socket is in the
/// runtime directory, or else in a directory that other users could have made before. Such a directory is used only
/// if this user owns it.
pub fn private_path() -> PathBuf {
    let uid = rustix::process::geteuid().as_raw();
    let is_ours =
        |dir: &PathBuf| std::fs::metadata(dir).is_ok_and(|m| m.is_dir() && m.uid() == uid && m.mode() & 0o077 == 0);
    let named = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|dir| dir.is_absolute());
    let usual = PathBuf::from(format!("/run/user/{uid}"));
    let runtime = named.into_iter().chain([usual]).find(is_ours).map(|dir| dir.join("fastsocket"));
    let directory = runtime.unwrap_or_else(|| match uid {
        0 => paths::ROOT_DIRECTORY.into(),
        _ => format!("{}{uid}", paths::USER_DIRECTORY).into(),
    });
    directory.join("monitor.sock")
}

/// Does the monitor speak this program's version of the protocol? EPROTO: it speaks another one.
pub fn greet(path: &Path) -> std::result::Result<(), Errno> {
    let socket = connect(path, SocketFlags::empty())?;
    let pid = std::process::id();
    // The monitor wants a nonce that no other process of this family has. This process has no family, so the nonce
    // is its pid.
    let (nonce, version) = (pid.into(), fsocket_abi::VERSION.into());
    let hello = Msg::from(request::Hello { nonce, pid, version, rights: 0, name: [0; 16], off: false }).numbered(1);
    retry_on_intr(|| net::send(&socket, hello.as_bytes(), SendFlags::NOSIGNAL))?;
    loop {
        match receive(&socket) {
            Ok((answer, _)) if answer.answers(&hello) => {
                return answer.refusal().map_or(Ok(()), |errno| Err(Errno::from_raw_os_error(errno)));
            }
            Ok(_) => {}
            // A message of another size: the peer does not speak this protocol at all.
            Err(e) => return Err(e.downcast().unwrap_or(Errno::PROTO)),
        }
    }
}

/// Time that a monitor may take to answer, unless `FASTSOCKET_PATIENCE` allows more.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

fn answer_limit() -> Duration {
    let said = std::env::var(paths::ENV_PATIENCE).ok().and_then(|ms| ms.parse().ok());
    said.map_or(ANSWER_LIMIT, |ms| ANSWER_LIMIT.max(Duration::from_millis(ms)))
}
/// Maximum number of bytes of a report. A monitor that sends more is broken.
const REPORT_LIMIT: u64 = 1 << 30;

/// Socket of the monitor that `run` would use now. Starts no monitor.
pub fn find() -> Result<PathBuf> {
    if let Some(path) = from_env() {
        return Ok(path);
    }
    let candidates = [PathBuf::from(paths::SYSTEM_SOCKET), private_path()];
    for path in &candidates {
        match probe(path) {
            Ok(uid) if uid.is_some_and(|uid| uid != 0 && uid != rustix::process::geteuid().as_raw()) => {
                bail!("monitor {}: runs as another user", path.display())
            }
            Ok(_) => return Ok(path.clone()),
            Err(e) if is_absent(e) => {}
            Err(e) => bail!("monitor {}: {e}", path.display()),
        }
    }
    let places: Vec<_> = candidates.iter().map(|p| p.display().to_string()).collect();
    bail!(
        "nothing runs under fastsocket now: no monitor is at {} (a private one ends 5 s after its last program). \
         Start a program: fastsocket run -- PROGRAM",
        places.join(" or ")
    )
}

/// Asks the monitor for its report.
pub fn report(path: &Path) -> Result<Report> {
    report_with(path, request::Report { reset: false, brief: false })
}

/// The last report of this user's private monitor, and its age.
pub fn last_report() -> Result<(Duration, Report)> {
    if from_env().is_some() {
        bail!("no private monitor");
    }
    let file = fsocket_proto::report::last(&private_path());
    let meta = std::fs::symlink_metadata(&file)?;
    if !meta.is_file() || meta.uid() != rustix::process::geteuid().as_raw() || meta.len() > REPORT_LIMIT {
        bail!("{}: not a report of this user's monitor", file.display());
    }
    let report = serde_json::from_slice(&std::fs::read(&file)?).context("malformed report")?;
    Ok((meta.modified()?.elapsed().unwrap_or_default(), report))
}

/// As [`report`], without the list of connections.
pub fn brief_report(path: &Path) -> Result<Report> {
    report_with(path, request::Report { reset: false, brief: true })
}

/// As [`report`], and resets the counters of zones.
pub fn report_and_reset(path: &Path) -> Result<Report> {
    report_with(path, request::Report { reset: true, brief: false })
}

fn report_with(path: &Path, request: request::Report) -> Result<Report> {
    let text = ask(path, request, None, |a: answer::Report| a.length)?;
    serde_json::from_slice(&text).context("malformed report")
}

/// Asks the monitor to steer a device, or which devices it steers.
pub fn steer(path: &Path, request: &steer::Request) -> Result<steer::Answer> {
    ask_json(path, |length| request::Steer { length }, |a: answer::Steer| a.length, request)
}

/// Asks the monitor to switch processes off or on.
pub fn operate(path: &Path, request: &operate::Request) -> Result<operate::Answer> {
    ask_json(path, |length| request::Operate { length }, |a: answer::Operate| a.length, request)
}

/// Sends a request with a JSON text, and returns the answer's JSON text.
fn ask_json<R: Asks, A: serde::de::DeserializeOwned>(
    path: &Path,
    of_length: impl FnOnce(u64) -> R,
    length_of: impl Fn(R::Answer) -> u64,
    text: &impl serde::Serialize,
) -> Result<A> {
    let json = serde_json::to_vec(text)?;
    let fd = fs::memfd_create("fastsocket-request", fs::MemfdFlags::CLOEXEC | fs::MemfdFlags::ALLOW_SEALING)?;
    std::fs::File::from(fd.try_clone()?).write_all(&json)?;
    fs::fcntl_add_seals(&fd, fs::SealFlags::SHRINK | fs::SealFlags::GROW | fs::SealFlags::WRITE)?;
    let text = ask(path, of_length(json.len() as u64), Some(&fd), length_of)?;
    serde_json::from_slice(&text).context("malformed answer")
}

/// Sends a request that is answered with a memfd, and returns the contents of the memfd.
fn ask<R: Asks>(
    path: &Path,
    request: R,
    attach: Option<&OwnedFd>,
    length_of: impl Fn(R::Answer) -> u64,
) -> Result<Vec<u8>> {
    let socket = connect(path, SocketFlags::empty()).with_context(|| format!("monitor {}", path.display()))?;
    let request = Into::<Msg>::into(request).numbered(1);
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = net::SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = attach.iter().map(|fd| fd.as_fd()).collect();
    if !fds.is_empty() && !control.push(net::SendAncillaryMessage::ScmRights(&fds)) {
        bail!("no room for a descriptor");
    }
    let bytes = [std::io::IoSlice::new(request.as_bytes())];
    retry_on_intr(|| net::sendmsg(&socket, &bytes, &mut control, SendFlags::NOSIGNAL))?;
    loop {
        let (answer, fd) = receive(&socket).context("no answer from the monitor")?;
        if !answer.answers(&request) {
            continue;
        }
        if let Some(errno) = answer.refusal() {
            return Err(std::io::Error::from_raw_os_error(errno)).context("the monitor refuses");
        }
        let length = answer.read().map(&length_of).map_err(|_| anyhow!("malformed answer"))?;
        let file = std::fs::File::from(fd.context("answer without a descriptor")?);
        if length > REPORT_LIMIT {
            bail!("answer of {length} bytes");
        }
        let mut text = vec![0; length as usize];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut text, 0).context("cannot read the answer")?;
        return Ok(text);
    }
}

/// Receives one message and its descriptor.
fn receive(socket: &OwnedFd) -> Result<(Msg, Option<OwnedFd>)> {
    let mut bytes = [0; MSG_SIZE];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = net::RecvAncillaryBuffer::new(&mut space);
    let flags = net::RecvFlags::CMSG_CLOEXEC;
    // The socket has a time limit, so the kernel does not restart the call after a signal (such as SIGWINCH).
    let got = retry_on_intr(|| net::recvmsg(socket, &mut [std::io::IoSliceMut::new(&mut bytes)], &mut control, flags))?;
    if got.bytes != MSG_SIZE {
        bail!("message of {} bytes", got.bytes);
    }
    let fd = control.drain().find_map(|message| match message {
        net::RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    let msg = Msg::read_from_bytes(&bytes).map_err(|_| anyhow!("malformed message"))?;
    Ok((msg, fd))
}
