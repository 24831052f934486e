//! Receive Flow Deliver and other policies: which CPU handles an incoming packet.
//!
//! There is one [`Steering`] for each device. `steer.bpf.c` steers. This module loads and
//! attaches the programs, and writes their maps.

use crate::counters::{self, Count};
use crate::slices::{Slices, GRANULE};
use crate::xdp::{self, Mode, XdpLink};
use crate::{load, probe, skel, Error, Result};
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{libbpf_sys, Link, MapCore, MapFlags, Object, ObjectBuilder, ProgramType};
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The order of `enum steer_reason` in `steer.h`.
const REASONS: &[&str] =
    &["to_self", "to_other", "passed_active", "passed_passive", "not_tcp", "fragment", "short", "no_cpu", "queue_full"];

/// Number of flow groups: a group has the same low 12 bits of the client's port (Affinity-Accept,
/// 3.1).
pub const GROUPS: usize = 4096;

/// Maximum number of packets that wait for one CPU; the kernel drops further ones.
const QUEUE: u32 = 2048;

/// STEER_ABI in `steer_policy.h`.
const ABI: u32 = 1;

/// The variants in which a device is asked to accept the program, in this order: mode, and
/// whether the program says that it handles packets in several fragments. Drivers with a large
/// MTU demand that flag. In generic mode it must not be set: the kernel then copies packets to
/// per-CPU page pools, and overwrites packets that wait in a cpumap. (Seen on Linux 6.18:
/// SYN-ACKs got lost, with IP_INHDR and wrong packet types.)
const VARIANTS: [(Mode, bool); 3] = [(Mode::Native, false), (Mode::Native, true), (Mode::Generic, false)];

/// How the CPU for packets of one class is chosen; `enum policy` in `steer.bpf.c`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum By {
    /// Packets stay on the CPU that RSS has chosen.
    Stay = 0,
    /// By the connection's source-port slice.
    Slice = 1,
    /// By the client's flow group.
    Group = 2,
    /// The CPU on which the application last read the socket.
    Read = 3,
    /// The CPU on which the application opened the socket.
    Opened = 4,
    /// A BPF object of the operator decides.
    User = 5,
}

/// A policy that the operator selects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Receive Flow Deliver: active connections by slice, passive ones stay.
    Rfd,
    /// As RFD, and passive connections by flow group.
    FlowGroups,
    /// Every connection to the CPU where its application opened it; accepted ones stay.
    ConnectCpu,
    /// Every connection to the CPU where its application last read it.
    RecvCpu,
    /// The object in this file decides for every packet (see `steer_policy.h`).
    User(PathBuf),
}

impl Policy {
    /// Parses `rfd`, `flow-groups`, `connect-cpu`, `recv-cpu`, or the path of a BPF object.
    pub fn parse(name: &str) -> Policy {
        match name {
            "rfd" => Policy::Rfd,
            "flow-groups" => Policy::FlowGroups,
            "connect-cpu" => Policy::ConnectCpu,
            "recv-cpu" => Policy::RecvCpu,
            path => Policy::User(PathBuf::from(path)),
        }
    }

    /// The name that [`Policy::parse`] accepts.
    pub fn name(&self) -> String {
        match self {
            Policy::Rfd => "rfd".to_owned(),
            Policy::FlowGroups => "flow-groups".to_owned(),
            Policy::ConnectCpu => "connect-cpu".to_owned(),
            Policy::RecvCpu => "recv-cpu".to_owned(),
            Policy::User(path) => path.display().to_string(),
        }
    }

    /// The ways for active and for passive connections. `slices`: a socket can have a range of
    /// ports on this kernel.
    fn by(&self, slices: bool) -> (By, By) {
        let opened = if slices { By::Slice } else { By::Opened };
        match self {
            Policy::Rfd => (opened, By::Stay),
            Policy::FlowGroups => (opened, By::Group),
            Policy::ConnectCpu => (By::Opened, By::Stay),
            Policy::RecvCpu => (By::Read, By::Read),
            Policy::User(_) => (By::User, By::User),
        }
    }

