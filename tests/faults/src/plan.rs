//! Chooses faults among all possible ones.

use crate::trap::{Fault, Site};
use libc::{SYS_recvmsg, EAGAIN, EINTR, ENOMEM};
use std::collections::BTreeMap;

/// How many of the faults run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// The first call of each place, with its most likely error.
    Short,
    /// The first, second and last call of each place with every error, and failures for good from
    /// the first call on.
    Usual,
    /// Up to this many calls of each place, and the last one.
    Full(u32),
}

pub struct Planned {
    pub faults: Vec<Fault>,
}

impl Planned {
    pub fn of(sites: &BTreeMap<Site, (u32, &'static [i32])>, extent: Extent) -> Planned {
        let mut faults = Vec::new();
        for (site, (count, errors)) in sites {
            let mut calls: Vec<u32> = match extent {
                Extent::Short => vec![1],
                Extent::Usual => vec![1, 2, *count],
                Extent::Full(most) => (1..=most).chain([*count]).collect(),
            };
            calls.retain(|n| n <= count);
            calls.dedup();
            for error in errors.iter().take(if extent == Extent::Short { 1 } else { errors.len() }) {
                faults.extend(calls.iter().map(|nth| Fault { site: *site, nth: *nth, on: false, error: *error }));
                // After a signal or a race the next attempt succeeds. A receive from a Unix socket
                // takes no memory (net/unix/af_unix.c), so it cannot lack memory for good.
                let passes = [EINTR, EAGAIN].contains(error) || site.number == SYS_recvmsg && *error == ENOMEM;
                if extent != Extent::Short && !passes {
                    faults.push(Fault { site: *site, nth: 1, on: true, error: *error });
                }
            }
        }
        Planned { faults }
    }
}
