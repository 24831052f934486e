//! `fastsocket doctor`: checks whether this machine has what Fastsocket needs. Each check prints one line and changes
//! nothing.

use crate::cmdline::Doctor;
use crate::program;
use anyhow::{anyhow, bail, ensure, Context, Result};
use fsocket_abi::{arena, channel};
use fsocket_client::locate::Pieces;
use fsocket_client::{control, locate};
use rustix::fs::{fcntl_add_seals, ftruncate, memfd_create, MemfdFlags, SealFlags};
use rustix::process::{getrlimit, Resource};
use std::fs;
use std::path::Path;
use std::process::Command;

/// The oldest kernel on which Fastsocket is tested.
const KERNEL: (u32, u32) = (6, 1);
/// Number of file descriptors that a busy program needs together with the library.
const DESCRIPTORS: u64 = 1024;

type Check = fn(&Pieces) -> Result<String>;
const CHECKS: &[(&str, Check)] = &[
    ("kernel", kernel),
    ("kernel does itself", does_itself),
    ("membarrier", membarrier),
    ("sealed memfd", memfd),
    ("eventfd", eventfd),
    ("network namespace cookie", netns_cookie),
    ("open files", open_files),
    ("address space", address_space),
    ("file size", file_size),
    ("library", library),
    ("monitor", monitor),
    ("other hosts", other_hosts),
];

/// Prints one line for each check; returns 1 if any has failed.
pub fn run(args: &Doctor) -> i32 {
    let mut bad = 0;
    let named = args.program.as_deref().map(|file| ("program", can_load(file)));
    let checks = CHECKS.iter().map(|(name, check)| (*name, check(&args.pieces)));
    for (name, result) in checks.chain(named) {
        match result {
            Ok(text) => anstream::println!("ok    {name}: {text}"),
            Err(e) => {
                bad += 1;
                anstream::println!("FAIL  {name}: {e:#}");
            }
        }
    }
    (bad > 0) as i32
}

fn kernel(_: &Pieces) -> Result<String> {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map(|n| n.parse::<u32>().unwrap_or(0));
    let found = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    ensure!(found >= KERNEL, "{release}; {}.{} or later is needed", KERNEL.0, KERNEL.1);
    Ok(release)
}

/// Checks for features that the Fastsocket papers patched into the kernel. Every kernel since
/// [`KERNEL`] has them.
fn does_itself(_: &Pieces) -> Result<String> {
    let on = |name: &str| {
        let value = fs::read_to_string(format!("/proc/sys/net/ipv4/{name}"));
        value.map_or("unknown", |v| if v.trim() == "0" { "off" } else { "on" })
    };
    let demux = match (on("ip_early_demux"), on("tcp_early_demux")) {
        ("on", tcp) => tcp,
        (ip, _) => ip,
    };
    Ok(format!(
        "SYN path without the listener's lock, established table without locks, sockets outside the dcache, \
         page pools; early demux {demux}"
    ))
}

fn membarrier(_: &Pieces) -> Result<String> {
    // SAFETY: MEMBARRIER_CMD_QUERY takes no pointers and changes nothing.
    let commands = unsafe { libc::syscall(libc::SYS_membarrier, libc::MEMBARRIER_CMD_QUERY, 0, 0) };
    ensure!(commands >= 0, "not supported: {}", std::io::Error::last_os_error());
    for (name, bit) in [
        ("private expedited", libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED),
        ("global expedited", libc::MEMBARRIER_CMD_GLOBAL_EXPEDITED),
    ] {
        ensure!(commands & libc::c_long::from(bit) != 0, "no {name}");
    }
    Ok("private and global expedited".to_owned())
}

fn memfd(_: &Pieces) -> Result<String> {
    let fd = memfd_create("fastsocket-doctor", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&fd, 4096)?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE)?;
    ensure!(ftruncate(&fd, 8192).is_err(), "a seal does not hold");
    Ok("shrink, grow, future write".to_owned())
}

fn eventfd(_: &Pieces) -> Result<String> {
    let fd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?;
    rustix::io::write(&fd, &1u64.to_ne_bytes())?;
    Ok("works".to_owned())
}

