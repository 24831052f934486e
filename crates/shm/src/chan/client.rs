//! The client's side of a channel: usable slots, and their ports.

use super::{Chan, Client, Rings, PORT_BLOCK};
use crate::ctl;
use core::sync::atomic::Ordering;
use fsocket_abi::arena::Reason;
use fsocket_abi::channel::{status, CLIENT, SLOTS};
use fsocket_proto::request;
use fsocket_sync::trim;
use fsocket_sys as sys;

/// A slot for a new connection.
pub struct Taken {
    pub slot: usize,
    /// The client port of this slot.
    pub port: u16,
    pub rings: Rings,
}

impl Chan {
    fn both_closed(&self, slot: usize) -> bool {
        let s = self.slot(slot);
        // Acquire: the server's last accesses are before its CLOSED.
        s.dir.iter().all(|d| d.prod.status.load(Ordering::Acquire) & status::CLOSED != 0)
            && trim::is_quiet([0, 1].map(|dir| &s.dir[dir].cons.trims))
    }

    /// Has the slot's last connection moved to the kernel, under the slot's port?
    fn went_to_kernel(&self, slot: usize) -> bool {
        self.slot(slot).switching.load(Ordering::Relaxed) != 0
    }

    /// Is the slot's port free? It is not while the kernel connection lives or is in TIME_WAIT.
    fn port_is_free(&self, c: &Client, slot: usize) -> bool {
        let port = c.ports[slot / PORT_BLOCK] + (slot % PORT_BLOCK) as u16;
        if !self.went_to_kernel(slot) {
            return true;
        }
        let mut any = [0u8; 28];
        any[..2].copy_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
        any[2..4].copy_from_slice(&port.to_be_bytes());
        let flags = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
        // An IPv6 socket covers both versions. A host without IPv6 uses an IPv4 socket.
        let (fd, len) = match sys::socket(libc::AF_INET6, flags, 0) {
            Ok(fd) => {
                let _ = sys::setsockopt(fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, &0i32.to_ne_bytes());
                (fd, 28)
            }
            Err(_) => match sys::socket(libc::AF_INET, flags, 0) {
                Ok(fd) => {
                    any[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
                    (fd, 16)
                }
                Err(_) => return false,
            },
        };
        let free = sys::bind(fd, &any[..len]).is_ok();
        let _ = sys::close(fd);
        free
    }

    /// Returns a slot when the client has closed its connection.
    pub fn retire_slot(&self, slot: usize) {
        if self.my_side() != CLIENT {
            return;
        }
        let Some(mut c) = self.client() else { return };
        if self.both_closed(slot) && !self.went_to_kernel(slot) {
            let n = c.free_n;
            if n < SLOTS {
                c.free[n] = slot as u16;
                c.free_n += 1;
            }
        } else if c.closing_n < SLOTS {
            let at = (c.closing_at + c.closing_n) % SLOTS;
            c.closing[at] = slot as u16;
            c.closing_n += 1;
        }
    }

    /// Takes a slot that neither side uses.
    ///
    /// # Errors
    /// `Full`: all slots are in use, or no port is free. `Resource`: there is no address space for
    /// the rings.
    pub fn take_slot(&self, c: &mut Client) -> Result<Taken, Reason> {
        let slot = self.free_slot(c).ok_or(Reason::Full)?;
        let usable = self.port_of(c, slot).ok_or(Reason::Full).and_then(|port| {
            let rings = self.rings(slot).map_err(|_| Reason::Resource)?;
            Ok(Taken { slot, port, rings })
        });
        if usable.is_err() {
            self.give_back(c, slot);
        }
        usable
    }

    fn free_slot(&self, c: &mut Client) -> Option<usize> {
        for _ in 0..c.closing_n.min(if c.free_n == 0 { SLOTS } else { 4 }) {
            let s = c.closing[c.closing_at];
            c.closing_at = (c.closing_at + 1) % SLOTS;
            if self.both_closed(s as usize) && self.port_is_free(c, s as usize) {
                c.closing_n -= 1;
                let n = c.free_n;
                c.free[n] = s;
                c.free_n += 1;
                if c.free_n >= 2 {
                    break;
                }
            } else {
                let at = (c.closing_at + c.closing_n - 1) % SLOTS;
                c.closing[at] = s;
            }
        }
        if c.free_n > 0 {
            c.free_n -= 1;
            Some(c.free[c.free_n] as usize)
        } else if c.unused < SLOTS {
            c.unused += 1;
            Some(c.unused - 1)
        } else {
            None
        }
    }

    /// The client port of a slot. If necessary, the monitor leases a block of ports.
    fn port_of(&self, c: &mut Client, slot: usize) -> Option<u16> {
        let block = slot / PORT_BLOCK;
        if c.ports[block] == 0 {
            let (lease, _) = ctl::request(self.ports(None), None).ok()?;
            if !legal_block(lease.first.into()) || lease.count < PORT_BLOCK as u32 {
                return None;
            }
            c.ports[block] = lease.first;
        }
        Some(c.ports[block] + (slot % PORT_BLOCK) as u16)
    }

    /// Stores the port lease that came with a new channel.
    pub fn first_ports(&self, first: u16) {
        if let Some(mut c) = self.client().filter(|_| legal_block(first as u64)) {
            c.ports[0] = first;
        }
    }

    /// Shows the next monitor the port leases of this channel. If another client got the ports
    /// meanwhile, new connections do not use them.
    pub fn lease_again(&self) {
        let Some(mut c) = self.client() else { return };
        for first in c.ports.iter_mut().filter(|first| **first != 0) {
            if ctl::request(self.ports(Some(*first)), None).is_err() {
                *first = 0;
            }
        }
    }

    /// The program has bound this socket to a port. Asks the monitor to assign the port to this
    /// channel. False: the monitor refuses.
    pub fn has_bound(&self, fd: i32) -> bool {
        ctl::request(self.ports(None), Some(fd)).is_ok()
    }

    fn ports(&self, again: Option<u16>) -> request::Ports {
        request::Ports { channel: self.id.load(Ordering::Relaxed), again }
    }

    pub fn give_back(&self, c: &mut Client, slot: usize) {
        let n = c.free_n;
        if n < SLOTS {
            c.free[n] = slot as u16;
            c.free_n += 1;
        }
    }
}

/// Is this the first port of a usable lease?
fn legal_block(first: u64) -> bool {
    (1024..=65536 - PORT_BLOCK as u64).contains(&first)
}
