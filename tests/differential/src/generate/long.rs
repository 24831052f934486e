//! Lengths at and beside every power of two, and negative ones. A send has a few bytes, or more
//! than memory can hold, since it is not promised how many fit.

use super::Gen;
use crate::actor::LONG;
use crate::call::Call;

/// Bits of a program's addresses.
const BITS: usize = 47;

impl Gen {
    pub(super) fn long(&mut self, actor: usize) {
        let Some((fd, side)) = self.end_of(actor) else { return };
        let call = self.rng.below(LONG.len());
        let name = LONG[call].0;
        let receives = call % 2 == 1;
        let ready = self.m.conns[side.conn].bytes[side.side] > 0;
        let dontwait = matches!(name, "recv" | "recvmsg" | "peek");
        if self.m.is_slept_on(fd.what) || receives && !dontwait && !ready && !self.m.is_nonblock(fd.var) {
            return;
        }
        // The exponent from which a call refuses its length. Some calls check the range before they
        // cut the length; others refuse only negative lengths.
        let refused = match name {
            "write" | "writev_2" => BITS,
            "writev" | "sendmsg" | "pwritev2" => 63,
            _ => 64,
        };
        let power = match receives {
            true => self.rng.below(64),
            false if refused < 64 && self.rng.chance(50) => refused + self.rng.below(64 - refused),
            false => self.rng.below(12),
        };
        let mut add = self.rng.pick(&[-1i64, 0, 1]);
        if power == 63 && self.rng.chance(50) {
            add = i64::MAX - self.rng.below(5) as i64; // negative: -1, -2, ...
        } else if power == refused {
            add = add.max(0);
        }
        self.push(actor, 0, Call::Long, &[fd.var as i64, call as i64, power as i64, add]);
        let bytes = &mut self.m.conns[side.conn].bytes;
        match receives {
            // (It is not known how much was received. A side that the model believes to sleep may
            // be awake.)
            true if name != "peek" => bytes[side.side] = 0,
            false if power < 12 => bytes[1 - side.side] += 1 << power,
            _ => {}
        }
    }
}
