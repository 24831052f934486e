//! Facts about one process: its program, the library in it, its monitor. The process writes its
//! own memory and environment, so these facts may be false. The monitor decides nothing by them.

use super::reason::Reason;
use crate::program::{self, Kind};
use crate::{glibc, place};
use fsocket_client::{control, locate};
use fsocket_proto::paths;
use fsocket_proto::report::{self, Counters, Report};
use procfs::process::{MMapPath, Process};
use procfs::ProcError;
use rustix::io::Errno;
use serde::Serialize;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Entry of the auxiliary vector: the program got rights from its file (setuid, capabilities), so
/// ld.so ignores LD_PRELOAD.
const AT_SECURE: u64 = 23;
/// How the file name of gcompat begins: the library that offers glibc's functions on top of musl.
const GCOMPAT: &[u8] = b"libgcompat.so";

/// Facts about a process.
#[derive(Debug, Clone, Serialize)]
pub struct Facts {
    pub pid: i32,
    pub name: String,
    pub user: u32,
    pub program: Option<PathBuf>,
    pub program_kind: &'static str,
    pub network_namespace: u64,
    pub user_namespace: u64,
    /// Inode of the user namespace that owns the process's network namespace.
    pub netns_owner: u64,
    pub library: Option<Library>,
    /// The process runs on musl and has gcompat, which adds glibc's functions.
    #[serde(skip)]
    has_gcompat: bool,
    /// The version of the glibc that the process has mapped.
    #[serde(skip)]
    glibc: Option<glibc::Version>,
    pub monitor: Option<Monitor>,
    /// The monitor knows the process.
    pub registered: bool,
    /// The process is switched off: by `fastsocket off`, or by `rule`.
    pub is_off: bool,
    /// FILE:LINE of the `[[program]]` section that applies to the process; empty if none does.
    pub rule: String,
    pub counters: Counters,
    /// The reason why no connection of this process can be accelerated.
    pub obstacles: Vec<Reason>,
    #[serde(skip)]
    pub report: Report,
}

/// The library as the process has it mapped.
#[derive(Debug, Clone, Serialize)]
pub struct Library {
    pub path: PathBuf,
    /// Another file has this path now, so the process runs an older library.
    pub replaced: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Monitor {
    pub socket: PathBuf,
    /// `system` or `private`.
    pub kind: &'static str,
    pub state: State,
    pub pid: u32,
    pub user: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    Answers,
    Absent,
    /// The monitor has another version of the protocol than this command.
    OtherVersion,
    Refuses(String),
}

/// A path of the file system that process `pid` sees, as a path for this process.
fn as_seen_by(pid: i32, path: &Path) -> PathBuf {
    let mut seen = OsString::from(format!("/proc/{pid}/root"));
    seen.push(path);
    seen.into()
}

/// A monitor, and its answer.
struct Asked {
    socket: PathBuf,
    state: State,
    user: Option<u32>,
    report: Report,
}

impl Asked {
    /// Asks the monitor at `socket`. `seen`: the same path as this process must write it.
    fn at(seen: PathBuf, socket: PathBuf) -> Asked {
        let (state, user) = match control::probe(&seen) {
            Ok(user) => match control::greet(&seen) {
                Ok(()) => (State::Answers, user),
                Err(Errno::PROTO) => (State::OtherVersion, user),
                Err(e) => (State::Refuses(e.to_string()), user),
            },
            Err(e) if control::is_absent(e) => (State::Absent, None),
            Err(e) => (State::Refuses(e.to_string()), None),
        };
        let report =
            if state == State::Answers { control::report(&seen).unwrap_or_default() } else { Report::default() };
        Asked { socket, state, user, report }
    }

    /// Asks a monitor of another ABI than this command's. It refuses the greeting of this command,
    /// so this only checks that it listens, and fetches its report.
    fn beside(asked: &Asked, seen: &Path) -> Option<Asked> {
        let user = control::probe_at(seen).ok()?;
        let report = control::report(seen).ok()?;
        let socket = asked.socket.with_file_name(seen.file_name()?);
        Some(Asked { socket, state: State::Answers, user, report })
    }

