//! Sockets that are changed and closed. The next socket must be as new, whatever the library keeps
//! for reuse.

use super::model::What;
use super::Gen;
use crate::call::Call;
use crate::program::VARS;
use crate::symbols::TOUCH;

impl Gen {
    /// Changes and closes a socket, and reports the attributes of the next one; or puts an end of a
    /// connection into a map.
    pub(super) fn recycled(&mut self, actor: usize) {
        if self.next_var + 4 > VARS {
            return;
        }
        if self.rng.chance(15) {
            return self.put_into_map(actor);
        }
        let family = self.rng.pick(&[libc::AF_INET, libc::AF_INET, libc::AF_INET6]);
        let first = self.vars(2);
        self.push(actor, first, Call::Socket, &[family.into(), 0]);
        for _ in 0..self.rng.pick(&[1, 1, 2]) {
            let what = self.rng.below(TOUCH.len()) as i64;
            self.push(actor, 0, Call::Touch, &[first as i64, what]);
        }
        self.push(actor, 0, Call::Close, &[first as i64]);
        let second = first + 1;
        self.push(actor, second, Call::Socket, &[family.into(), 0]);
        self.push(actor, 0, Call::Attributes, &[second as i64]);
        self.push(actor, 0, Call::Close, &[second as i64]);
    }

    /// Puts an end on which no actor sleeps into a map of sockets.
    fn put_into_map(&mut self, actor: usize) {
        let Some((fd, side)) = self.end_of(actor) else { return };
        // The kernel's answer about an ending connection depends on the moment.
        let live = self.m.conns[side.conn].fin == [false; 2];
        if live && !self.m.is_slept_on(What::End(side)) {
            self.push(actor, 0, Call::SockMap, &[fd.var as i64]);
        }
    }
}
