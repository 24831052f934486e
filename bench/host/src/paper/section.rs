//! A figure or table of a paper, measured here or listed with a reason.

use super::experiment::Experiment;
use fsocket_bench_args::Paper as Args;
use serde::Serialize;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Paper {
    SocksDirect,
    Fastsocket,
    AffinityAccept,
}

impl Paper {
    #[cfg(test)]
    pub const ALL: [Paper; 3] = [Paper::SocksDirect, Paper::Fastsocket, Paper::AffinityAccept];

    pub fn title(self) -> &'static str {
        match self {
            Paper::SocksDirect => "SocksDirect (SIGCOMM 2019)",
            Paper::Fastsocket => "Fastsocket (ASPLOS 2016)",
            Paper::AffinityAccept => "Affinity-Accept (EuroSys 2012)",
        }
    }

    /// The machine and the kernel of the paper's figures.
    pub fn machine(self) -> &'static str {
        match self {
            Paper::SocksDirect => {
                "two Intel Xeon E5-2698 v3 (32 cores), Mellanox ConnectX-4 at 100 Gbit/s, Linux 4.15 (section 5.1)"
            }
            Paper::Fastsocket => {
                "two Intel Xeon E5-2697 v2 (24 cores), Intel 82599 at 10 Gbit/s, Linux 2.6.32 (section 4.1)"
            }
            Paper::AffinityAccept => {
                "48 AMD Opteron or 80 Intel Xeon cores, Intel 82599 at 10 Gbit/s, a patched Linux (section 6.1)"
            }
        }
    }
}

/// The reason why a figure is not measured here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Why {
    /// A drawing or a table of properties: it holds no measurement.
    NoMeasurement,
    MoreCores,
    NetworkCard,
    Rdma,
    /// Counters of the CPU or the kernel that a guest does not have.
    Counters,
    /// Another program of the project measures it.
    Elsewhere,
    NotMeasuredYet,
}

impl Why {
    pub fn text(self) -> &'static str {
        match self {
            Why::NoMeasurement => "holds no measurement",
            Why::MoreCores => "needs more cores",
            Why::NetworkCard => "needs a network card with queues",
            Why::Rdma => "needs RDMA hardware",
            Why::Counters => "needs counters that a guest does not have",
            Why::Elsewhere => "measured by another command",
            Why::NotMeasuredYet => "not measured yet",
        }
    }
}

/// A figure, or a part of one, that is listed instead of measured.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Listed {
    pub why: Why,
    pub text: &'static str,
    /// The command that checks the function, or measures it in another place.
    pub check: Option<&'static str>,
}

pub const fn listed(why: Why, text: &'static str) -> Listed {
    Listed { why, text, check: None }
}

impl Listed {
    pub const fn by(self, command: &'static str) -> Listed {
        Listed { check: Some(command), ..self }
    }
}

#[derive(Debug)]
pub enum Kind {
    /// The experiments, and (optional) the part of the figure that this machine cannot show.
    Measured(fn(&Args) -> Vec<Experiment>, Option<Listed>),
    Listed(Listed),
}

/// One figure or table.
#[derive(Debug)]
pub struct Section {
    /// The name that `--only` takes.
    pub name: &'static str,
    pub paper: Paper,
    /// "figure 7", "table 4", or the number of a section of the text.
    pub item: &'static str,
    pub title: &'static str,
    /// The paper's result in one sentence.
    pub says: &'static str,
    /// Differences from the paper's experiment beside the machine.
    pub differs: &'static str,
    pub kind: Kind,
}

impl Section {
    /// Does `--only NAME` select the section?
    pub fn matches(&self, name: &str) -> bool {
        self.name == name || self.name.strip_prefix(name).is_some_and(|rest| rest.starts_with('-'))
    }

    pub fn listed(&self) -> Option<&Listed> {
        match &self.kind {
            Kind::Measured(_, rest) => rest.as_ref(),
            Kind::Listed(listed) => Some(listed),
        }
    }
}
