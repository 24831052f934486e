//! Which other hosts have Fastsocket, as recorded by `fsocket_bpf::announce` (ADR 58).

use fsocket_bpf::announce::{Hosts, LAST};
use fsocket_proto::report;
use rustix::fd::BorrowedFd;
use std::hash::BuildHasher;
use std::path::PathBuf;

/// The announcement: `[hosts]` of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Announce {
    /// Announce only connections of this control group and its descendants; `None`: all
    /// connections.
    pub cgroup: Option<PathBuf>,
    /// This host's number, 1 to [`LAST`].
    pub number: u32,
}

impl Announce {
    /// A number for a host whose configuration has none. The number changes at each start, so that
    /// nobody can use it to track the host.
    pub fn any_number() -> u32 {
        std::hash::RandomState::new().hash_one(0) as u32 % LAST + 1
    }
}

/// Whether this host announces Fastsocket and notices other hosts that do.
#[derive(Default)]
pub enum State {
    #[default]
    Off,
    /// The announcement is impossible, for this reason.
    Refused(String),
    On(Hosts),
}

impl State {
    /// Makes the state from the broker's answer.
    pub fn of(answer: Result<Hosts, String>) -> State {
        match answer {
            Ok(hosts) => State::On(hosts),
            Err(why) => {
                tracing::warn!(%why, "this host does not announce itself to others");
                State::Refused(why)
            }
        }
    }

    /// The number of the host at the other end of a connection, as that host has told in the
    /// handshake. `None`: it has told nothing, or this host announces nothing. This number does
    /// not say whether the other end is on this host: the caller must find that out first (from
    /// the record of pairs, or from addresses). The number is a hint and no proof: anybody can
    /// send the TCP option.
    pub fn behind(&self, socket: BorrowedFd<'_>) -> Option<u32> {
        match self {
            State::On(hosts) => hosts.behind(socket),
            State::Off | State::Refused(_) => None,
        }
    }

    /// `sees_all`: the report includes hosts that other users' connections have shown.
    pub fn report(&self, own: Option<&Announce>, sees_all: bool) -> report::Hosts {
        let (state, known) = match self {
            State::Off => ("off".to_owned(), Vec::new()),
            State::Refused(why) => (why.clone(), Vec::new()),
            State::On(hosts) if sees_all => ("on".to_owned(), hosts.known()),
            State::On(_) => ("on".to_owned(), Vec::new()),
        };
        let host = |(address, number): (std::net::IpAddr, u32)| report::Host { address: address.to_string(), number };
        let number = own.map_or(0, |own| own.number);
        report::Hosts { state, number, known: known.into_iter().map(host).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_number_is_one_that_fits() {
        assert!((0..1000).map(|_| Announce::any_number()).all(|n| (1..=LAST).contains(&n)));
    }
}
