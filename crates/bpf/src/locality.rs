//! Locality: the share of packets that the kernel handles on the CPU where the application runs,
//! for each process, and for passive and active connections.
//!
//! The beginning of `locality.bpf.c` says exactly what is compared.

use crate::counters::{self, Count};
use crate::{load, probe, skel, Error, Result};
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{Link, MapCore, MapFlags};
use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsRawFd;

/// The order of `enum reason` in `locality.bpf.c`.
const REASONS: &[&str] = &["waiting_packets", "judged", "too_many_cpus", "no_record", "no_cell"];

/// Which side has opened a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Unknown: the connection was established before the measurement began.
    Older,
    /// Accepted.
    Passive,
    /// Connected.
    Active,
}

/// Number of packets for one process, one kind of connection, and one pair of CPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cell {
    pub tgid: u32,
    /// The process's name when it was first seen; empty if it is not known.
    pub comm: String,
    pub kind: Kind,
    /// CPU that handled the packets.
    pub handled: u16,
    /// CPU on which the application used the connection.
    pub app: u32,
    pub packets: u64,
}

impl Cell {
    /// Did the kernel handle these packets on the application's CPU?
    pub fn is_local(&self) -> bool {
        u32::from(self.handled) == self.app
    }
}

/// A running measurement of all TCP connections of the machine. It ends when this value is
/// dropped.
pub struct Locality {
    // Dropped before the skeleton, so that the programs are detached while they still exist.
    _links: Vec<Link>,
    skel: skel::locality::LocalitySkel<'static>,
}

impl Locality {
    /// Loads and attaches the programs.
    ///
    /// # Errors
    /// [`Error::Missing`] with the reason if this kernel or process cannot do it.
    pub fn start() -> Result<Locality> {
        probe::permitted()?;
        for needed in ["inet_sock_set_state", "tcp_rcv_space_adjust"] {
            probe::tracepoint(needed)?;
        }
        let cgroup = probe::cgroup2()?;
        let cgroup = File::open(&cgroup).map_err(|e| Error::file(&cgroup, e))?;

        let storage = load::storage();
        let skel = load::logged("locality", || {
            let mut open = skel::locality::LocalitySkelBuilder::default().open(storage)?;
            open.progs.writes.set_autoload(probe::tracepoint("sock_send_length").is_ok());
            open.load()
        })?;
        let mut links = Vec::new();
        let attach = |e| Error::attach("locality", e);
        // State changes come first, because a connection whose kind is unknown is of no use.
        links.push(skel.progs.state.attach().map_err(attach)?);
        links.push(skel.progs.reads.attach().map_err(attach)?);
        if skel.progs.writes.autoload() {
            links.push(skel.progs.writes.attach().map_err(attach)?);
        }
        links.push(skel.progs.packet.attach_cgroup(cgroup.as_raw_fd()).map_err(attach)?);
        Ok(Locality { _links: links, skel })
    }

    /// The counts so far.
    ///
    /// # Errors
    /// [`Error::Map`].
    pub fn cells(&self) -> Result<Vec<Cell>> {
        let failed = |e| Error::map("locality", e);
        let cells = &self.skel.maps.cells;
        let mut names = HashMap::new();
        let mut found = Vec::new();
        for key in cells.keys() {
            let (Some(cell), Some(value)) = (Key::parse(&key), cells.lookup(&key, MapFlags::ANY).map_err(failed)?)
            else {
                continue;
            };
            let comm = match names.entry(cell.tgid) {
                std::collections::hash_map::Entry::Occupied(e) => e.into_mut(),
                std::collections::hash_map::Entry::Vacant(e) => e.insert(self.comm(cell.tgid)?),
            };
            found.push(Cell {
                tgid: cell.tgid,
                comm: comm.clone(),
                kind: cell.kind,
                handled: cell.handled,
                app: cell.app,
                packets: value.first_chunk().map_or(0, |v| u64::from_ne_bytes(*v)),
            });
        }
        found.sort_by_key(|c| (c.tgid, c.kind, c.handled, c.app));
        Ok(found)
    }

    /// Number of packets that belong to no cell, by reason.
    ///
    /// # Errors
    /// [`Error::Map`].
    pub fn reasons(&self) -> Result<Vec<Count>> {
        counters::read(&self.skel.maps.reasons, REASONS)
    }

    fn comm(&self, tgid: u32) -> Result<String> {
        let owners = &self.skel.maps.owners;
        let name = owners.lookup(&tgid.to_ne_bytes(), MapFlags::ANY).map_err(|e| Error::map("owners", e))?;
        let name = name.unwrap_or_default();
        let end = name.iter().position(|&b| b == 0).unwrap_or(name.len());
        Ok(String::from_utf8_lossy(&name[..end]).into_owned())
    }
}

/// The key of a cell; `struct cell` in `locality.bpf.c`.
struct Key {
    tgid: u32,
    kind: Kind,
    handled: u16,
    app: u32,
}

impl Key {
    fn parse(bytes: &[u8]) -> Option<Key> {
        let half = |at: usize| Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?));
        let word = |at: usize| Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?));
        let kind = match half(4)? {
            0 => Kind::Older,
            1 => Kind::Passive,
            2 => Kind::Active,
            _ => return None,
        };
        Some(Key { tgid: word(0)?, kind, handled: half(6)?, app: word(8)? })
    }
}