    fn process(&self, pid: i32) -> Option<&report::Process> {
        self.report.processes.iter().find(|p| i64::from(p.pid) == i64::from(pid))
    }
}

/// Running monitors with the sockets that their command lines name. Only monitors of this user and
/// of root count, because another user could run a false monitor. They must also be in this
/// command's PID namespace, so that their process numbers mean the same here.
fn monitors(user: u32) -> impl Iterator<Item = (i32, PathBuf)> {
    let all = procfs::process::all_processes().into_iter().flatten().flatten();
    let own = std::process::id().try_into().map_or(0, |pid| place::namespace(pid, "pid"));
    let all = all.filter(move |p| place::namespace(p.pid, "pid") == own);
    // The owner comes from `status`: the folder of a process that may not be traced belongs to
    // root in any case.
    let all = all.filter(move |p| p.status().is_ok_and(|status| [user, 0].contains(&status.euid)));
    let is_monitor = |p: &Process| p.exe().is_ok_and(|exe| exe.file_name() == Some(OsStr::new(locate::MONITOR)));
    all.filter(is_monitor).filter_map(|p| {
        let arguments = p.cmdline().ok()?;
        let at = arguments.iter().position(|a| a == "--socket")?;
        Some((p.pid, PathBuf::from(arguments.get(at + 1)?)))
    })
}

impl Facts {
    /// Reads the facts about process `pid`. `None`: there is no such process.
    ///
    /// # Errors
    /// This user may not look at the process.
    pub fn of(pid: i32) -> Result<Option<Facts>, String> {
        match Facts::read(pid) {
            Ok(facts) => Ok(Some(facts)),
            Err(ProcError::NotFound(_)) => Ok(None),
            Err(ProcError::PermissionDenied(_)) => Err(format!(
                "process {pid}: /proc/{pid} may not be read; ask as its user, or as root outside of containers"
            )),
            Err(e) => Err(format!("process {pid}: {e}")),
        }
    }

    fn read(pid: i32) -> Result<Facts, ProcError> {
        let process = Process::new(pid)?;
        let (stat, user) = (process.stat()?, process.uid()?);
        let maps = process.maps()?;
        let environ = process.environ()?;
        let library = maps.iter().find_map(|m| match &m.pathname {
            MMapPath::Path(path) => mapped_library(pid, path, m.inode),
            _ => None,
        });
        let libc = maps.iter().find_map(|m| match &m.pathname {
            MMapPath::Path(path) if path.file_name() == Some(OsStr::new("libc.so.6")) => Some(as_seen_by(pid, path)),
            _ => None,
        });
        let has_gcompat = maps.iter().any(|m| match &m.pathname {
            MMapPath::Path(path) => path.file_name().is_some_and(|name| name.as_bytes().starts_with(GCOMPAT)),
            _ => false,
        });
        let exe = process.exe().ok();
        // The link `exe` opens the program even if its file was deleted or lies in another mount
        // namespace.
        let kind = program::look(Path::new(&format!("/proc/{pid}/exe"))).unwrap_or(Kind::Unknown);
        let mut facts = Facts {
            pid,
            name: stat.comm.clone(),
            user,
            program: exe,
            program_kind: kind.word(),
            network_namespace: place::namespace(pid, "net"),
            user_namespace: place::namespace(pid, "user"),
            netns_owner: place::netns_owner(pid),
            library,
            has_gcompat,
            glibc: libc.and_then(|file| glibc::newest(&file)),
            monitor: None,
            registered: false,
            is_off: false,
            rule: String::new(),
            counters: Counters::new(),
            obstacles: Vec::new(),
            report: Report::default(),
        };
        if facts.library.is_some() {
            facts.ask_monitor(&environ);
        }
        facts.obstacles = facts.find_obstacles(&kind, &environ, &process, stat.starttime);
        Ok(facts)
    }

    fn ask_monitor(&mut self, environ: &HashMap<OsString, OsString>) {
        let named = environ.get(OsStr::new(paths::ENV_SOCKET)).filter(|v| !v.is_empty());
        let usual = || control::from_env().unwrap_or_else(|| PathBuf::from(paths::SYSTEM_SOCKET));
        let socket = named.map_or_else(usual, PathBuf::from);
        let mut asked = Asked::at(as_seen_by(self.pid, &socket), socket);
        // A program that sets its title may have overwritten its environment. Then its monitor is
        // the one that knows its pid.
        if named.is_none() && asked.process(self.pid).is_none() {
            let mut others = monitors(self.user).map(|(pid, socket)| Asked::at(as_seen_by(pid, &socket), socket));
            asked = others.find(|other| other.process(self.pid).is_some()).unwrap_or(asked);
        }
        // After an upgrade the old monitor may still run and serve this process.
        if asked.process(self.pid).is_none() {
            let beside = control::others(&as_seen_by(self.pid, &asked.socket)).into_iter();
            let mut others = beside.filter_map(|(_, seen)| Asked::beside(&asked, &seen));
            asked = others.find(|other| other.process(self.pid).is_some()).unwrap_or(asked);
        }
        if let Some(own) = asked.process(self.pid) {
            self.registered = true;
            self.is_off = own.off;
            self.rule = own.rule.clone();
            self.counters = own.counters.clone();
        }
        let is_system = asked.socket.parent() == Path::new(paths::SYSTEM_SOCKET).parent();
        let kind = if is_system { "system" } else { "private" };
        let Asked { socket, state, user, report } = asked;
        self.monitor = Some(Monitor { socket, kind, state, pid: report.monitor_pid, user });
        self.report = report;
    }

