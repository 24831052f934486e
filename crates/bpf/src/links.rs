//! Finds the BPF programs that are attached to netfilter's hooks; see `links.bpf.c`.

use crate::{load, probe, skel, Error, Result};
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{Iter, Link};
use std::io::Read;

/// The loaded program, which can be run any number of times.
pub struct Links {
    /// The iterator keeps the program loaded.
    iterator: Link,
}

impl Links {
    /// Loads the program.
    ///
    /// # Errors
    /// [`Error::Missing`] with the reason if this kernel or process cannot do it.
    pub fn start() -> Result<Links> {
        probe::permitted()?;
        probe::btf()?;
        let skel = load::logged("links", || skel::links::LinksSkelBuilder::default().open(load::storage())?.load())?;
        let iterator = skel.progs.netfilter.attach().map_err(|e| Error::attach("links", e))?;
        Ok(Links { iterator })
    }

    /// Inode numbers of the network namespaces with such programs: one number for each program.
    ///
    /// # Errors
    /// [`Error::Map`].
    pub fn netfilter(&self) -> Result<Vec<u64>> {
        let mut numbers = Vec::new();
        Iter::new(&self.iterator)
            .and_then(|mut list| Ok(list.read_to_end(&mut numbers)?))
            .map_err(|e| Error::map("links", e))?;
        let number = |n: &[u8]| n.first_chunk().map(|n| u64::from(u32::from_ne_bytes(*n)));
        Ok(numbers.chunks(4).filter_map(number).collect())
    }
}
