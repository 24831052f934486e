//! Which other hosts have Fastsocket (ADR 58): as `fsocket_bpf::announce` notes it.

use fsocket_bpf::announce::{Hosts, LAST};
use fsocket_proto::report;
use rustix::fd::BorrowedFd;
use std::hash::BuildHasher;
use std::path::PathBuf;

/// What is announced: `[hosts]` of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Announce {
    /// What is below it; `None`: all.
    pub cgroup: Option<PathBuf>,
    /// This host's number, 1 to [`LAST`].
    pub number: u32,
}

impl Announce {
    /// A number for a host that was given none. It is another one after each start, so that it follows nobody.
    pub fn any_number() -> u32 {
        std::hash::RandomState::new().hash_one(0) as u32 % LAST + 1
    }
}

/// Whether this host says that it has Fastsocket, and hears others.
#[derive(Default)]
pub enum State {
    #[default]
    Off,
    /// It cannot be had; why.
    Refused(String),
    On(Hosts),
}

impl State {
    /// Of what the broker has answered.
    pub fn of(answer: Result<Hosts, String>) -> State {
        match answer {
            Ok(hosts) => State::On(hosts),
            Err(why) => {
                tracing::warn!(%why, "this host does not announce itself to others");
                State::Refused(why)
            }
        }
    }

    /// Number of the host at the other end of a connection, if that has Fastsocket, as it has said in the handshake.
    /// `None`: it has said nothing, or nothing is announced here. Ask first whether the other end is on this host (the
    /// record of pairs, addresses): only that says so, the number does not. A hint, and no proof: anybody can send the
    /// option.
    pub fn behind(&self, socket: BorrowedFd<'_>) -> Option<u32> {
        match self {
            State::On(hosts) => hosts.behind(socket),
            State::Off | State::Refused(_) => None,
        }
    }

    /// `sees_all`: also other users' peers.
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
