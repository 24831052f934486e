//! What the monitor does at an end of a kernel connection for a side that does not have it: it sends what that side has not
//! read, ends a direction, and lets go of the end when nobody needs it.

use crate::foreign::ForeignFd;
use crate::shm::channels::Channel;
use crate::shm::switched::{Named, Release};
use fsocket_abi::channel::{status, RING_CAP};
use fsocket_abi::path_switch::{self, PeerStatus};
use fsocket_proto::switch::act;
use fsocket_ring::{self as ring, Mapped};
use fsocket_sync::atomic::Ordering;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::{retry_on_intr, Errno};
use rustix::net::Shutdown;

/// Bytes moved per step.
const STEP: usize = 16 * 1024;
/// The same into a Unix socket. The kernel counts the memory of a message, 16 KiB for these bytes and what it puts beside
/// them. So what the sender's buffer size lets into a ring fits into the socket.
const UNIX_STEP: usize = 8 * 1024 - 512;

/// An [`act`] of the monitor itself, for a side without a process.
pub fn at_other_end(ch: &Channel, named: &Named, what: u32) {
    let end = ch.switched.borrow().end(named, 1 - named.side);
    if let Some(end) = end {
        let _ = act_at(ch, named, &end, what);
    }
}

/// A side closes, or is gone. The mover may have to act at that side's end yet, and releases it then: what the side has sent
/// has to come first. To be called before CLOSED, and after CLOSED and a fence: then either this sees a mover that is
/// done, or the mover sees CLOSED.
pub fn leave_end(ch: &Channel, named: &Named, how: Release) {
    let Named { slot, side, generation, .. } = *named;
    let mut all = ch.switched.borrow_mut();
    all.hang_up(slot, side, generation);
    let Some(ends) = all.of(named) else { return };
    let control = ch.mem.slot(slot);
    let is_slots = control.generation.load(Ordering::Relaxed) == generation;
    let [own, other] = [side, 1 - side].map(|side| PeerStatus::look(&control.dir[side].prod));
    let unmoved = !own.has_moved() && !other.has_moved();
    // No process is left that moves it.
    let stays = unmoved && !other.has_begun_to_move() && (ends.asked == side || own.has_begun_to_move());
    if is_slots && unmoved && ends.ready && !stays && !other.has(status::CLOSED) {
        return;
    }
    let end = all.end(named, side).filter(|_| is_slots && other.has_moved() && !own.has_moved());
    if let Some(end) = end.filter(|_| !ends.poured[side]) {
        // It has not come for its end.
        let _ = pour(ch, &Named { side: 1 - side, ..*named }, &end);
    }
    if stays || !is_slots || other.has(status::CLOSED) {
        all.release(slot, 1 - side, generation, Release::Copied);
    }
    all.release(slot, side, generation, how);
}

/// Acts at the other side's end, in that side's name. No step blocks.
pub fn act_at(ch: &Channel, named: &Named, end: &ForeignFd, what: u32) -> Result<(), Errno> {
    if what & act::POUR != 0 {
        pour(ch, named, end)?;
    }
    if what & act::FIN != 0 {
        end.shutdown(Shutdown::Write);
    }
    if what & act::RESET != 0 {
        end.reset_on_close();
    }
    if what & act::SHUT_BOTH != 0 {
        end.shutdown(Shutdown::Both);
    }
    if what & act::SPEAK != 0 {
        let mut fds = [PollFd::from_borrowed_fd(end.as_fd(), PollFlags::empty())];
        if retry_on_intr(|| poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))) == Ok(0) {
            let _ = end.send(&[0]);
        }
    }
    Ok(())
}

/// Sends what `named.side` has not read. The other side sends again the bytes that do not fit.
/// Others write the ring and the words beside it, so each is read once and checked.
fn pour(ch: &Channel, named: &Named, end: &ForeignFd) -> Result<(), Errno> {
    let from = 1 - named.side;
    let mem = ch.mem.ring(named.slot, from).map_err(|_| Errno::NOMEM)?;
    let control = ch.mem.slot(named.slot);
    let (dir, at) = (&control.dir[from], &control.migrated[from]);
    let h = path_switch::resume_at(dir, at).ok_or(Errno::INVAL)?;
    // SAFETY: `mem` is RING_CAP bytes, page-aligned, and lives as long as `r` is used.
    let r = unsafe { Mapped::new(mem.start()) };
    let mut buf = [0u8; STEP];
    let step = if ch.is_unix() { UNIX_STEP } else { STEP };
    // A peer that goes on writing must not keep us here: no more than a ring full.
    for _ in 0..RING_CAP / step * 2 {
        // SAFETY: `buf` has STEP bytes; nobody else has `h`.
        let n = match unsafe { ring::recv(r, dir, &h, Some(buf.as_mut_ptr()), step, true) } {
            Ok(n @ 1..) => n,
            _ => break,
        };
        // (Both sides may have closed meanwhile. These are another connection's bytes then.)
        if control.generation.load(Ordering::Relaxed) != named.generation {
            return Err(Errno::NOENT);
        }
        match end.send(&buf[..n]) {
            Ok(k) => {
                // SAFETY: nothing is written.
                let _ = unsafe { ring::recv(r, dir, &h, None, k, false) };
            }
            Err(Errno::INTR) => {}
            // The end is gone, or full.
            Err(_) => break,
        }
    }
    path_switch::leave_at(at, h.base(), h.limit());
    Ok(())
}
