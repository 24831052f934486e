//! Selection of the listen socket for a new connection: by the CPU that handles
//! its SYN. One [`Select`] per listener group; what exactly is chosen stands at
//! the top of `select.bpf.c`.

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
/// Places for sockets; `max_entries` of `sockets`.
pub const PLACES: u32 = 1024;
/// Slots over all CPUs, or a few more: what bounds the workers of one CPU, and as many flow
/// groups as Affinity-Accept has (3.1).
const SLOTS: usize = 4096;
const OWN: u32 = 0x8000_0000;

/// The program and its maps by their descriptors. It takes a privilege to load them and none to
/// use them, so another process may have loaded them.
#[derive(Debug)]
pub struct Parts {
    pub program: OwnedFd,
    pub sockets: OwnedFd,
    pub slots: OwnedFd,
    pub selections: OwnedFd,
    pub balances: OwnedFd,
    pub waker: OwnedFd,
}

/// A loaded program with its maps. Goes away with the value once no group of
/// sockets has it attached.
pub struct Select {
    parts: Parts,
    waker: Waker,
    cpus: usize,
    per_cpu: usize,
    /// The slots as they are; empty: not known.
    written: RefCell<Vec<u32>>,
}

/// libbpf's view of the ring buffer, in which nothing is said.
struct Waker(NonNull<libbpf::ring_buffer>);

impl Waker {
    fn new(map: BorrowedFd<'_>) -> Option<Waker> {
        // SAFETY: the descriptor lives during the call; no context, no options.
        let new =
            unsafe { libbpf::ring_buffer__new(map.as_raw_fd(), Some(ignore), std::ptr::null_mut(), std::ptr::null()) };
        NonNull::new(new).map(Waker)
    }
}

impl Drop for Waker {
    fn drop(&mut self) {
        // SAFETY: made in `new`, freed once.
        unsafe { libbpf::ring_buffer__free(self.0.as_ptr()) };
    }
}

unsafe extern "C" fn ignore(_: *mut c_void, _: *mut c_void, _: libbpf::size_t) -> libc::c_int {
    0
}

/// CPUs and slots for each, as the program is loaded for CPUs numbered below `cpus`.
fn shape(cpus: usize) -> (usize, usize) {
    let cpus = cpus.clamp(1, 4096).next_power_of_two();
    (cpus, (SLOTS / cpus).max(8))
}

impl Parts {
    /// Loads, for CPUs numbered below `cpus`, with the maps pinned in the folder `pins`. Maps that
    /// are pinned there already, by a process that is gone, are taken over with what is in
    /// them: a program that still uses them and this one then select alike.
    ///
    /// # Errors
    /// [`Error::Missing`] with the reason where it cannot be had, [`Error::Load`]; also where maps
    /// there are of another version.
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
                    // The loader's own (.rodata) are different each time.
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

/// What a call of libbpf returns, as a result.
fn checked(map: &str, returned: libc::c_int) -> Result<()> {
    match returned {
        0.. => Ok(()),
        e => Err(Error::map(map, libbpf_rs::Error::from_raw_os_error(-e))),
    }
}

impl Select {
    /// For CPUs numbered below `cpus`.
    ///
    /// # Errors
    /// As of [`Parts::load`].
    pub fn load(cpus: usize) -> Result<Select> {
        Select::of(Parts::load(cpus, None)?, cpus)
    }

    /// What [`Parts::load`] has loaded for as many CPUs.
    ///
    /// # Errors
    /// [`Error::Map`].
    pub fn of(parts: Parts, cpus: usize) -> Result<Select> {
        let waker = Waker::new(parts.waker.as_fd())
            .ok_or_else(|| Error::map("waker", std::io::Error::last_os_error().into()))?;
        let (cpus, per_cpu) = shape(cpus);
        Ok(Select { parts, waker, cpus, per_cpu, written: RefCell::default() })
    }

    /// To be attached to a socket of the group (SO_ATTACH_REUSEPORT_EBPF).
    pub fn program(&self) -> BorrowedFd<'_> {
        self.parts.program.as_fd()
    }

