//! Finds out by a TCP option which other hosts have Fastsocket; see `announce.bpf.c`.

use crate::counters::sum;
use crate::{load, probe, skel, Error, Result};
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{libbpf_sys as libbpf, Link};
use std::fs::File;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// Host numbers are 1 to this.
pub const LAST: u32 = (1 << 24) - 1;

/// The order of `enum reason` in `announce.bpf.c`.
const REASONS: [&str; 3] = ["opened", "accepted", "without"];

/// The loaded program. New connections carry the option until this value is dropped.
pub struct Announcer {
    // Dropped before the skeleton, so that the program is detached while it still exists.
    _link: Link,
    skel: skel::announce::AnnounceSkel<'static>,
}

/// Descriptors of the maps that the program writes. Using them takes no privilege.
#[derive(Debug)]
pub struct Parts {
    pub sockets: OwnedFd,
    pub hosts: OwnedFd,
    pub reasons: OwnedFd,
}

/// Reads the maps of an [`Announcer`], which may belong to another process.
pub struct Hosts(Parts);

impl Announcer {
    /// Loads the program and attaches it to a cgroup: processes in this cgroup announce this host
    /// by `number`.
    ///
    /// # Errors
    /// [`Error::Missing`] with the reason if this kernel or process cannot do it; [`Error::Busy`]
    /// if another owner's program in the cgroup allows no other program.
    pub fn start(cgroup: &Path, number: u32) -> Result<Announcer> {
        probe::permitted()?;
        let directory = File::open(cgroup).map_err(|e| Error::file(cgroup, e))?;
        let skel = load::logged("announce", || {
            let mut open = skel::announce::AnnounceSkelBuilder::default().open(load::storage())?;
            if let Some(data) = open.maps.rodata_data.as_deref_mut() {
                data.own_number = number & LAST;
            }
            open.load()
        })?;
        let attached = skel.progs.announce.attach_cgroup(directory.as_raw_fd());
        let link = attached.map_err(|e| match e.kind() {
            libbpf_rs::ErrorKind::PermissionDenied => {
                Error::Busy { what: "sockops", source: std::io::Error::from_raw_os_error(libc::EPERM) }
            }
            _ => Error::attach("announce", e),
        })?;
        Ok(Announcer { _link: link, skel })
    }

    /// For tests: attaches the program so that it allows no other one beside it, until the cgroup
    /// is removed.
    ///
    /// # Errors
    /// Those of the system calls.
    pub fn attach_alone(&self, cgroup: &Path) -> Result<()> {
        let directory = File::open(cgroup).map_err(|e| Error::file(cgroup, e))?;
        let program = self.skel.progs.announce.as_fd().as_raw_fd();
        // SAFETY: the call takes only numbers.
        let rc = unsafe { libbpf::bpf_prog_attach(program, directory.as_raw_fd(), libbpf::BPF_CGROUP_SOCK_OPS, 0) };
        match rc {
            0 => Ok(()),
            e => Err(Error::attach("announce", std::io::Error::from_raw_os_error(-e).into())),
        }
    }

    /// # Errors
    /// No descriptor is left.
    pub fn parts(&self) -> Result<Parts> {
        let own = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().map_err(|e| Error::map("announce", e.into()));
        let maps = &self.skel.maps;
        Ok(Parts {
            sockets: own(maps.sockets.as_fd())?,
            hosts: own(maps.hosts.as_fd())?,
            reasons: own(maps.reasons.as_fd())?,
        })
    }
}

impl Hosts {
    pub fn of(parts: Parts) -> Hosts {
        Hosts(parts)
    }

    /// Number of the host at the other end of a connection, as that host has announced it in the
    /// handshake. `None`: it has announced nothing. This is only a hint, because any process can
    /// announce any number, even one of this host.
    pub fn behind(&self, socket: BorrowedFd<'_>) -> Option<u32> {
        let (fd, mut number) = (socket.as_raw_fd(), 0u32);
        let (key, value) = ((&raw const fd).cast(), (&raw mut number).cast());
        // SAFETY: key (a descriptor, as of all such maps) and value are as large as the map's, and live during the call.
        let found = unsafe { libbpf::bpf_map_lookup_elem(self.0.sockets.as_raw_fd(), key, value) };
        (found == 0).then_some(number)
    }

    /// Addresses of hosts with Fastsocket, and their numbers, as the last connection with each of
    /// them has shown.
    pub fn known(&self) -> Vec<(IpAddr, u32)> {
        let map = self.0.hosts.as_raw_fd();
        let mut known = Vec::new();
        let mut last: Option<[u8; 16]> = None;
        // Hosts may be added and removed meanwhile, so the loop has a limit.
        for _ in 0..4096 {
            let (mut next, mut number) = ([0u8; 16], 0u32);
            let from = last.as_ref().map_or(std::ptr::null(), |key| key.as_ptr().cast());
            // SAFETY: keys and value are as large as the map's, and live during the calls.
            let found = unsafe { libbpf::bpf_map_get_next_key(map, from, next.as_mut_ptr().cast()) };
            if found != 0 {
                break;
            }
            // SAFETY: key and number are as large as the map's, and live during the call.
            let found = unsafe { libbpf::bpf_map_lookup_elem(map, next.as_ptr().cast(), (&raw mut number).cast()) };
            if found == 0 {
                known.push((Ipv6Addr::from(next).to_canonical(), number));
            }
            last = Some(next);
        }
        known
    }

    /// Number of connections with addresses other than loopback: `opened` to a host that has
    /// announced itself, `accepted` from one, or `without` an announcement.
    pub fn counts(&self) -> [(&'static str, u64); 3] {
        let mut key = 0;
        REASONS.map(|name| {
            let n = sum(self.0.reasons.as_fd(), key);
            key += 1;
            (name, n)
        })
    }
}
