//! Selects the listen socket for a new connection, by the CPU that handles the connection's SYN.
//! There is one [`Select`] for each listener group. The beginning of `select.bpf.c` says exactly
//! what is chosen.

use crate::counters::Count;
use crate::{load, probe, skel, Error, Result};
use libbpf_rs::libbpf_sys as libbpf;
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use std::cell::RefCell;
use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;

/// The order of `enum selection` in `select.bpf.c`.
const SELECTIONS: &[&str] = &["lookups", "self", "other", "beside", "to_global", "to_kernel", "migrated"];

/// Place of the global listen socket.
pub const GLOBAL: u32 = 0;
/// Number of places for sockets; equal to `max_entries` of `sockets`.
pub const PLACES: u32 = 1024;
/// Number of slots of all CPUs together, about. This limits the workers of one CPU. It equals the
/// number of flow groups in Affinity-Accept (3.1).
const SLOTS: usize = 4096;
const OWN: u32 = 0x8000_0000;

/// Descriptors of the program and its maps. Loading them takes a privilege and using them takes
/// none, so another process may have loaded them.
#[derive(Debug)]
pub struct Parts {
    pub program: OwnedFd,
    pub sockets: OwnedFd,
    pub slots: OwnedFd,
    pub selections: OwnedFd,
    pub balances: OwnedFd,
    pub waker: OwnedFd,
}

/// A loaded program with its maps. The kernel frees them when this value is dropped and no group
/// of sockets has the program attached.
pub struct Select {
    parts: Parts,
    waker: Waker,
    cpus: usize,
    per_cpu: usize,
    /// The slots as last written to the map; empty: unknown.
    written: RefCell<Vec<u32>>,
}

/// libbpf's view of the ring buffer that wakes the monitor. Its records have no content.
struct Waker(NonNull<libbpf::ring_buffer>);

impl Waker {
    fn new(map: BorrowedFd<'_>) -> Option<Waker> {
        // SAFETY: the descriptor lives during the call; neither context nor options are passed.
        let new =
            unsafe { libbpf::ring_buffer__new(map.as_raw_fd(), Some(ignore), std::ptr::null_mut(), std::ptr::null()) };
        NonNull::new(new).map(Waker)
    }
}

impl Drop for Waker {
    fn drop(&mut self) {
        // SAFETY: `new` has made the ring, and it is freed once.
        unsafe { libbpf::ring_buffer__free(self.0.as_ptr()) };
    }
}

unsafe extern "C" fn ignore(_: *mut c_void, _: *mut c_void, _: libbpf::size_t) -> libc::c_int {
    0
}

/// Number of CPUs, and slots for each, for which the program is loaded if CPU numbers are below
/// `cpus`.
fn shape(cpus: usize) -> (usize, usize) {
    let cpus = cpus.clamp(1, 4096).next_power_of_two();
    (cpus, (SLOTS / cpus).max(8))
}

impl Parts {
    /// Loads the program for CPU numbers below `cpus`. With `pins`, its maps are pinned in that
    /// folder. If an earlier process has pinned maps there, they are used with their content. So
    /// the new program selects like an old one that is still attached.
    ///
    /// # Errors
    /// [`Error::Missing`] with the reason if this kernel or process cannot do it;
    /// [`Error::Load`], also if the maps there are of another version.
    pub fn load(cpus: usize, pins: Option<&Path>) -> Result<Parts> {
        probe::permitted()?;
        let (cpus, per_cpu) = shape(cpus);
        let storage = load::storage();
        let skel = load::logged("select", || {
            let mut open = skel::select::SelectSkelBuilder::default().open(storage)?;
            if let Some(rodata) = open.maps.rodata_data.as_mut() {
                rodata.cpu_mask = cpus as u32 - 1;
                rodata.sub_mask = per_cpu as u32 - 1;
                rodata.sub_shift = per_cpu.trailing_zeros();
            }
            open.maps.slots.set_max_entries((cpus * per_cpu) as u32)?;
            if let Some(folder) = pins {
                for mut map in open.open_object_mut().maps_mut() {
                    let name = map.name().to_string_lossy().into_owned();
                    // The loader's own maps (.rodata) are different each time, so they are not
                    // pinned.
                    if !name.contains('.') {
                        map.set_pin_path(folder.join(name))?;
                    }
                }
            }
            open.load()
        })?;
        let own = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().map_err(|e| Error::map("select", e.into()));
        Ok(Parts {
            program: own(skel.progs.select_listener.as_fd())?,
            sockets: own(skel.maps.sockets.as_fd())?,
            slots: own(skel.maps.slots.as_fd())?,
            selections: own(skel.maps.selections.as_fd())?,
            balances: own(skel.maps.balances.as_fd())?,
            waker: own(skel.maps.waker.as_fd())?,
        })
    }
}

