//! `fastsocket run`: sets up the environment and becomes the program.

use crate::cmdline::Run;
use crate::program::{self, Kind};
use crate::{drops, private};
use fsocket_client::locate::Pieces;
use fsocket_client::preload_list::{preload_list, without_library};
use fsocket_client::EXIT_OWN;
use fsocket_client::{control, locate};
use fsocket_proto::paths;
use std::ffi::{CString, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

const EXIT_CANNOT_EXECUTE: i32 = 126;
const EXIT_NOT_FOUND: i32 = 127;

/// Words that [`paths::ENV_DISABLE`] may hold, in the order of the options.
const PARTS: [&str; 4] = ["shm", "zones", "balance", "unix"];

/// Does not return unless something failed; the exit status.
pub fn run(args: &Run) -> i32 {
    let disable = match disabled_parts(
        std::env::var_os(paths::ENV_DISABLE),
        [args.no_shm, args.no_zones, args.no_balance, args.no_unix],
    ) {
        Ok(list) => list,
        Err(e) => {
            eprintln!("fastsocket: {e}");
            return EXIT_OWN;
        }
    };
    let program = args.program[0].to_string_lossy();
    // (What cannot be read is execvp's to complain of.)
    let path = program::in_path(&args.program[0]);
    let kind = path.as_deref().and_then(|path| program::look(path).ok()).unwrap_or(Kind::Unknown);
    let dropped = drops::why(&args.program, path.as_deref());
    let refuses = kind.obstacle().filter(|_| kind.refuses_library());
    let outcome = match &refuses {
        Some(why) => Err(why.clone()),
        None => prepare(&args.pieces),
    };
    if let (true, Some(why)) =
        (args.require, outcome.as_ref().err().cloned().or_else(|| kind.obstacle().or_else(|| dropped.clone())))
    {
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
            if let Some(why) = dropped {
                eprintln!("fastsocket: warning: {why}");
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
            if args.summary {
                std::env::set_var(paths::ENV_SUMMARY, std::process::id().to_string());
            }
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
            // By that `stat` tells that it was to be accelerated.
            if let (true, Ok(socket)) = (kind.refuses_library(), control::find()) {
                std::env::set_var(paths::ENV_SOCKET, socket);
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
    let socket = control::private_path();
    private::directory(&socket)?;
    match control::probe(&socket) {
        Ok(uid) => {
            if uid.is_some_and(|uid| uid != rustix::process::geteuid().as_raw()) {
                return Err(format!("monitor {}: runs as another user", socket.display()));
            }
            Ok((socket, "private".to_owned()))
        }
        Err(e) if control::is_absent(e) => {
            private::start(&locate::monitor(pieces.monitor.as_deref())?, &socket)?;
            Ok((socket, "private, started".to_owned()))
        }
        Err(e) => Err(failed(&socket, e)),
    }
}

/// The list of parts that are off, with those added that are asked for.
fn disabled_parts(now: Option<OsString>, off: [bool; PARTS.len()]) -> Result<OsString, String> {
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

    #[test]
    fn users_asan_options_have_the_last_word() {
        assert_eq!(asan_options(None), "verify_asan_link_order=0");
        assert_eq!(asan_options(Some("log_path=/x".into())), "verify_asan_link_order=0:log_path=/x");
    }

    #[test]
    fn disable_list() {
        let list = |now: Option<&str>, no_shm| disabled_parts(now.map(Into::into), [no_shm, false, false, false]);
        assert_eq!(list(None, false).unwrap(), "");
        assert_eq!(list(None, true).unwrap(), "shm");
        assert_eq!(list(Some("zones, shm"), true).unwrap(), "zones,shm");
        assert_eq!(disabled_parts(None, [false, true, true, false]).unwrap(), "zones,balance");
        assert!(list(Some("shn"), false).unwrap_err().contains("shn"));
    }
}
