//! The monitor's socket, from a client's side.

use anyhow::{anyhow, bail, Context, Result};
use fsocket_proto::report::Report;
use fsocket_proto::{answer, operate, paths, request, steer, Asks, Msg, MSG_SIZE};
use rustix::event::{poll, PollFd, PollFlags};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs;
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use std::ffi::OsString;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

/// Connects to a monitor. EAGAIN means: one listens, but its queue is full, all the time for which it is waited for.
pub fn connect(path: &Path, flags: SocketFlags) -> std::result::Result<OwnedFd, Errno> {
    let fd = net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags | SocketFlags::CLOEXEC, None)?;
    for wait in [net::sockopt::Timeout::Send, net::sockopt::Timeout::Recv] {
        net::sockopt::set_socket_timeout(&fd, wait, Some(answer_limit()))?;
    }
    net::connect(&fd, &SocketAddrUnix::new(path)?)?;
    Ok(fd)
}

/// Does a monitor listen there? The uid it runs as, if it says so.
pub fn probe(path: &Path) -> std::result::Result<Option<u32>, Errno> {
    match connect(path, SocketFlags::NONBLOCK) {
        Ok(fd) => Ok(net::sockopt::socket_peercred(&fd).ok().map(|c| c.uid.as_raw())),
        Err(Errno::AGAIN) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Waits until a monitor answers, at most so long: one that has just started listens before it can serve.
pub fn await_answer(path: &Path, limit: Duration) {
    let Ok(socket) = connect(path, SocketFlags::NONBLOCK) else { return };
    let ask = Msg::from(request::Report { reset: false, brief: true }).numbered(1);
    if let (Ok(_), Ok(limit)) = (net::send(&socket, ask.as_bytes(), SendFlags::NOSIGNAL), limit.try_into()) {
        let _ = poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&limit));
    }
}

/// Nobody listens there, as against: somebody does and will not talk to us.
pub fn is_absent(e: Errno) -> bool {
    matches!(e, Errno::NOENT | Errno::CONNREFUSED | Errno::NOTDIR)
}

/// Path that the environment names, if any.
pub fn from_env() -> Option<PathBuf> {
    std::env::var_os(paths::ENV_SOCKET).filter(|v: &OsString| !v.is_empty()).map(PathBuf::from)
}

/// Where this user's private monitor is, for all programs of the user: in the runtime directory, else in a directory that
/// others can make before. It is used only if it belongs to this user ([`crate::private::directory`]).
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

/// Does the monitor speak our version of the protocol? EPROTO: another one.
pub fn greet(path: &Path) -> std::result::Result<(), Errno> {
    let socket = connect(path, SocketFlags::empty())?;
    let pid = std::process::id();
    // (The monitor wants a name, which no other process of this family has: there is none.)
    let (nonce, version) = (pid.into(), fsocket_abi::VERSION.into());
    let hello = Msg::from(request::Hello { nonce, pid, version, rights: 0, name: [0; 16], off: false }).numbered(1);
    net::send(&socket, hello.as_bytes(), SendFlags::NOSIGNAL)?;
    loop {
        match receive(&socket) {
            Ok((answer, _)) if answer.answers(&hello) => {
                return answer.refusal().map_or(Ok(()), |errno| Err(Errno::from_raw_os_error(errno)));
            }
            Ok(_) => {}
            // A message of another size: it does not speak our language at all.
            Err(e) => return Err(e.downcast().unwrap_or(Errno::PROTO)),
        }
    }
}

/// How long a monitor may take to answer, unless `FASTSOCKET_PATIENCE` says more.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

fn answer_limit() -> Duration {
    let said = std::env::var(paths::ENV_PATIENCE).ok().and_then(|ms| ms.parse().ok());
    said.map_or(ANSWER_LIMIT, |ms| ANSWER_LIMIT.max(Duration::from_millis(ms)))
}
/// Longest report that is read; a monitor that says more is broken.
const REPORT_LIMIT: u64 = 1 << 30;

/// The monitor that `run` would use now, without starting one.
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

/// Asks the monitor what there is.
pub fn report(path: &Path) -> Result<Report> {
    report_with(path, request::Report { reset: false, brief: false })
}

/// What this user's private monitor said when it ended, and how long ago that was.
pub fn last_report() -> Result<(Duration, Report)> {
    if from_env().is_some() {
        bail!("no private monitor");
    }
    let file = fsocket_proto::report::last(&private_path());
    let meta = std::fs::symlink_metadata(&file)?;
    if !meta.is_file() || meta.uid() != rustix::process::geteuid().as_raw() || meta.len() > REPORT_LIMIT {
        bail!("{}: no file of ours", file.display());
    }
    let report = serde_json::from_slice(&std::fs::read(&file)?).context("malformed report")?;
    Ok((meta.modified()?.elapsed().unwrap_or_default(), report))
}

/// As [`report`], without the list of connections.
pub fn brief_report(path: &Path) -> Result<Report> {
    report_with(path, request::Report { reset: false, brief: true })
}

/// As [`report`]; the counters of zones are zero afterwards.
pub fn report_and_reset(path: &Path) -> Result<Report> {
    report_with(path, request::Report { reset: true, brief: false })
}

fn report_with(path: &Path, request: request::Report) -> Result<Report> {
    let text = ask(path, request, None, |a: answer::Report| a.length)?;
    serde_json::from_slice(&text).context("malformed report")
}

/// Has the monitor steer a device, or says what is steered.
pub fn steer(path: &Path, request: &steer::Request) -> Result<steer::Answer> {
    ask_json(path, |length| request::Steer { length }, |a: answer::Steer| a.length, request)
}

/// Has the monitor switch processes off or on.
pub fn operate(path: &Path, request: &operate::Request) -> Result<operate::Answer> {
    ask_json(path, |length| request::Operate { length }, |a: answer::Operate| a.length, request)
}

/// A request with a text of some length, and an answer with one.
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

/// A request that is answered by a memfd; what is in it.
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
    net::sendmsg(&socket, &[std::io::IoSlice::new(request.as_bytes())], &mut control, SendFlags::NOSIGNAL)?;
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

/// One message and the descriptor that came with it.
fn receive(socket: &OwnedFd) -> Result<(Msg, Option<OwnedFd>)> {
    let mut bytes = [0; MSG_SIZE];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = net::RecvAncillaryBuffer::new(&mut space);
    let flags = net::RecvFlags::CMSG_CLOEXEC;
    let got = net::recvmsg(socket, &mut [std::io::IoSliceMut::new(&mut bytes)], &mut control, flags)?;
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
