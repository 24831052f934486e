//! Arguments of `fastsocket tune`.

use clap::{Args, ValueEnum};
use fsocket_tune::{CpuSet, Group, Options, RpsPolicy};
use std::path::PathBuf;

/// Prepare a network device and the kernel for short connections: queues,
/// interrupts, XPS, RPS, RSS, moderation, ntuple filters, sysctls. Says what
/// it found and would do; changes nothing without --apply.
///
/// Exit status: 0; 1 if nothing or not everything could be done; 125 usage.
#[derive(Debug, Args)]
pub struct Tune {
    /// The network device
    #[arg(value_name = "DEV")]
    pub device: String,
    /// Do it; the old values are written to /var/lib/fastsocket/tune first
    #[arg(long)]
    pub apply: bool,
    /// Undo it: put back what was there before
    #[arg(long, conflicts_with_all = ["apply", "cpus", "skip", "only", "rps"])]
    pub revert: bool,
    /// Undo also what somebody else has changed since
    #[arg(long, requires = "revert")]
    pub force: bool,
    /// For other programs
    #[arg(long)]
    pub json: bool,
    /// One line for each queue
    #[arg(short, long)]
    pub verbose: bool,
    /// Use these CPUs only [default: those online, not isolated, in our cpuset]
    #[arg(long, value_name = "LIST")]
    pub cpus: Option<CpuSet>,
    /// Leave these alone
    #[arg(long, value_name = "GROUP", value_delimiter = ',')]
    pub skip: Vec<GroupArg>,
    /// Touch only these
    #[arg(long, value_name = "GROUP", value_delimiter = ',', conflicts_with = "skip")]
    pub only: Vec<GroupArg>,
    /// When packets are passed on to CPUs that have no queue
    #[arg(long, value_enum, default_value_t)]
    pub rps: Rps,
    /// A directory with copies of /proc, /sys and of what the device answers
    #[arg(long, value_name = "DIR", hide = true, default_value = "/")]
    pub root: PathBuf,
    /// Where the old values are kept
    #[arg(long, value_name = "DIR", hide = true)]
    pub state_dir: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub enum Rps {
    /// On devices with interrupts
    #[default]
    Auto,
    /// Never
    Off,
    /// On any device
    Spread,
}

/// A group by its name.
#[derive(Clone, Copy, Debug)]
pub struct GroupArg(Group);

impl ValueEnum for GroupArg {
    fn value_variants<'a>() -> &'a [GroupArg] {
        const ALL: &[GroupArg] = &[
            GroupArg(Group::Queues),
            GroupArg(Group::Rss),
            GroupArg(Group::Irq),
            GroupArg(Group::Xps),
            GroupArg(Group::Rps),
            GroupArg(Group::Coalesce),
            GroupArg(Group::Ntuple),
            GroupArg(Group::Sysctl),
        ];
        ALL
    }

    fn to_possible_value(&self) -> Option<clap::builder::PossibleValue> {
        Some(clap::builder::PossibleValue::new(self.0.name()))
    }
}

impl Tune {
    pub fn options(&self) -> Options {
        let skip = match self.only.is_empty() {
            true => self.skip.iter().map(|g| g.0).collect(),
            false => Group::ALL.iter().filter(|g| !self.only.iter().any(|o| o.0 == **g)).copied().collect(),
        };
        let rps = match self.rps {
            Rps::Auto => RpsPolicy::Auto,
            Rps::Off => RpsPolicy::Off,
            Rps::Spread => RpsPolicy::Spread,
        };
        Options { cpus: self.cpus.clone(), skip, rps }
    }
}
