//! Steering without an XDP program: by rules in the card, which are tried before XDP, or by the
//! kernel's RPS with RFS, where XDP is impossible.
//!
//! Unlike an XDP program, these settings do not end when a descriptor is closed. So each change is
//! written to a file at once. If the monitor is killed, the next monitor undoes the changes.

use super::groups::Groups;
use super::place::Place;
use super::sys::{in_sys, undo};
use super::xdp::{slices_for, Steered};
use fsocket_bpf::slices::Slices;
use fsocket_bpf::steer::Policy;
use fsocket_proto::steer::{Attach, Device};
use fsocket_tune::deliver::{self, Ports, Step, Table};
use fsocket_tune::ethtool::{Ioctl, Nic};
use fsocket_tune::CpuSet;

/// The ways to steer, in the order in which they are tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Ntuple,
    /// Rules for outgoing connections. For the others, the card's RSS indirection table serves as
    /// flow groups.
    Rss,
    Xdp,
    Rps,
}

/// The ways that fit a request.
///
/// # Errors
/// An unknown mode, or a mode that cannot do what the policy demands.
pub fn ways(request: &Attach) -> Result<Vec<Way>, String> {
    let policy = Policy::parse(&request.policy);
    let only = |way, can| match can {
        true => Ok(vec![way]),
        false => Err(format!("{} cannot do policy {}", request.mode.as_deref().unwrap_or("it"), request.policy)),
    };
    // A card's rules know only ports. RPS cannot run a policy program of a user.
    let rss = policy == Policy::FlowGroups && !request.precise;
    let (rules, rps) = (policy == Policy::Rfd && !request.precise, !matches!(policy, Policy::User(_)));
    match request.mode.as_deref() {
        None => Ok([(rules, Way::Ntuple), (rss, Way::Rss), (true, Way::Xdp), (rps, Way::Rps)]
            .into_iter()
            .filter_map(|(can, way)| can.then_some(way))
            .collect()),
        Some("ntuple") => only(Way::Ntuple, rules),
        Some("rss") => only(Way::Rss, rss),
        Some("rps") => only(Way::Rps, rps),
        Some("native" | "generic") => Ok(vec![Way::Xdp]),
        Some(other) => Err(format!("no such mode: {other} (ntuple, rss, native, generic or rps)")),
    }
}

/// A device that is steered in such a way.
pub struct Plain {
    pub netns: u64,
    pub request: Attach,
    pub place: Place,
    pub slices: Option<Slices>,
    pub cpus: Vec<u32>,
    way: Way,
    rfs: bool,
    pub steps: Vec<Step>,
    because: Vec<String>,
    ifindex: u32,
    /// The flow groups in the card's table.
    pub groups: Option<(Groups, Table, Ioctl)>,
}

impl Plain {
    /// # Errors
    /// Why the device or the kernel does not support it. Nothing is changed then.
    pub fn attach(
        place: Place,
        request: &Attach,
        way: Way,
        because: &[String],
        others: &[Steered],
    ) -> Result<Plain, String> {
        let cpus = request.cpus.clone().unwrap_or_else(crate::cpus::allowed_cpus);
        let name = request.device.as_str();
        let slices = (way != Way::Rps).then(|| slices_for(&place, &cpus, others)).transpose()?;
        let (steps, ifindex, rfs, table) = in_sys(&place, name, |root, nic| {
            let (ifindex, _) = nic.identity().map_err(|e| format!("{name}: {e}"))?;
            let mut rfs = false;
            let queues = deliver::queues_by_cpu(root, name);
            let table = (way == Way::Rss).then(|| deliver::table(nic, &queues, &cpus)).transpose()?;
            let mut steps = match &slices {
                Some(slices) => {
                    deliver::filters(nic)?;
                    let ports = |(i, cpu): (usize, &u32)| Ports {
                        cpu: *cpu,
                        first: *slices.range(i).start(),
                        count: slices.ports,
                    };
                    let ports: Vec<Ports> = slices.cpus.iter().enumerate().map(ports).collect();
                    let rules = deliver::rules(&ports, &queues);
                    deliver::install(nic, &rules?)?
                }
                None => {
                    let steps = deliver::follow(root, root, name, &cpus.iter().copied().collect::<CpuSet>())?;
                    rfs = root.number(deliver::FLOW_TABLE).is_some_and(|n| n > 0);
                    steps
                }
            };
            let table = table.map(|(table, home, step)| {
                steps.push(step);
                (table, home)
            });
            Ok((steps, ifindex, rfs, table))
        })?;
        let groups = match table {
            Some((table, home)) => {
                let nic = place.within(|| Ioctl::new(name))?.map_err(|e| format!("{name}: {e}"))?;
                Some((Groups::at(home, cpus.len()), table, nic))
            }
            None => None,
        };
        let mut because = because.to_vec();
        if way == Way::Rps && !rfs {
            because.push("RFS: cannot see net.core.rps_sock_flow_entries from here; set it to 32768".to_owned());
        }
        let request = request.clone();
        Ok(Plain { netns: place.cookie, request, place, slices, cpus, way, rfs, steps, because, ifindex, groups })
    }

