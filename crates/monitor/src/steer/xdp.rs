//! A device that is steered by an XDP program.

use super::groups::Groups;
use super::place::Place;
use super::sys::undo;
use fsocket_bpf::probe;
use fsocket_bpf::slices::Slices;
use fsocket_bpf::steer::{Policy, Request as Load, Steering};
use fsocket_bpf::xdp::Mode;
use fsocket_proto::steer::{Attach, Device, Slice};
use fsocket_tune::deliver::{self, Step};
use fsocket_tune::ethtool::Ioctl;

const NO_SLICES: &str = "this kernel (older than 6.3) gives a socket no range of ports, so there are no slices";

/// A device that is steered by an XDP program.
pub struct Steered {
    /// SO_NETNS_COOKIE of its network namespace.
    pub netns: u64,
    pub request: Attach,
    pub cpus: Vec<u32>,
    pub slices: Option<Slices>,
    pub steering: Steering,
    /// The ports that are set in the BPF map `listened`.
    pub listened: Vec<u16>,
    /// Why no better way of steering is used.
    pub because: Vec<String>,
    /// The flow groups, if they steer incoming connections.
    pub groups: Option<Groups>,
    pub place: Place,
    // Declared last: its settings are put back after the program was detached.
    pub left: Left,
}

/// Settings of the device that an XDP program needs, and that outlive the program. Dropping this
/// value puts them back.
pub struct Left {
    place: Place,
    device: String,
    pub steps: Vec<Step>,
}

impl Drop for Left {
    fn drop(&mut self) {
        if !self.steps.is_empty() {
            undo(&self.place, &self.device, &self.steps);
        }
    }
}

/// The slices of source ports in a network namespace. All devices share one set of slices, because
/// a connection chooses its port before its device.
pub fn slices_for(place: &Place, cpus: &[u32], others: &[Steered]) -> Result<Slices, String> {
    if !probe::port_range() {
        return Err(NO_SLICES.to_owned());
    }
    match others.iter().find(|s| s.netns == place.cookie && s.slices.is_some()) {
        Some(other) if other.cpus != cpus => {
            Err(format!("device {} of this network namespace is steered to other CPUs", other.request.device))
        }
        Some(Steered { slices: Some(slices), .. }) => Ok(slices.clone()),
        _ => {
            let range = place.port_range()?;
            let (low, high) = (*range.start(), *range.end());
            Slices::new(range, cpus).ok_or_else(|| {
                format!("ip_local_port_range {low} {high} is too small for slices for {} CPUs", cpus.len())
            })
        }
    }
}

/// Loads the program and attaches it to the device, in the network namespace of `place`.
pub fn attach_in(place: Place, request: Attach, others: &[Steered]) -> Result<Steered, String> {
    let mode = match request.mode.as_deref() {
        None => None,
        Some("native") => Some(Mode::Native),
        Some("generic") => Some(Mode::Generic),
        Some(other) => return Err(format!("no such mode: {other} (native or generic)")),
    };
    let policy = Policy::parse(&request.policy);
    let cpus = request.cpus.clone().unwrap_or_else(crate::cpus::allowed_cpus);
    let can_slice = probe::port_range();
    let slices = (policy.wants_slices() && can_slice).then(|| slices_for(&place, &cpus, others)).transpose()?;
    let mut because = Vec::new();
    if policy.wants_slices() && !can_slice {
        // Without slices, the program itself records which CPU has opened a connection.
        because.push(format!("{NO_SLICES}: connect-cpu instead"));
    }
    let groups = (policy == Policy::FlowGroups).then(|| Groups::dealt(&cpus));
    let load = Load {
        device: request.device.clone(),
        policy,
        precise: request.precise,
        cpus: cpus.clone(),
        slices: can_slice,
        mode,
        netns: place.cookie,
    };
    let named = |e: &dyn std::fmt::Display| format!("{}: {e}", request.device);
    // Declared before `steering`, so that it is dropped after it even if a step below fails.
    let mut left = Left { place: place.again()?, device: request.device.clone(), steps: Vec::new() };
    let steering = place.within(|| {
        let nic = Ioctl::new(&load.device).map_err(|e| named(&e))?;
        let offloads = deliver::offloads(&nic);
        let attached = Steering::attach(&load).map_err(|e| named(&e));
        left.steps = deliver::switched_off(&nic, offloads);
        attached
    })??;
    let fill = || {
        if let Some(slices) = &slices {
            steering.set_slices(slices)?;
        }
        steering.set_groups(&cpus)
    };
    fill().map_err(|e| named(&e))?;
    Ok(Steered {
        netns: place.cookie,
        request,
        cpus,
        slices,
        steering,
        listened: Vec::new(),
        because,
        groups,
        place,
        left,
    })
}

impl Steered {
    /// Updates the map of ports with listeners. If the kernel does not answer, the map stays
    /// unchanged.
    pub fn refresh_listened(&mut self) {
        let Some(now) = self.place.listened_ports() else { return };
        let gone = self.listened.iter().filter(|p| !now.contains(p)).map(|p| (*p, false));
        for (port, listened) in gone.chain(now.iter().map(|p| (*p, true))) {
            if let Err(e) = self.steering.set_listened(port, listened) {
                tracing::warn!("{}: {e}", self.request.device);
            }
        }
        self.listened = now;
    }

    pub fn describe(&self) -> Result<Device, String> {
        let (mode, because) = self.steering.mode();
        let packets = self.steering.counts().map_err(|e| e.to_string())?;
        let used = self.place.local_ports();
        let slice = |slices: &Slices, index: usize| {
            let range = slices.range(index);
            let in_use = used.iter().filter(|port| range.contains(port)).count() as u32;
            Slice { cpu: slices.cpus[index], first: *range.start(), last: *range.end(), in_use }
        };
        Ok(Device {
            device: self.request.device.clone(),
            policy: self.request.policy.clone(),
            precise: self.request.precise,
            by: format!("XDP {}", mode.name()),
            because: {
                let why: Vec<&str> = self.because.iter().map(String::as_str).chain(because).collect();
                (!why.is_empty()).then(|| why.join("; "))
            },
            alive: self.steering.is_alive(),
            cpus: self.cpus.clone(),
            slices: self.slices.iter().flat_map(|s| (0..s.cpus.len()).map(move |i| slice(s, i))).collect(),
            packets: packets.into_iter().map(|count| (count.name.to_owned(), count.by_cpu)).collect(),
        })
    }
}