    /// What workers and monitor map: one `fsocket_abi::balance::Balance`.
    pub fn balance(&self) -> BorrowedFd<'_> {
        self.parts.balances.as_fd()
    }

    /// Readable when the program wants the monitor to look, until [`Select::heard`].
    pub fn waker(&self) -> BorrowedFd<'_> {
        self.parts.waker.as_fd()
    }

    /// The waker was heard.
    pub fn heard(&self) {
        // SAFETY: the buffer lives as long as `self`, which is used by one thread.
        unsafe { libbpf::ring_buffer__consume(self.waker.0.as_ptr()) };
    }

    /// Puts a listening socket in its place. The kernel takes it out when it is
    /// closed.
    ///
    /// # Errors
    /// [`Error::Map`]: not a listening socket that shares its address, or it
    /// has a place already.
    pub fn put(&self, place: u32, socket: BorrowedFd<'_>) -> Result<()> {
        let value = socket.as_raw_fd() as u64;
        let (key, value) = ((&raw const place).cast(), (&raw const value).cast());
        // SAFETY: key and value are as large as the map's, and live during the call.
        checked("sockets", unsafe { libbpf::bpf_map_update_elem(self.parts.sockets.as_raw_fd(), key, value, 0) })
    }

    /// Cookie of the socket in a place.
    pub fn cookie(&self, place: u32) -> Option<u64> {
        let mut cookie = 0u64;
        let (key, value) = ((&raw const place).cast(), (&raw mut cookie).cast());
        // SAFETY: as in `put`.
        let found = unsafe { libbpf::bpf_map_lookup_elem(self.parts.sockets.as_raw_fd(), key, value) };
        (found == 0).then_some(cookie)
    }

    /// Empties a place; nothing there is no error.
    pub fn take_out(&self, place: u32) {
        // SAFETY: as in `put`.
        unsafe { libbpf::bpf_map_delete_elem(self.parts.sockets.as_raw_fd(), (&raw const place).cast()) };
    }

    /// Slots of one CPU.
    pub fn per_cpu(&self) -> usize {
        self.per_cpu
    }

    /// Shares the slots of all CPUs among workers: (place, CPU) each. A CPU
    /// without a worker gets somebody else's, or with `orphans_to_global` the
    /// global listen socket, which everybody serves. `elsewhere`: the CPU whose workers
    /// have a slot that is another CPU's (its number, and the slot's among those of that CPU).
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
        // Until all of them are there.
        written.clear();
        let keys: Vec<u32> = new.iter().map(|slot| *slot as u32).collect();
        let values: Vec<u32> = new.iter().map(|slot| slots[*slot]).collect();
        if !new.is_empty() {
            let mut n = new.len() as u32;
            let (keys, values) = (keys.as_ptr().cast(), values.as_ptr().cast());
            // SAFETY: `n` keys and values of four bytes each, as the map has them.
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
            // SAFETY: a key as the map has it, and a value of eight bytes for each possible CPU.
            checked("selections", unsafe { libbpf::bpf_map_update_elem(map, key, value, 0) })?;
        }
        Ok(())
    }

    /// Selections by kind and CPU so far.
    ///
    /// # Errors
    /// [`Error::Map`].
    pub fn counts(&self) -> Result<Vec<Count>> {
        let map = self.parts.selections.as_raw_fd();
        let mut counts = Vec::with_capacity(SELECTIONS.len());
        for (key, name) in SELECTIONS.iter().enumerate() {
            let mut by_cpu = vec![0u64; per_cpu_values()?];
            let (key, value) = (&(key as u32), by_cpu.as_mut_ptr().cast());
            // SAFETY: as in `reset`.
            checked("selections", unsafe { libbpf::bpf_map_lookup_elem(map, (&raw const *key).cast(), value) })?;
            counts.push(Count { name, by_cpu });
        }
        Ok(counts)
    }
}

/// Values of one key of a map by CPU.
fn per_cpu_values() -> Result<usize> {
    libbpf_rs::num_possible_cpus().map_err(|e| Error::map("selections", e))
}

/// The value of every slot. Workers of one CPU take turns in its slots, and so
/// do all of them in those of a CPU that nobody works on.
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
                // Not all orphaned CPUs to the same worker.
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