    pub fn is_alive(&self) -> bool {
        let name = self.request.device.as_str();
        let there = || Ioctl::new(name).and_then(|nic| nic.identity()).is_ok_and(|(index, _)| index == self.ifindex);
        self.place.within(there).unwrap_or(false)
    }

    pub fn describe(&self) -> Device {
        let slices = self.slices.iter().flat_map(|s| (0..s.cpus.len()).map(|i| (s.cpus[i], s.range(i))));
        let used = if self.slices.is_some() { self.place.local_ports() } else { Vec::new() };
        let slice = |(cpu, range): (u32, std::ops::RangeInclusive<u16>)| fsocket_proto::steer::Slice {
            cpu,
            first: *range.start(),
            last: *range.end(),
            in_use: used.iter().filter(|port| range.contains(port)).count() as u32,
        };
        Device {
            device: self.request.device.clone(),
            policy: self.request.policy.clone(),
            precise: self.request.precise,
            by: match self.way {
                Way::Ntuple => "rules in the card".to_owned(),
                Way::Rss => "rules and the RSS table of the card".to_owned(),
                _ if self.rfs => "RPS, following the application (RFS)".to_owned(),
                _ => "RPS".to_owned(),
            },
            because: (!self.because.is_empty()).then(|| self.because.join("; ")),
            alive: self.is_alive(),
            cpus: self.cpus.clone(),
            slices: slices.map(slice).collect(),
            packets: Default::default(),
        }
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        undo(&self.place, &self.request.device, &self.steps);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(policy: &str, mode: Option<&str>) -> Attach {
        Attach {
            device: "eth0".to_owned(),
            policy: policy.to_owned(),
            precise: false,
            cpus: None,
            mode: mode.map(str::to_owned),
        }
    }

    #[test]
    fn the_order_of_ways() {
        use Way::{Ntuple, Rps, Rss, Xdp};
        assert_eq!(ways(&request("rfd", None)).unwrap(), [Ntuple, Xdp, Rps]);
        assert_eq!(ways(&Attach { precise: true, ..request("rfd", None) }).unwrap(), [Xdp, Rps]);
        assert_eq!(ways(&request("flow-groups", None)).unwrap(), [Rss, Xdp, Rps]);
        assert_eq!(ways(&Attach { precise: true, ..request("flow-groups", None) }).unwrap(), [Xdp, Rps]);
        assert_eq!(ways(&request("flow-groups", Some("rss"))).unwrap(), [Rss]);
        assert_eq!(ways(&request("connect-cpu", None)).unwrap(), [Xdp, Rps]);
        assert_eq!(ways(&request("recv-cpu", None)).unwrap(), [Xdp, Rps]);
        assert_eq!(ways(&request("/x.o", None)).unwrap(), [Xdp]);
        assert_eq!(ways(&request("rfd", Some("rps"))).unwrap(), [Rps]);
        assert_eq!(ways(&request("rfd", Some("ntuple"))).unwrap(), [Ntuple]);
        assert_eq!(ways(&request("rfd", Some("generic"))).unwrap(), [Xdp]);
        for (policy, mode) in
            [("recv-cpu", "ntuple"), ("connect-cpu", "ntuple"), ("/x.o", "rps"), ("rfd", "magic"), ("rfd", "rss")]
        {
            assert!(ways(&request(policy, Some(mode))).is_err(), "{policy} by {mode}");
        }
    }
}