fn netns_cookie(_: &Pieces) -> Result<String> {
    let socket = std::net::UdpSocket::bind(("127.0.0.1", 0)).context("no socket on 127.0.0.1")?;
    let (mut cookie, mut len) = (0u64, size_of::<u64>() as libc::socklen_t);
    let fd = std::os::fd::AsRawFd::as_raw_fd(&socket);
    // SAFETY: `cookie` is live during the call, and `len` is its size.
    let result =
        unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_NETNS_COOKIE, (&raw mut cookie).cast(), &mut len) };
    ensure!(result == 0, "{}", std::io::Error::last_os_error());
    Ok(cookie.to_string())
}

fn open_files(_: &Pieces) -> Result<String> {
    let limit = getrlimit(Resource::Nofile).current;
    ensure!(limit.is_none_or(|n| n >= DESCRIPTORS), "limit {}; {DESCRIPTORS} are wanted", limit.unwrap_or(0));
    Ok(limit.map_or("no limit".to_owned(), |n| n.to_string()))
}

fn address_space(_: &Pieces) -> Result<String> {
    let channel = channel::segment(0).1 as u64;
    let need = channel * channel::ADDRESS_SHARE + arena::ARENA_SIZE as u64;
    match getrlimit(Resource::As).current {
        Some(limit) if limit < need => {
            bail!("limit {} MiB; a channel takes {} MiB, all of them a quarter of it", limit >> 20, channel >> 20)
        }
        Some(limit) => Ok(format!("limit {} MiB", limit >> 20)),
        None => Ok("no limit".to_owned()),
    }
}

/// Checks RLIMIT_FSIZE, because the kernel applies this limit to a memfd, too.
fn file_size(_: &Pieces) -> Result<String> {
    let need = channel::CHANNEL_SIZE as u64;
    match getrlimit(Resource::Fsize).current {
        Some(limit) if limit < need => bail!("limit {} MiB; a channel takes {} MiB", limit >> 20, need >> 20),
        _ => Ok("enough".to_owned()),
    }
}

/// Starts a program with the library in LD_PRELOAD, and checks that the library is mapped there.
fn library(pieces: &Pieces) -> Result<String> {
    let path = locate::library(pieces.library.as_deref()).map_err(|e| anyhow!(e))?;
    let output =
        Command::new("cat").arg("/proc/self/maps").env("LD_PRELOAD", &path).output().context("cannot run cat")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success() && said.is_empty(), "{}: {} {}", path.display(), output.status, said.trim());
    let maps = String::from_utf8_lossy(&output.stdout);
    ensure!(maps.lines().any(|l| l.ends_with(&*path.to_string_lossy())), "{}: not loaded", path.display());
    Ok(path.display().to_string())
}

/// Checks whether the loader can put the library into this program.
fn can_load(file: &Path) -> Result<String> {
    let path = program::in_path(file.as_os_str()).ok_or_else(|| anyhow!("{}: not found", file.display()))?;
    let kind = program::look(&path).with_context(|| path.display().to_string())?;
    if let Some(why) = kind.obstacle() {
        bail!("{}: {why}", path.display());
    }
    Ok(format!("{} ({})", path.display(), kind.word()))
}

/// Reports whether this host announces Fastsocket to others (`[hosts]` of the monitor's
/// configuration).
fn other_hosts(_: &Pieces) -> Result<String> {
    let Ok(socket) = control::find() else { return Ok("not announced: no monitor runs".to_owned()) };
    let hosts = control::brief_report(&socket)?.hosts;
    match hosts.state.as_str() {
        "off" | "" => Ok("not announced (docs/hosts.md)".to_owned()),
        "on" => Ok(format!("announced, number {}", hosts.number)),
        why => bail!("not announced: {why}"),
    }
}

fn monitor(pieces: &Pieces) -> Result<String> {
    match control::find() {
        Ok(socket) => {
            let report = control::report(&socket)?;
            let others: String =
                control::others(&socket).iter().map(|(abi, _)| format!("; one of ABI {abi} stays")).collect();
            let at = socket.display();
            Ok(format!("process {} at {at}, up {:.0} s{others}", report.monitor_pid, report.uptime))
        }
        Err(none) => {
            let path = locate::monitor(pieces.monitor.as_deref()).map_err(|e| anyhow!("{none}, and {e}"))?;
            fs::File::open(&path).with_context(|| path.display().to_string())?;
            Ok(format!("none runs; 'fastsocket run' will start {}", path.display()))
        }
    }
}