/// Turns the return value of a libbpf call into a result.
fn checked(map: &str, returned: libc::c_int) -> Result<()> {
    match returned {
        0.. => Ok(()),
        e => Err(Error::map(map, libbpf_rs::Error::from_raw_os_error(-e))),
    }
}

impl Select {
    /// Loads the program for CPU numbers below `cpus`.
    ///
    /// # Errors
    /// Those of [`Parts::load`].
    pub fn load(cpus: usize) -> Result<Select> {
        Select::of(Parts::load(cpus, None)?, cpus)
    }

    /// Uses `parts` that [`Parts::load`] has loaded for the same `cpus`.
    ///
    /// # Errors
    /// [`Error::Map`].
    pub fn of(parts: Parts, cpus: usize) -> Result<Select> {
        let waker = Waker::new(parts.waker.as_fd())
            .ok_or_else(|| Error::map("waker", std::io::Error::last_os_error().into()))?;
        let (cpus, per_cpu) = shape(cpus);
        Ok(Select { parts, waker, cpus, per_cpu, written: RefCell::default() })
    }

    /// The program, to be attached to a socket of the group (SO_ATTACH_REUSEPORT_EBPF).
    pub fn program(&self) -> BorrowedFd<'_> {
        self.parts.program.as_fd()
    }

    /// The memory that workers and the monitor map: one `fsocket_abi::balance::Balance`.
    pub fn balance(&self) -> BorrowedFd<'_> {
        self.parts.balances.as_fd()
    }

    /// Becomes readable when the program wants the monitor to look, and stays so until
    /// [`Select::heard`] is called.
    pub fn waker(&self) -> BorrowedFd<'_> {
        self.parts.waker.as_fd()
    }

    /// Empties the waker, because the monitor is about to look.
    pub fn heard(&self) {
        // SAFETY: the buffer lives as long as `self`, which is used by one thread.
        unsafe { libbpf::ring_buffer__consume(self.waker.0.as_ptr()) };
    }

    /// Puts a listening socket into a place. When the socket is closed, the kernel removes it.
    ///
    /// # Errors
    /// [`Error::Map`]: the socket does not listen or does not share its address, or it has a
    /// place already.
    pub fn put(&self, place: u32, socket: BorrowedFd<'_>) -> Result<()> {
        let value = socket.as_raw_fd() as u64;
        let (key, value) = ((&raw const place).cast(), (&raw const value).cast());
        // SAFETY: key and value are as large as the map's, and live during the call.
        checked("sockets", unsafe { libbpf::bpf_map_update_elem(self.parts.sockets.as_raw_fd(), key, value, 0) })
    }

    /// Cookie of the socket at a place.
    pub fn cookie(&self, place: u32) -> Option<u64> {
        let mut cookie = 0u64;
        let (key, value) = ((&raw const place).cast(), (&raw mut cookie).cast());
        // SAFETY: key and value are as large as the map's, and live during the call.
        let found = unsafe { libbpf::bpf_map_lookup_elem(self.parts.sockets.as_raw_fd(), key, value) };
        (found == 0).then_some(cookie)
    }

    /// Empties a place. It is no error if the place is empty already.
    pub fn take_out(&self, place: u32) {
        // SAFETY: the key is as large as the map's, and lives during the call.
        unsafe { libbpf::bpf_map_delete_elem(self.parts.sockets.as_raw_fd(), (&raw const place).cast()) };
    }

    /// Number of slots of one CPU.
    pub fn per_cpu(&self) -> usize {
        self.per_cpu
    }

    /// Distributes the slots of all CPUs among `workers`, each a (place, CPU). A CPU without a
    /// worker gets workers of other CPUs, or with `orphans_to_global` the global listen socket,
    /// which every worker serves. `elsewhere`: for a CPU and the index of one of its slots,
    /// another CPU whose workers shall have the slot.
    ///
    /// # Errors
    /// [`Error::Map`].
    pub fn assign(
        &self,
        workers: &[(u32, u32)],
        orphans_to_global: bool,
        elsewhere: impl Fn(u32, usize) -> Option<u32>,
    ) -> Result<()> {
        let slots = share_out(self.cpus, self.per_cpu, workers, orphans_to_global, elsewhere);
        let mut written = self.written.borrow_mut();
        let is_new = |slot: &usize| written.get(*slot) != slots.get(*slot);
        let new: Vec<usize> = (0..slots.len()).filter(is_new).collect();
        // Empty until all slots are written, in case that fails.
        written.clear();
        let keys: Vec<u32> = new.iter().map(|slot| *slot as u32).collect();
        let values: Vec<u32> = new.iter().map(|slot| slots[*slot]).collect();
        if !new.is_empty() {
            let mut n = new.len() as u32;
            let (keys, values) = (keys.as_ptr().cast(), values.as_ptr().cast());
            // SAFETY: `n` keys and `n` values of four bytes each, as the map demands.
            checked("slots", unsafe {
                let map = self.parts.slots.as_raw_fd();
                libbpf::bpf_map_update_batch(map, keys, values, &raw mut n, std::ptr::null())
            })?;
        }
        *written = slots;
        Ok(())
    }

    /// Sets all counters to zero.
    ///
    /// # Errors
    /// [`Error::Map`].
    pub fn reset(&self) -> Result<()> {
        let map = self.parts.selections.as_raw_fd();
        let zeros = vec![0u64; per_cpu_values()?];
        for key in 0..SELECTIONS.len() as u32 {
            let (key, value) = ((&raw const key).cast(), zeros.as_ptr().cast());
            // SAFETY: the key is as large as the map's, and the value has eight bytes for each
            // possible CPU.
            checked("selections", unsafe { libbpf::bpf_map_update_elem(map, key, value, 0) })?;
        }
        Ok(())
    }

    /// Number of selections so far, by kind and CPU.
    ///
    /// # Errors
    /// [`Error::Map`].
    pub fn counts(&self) -> Result<Vec<Count>> {
        let map = self.parts.selections.as_raw_fd();
        let mut counts = Vec::with_capacity(SELECTIONS.len());
        for (key, name) in SELECTIONS.iter().enumerate() {
            let mut by_cpu = vec![0u64; per_cpu_values()?];
            let (key, value) = (&(key as u32), by_cpu.as_mut_ptr().cast());
            // SAFETY: the key is as large as the map's, and the value has room for eight bytes
            // for each possible CPU.
            checked("selections", unsafe { libbpf::bpf_map_lookup_elem(map, (&raw const *key).cast(), value) })?;
            counts.push(Count { name, by_cpu });
        }
        Ok(counts)
    }
}

