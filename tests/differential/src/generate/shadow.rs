//! Listeners of one port that shadow each other, and threads that connect to their own listener.

use super::model::What;
use super::{option, Gen};
use crate::call::Call;
use crate::program::{PORTS, VARS};

/// Number of the loopback device in each network namespace.
const LOOPBACK: i64 = 1;

impl Gen {
    /// Adds listeners at different addresses of one port (SO_REUSEPORT), some of them in the kernel
    /// alone, and connections to each address. Then every listener accepts. Some listeners are
    /// closed in between.
    pub(super) fn shadows(&mut self, actor: usize) {
        let port = self.m.ports.len();
        if port >= PORTS || self.next_var + 18 > VARS {
            return;
        }
        // (A private monitor takes up to 2 s to learn of a nearer listener whose process lacks the
        // library: docs/limits.md.)
        self.mixable = false;
        let awake = self.m.awake();
        let mut listeners: Vec<(usize, usize)> = Vec::new();
        // (Two listeners at one address would share connections by a number that differs between
        // runs.)
        let mut free = vec![0, 1, 2, 4, 5];
        for place in 0..self.rng.pick(&[2, 2, 3, 4]) {
            let owner = if place == 0 { actor } else { self.rng.pick(&awake) };
            // The first listener is closed last. It keeps the port from all other programs on this
            // machine.
            let at: i64 = if place == 0 { 3 } else { free.swap_remove(self.rng.below(free.len())) };
            let family = if matches!(at, 2 | 3 | 5) { libc::AF_INET6 } else { libc::AF_INET };
            let flags = i64::from(libc::SOCK_NONBLOCK);
            let v = self.new_fd(owner, Call::Socket, &[family.into(), flags], What::Fresh { family });
            self.push(owner, 0, Call::SetOpt, &[v as i64, option("REUSEPORT"), 1]);
            match self.rng.below(6) {
                0 => self.push(owner, 0, Call::SetOpt, &[v as i64, option("TIMESTAMP"), 1]),
                1 => self.push(owner, 0, Call::SetOpt, &[v as i64, option("BINDTOIFINDEX"), LOOPBACK]),
                _ => {}
            }
            let first = listeners.is_empty();
            self.push(owner, 0, Call::Bind, &[v as i64, at, if first { -1 } else { port as i64 }]);
            self.push(owner, 0, Call::Listen, &[v as i64, 16, if first { port as i64 } else { -1 }]);
            if first {
                self.m.ports.push(at);
            }
            listeners.push((owner, v));
            self.who_gets(actor, port, &listeners);
        }
        while let Some((owner, v)) = listeners.pop() {
            self.push(owner, 0, Call::Close, &[v as i64]);
            self.m.close(owner, v);
            if !listeners.is_empty() && self.rng.chance(60) {
                self.who_gets(actor, port, &listeners);
            }
        }
    }

    /// A client connects to one of the addresses, and each listener accepts.
    fn who_gets(&mut self, client: usize, port: usize, listeners: &[(usize, usize)]) {
        if self.next_var + 2 > VARS {
            return;
        }
        let (to, family) = self.rng.pick(&[
            (0i64, libc::AF_INET),
            (0, libc::AF_INET),
            (4, libc::AF_INET),
            (2, libc::AF_INET6),
            (5, libc::AF_INET6),
        ]);
        let c = self.new_fd(client, Call::Socket, &[family.into(), 0], What::Fresh { family });
        self.push(client, 0, Call::Connect, &[c as i64, to, port as i64]);
        let got = self.vars(1);
        for (owner, v) in listeners {
            self.push(*owner, got, Call::Accept, &[*v as i64]);
        }
        self.push(client, 0, Call::GetPeerName, &[c as i64]);
        self.push(client, 0, Call::Close, &[c as i64]);
        self.m.close(client, c);
    }

    /// A thread listens, connects to itself, accepts, sends, receives and closes, a few times.
    pub(super) fn connect_to_itself(&mut self, actor: usize) {
        for _ in 0..self.rng.pick(&[1, 2, 3]) {
            let port = self.m.ports.len();
            if port >= PORTS || self.next_var + 3 > VARS {
                return;
            }
            let (at, to) = self.rng.pick(&[(0, 0), (1, 0), (1, 4), (2, 2), (3, 2), (3, 0)]);
            let of = |a: i64| if matches!(a, 2 | 3) { libc::AF_INET6 } else { libc::AF_INET };
            let l = self.new_fd(actor, Call::Socket, &[of(at).into(), 0], What::Fresh { family: of(at) });
            self.push(actor, 0, Call::Bind, &[l as i64, at, -1]);
            self.push(actor, 0, Call::Listen, &[l as i64, 5, port as i64]);
            self.m.ports.push(at);
            let c = self.new_fd(actor, Call::Socket, &[of(to).into(), 0], What::Fresh { family: of(to) });
            self.push(actor, 0, Call::Connect, &[c as i64, to, port as i64]);
            let s = self.new_fd(actor, Call::Accept, &[l as i64], What::Fresh { family: of(at) });
            let [from, into] = if self.rng.chance(50) { [c, s] } else { [s, c] };
            self.push(actor, 0, Call::Send, &[from as i64, 3, 0]);
            self.push(actor, 0, Call::Recv, &[into as i64, 3, libc::MSG_WAITALL.into()]);
            let mut all = [l, c, s];
            all.rotate_left(self.rng.below(3));
            for v in all {
                self.push(actor, 0, Call::Close, &[v as i64]);
                self.m.close(actor, v);
            }
        }
    }
}
