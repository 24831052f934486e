//! Finds the library, the monitor, and the programs that commands execute.

use clap::Args;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

pub const LIBRARY: &str = "libfsocket.so";
pub const MONITOR: &str = "fastsocketd";

/// Where the other two pieces are.
#[derive(Debug, Default, Clone, Args)]
pub struct Pieces {
    /// The preloaded library [default: beside this program, ../lib, /usr/lib/fastsocket]
    #[arg(long, value_name = "PATH", env = "FASTSOCKET_LIBRARY")]
    pub library: Option<PathBuf>,
    /// The monitor [default: beside this program, ../sbin, /usr/sbin]
    #[arg(long, value_name = "PATH", env = "FASTSOCKET_MONITOR")]
    pub monitor: Option<PathBuf>,
}

/// Absolute path of the library, which is fit for `LD_PRELOAD`. The error says why there is none.
pub fn library(named: Option<&Path>) -> Result<PathBuf, String> {
    let path = find(named, LIBRARY, &["", "../lib", "../lib/fastsocket"], &["/usr/lib/fastsocket", "/usr/lib"])?;
    check_library(&path)?;
    Ok(path)
}

/// Absolute path of the monitor.
pub fn monitor(named: Option<&Path>) -> Result<PathBuf, String> {
    find(named, MONITOR, &["", "../sbin", "../../sbin"], &["/usr/sbin", "/usr/local/sbin", "/usr/bin"])
}

/// The program that a command executes: beside this one, where the library is installed, or in PATH.
pub fn program(name: &str) -> Result<PathBuf, String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    find(None, name, &["", "../lib/fastsocket"], &["/usr/lib/fastsocket"]).or_else(|e| {
        let mut named = std::env::split_paths(&path).map(|dir| dir.join(name));
        named.find(|file| rustix::fs::access(file, rustix::fs::Access::EXEC_OK).is_ok()).ok_or(e)
    })
}

/// `beside`: directories relative to the directory of this program.
fn find(named: Option<&Path>, name: &str, beside: &[&str], system: &[&str]) -> Result<PathBuf, String> {
    if let Some(path) = named {
        return path.canonicalize().map_err(|e| format!("{}: {e}", path.display()));
    }
    let own = std::env::current_exe().ok();
    let own_dir = own.as_deref().and_then(Path::parent);
    let near = own_dir.iter().flat_map(|dir| beside.iter().map(|b| dir.join(b)));
    near.chain(system.iter().map(PathBuf::from))
        .find_map(|dir| dir.join(name).canonicalize().ok())
        .ok_or_else(|| format!("{name} not found"))
}

/// Checks once what ld.so would otherwise report in every program.
fn check_library(path: &Path) -> Result<(), String> {
    let text = path.to_string_lossy();
    // ld.so(8): entries are separated by spaces or colons; neither can be escaped.
    if text.contains([' ', ':']) {
        return Err(format!("{text}: LD_PRELOAD cannot hold a path with a space or a colon"));
    }
    let mut theirs = [0; 20];
    let mut ours = [0; 20];
    let read =
        |path: &Path, to: &mut [u8]| File::open(path).and_then(|mut f| f.read_exact(to)).map_err(|e| e.to_string());
    read(path, &mut theirs).map_err(|e| format!("{text}: {e}"))?;
    read(Path::new("/proc/self/exe"), &mut ours).map_err(|e| format!("/proc/self/exe: {e}"))?;
    // ELF magic, class, byte order; machine. A shared object is ET_DYN, type 3.
    if theirs[..6] != ours[..6] || theirs[18..20] != ours[18..20] || theirs[16] != 3 {
        return Err(format!("{text}: not a shared library for this machine"));
    }
    Ok(())
}