    fn find_obstacles(
        &self,
        kind: &Kind,
        environ: &HashMap<OsString, OsString>,
        process: &Process,
        started: u64,
    ) -> Vec<Reason> {
        let mut found = Vec::new();
        let mut say = |reason, text: String| found.push(Reason { reason, text });
        let variable = |name: &str| environ.get(OsStr::new(name)).map(|v| v.to_string_lossy()).unwrap_or_default();
        let needs = locate::library(std::env::var_os("FASTSOCKET_LIBRARY").as_deref().map(Path::new))
            .ok()
            .and_then(|file| glibc::newest(&file));
        if let Some(why) = kind.obstacle() {
            say(kind.word(), format!("the library has no effect on this program: {why}"));
        } else if self.library.is_none() {
            if process.auxv().is_ok_and(|auxv| auxv.get(&AT_SECURE).is_some_and(|v| *v != 0)) {
                say("set_user_id", "the program is set-user-ID or set-group-ID, or has file capabilities: the loader ignores LD_PRELOAD".into());
            } else if let (Some(has), Some(needs)) = (self.glibc, needs.filter(|needs| Some(*needs) > self.glibc)) {
                say("old_glibc", format!("its glibc is {has}, the library needs {needs}"));
            } else if variable("LD_PRELOAD").contains(locate::LIBRARY) {
                say("not_loaded", "LD_PRELOAD names the library, but the loader could not load it".into());
            } else {
                say("no_library", "it was started without the library (fastsocket run)".into());
            }
        }
        if self.library.is_some() && self.has_gcompat {
            say(
                "gcompat",
                "it was built for glibc and runs on musl by way of gcompat: the library does nothing".into(),
            );
        }
        if self.library.is_some() && variable(paths::ENV_DISABLE).split(',').any(|part| part.trim() == "shm") {
            say("disabled", format!("shared memory is switched off ({}, --no-shm)", paths::ENV_DISABLE));
        }
        if self.is_off {
            let by = if self.rule.is_empty() { "" } else { " or the configuration" };
            say("off", format!("an operator{by} has switched it off (fastsocket off, on)"));
        }
        let Some(monitor) = &self.monitor else { return found };
        let socket = monitor.socket.display();
        match &monitor.state {
            State::Absent => say("no_monitor", format!("no monitor is at {socket}")),
            State::OtherVersion => {
                let abi = fsocket_abi::VERSION;
                say("mismatch", format!("the monitor at {socket} is of another version than this command (ABI {abi})"));
            }
            State::Refuses(e) => say("no_monitor", format!("the monitor at {socket} does not answer: {e}")),
            State::Answers if monitor.user.is_some_and(|user| user != 0 && user != self.user) => {
                let user = monitor.user.unwrap_or_default();
                say("other_users_monitor", format!("the monitor at {socket} is that of user {user}"));
            }
            State::Answers if !self.registered => {
                let since = i32::try_from(monitor.pid).ok().and_then(|pid| Process::new(pid).ok()?.stat().ok());
                if since.is_some_and(|monitor| monitor.starttime > started) {
                    say("monitor_later", "it started before its monitor, and has made no socket call since".into());
                } else if process.status().is_ok_and(|s| s.seccomp == Some(2)) {
                    say("seccomp", "it has a filter of system calls, and does not reach the monitor".into());
                } else {
                    say("not_registered", "the monitor does not know it: it has made no socket call yet".into());
                }
            }
            State::Answers => {}
        }
        found
    }

    /// Whether the process is a monitor. A monitor may hold connections whose programs have not
    /// fetched them yet.
    pub fn is_monitor(&self) -> bool {
        self.program.as_deref().and_then(Path::file_name) == Some(OsStr::new(locate::MONITOR))
    }

    pub fn counter(&self, name: &str) -> u64 {
        self.counters.get(name).copied().unwrap_or(0)
    }
}

/// The library, if the mapped file at `path` is the library.
fn mapped_library(pid: i32, path: &Path, inode: u64) -> Option<Library> {
    let name = path.file_name()?.as_bytes();
    let ended = name.strip_suffix(b" (deleted)");
    if ended.unwrap_or(name) != locate::LIBRARY.as_bytes() {
        return None;
    }
    let path = path.with_file_name(locate::LIBRARY);
    let now = std::fs::metadata(as_seen_by(pid, &path)).ok();
    let replaced = ended.is_some() || now.is_none_or(|m| std::os::unix::fs::MetadataExt::ino(&m) != inode);
    Some(Library { path, replaced })
}
