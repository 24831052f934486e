//! `fastsocket run`: sets up the environment and becomes the program.

use crate::cmdline::{Pieces, Run};
use crate::program::{self, Kind};
use crate::{control, locate, private, EXIT_OWN};
use fsocket_proto::paths;
use std::ffi::{CString, OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

const EXIT_CANNOT_EXECUTE: i32 = 126;
const EXIT_NOT_FOUND: i32 = 127;

/// Words that [`paths::ENV_DISABLE`] may hold, in the order of the options.
const PARTS: [&str; 3] = ["shm", "zones", "balance"];

/// Does not return unless something failed; the exit status.
pub fn run(args: &Run) -> i32 {
    let disable =
        match disabled_parts(std::env::var_os(paths::ENV_DISABLE), [args.no_shm, args.no_zones, args.no_balance]) {
            Ok(list) => list,
            Err(e) => {
                eprintln!("fastsocket: {e}");
                return EXIT_OWN;
            }
        };
    let program = args.program[0].to_string_lossy();
    // (What cannot be read is execvp's to complain of.)
    let kind = program::in_path(&args.program[0]).and_then(|path| program::look(&path).ok());
    let kind = kind.unwrap_or(Kind::Unknown);
    let refuses = kind.obstacle().filter(|_| kind.refuses_library());
    let outcome = match &refuses {
        Some(why) => Err(why.clone()),
        None => prepare(&args.pieces),
    };
    if let (true, Some(why)) = (args.require, outcome.as_ref().err().cloned().or_else(|| kind.obstacle())) {
        eprintln!("fastsocket: {program} cannot be accelerated: {why}");
        return EXIT_OWN;
    }
    match outcome {
        Ok(setup) => {
            if let Some(why) = kind.obstacle() {
                eprintln!(
                    "fastsocket: warning: {why}; {program} runs on stock sockets, programs that it starts do not"
                );
            }
            if args.verbose {
                eprintln!("fastsocket: library {}", setup.library.display());
                eprintln!("fastsocket: monitor {} ({})", setup.socket.display(), setup.origin);
                if !disable.is_empty() {
                    eprintln!("fastsocket: switched off: {}", disable.to_string_lossy());
                }
            }
            // One thread: nobody reads the environment meanwhile.
            std::env::set_var(paths::ENV_SOCKET, &setup.socket);
            std::env::set_var("LD_PRELOAD", preload_list(std::env::var_os("LD_PRELOAD"), &setup.library));
            std::env::set_var(ENV_ASAN, asan_options(std::env::var_os(ENV_ASAN)));
            if std::env::var_os(ENV_UV).is_none() {
                std::env::set_var(ENV_UV, "0");
            }
            std::env::set_var(paths::ENV_PIN, args.pin.word());
            if !disable.is_empty() {
                std::env::set_var(paths::ENV_DISABLE, disable);
            }
        }
        Err(e) => {
            eprintln!("fastsocket: warning: {e}; {program} runs on stock sockets");
            if let (Some(_), Some(list)) = (refuses, std::env::var_os("LD_PRELOAD")) {
                // Under another one of us.
                std::env::set_var("LD_PRELOAD", without_library(&list));
            }
        }
    }
    execute(&args.program)
}

/// What the program needs in its environment.
pub struct Setup {
    pub library: PathBuf,
    pub socket: PathBuf,
    /// How the monitor was found, in words.
    pub origin: String,
}

fn prepare(pieces: &Pieces) -> Result<Setup, String> {
    let library = locate::library(pieces.library.as_deref())?;
    let (socket, origin) = monitor(pieces)?;
    Ok(Setup { library, socket, origin })
}

/// A monitor that listens: the one named by the environment, the system's, or
/// this user's own, started if need be.
fn monitor(pieces: &Pieces) -> Result<(PathBuf, String), String> {
    let failed = |path: &Path, e: rustix::io::Errno| format!("monitor {}: {e}", path.display());
    if let Some(path) = control::from_env() {
        control::probe(&path).map_err(|e| failed(&path, e))?;
        return Ok((path, format!("named by {}", paths::ENV_SOCKET)));
    }
    let system = PathBuf::from(paths::SYSTEM_SOCKET);
    match control::probe(&system) {
        Ok(_) => return Ok((system, "system".to_owned())),
        Err(e) if control::is_absent(e) => {}
        Err(e) => return Err(failed(&system, e)),
    }
    let Some(socket) = control::private_path() else {
        let monitor = locate::monitor(pieces.monitor.as_deref())?;
        let socket = private::scratch()?;
        eprintln!(
            "fastsocket: this user has no runtime directory (XDG_RUNTIME_DIR): the monitor is in {}, and only \
             programs that this one starts meet there",
            socket.parent().unwrap_or(&socket).display()
        );
        private::start(&monitor, &socket, true)?;
        return Ok((socket, "private, of this program".to_owned()));
    };
    match control::probe(&socket) {
        Ok(uid) => {
            private::directory(&socket)?;
            if uid.is_some_and(|uid| uid != rustix::process::geteuid().as_raw()) {
                return Err(format!("monitor {}: runs as another user", socket.display()));
            }
            Ok((socket, "private".to_owned()))
        }
        Err(e) if control::is_absent(e) => {
            private::start(&locate::monitor(pieces.monitor.as_deref())?, &socket, false)?;
            Ok((socket, "private, started".to_owned()))
        }
        Err(e) => Err(failed(&socket, e)),
    }
}

/// The list of parts that are off, with those added that are asked for.
fn disabled_parts(now: Option<OsString>, off: [bool; 3]) -> Result<OsString, String> {
    let now = now.unwrap_or_default();
    let now = now.to_string_lossy();
    let mut parts: Vec<&str> = now.split(',').map(str::trim).filter(|p| !p.is_empty()).collect();
    if let Some(bad) = parts.iter().find(|p| !PARTS.contains(p)) {
        return Err(format!("{}: unknown part '{bad}' (known: {})", paths::ENV_DISABLE, PARTS.join(", ")));
    }
    for (part, off) in PARTS.into_iter().zip(off) {
        if off && !parts.contains(&part) {
            parts.push(part);
        }
    }
    Ok(parts.join(",").into())
}

/// Whether libuv uses io_uring. Some of its releases do by themselves (uvloop has one), with a
/// ring that the kernel polls: all sockets of such a process are the kernel's.
const ENV_UV: &str = "UV_USE_IO_URING";
/// Options of AddressSanitizer's runtime.
const ENV_ASAN: &str = "ASAN_OPTIONS";
/// Where it is a library (gcc's default) it ends the program if another one comes before it.
const ASAN_ORDER: &str = "verify_asan_link_order";

/// The options, and that the order of libraries is as it should be. Before the user's, who has
/// the last word: a later option counts.
fn asan_options(now: Option<OsString>) -> OsString {
    let mut options = OsString::from(format!("{ASAN_ORDER}=0"));
    if let Some(now) = now.filter(|now| !now.is_empty()) {
        options.push(":");
        options.push(now);
    }
    options
}

/// Runtimes of sanitizers: they watch the program from before us, if they are asked to.
fn is_sanitizer(entry: &[u8]) -> bool {
    let name = Path::new(OsStr::from_bytes(entry)).file_name().unwrap_or_default().as_bytes();
    [&b"libasan."[..], b"libtsan.", b"liblsan.", b"libubsan.", b"libclang_rt."].iter().any(|p| name.starts_with(p))
}

/// `LD_PRELOAD` with the library first (after the runtimes of sanitizers), once; what else is
/// there stays.
pub fn preload_list(now: Option<OsString>, library: &Path) -> OsString {
    let now = now.unwrap_or_default();
    let entries: Vec<&[u8]> = entries(&now).collect();
    let same = |e: &[u8]| Path::new(OsStr::from_bytes(e)).canonicalize().is_ok_and(|p| p == library);
    if entries.iter().any(|e| same(e)) {
        return now;
    }
    let (before, after): (Vec<&[u8]>, Vec<&[u8]>) = entries.into_iter().partition(|e| is_sanitizer(e));
    // Another build of the library: two of them would hook each other.
    let stranger = |e: &&[u8]| !is_library(e);
    let ours = library.as_os_str().as_bytes();
    let list: Vec<&[u8]> = before.into_iter().chain([ours]).chain(after.into_iter().filter(stranger)).collect();
    OsString::from_vec(list.join(&b':'))
}

/// Entries of a list of libraries.
fn entries(list: &OsStr) -> impl Iterator<Item = &[u8]> {
    list.as_bytes().split(|b| matches!(b, b':' | b' ')).filter(|e| !e.is_empty())
}

/// Is this our library, of any build?
fn is_library(entry: &[u8]) -> bool {
    Path::new(OsStr::from_bytes(entry)).file_name() == Some(OsStr::new(locate::LIBRARY))
}

/// `LD_PRELOAD` for a program that cannot load the library.
fn without_library(list: &OsStr) -> OsString {
    OsString::from_vec(entries(list).filter(|e| !is_library(e)).collect::<Vec<_>>().join(&b':'))
}

/// Becomes the program; returns the exit status if it cannot.
fn execute(program: &[OsString]) -> i32 {
    let args: Result<Vec<CString>, _> = program.iter().map(|a| CString::new(a.as_bytes())).collect();
    let Ok(args) = args else {
        eprintln!("fastsocket: argument with a zero byte");
        return EXIT_OWN;
    };
    let pointers: Vec<_> = args.iter().map(|a| a.as_ptr()).chain([std::ptr::null()]).collect();
    // SAFETY: `pointers` ends with null, and it and what it points to live here.
    unsafe { libc::execvp(pointers[0], pointers.as_ptr()) };
    let e = std::io::Error::last_os_error();
    let name = program[0].to_string_lossy();
    if e.raw_os_error() == Some(libc::ENOENT) {
        eprintln!("fastsocket: {name}: not found");
        EXIT_NOT_FOUND
    } else {
        eprintln!("fastsocket: {name}: cannot execute: {e}");
        EXIT_CANNOT_EXECUTE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn preload(now: &str) -> String {
        preload_list(Some(now.into()), Path::new("/opt/fs/libfsocket.so")).into_string().unwrap()
    }

    #[test]
    fn library_goes_first_and_others_stay() {
        assert_eq!(preload(""), "/opt/fs/libfsocket.so");
        assert_eq!(preload("/a.so:/b.so c.so"), "/opt/fs/libfsocket.so:/a.so:/b.so:c.so");
    }

    #[test]
    fn another_build_is_replaced() {
        assert_eq!(preload("/x/libfsocket.so:/b.so"), "/opt/fs/libfsocket.so:/b.so");
    }

    #[test]
    fn sanitizers_stay_in_front() {
        let list = preload("/b.so:/usr/lib/libtsan.so.2:libclang_rt.asan-x86_64.so");
        assert_eq!(list, "/usr/lib/libtsan.so.2:libclang_rt.asan-x86_64.so:/opt/fs/libfsocket.so:/b.so");
        assert_eq!(asan_options(None), "verify_asan_link_order=0");
        assert_eq!(asan_options(Some("log_path=/x".into())), "verify_asan_link_order=0:log_path=/x");
    }

    #[test]
    fn same_file_is_not_added_twice() {
        let exe = std::env::current_exe().unwrap().canonicalize().unwrap();
        let now = OsString::from(format!("/b.so:{}", exe.display()));
        assert_eq!(preload_list(Some(now.clone()), &exe), now);
    }

    #[test]
    fn another_loader_gets_no_library() {
        assert_eq!(without_library(OsStr::new("/b.so:/x/libfsocket.so c.so")), "/b.so:c.so");
        assert_eq!(without_library(OsStr::new("/x/libfsocket.so")), "");
    }

    #[test]
    fn disable_list() {
        let list = |now: Option<&str>, no_shm| disabled_parts(now.map(Into::into), [no_shm, false, false]);
        assert_eq!(list(None, false).unwrap(), "");
        assert_eq!(list(None, true).unwrap(), "shm");
        assert_eq!(list(Some("zones, shm"), true).unwrap(), "zones,shm");
        assert_eq!(disabled_parts(None, [false, true, true]).unwrap(), "zones,balance");
        assert!(list(Some("shn"), false).unwrap_err().contains("shn"));
    }
}
