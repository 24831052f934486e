//! `fastsocket run`: sets up the environment and becomes the program. If a part of Fastsocket is
//! missing, the program runs on stock sockets, unless `--require` is given.

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

/// Becomes the program. Returns only on failure, with the exit status.
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
    // If the file cannot be read, go on: execvp reports the error.
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
            // No other thread can read the environment now, because the process has one thread.
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
                // An outer `fastsocket run` has put the library into LD_PRELOAD; with it, this
                // program would not start.
                std::env::set_var("LD_PRELOAD", without_library(&list));
            }
            // The program will not load the library, but `stat` finds by this variable that it
            // should be accelerated.
            if let (true, Ok(socket)) = (kind.refuses_library(), control::find()) {
                std::env::set_var(paths::ENV_SOCKET, socket);
            }
        }
    }
    execute(&args.program)
}

/// Settings in the program's environment.
pub struct Setup {
    pub library: PathBuf,
    pub socket: PathBuf,
    /// How the monitor was found, in words for the user.
    pub origin: String,
}

fn prepare(pieces: &Pieces) -> Result<Setup, String> {
    let library = locate::library(pieces.library.as_deref())?;
    let (socket, origin) = monitor(pieces)?;
    Ok(Setup { library, socket, origin })
}

/// Finds a monitor that listens. The first of these counts: the one that the environment names,
/// the system's, this user's private one. A private monitor is started if none runs.
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
    // Probe the socket of this ABI: a monitor of another ABI serves only programs with another
    // version of the library.
    match control::probe_at(&control::named(&socket)) {
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

/// The list of disabled parts (`now`), with the parts added whose entry in `off` is true.
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

/// Tells libuv whether to use io_uring. Some releases of libuv use it by default (uvloop contains
/// one), with a ring that the kernel polls. All sockets of such a process would have to use the
/// kernel, so the command switches it off.
const ENV_UV: &str = "UV_USE_IO_URING";
/// Options of AddressSanitizer's runtime.
const ENV_ASAN: &str = "ASAN_OPTIONS";
/// If AddressSanitizer's runtime is a shared library (gcc's default), it ends the program when
/// another library is loaded before it. This option switches the check off.
const ASAN_ORDER: &str = "verify_asan_link_order";

/// Adds the option before the user's own options, because a later option wins.
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
    // SAFETY: `pointers` ends with null, and the strings that it points to live in `args`, which
    // is live here.
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
