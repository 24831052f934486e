//! Contention of the kernel's locks: which functions waited for which lock, how often and how
//! long.

use crate::counters::{self, Count};
use crate::kallsyms::Symbols;
use crate::{load, probe, skel, Error, Result};
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{Link, MapCore, MapFlags};
use std::collections::HashMap;

/// The order of `enum reason` in `locks.bpf.c`.
const REASONS: &[&str] = &["counted", "no_wait", "no_begin", "no_stack", "no_site"];

/// Flags of a wait: `LCB_F_*` in the kernel's `trace/events/lock.h`.
const SPIN: u32 = 1;
const READ: u32 = 2;
const WRITE: u32 = 4;
const RT: u32 = 8;
const PERCPU: u32 = 16;
const MUTEX: u32 = 32;

/// All waits of one function for locks with one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contention {
    /// The lock's usual name (`slock`, `ep.lock`), the name of its variable, or empty.
    pub lock: String,
    /// `spinlock`, `rwlock`, `mutex`, `rwsem`, `percpu-rwsem`, `rt-mutex`.
    pub class: &'static str,
    /// The function that wanted the lock; empty if the stack is unknown.
    pub caller: String,
    pub times: u64,
    /// Nanoseconds: the sum of all waits, and the longest wait.
    pub ns: u64,
    pub longest: u64,
}

/// A running measurement of the whole machine. It ends when this value is dropped.
pub struct Locks {
    // Dropped before the skeleton, so that the programs are detached while they still exist.
    _links: Vec<Link>,
    skel: skel::locks::LocksSkel<'static>,
}

impl Locks {
    /// Loads and attaches the programs.
    ///
    /// # Errors
    /// [`Error::Missing`] with the reason if this kernel or process cannot do it.
    pub fn start() -> Result<Locks> {
        probe::permitted()?;
        // The tracepoint exists since Linux 5.19.
        probe::tracepoint("contention_begin")?;
        let skel = load::logged("locks", || skel::locks::LocksSkelBuilder::default().open(load::storage())?.load())?;
        let failed = |e| Error::attach("locks", e);
        // The program for ends is attached first: otherwise some wait could stay without an end
        // for ever.
        let links = vec![skel.progs.end.attach().map_err(failed)?, skel.progs.begin.attach().map_err(failed)?];
        Ok(Locks { _links: links, skel })
    }

    /// The waits so far. The one with the longest sum comes first.
    ///
    /// # Errors
    /// [`Error::Map`]; [`Error::File`] if the kernel's symbols cannot be read.
    pub fn contention(&self) -> Result<Vec<Contention>> {
        let failed = |e| Error::map("sites", e);
        let symbols = Symbols::read()?;
        let sites = &self.skel.maps.sites;
        let mut found: HashMap<(String, &'static str, String), Contention> = HashMap::new();
        for key in sites.keys() {
            let Some(value) = sites.lookup(&key, MapFlags::ANY).map_err(failed)? else { continue };
            let word = |at: usize| value.get(at..).and_then(|v| v.first_chunk()).map_or(0, |v| u64::from_ne_bytes(*v));
            let half = |at: usize| key.get(at..).and_then(|v| v.first_chunk()).map_or(0, |v| i32::from_ne_bytes(*v));
            let (stack, flags) = (half(0), half(4) as u32);
            let frames: Vec<&str> = self.stack(stack)?.iter().filter_map(|at| symbols.function(*at)).collect();
            let caller = crate::locknames::caller(&frames).unwrap_or_default().to_owned();
            let class = class(flags);
            let lock = match symbols.variable(word(24)) {
                Some(name) => name.to_owned(),
                None => crate::locknames::lock(&frames, class).unwrap_or_default().to_owned(),
            };
            let entry = found.entry((lock.clone(), class, caller.clone())).or_insert_with(|| Contention {
                lock,
                class,
                caller,
                times: 0,
                ns: 0,
                longest: 0,
            });
            entry.times += word(0);
            entry.ns += word(8);
            entry.longest = entry.longest.max(word(16));
        }
        let mut all: Vec<Contention> = found.into_values().filter(|c| c.times > 0).collect();
        all.sort_by(|a, b| b.ns.cmp(&a.ns).then_with(|| a.caller.cmp(&b.caller)));
        Ok(all)
    }

    /// Number of waits that were counted, and of those that could not be, by reason.
    ///
    /// # Errors
    /// [`Error::Map`].
    pub fn reasons(&self) -> Result<Vec<Count>> {
        counters::read(&self.skel.maps.reasons, REASONS)
    }

    /// The return addresses of a stack, innermost first.
    fn stack(&self, id: i32) -> Result<Vec<u64>> {
        if id < 0 {
            return Ok(Vec::new());
        }
        let stacks = &self.skel.maps.stacks;
        let bytes = stacks.lookup(&id.to_ne_bytes(), MapFlags::ANY).map_err(|e| Error::map("stacks", e))?;
        let bytes = bytes.unwrap_or_default();
        let words = bytes.chunks_exact(8).map(|w| u64::from_ne_bytes(w.try_into().expect("chunks of 8")));
        Ok(words.take_while(|at| *at != 0).collect())
    }
}

fn class(flags: u32) -> &'static str {
    match flags {
        f if f & MUTEX != 0 => "mutex",
        f if f & PERCPU != 0 => "percpu-rwsem",
        f if f & RT != 0 => "rt-mutex",
        f if f & SPIN != 0 && f & (READ | WRITE) != 0 => "rwlock",
        f if f & SPIN != 0 => "spinlock",
        f if f & (READ | WRITE) != 0 => "rwsem",
        // queued_spin_lock_slowpath() sets no flag.
        0 => "spinlock",
        _ => "other",
    }
}