/// Number of possible CPUs, which is the number of values that a per-CPU map has for each key.
fn per_cpu_values() -> Result<usize> {
    libbpf_rs::num_possible_cpus().map_err(|e| Error::map("selections", e))
}

/// Computes the value of every slot. Workers of one CPU take turns in its slots. In the slots of
/// a CPU without a worker, all workers take turns.
fn share_out(
    cpus: usize,
    per_cpu: usize,
    workers: &[(u32, u32)],
    orphans_to_global: bool,
    elsewhere: impl Fn(u32, usize) -> Option<u32>,
) -> Vec<u32> {
    let on = |cpu: usize| workers.iter().filter(move |(_, c)| *c as usize % cpus == cpu).map(|(place, _)| *place);
    let by_cpu: Vec<Vec<u32>> = (0..cpus).map(|cpu| on(cpu).collect()).collect();
    let mut slots = Vec::with_capacity(cpus * per_cpu);
    for (cpu, own) in by_cpu.iter().enumerate() {
        for k in 0..per_cpu {
            let there = || by_cpu.get(elsewhere(cpu as u32, k)? as usize).filter(|there| !there.is_empty());
            slots.push(match (own.len(), workers.len()) {
                (0, n) if n == 0 || orphans_to_global => GLOBAL,
                // Starts with another worker for each CPU without one, so that one worker does
                // not get them all.
                (0, n) => workers[(cpu + k) % n].0,
                (n, _) => there().map_or_else(|| own[k % n] | OWN, |there| there[k % there.len()]),
            });
        }
    }
    slots
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slot_has_somebody() {
        let slots = share_out(4, 8, &[(1, 0), (2, 1), (3, 1)], false, |_, _| None);
        assert_eq!(slots.len(), 32);
        assert!(slots[..8].iter().all(|s| *s == 1 | OWN));
        assert!(slots[8..16].iter().all(|s| *s == 2 | OWN || *s == 3 | OWN));
        assert_eq!(slots[8..16].iter().filter(|s| **s == 2 | OWN).count(), 4);
        for place in 1..=3 {
            assert!(slots[16..].contains(&place), "worker {place} has a share of the idle CPUs");
        }
        assert!(slots[16..].iter().all(|s| s & OWN == 0 && *s != GLOBAL));
        assert!(share_out(2, 8, &[], false, |_, _| None).iter().all(|s| *s == GLOBAL));
        let slots = share_out(2, 8, &[(1, 0)], true, |_, _| None);
        assert!(slots[..8].iter().all(|s| *s == 1 | OWN) && slots[8..].iter().all(|s| *s == GLOBAL));
    }

    #[test]
    fn slots_that_are_elsewhere() {
        let away = |cpu: u32, k: usize| (cpu == 0 && k < 4).then_some(1);
        let slots = share_out(2, 8, &[(1, 0), (2, 1), (3, 1)], false, away);
        assert_eq!(slots[..4], [2, 3, 2, 3], "of the other CPU, and not its own");
        assert!(slots[4..8].iter().all(|s| *s == 1 | OWN));
        let slots = share_out(2, 8, &[(1, 0)], false, away);
        assert!(slots[..8].iter().all(|s| *s == 1 | OWN), "nobody is there");
        assert!(share_out(2, 8, &[(1, 0)], false, |_, _| Some(9)).iter().all(|s| s & !OWN == 1));
    }
}