    /// Should clients take their source ports from slices, if the kernel can do that?
    pub fn wants_slices(&self) -> bool {
        self.by(true).0 == By::Slice
    }
}

/// A request to attach programs.
#[derive(Clone, Debug)]
pub struct Request {
    pub device: String,
    pub policy: Policy,
    /// Classify by the socket table alone. This is slower, but also right if a program listens on
    /// a port that the monitor does not know.
    pub precise: bool,
    /// CPUs that take part, ascending.
    pub cpus: Vec<u32>,
    /// A socket can have a range of ports on this kernel ([`probe::port_range`]). Otherwise a
    /// policy by slices remembers which CPU opened a connection instead.
    pub slices: bool,
    /// None: native mode, or generic mode if the device refuses.
    pub mode: Option<Mode>,
    /// SO_NETNS_COOKIE of the device's network namespace.
    pub netns: u64,
}

/// A steered device. When this value is dropped, the steering ends and leaves nothing behind.
pub struct Steering {
    // Dropped first, so that no packets come to the programs any more.
    xdp: XdpLink,
    programs: Programs,
    device: String,
    /// Why the device is not in a better mode.
    because: Option<String>,
}

/// The loaded programs with their maps. A change only writes to a map; no program is loaded
/// again.
pub struct Programs {
    _links: Vec<Link>,
    _user: Option<Object>,
    _readcpu: Option<skel::readcpu::ReadcpuSkel<'static>>,
    steer: skel::steer::SteerSkel<'static>,
}

