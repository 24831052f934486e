//! Bytes that are held back and released: TCP_CORK, MSG_MORE, and Nagle's algorithm switched on and
//! off.
//!
//! The library does not hold back the bytes that the kernel holds back (ADR 55), so no step looks
//! between the first send and the release. The test compares what the receiver has after the
//! release, and the sender's results on the way.

use super::model::{Side, What};
use super::{option, Gen};
use crate::call::Call;
use crate::program::VARS;

impl Gen {
    /// Adds sends that are held back, and the step that releases the bytes. No steps of other
    /// actors lie between. A close does not release: with unread bytes it is a reset, before which
    /// the kernel sends nothing that it holds back.
    pub(super) fn corked(&mut self, actor: usize) {
        let Some((fd, side)) = self.end_of(actor) else { return };
        let (v, to) = (fd.var as i64, 1 - side.side);
        let peer = What::End(Side { conn: side.conn, side: to });
        let conn = &self.m.conns[side.conn];
        // (A peer that is gone answers the first segment with a reset.)
        let ended = conn.fin != [false; 2] || self.m.processes_with(peer) == 0;
        if ended || self.m.is_slept_on(peer) || conn.bytes[to] > 12_000 {
            return;
        }
        if self.rng.chance(20) {
            let on = self.rng.below(2) as i64;
            return self.push(actor, 0, Call::SetOpt, &[v, option("NODELAY"), on]);
        }
        let cork = self.rng.chance(70);
        if cork {
            self.push(actor, 0, Call::SetOpt, &[v, option("CORK"), 1]);
        }
        for _ in 0..self.rng.pick(&[1, 2, 2, 3]) {
            let n = self.rng.pick(&[0, 1, 10, 100, 500, 1000, 3000]);
            self.m.conns[side.conn].bytes[to] += n as usize;
            let more = i64::from(libc::MSG_MORE);
            let flags = if !cork || self.rng.chance(20) { more } else { 0 };
            match self.rng.below(6) {
                0 | 1 => self.push(actor, 0, Call::Send, &[v, n, flags]),
                2 => self.push(actor, 0, Call::SendMsg, &[v, n, 2, flags]),
                3 if cork => self.push(actor, 0, Call::Write, &[v, n]),
                4 if cork => self.push(actor, 0, Call::WriteV, &[v, n, 3]),
                5 if cork && self.next_var + 1 < VARS => {
                    let f = self.new_fd(actor, Call::File, &[n + 50], What::File);
                    self.push(actor, 0, Call::SendFile, &[v, f as i64, 0, n]);
                }
                _ => self.push(actor, 0, Call::SendTo, &[v, n, flags]),
            }
        }
        match self.rng.below(8) {
            0 => self.push(actor, 0, Call::GetOpt, &[v, option("CORK")]),
            1 => self.push(actor, 0, Call::Poll, &[0, v, i64::from(libc::POLLOUT)]),
            2 => self.push(actor, 0, Call::GetOpt, &[v, option("NODELAY")]),
            _ => {}
        }
        // Any holder of the socket may release the bytes.
        let holders = self.m.holders_of(fd.what);
        let (other, var) = if cork { self.rng.pick_opt(&holders).unwrap_or((actor, fd.var)) } else { (actor, fd.var) };
        let var = var as i64;
        match self.rng.below(12) {
            0 => {
                self.push(other, 0, Call::Shutdown, &[var, 1]);
                self.m.conns[side.conn].fin[side.side] = true;
            }
            // The kernel holds bytes back for at most some 200 ms.
            2 => {
                self.push(other, 0, Call::Sleep, &[400]);
                if cork {
                    self.push(other, 0, Call::SetOpt, &[var, option("CORK"), 0]);
                }
            }
            3 | 4 if cork => {
                self.push(other, 0, Call::SetOpt, &[var, option("NODELAY"), 1]);
                self.push(other, 0, Call::SetOpt, &[var, option("CORK"), 0]);
            }
            _ if cork => self.push(other, 0, Call::SetOpt, &[var, option("CORK"), 0]),
            _ => {
                self.push(actor, 0, Call::Send, &[v, 7, 0]);
                self.m.conns[side.conn].bytes[to] += 7;
            }
        }
        self.m.wake_all_on(peer);
        let readers = self.m.holders_of(peer);
        if let Some((reader, var)) = self.rng.pick_opt(&readers) {
            if self.rng.chance(60) {
                self.receive_from(reader, super::model::Fd { var, what: peer });
            }
        }
    }
}
