//! Selection of the listen socket for a new connection: by the CPU that handles
//! its SYN. One [`Select`] per listener group; what exactly is chosen stands at
//! the top of `select.bpf.c`.

use crate::counters::{self, Count};
use crate::{load, probe, skel, Error, Result};
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{MapCore, MapFlags, RingBuffer, RingBufferBuilder};
use std::cell::RefCell;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;

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

/// A loaded program with its maps. Goes away with the value once no group of
/// sockets has it attached.
pub struct Select {
    skel: skel::select::SelectSkel<'static>,
    bell: RingBuffer<'static>,
    cpus: usize,
    per_cpu: usize,
    /// The slots as they are; empty: not known.
    written: RefCell<Vec<u32>>,
}

impl Select {
    /// For CPUs numbered below `cpus`.
    ///
    /// # Errors
    /// [`Error::Missing`] with the reason where it cannot be had, [`Error::Load`].
    pub fn load(cpus: usize) -> Result<Select> {
        Select::load_in(cpus, None)
    }

    /// As [`Select::load`], with the maps pinned in the folder `pins`. Maps that are
    /// pinned there already, by a process that is gone, are taken over with what is in
    /// them: a program that still uses them and this one then select alike.
    ///
    /// # Errors
    /// As of [`Select::load`]; also where maps there are of another version.
    pub fn load_in(cpus: usize, pins: Option<&Path>) -> Result<Select> {
        probe::permitted()?;
        let cpus = cpus.clamp(1, 4096).next_power_of_two();
        let per_cpu = (SLOTS / cpus).max(8);
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
        let ring = |e| Error::map("bell", e);
        let mut bell = RingBufferBuilder::new();
        bell.add(&skel.maps.bell, |_| 0).map_err(ring)?;
        let bell = bell.build().map_err(ring)?;
        Ok(Select { skel, bell, cpus, per_cpu, written: RefCell::default() })
    }

    /// To be attached to a socket of the group (SO_ATTACH_REUSEPORT_EBPF).
    pub fn program(&self) -> BorrowedFd<'_> {
        self.skel.progs.select_listener.as_fd()
    }

    /// What workers and monitor map: one `fsocket_abi::balance::Balance`.
    pub fn balance(&self) -> BorrowedFd<'_> {
        self.skel.maps.balances.as_fd()
    }

    /// Readable when the program wants the monitor to look, until [`Select::heard`].
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.skel.maps.bell.as_fd()
    }

    /// The bell was heard.
    pub fn heard(&self) {
        let _ = self.bell.consume();
    }

    /// Puts a listening socket in its place. The kernel takes it out when it is
    /// closed.
    ///
    /// # Errors
    /// [`Error::Map`]: not a listening socket that shares its address, or it
    /// has a place already.
    pub fn put(&self, place: u32, socket: BorrowedFd<'_>) -> Result<()> {
        let value = (socket.as_raw_fd() as u64).to_ne_bytes();
        let sockets = &self.skel.maps.sockets;
        sockets.update(&place.to_ne_bytes(), &value, MapFlags::ANY).map_err(|e| Error::map("sockets", e))
    }

    /// Cookie of the socket in a place.
    pub fn cookie(&self, place: u32) -> Option<u64> {
        let value = self.skel.maps.sockets.lookup(&place.to_ne_bytes(), MapFlags::ANY).ok()??;
        Some(u64::from_ne_bytes(value.try_into().ok()?))
    }

    /// Empties a place; nothing there is no error.
    pub fn take_out(&self, place: u32) {
        let _ = self.skel.maps.sockets.delete(&place.to_ne_bytes());
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
        let keys: Vec<u8> = new.iter().flat_map(|slot| (*slot as u32).to_ne_bytes()).collect();
        let values: Vec<u8> = new.iter().flat_map(|slot| slots[*slot].to_ne_bytes()).collect();
        if !new.is_empty() {
            let (n, any) = (new.len() as u32, MapFlags::ANY);
            let map = &self.skel.maps.slots;
            map.update_batch(&keys, &values, n, any, any).map_err(|e| Error::map("slots", e))?;
        }
        *written = slots;
        Ok(())
    }

    /// Sets all counters to zero.
    ///
    /// # Errors
    /// [`Error::Map`].
    pub fn reset(&self) -> Result<()> {
        let map = &self.skel.maps.selections;
        let cpus = libbpf_rs::num_possible_cpus().map_err(|e| Error::map("selections", e))?;
        let zeros = vec![vec![0u8; 8]; cpus];
        for key in 0..SELECTIONS.len() as u32 {
            map.update_percpu(&key.to_ne_bytes(), &zeros, MapFlags::ANY).map_err(|e| Error::map("selections", e))?;
        }
        Ok(())
    }

    /// Selections by kind and CPU so far.
    ///
    /// # Errors
    /// [`Error::Map`].
    pub fn counts(&self) -> Result<Vec<Count>> {
        counters::read(&self.skel.maps.selections, SELECTIONS)
    }
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