impl Steering {
    /// Loads the programs and attaches them to a device of the calling thread's network
    /// namespace. Packets are steered by slice or group only after [`Programs::set_slices`] and
    /// [`Programs::set_groups`].
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Device`], [`Error::Busy`], [`Error::Load`] with the
    /// verifier's message.
    pub fn attach(request: &Request) -> Result<Steering> {
        probe::permitted()?;
        probe::btf()?;
        let ifindex = xdp::ifindex(&request.device)?;
        let mut refused = Vec::new();
        for (mode, frags) in VARIANTS.iter().filter(|(mode, _)| request.mode.is_none_or(|wanted| wanted == *mode)) {
            let programs = Programs::load(request, *frags)?;
            // This comes last, because from here on packets come.
            match XdpLink::attach(&programs.steer.progs.steer, ifindex, *mode) {
                Ok(xdp) => {
                    let because = (!refused.is_empty()).then(|| refused.join("; "));
                    return Ok(Steering { xdp, programs, device: request.device.clone(), because });
                }
                // A program of another owner is attached. Another mode would be refused, too,
                // with a less useful error.
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => return Err(Error::Busy { what: "XDP", source: e }),
                Err(e) => refused.push(format!("{} XDP{}: {e}", mode.name(), if *frags { " (fragments)" } else { "" })),
            }
        }
        Err(Error::Refused(refused.join("; ")))
    }

    /// Name of the device.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// The mode in which the device runs the program, and why not in a better one.
    pub fn mode(&self) -> (Mode, Option<&str>) {
        (self.xdp.mode, self.because.as_deref())
    }

    /// Does the device still exist?
    pub fn is_alive(&self) -> bool {
        self.xdp.is_alive()
    }
}

impl std::ops::Deref for Steering {
    type Target = Programs;

    fn deref(&self) -> &Programs {
        &self.programs
    }
}

fn put(map: &impl MapCore, key: &[u8], value: &[u8]) -> Result<()> {
    map.update(key, value, MapFlags::ANY).map_err(|e| Error::map(&map.name().to_string_lossy(), e))
}

impl Programs {
    fn load(request: &Request, frags: bool) -> Result<Programs> {
        let possible = libbpf_rs::num_possible_cpus().map_err(|e| Error::map("cpus", e))?;
        let mut steer = load::logged("steer", || {
            let mut open = skel::steer::SteerSkelBuilder::default().open(load::storage())?;
            open.maps.cpus.set_max_entries(possible as u32)?;
            open.progs.steer.set_flags(flags(frags));
            open.progs.enqueued.set_autoload(probe::tracepoint("xdp_cpumap_enqueue").is_ok());
            open.load()
        })?;
        let id = steer.maps.cpus.info().map_err(|e| Error::map("cpus", e))?.info.id;
        if let Some(bss) = steer.maps.bss_data.as_deref_mut() {
            bss.cpus_id = id;
        }
        for cpu in &request.cpus {
            // The value is a struct bpf_cpumap_val: queue size, and no program.
            let value = [QUEUE.to_ne_bytes(), 0u32.to_ne_bytes()].concat();
            put(&steer.maps.cpus, &cpu.to_ne_bytes(), &value)?;
        }
        let mut links = Vec::new();
        if steer.progs.enqueued.autoload() {
            links.push(steer.progs.enqueued.attach().map_err(|e| Error::attach("steer", e))?);
        }
        let user = match &request.policy {
            Policy::User(path) => Some(own_policy(path, &steer, frags)?),
            _ => None,
        };
        let (active, passive) = request.policy.by(request.slices);
        let uses = |by| active == by || passive == by;
        let readcpu = (uses(By::Read) || uses(By::Opened))
            .then(|| readcpu(request.netns, uses(By::Read), &steer, &mut links))
            .transpose()?;
        // The value is a struct config.
        let config = [active as u32, passive as u32, u32::from(request.precise)].map(u32::to_ne_bytes).concat();
        put(&steer.maps.settings, &0u32.to_ne_bytes(), &config)?;
        Ok(Programs { _links: links, _user: user, _readcpu: readcpu, steer })
    }

    /// Stores which ports belong to which CPU.
    ///
    /// # Errors
    /// [`Error::Map`].
    pub fn set_slices(&self, slices: &Slices) -> Result<()> {
        for granule in 0..65536 / GRANULE {
            let cpu = slices.cpu_of((granule * GRANULE) as u16).map_or(0, |cpu| cpu + 1);
            put(&self.steer.maps.slices, &granule.to_ne_bytes(), &cpu.to_ne_bytes())?;
        }
        Ok(())
    }

    /// Sets the CPU of flow group `group`. None: its packets stay where they are.
    ///
    /// # Errors
    /// [`Error::Map`], also for a group that does not exist.
    pub fn set_group(&self, group: u32, cpu: Option<u32>) -> Result<()> {
        put(&self.steer.maps.groups, &group.to_ne_bytes(), &cpu.map_or(0, |cpu| cpu + 1).to_ne_bytes())
    }

    /// Sets the CPUs of all flow groups to those of [`dealt`].
    ///
    /// # Errors
    /// [`Error::Map`].
    pub fn set_groups(&self, cpus: &[u32]) -> Result<()> {
        for group in 0..GROUPS {
            self.set_group(group as u32, dealt(group, cpus))?;
        }
        Ok(())
    }

    /// Stores whether some socket listens on `port`. (The third rule of the classification uses
    /// this.)
    ///
    /// # Errors
    /// [`Error::Map`].
    pub fn set_listened(&self, port: u16, listened: bool) -> Result<()> {
        put(&self.steer.maps.listened, &u32::from(port).to_ne_bytes(), &[u8::from(listened)])
    }

    /// Number of connections whose CPU is remembered (`connect-cpu`, `recv-cpu`), including some
    /// that have ended.
    pub fn remembered(&self) -> usize {
        self.steer.maps.flows.keys().count()
    }

    /// Number of packets for each verdict, by the CPU that gave it.
    ///
    /// # Errors
    /// [`Error::Map`].
    pub fn counts(&self) -> Result<Vec<Count>> {
        counters::read(&self.steer.maps.reasons, REASONS)
    }
}

/// The initial CPU of a flow group. CPUs take turns, and each gets two groups at a time, because
/// the ports from which Linux clients connect are all even or all odd.
pub fn dealt(group: usize, cpus: &[u32]) -> Option<u32> {
    (!cpus.is_empty()).then(|| cpus[group / 2 % cpus.len()])
}

fn flags(frags: bool) -> u32 {
    if frags {
        libbpf_sys::BPF_F_XDP_HAS_FRAGS
    } else {
        0
    }
}

/// Reads a file that only root or this process's user can write, because its program will run in
/// the kernel. The file is read once, so a later replacement has no effect.
fn trusted(path: &Path) -> Result<Vec<u8>> {
    let failed = |e| Error::file(path, e);
    let mut file = File::open(path).map_err(failed)?;
    let found = file.metadata().map_err(failed)?;
    let own = [0, rustix::process::geteuid().as_raw()].contains(&found.uid());
    if !own || found.mode() & 0o022 != 0 || !found.is_file() {
        let (file, uid, mode) = (path.display().to_string(), found.uid(), found.mode() & 0o7777);
        return Err(Error::Untrusted { file, uid, mode });
    }
    let mut object = Vec::new();
    file.read_to_end(&mut object).map_err(failed)?;
    Ok(object)
}

/// Loads the operator's own policy, and puts it into its slot of the program array.
fn own_policy(path: &Path, steer: &skel::steer::SteerSkel<'_>, frags: bool) -> Result<Object> {
    let bytes = trusted(path)?;
    let name = path.display().to_string();
    let maps = &steer.maps;
    let shared = [("cpus", maps.cpus.as_fd()), ("reasons", maps.reasons.as_fd()), ("packets", maps.packets.as_fd())];
    let mut abi = None;
    let object = load::logged(&name, || {
        let mut open = ObjectBuilder::default().open_memory(&bytes)?;
        for mut map in open.maps_mut() {
            if let Some((_, fd)) = shared.iter().find(|(name, _)| map.name() == *name) {
                map.reuse_fd(*fd)?;
            }
            if map.name() == "steer_abi" {
                abi = Some(map.max_entries());
            }
        }
        for mut program in open.progs_mut() {
            // All programs of a program array must have the same value of this flag.
            program.set_flags(flags(frags));
        }
        open.load()
    })?;
    if abi != Some(ABI) {
        return Err(Error::PolicyAbi { object: name, found: abi.unwrap_or(0), wanted: ABI });
    }
    let found: Vec<i32> = object
        .progs()
        .filter(|program| program.prog_type() == ProgramType::Xdp)
        .map(|program| program.as_fd().as_raw_fd())
        .collect();
    let [program] = found[..] else { return Err(Error::NoPolicy(name)) };
    put(&maps.policies, &0u32.to_ne_bytes(), &program.to_ne_bytes())?;
    Ok(object)
}

/// Loads the programs that remember on which CPU connections are used: where they are opened and,
/// with `reads`, where they are read.
fn readcpu(
    netns: u64,
    reads: bool,
    steer: &skel::steer::SteerSkel<'_>,
    links: &mut Vec<Link>,
) -> Result<skel::readcpu::ReadcpuSkel<'static>> {
    probe::tracepoint("inet_sock_set_state")?;
    if reads {
        probe::tracepoint("tcp_rcv_space_adjust")?;
    }
    let skel = load::logged("readcpu", || {
        let mut open = skel::readcpu::ReadcpuSkelBuilder::default().open(load::storage())?;
        if let Some(rodata) = open.maps.rodata_data.as_deref_mut() {
            rodata.netns = netns;
        }
        open.maps.flows.reuse_fd(steer.maps.flows.as_fd())?;
        open.progs.reads.set_autoload(reads);
        open.load()
    })?;
    let failed = |e| Error::attach("readcpu", e);
    links.push(skel.progs.opens.attach().map_err(failed)?);
    if reads {
        links.push(skel.progs.reads.attach().map_err(failed)?);
    }
    Ok(skel)
}

#[cfg(test)]
mod tests;
