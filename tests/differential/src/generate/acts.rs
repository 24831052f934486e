//! Effects of options. Each scene has a listener, a connection, one option, and calls whose answers depend on the
//! effect. (`getsockopt` shows only that the option was stored.)

use super::{option, Gen};
use crate::call::Call;
use crate::program::VARS;

const DONTWAIT: i64 = libc::MSG_DONTWAIT as i64;
const IN: i64 = libc::POLLIN as i64;
const OUT: i64 = libc::POLLOUT as i64;
const SO_PEEK_OFF: i64 = 42;
const TCP_INQ: i64 = 36;
const SOCKET: i64 = libc::SOL_SOCKET as i64;
const TCP: i64 = libc::IPPROTO_TCP as i64;

/// A scene's descriptors, each with the actor that holds it.
#[derive(Clone, Copy)]
struct Scene {
    listener: (usize, i64),
    client: (usize, i64),
    server: (usize, i64),
}

impl Gen {
    pub(super) fn acts(&mut self, actor: usize) {
        let awake = self.m.awake();
        let other = self.rng.pick(&awake);
        if self.next_var + 10 > VARS {
            return;
        }
        match self.rng.below(32) {
            0..=2 => self.user_timeout(actor, other),
            3..=6 => self.time_outs(actor, other),
            7..=10 => self.deferred(actor, other),
            11..=14 => self.bounded(actor, other),
            15..=18 => self.low_water(actor, other),
            19..=21 => self.lingers(actor, other),
            22..=24 => self.queue_of(actor, other),
            25 | 26 => self.destination(actor, other),
            27 | 28 => self.messages_of(actor, other),
            29 => self.inline(actor, other),
            _ => self.only_v6(actor, other),
        }
    }

    fn set(&mut self, (actor, v): (usize, i64), name: &str, value: i64) {
        self.push(actor, 0, Call::SetOpt, &[v, option(name), value]);
    }

    /// Makes a listener of actor `server` and an unconnected socket of actor `client`. If `port` is negative, the
    /// listener is only bound, and does not listen yet.
    fn scene(&mut self, client: usize, server: usize, port: i64) -> Scene {
        let family = i64::from(libc::AF_INET);
        let first = self.vars(3);
        self.push(server, first, Call::Socket, &[family, libc::SOCK_NONBLOCK.into()]);
        self.push(client, first + 1, Call::Socket, &[family, 0]);
        let v = first as i64;
        self.set((server, v), "REUSEADDR", 1);
        self.push(server, 0, Call::Bind, &[v, 0, -1]);
        if port >= 0 {
            self.push(server, 0, Call::Listen, &[v, 16, port]);
        }
        Scene { listener: (server, v), client: (client, v + 1), server: (server, v + 2) }
    }

    fn meet(&mut self, s: Scene, port: i64) {
        self.push(s.client.0, 0, Call::Connect, &[s.client.1, 0, port]);
        self.push(s.server.0, s.server.1 as usize, Call::Accept, &[s.listener.1]);
        self.set(s.client, "NODELAY", 1);
        self.set(s.server, "NODELAY", 1);
    }

    /// Closes all descriptors of the scene.
    fn part(&mut self, s: Scene) {
        for (actor, v) in [s.server, s.client, s.listener] {
            self.push(actor, 0, Call::Close, &[v]);
        }
    }

    /// Reserves a port of the program for the scene's listener.
    fn own_port(&mut self) -> Option<i64> {
        // (No listener of the model uses it.)
        let port = self.m.ports.len();
        let free = port < crate::program::PORTS - 1;
        self.m.ports.extend(free.then_some(0));
        free.then_some(port as i64)
    }

    /// Picks a side that writes and a side that reads.
    fn sides(&mut self, s: Scene) -> ((usize, i64), (usize, i64)) {
        if self.rng.chance(60) {
            (s.client, s.server)
        } else {
            (s.server, s.client)
        }
    }

    /// TCP_USER_TIMEOUT: if the reader reads nothing for that time, the writer's connection ends.
    fn user_timeout(&mut self, a: usize, b: usize) {
        let Some(port) = self.own_port() else { return };
        let s = self.scene(a, b, port);
        let ms = self.rng.pick(&[50, 200, 400, 400, 0, 60_000]);
        let before = self.rng.chance(50);
        if before {
            // (The server's end inherits the option from the listener.)
            self.set(s.client, "USER_TIMEOUT", ms);
            self.set(s.listener, "USER_TIMEOUT", ms);
        }
        self.meet(s, port);
        let (writer, reader) = self.sides(s);
        if !before {
            self.set(writer, "USER_TIMEOUT", ms);
        }
        if self.rng.chance(30) {
            // The peer reads, so the time begins again.
            self.push(writer.0, 0, Call::Fill, &[writer.1]);
            self.push(reader.0, 0, Call::Drain, &[reader.1]);
        }
        let in_send = self.rng.below(2) as i64;
        let ends = (1..1000).contains(&ms);
        self.push(writer.0, 0, Call::Stuck, &[writer.1, if ends { 4000 } else { 700 }, in_send]);
        if ends {
            self.push(writer.0, 0, Call::Poll, &[0, writer.1, IN | OUT | i64::from(libc::POLLRDHUP)]);
            self.push(writer.0, 0, Call::Send, &[writer.1, 1, DONTWAIT | i64::from(libc::MSG_NOSIGNAL)]);
        }
        self.part(s);
    }

    /// SO_RCVTIMEO and SO_SNDTIMEO: the call ends, but not before its time.
    fn time_outs(&mut self, a: usize, b: usize) {
        let Some(port) = self.own_port() else { return };
        let s = self.scene(a, b, port);
        // (The buffers are bounded, so that full ones stay full.)
        self.set(s.listener, "RCVBUF", 32_768);
        self.set(s.listener, "SNDBUF", 30_000);
        self.set(s.client, "RCVBUF", 32_768);
        self.set(s.client, "SNDBUF", 30_000);
        let ms = self.rng.pick(&[10, 30, 80]);
        if self.rng.chance(25) {
            // `accept` has a time limit, too.
            self.push(b, 0, Call::SetFl, &[s.listener.1, 0]);
            self.push(b, 0, Call::SetRcvTimeo, &[s.listener.1, ms]);
            self.push(b, 0, Call::Clock, &[]);
            self.push(b, s.server.1 as usize, Call::AcceptNull, &[s.listener.1]);
            self.push(b, 0, Call::Passed, &[ms]);
        }
        self.meet(s, port);
        let (writer, reader) = self.sides(s);
        if self.rng.chance(40) {
            self.push(writer.0, 0, Call::Fill, &[writer.1]);
            self.push(writer.0, 0, Call::SetSndTimeo, &[writer.1, ms]);
            self.push(writer.0, 0, Call::Clock, &[]);
            match self.rng.below(3) {
                0 => self.push(writer.0, 0, Call::Stuck, &[writer.1, ms, 1]),
                1 => self.push(writer.0, 0, Call::Stuck, &[writer.1, ms, 0]),
                _ => self.push(writer.0, 0, Call::Poll, &[ms, writer.1, OUT]),
            }
            self.push(writer.0, 0, Call::Passed, &[ms]);
        } else {
            self.push(reader.0, 0, Call::SetRcvTimeo, &[reader.1, ms]);
            let some = self.rng.pick(&[0, 3]);
            if some > 0 {
                self.push(writer.0, 0, Call::Send, &[writer.1, some, 0]);
            }
            self.push(reader.0, 0, Call::Clock, &[]);
            let all = i64::from(libc::MSG_WAITALL);
            match self.rng.below(5) {
                0 => self.push(reader.0, 0, Call::RecvMsg, &[reader.1, 100, 2, all]),
                1 if some == 0 => self.push(reader.0, 0, Call::ReadV, &[reader.1, 100, 2]),
                2 if some == 0 => self.push(reader.0, 0, Call::RecvMmsg, &[reader.1, 100, 2, 0]),
                3 if some == 0 => self.push(reader.0, 0, Call::Read, &[reader.1, 100]),
                _ => self.push(reader.0, 0, Call::Recv, &[reader.1, 100, all]),
            }
            self.push(reader.0, 0, Call::Passed, &[ms]);
            self.push(reader.0, 0, Call::SetRcvTimeo, &[reader.1, 0]);
        }
        self.part(s);
    }

    /// TCP_DEFER_ACCEPT: a client appears only after it has sent something or has ended.
    fn deferred(&mut self, a: usize, b: usize) {
        let Some(port) = self.own_port() else { return };
        let seconds = self.rng.pick(&[5, 30, 0]);
        let early = self.rng.chance(60);
        let s = self.scene(a, b, if early { -1 } else { port });
        self.set(s.listener, "DEFER_ACCEPT", seconds);
        if early {
            self.push(b, 0, Call::Listen, &[s.listener.1, 16, port]);
        }
        self.push(a, 0, Call::Connect, &[s.client.1, 0, port]);
        self.push(b, 0, Call::Poll, &[self.rng.clone().pick(&[0, 15]), s.listener.1, IN]);
        if seconds > 0 {
            self.push(b, s.server.1 as usize, Call::AcceptNull, &[s.listener.1]);
        }
        let speaks = self.rng.chance(70);
        if speaks {
            self.push(a, 0, Call::Send, &[s.client.1, 5, 0]);
        } else {
            self.push(a, 0, Call::Close, &[s.client.1]);
        }
        self.push(b, 0, Call::Poll, &[0, s.listener.1, IN]);
        self.push(b, s.server.1 as usize, Call::Accept, &[s.listener.1]);
        self.push(b, 0, Call::Recv, &[s.server.1, 10, DONTWAIT]);
        self.part(s);
    }

    /// TCP_NOTSENT_LOWAT and SO_SNDBUF: how many bytes fit before there is no room, and when there is room again.
    fn bounded(&mut self, a: usize, b: usize) {
        let Some(port) = self.own_port() else { return };
        let s = self.scene(a, b, -1);
        self.set(s.listener, "RCVBUF", 32_768);
        self.push(b, 0, Call::Listen, &[s.listener.1, 16, port]);
        let which = self.rng.pick(&[0, 0, 1, 2]);
        let before = self.rng.chance(50);
        let set = |g: &mut Gen| match which {
            0 => g.set(s.client, "NOTSENT_LOWAT", g.rng.clone().pick(&[1, 4096, 16_384])),
            1 => g.set(s.client, "SNDBUF", g.rng.clone().pick(&[1, 8192, 30_000])),
            _ => {}
        };
        if before {
            set(self);
        }
        self.meet(s, port);
        if !before {
            set(self);
        }
        let (c, r) = (s.client, s.server);
        self.push(c.0, 0, Call::Fill, &[c.1]);
        self.push(c.0, 0, Call::Poll, &[0, c.1, OUT]);
        let sleeps = c.0 != r.0 && self.rng.chance(50);
        if sleeps {
            self.push(c.0, 0, Call::Poll, &[-1, c.1, OUT]);
        }
        self.push(r.0, 0, Call::Drain, &[r.1]);
        if !sleeps {
            self.push(c.0, 0, Call::Poll, &[0, c.1, OUT]);
        }
        self.part(s);
    }

    /// SO_RCVLOWAT: which waits report the socket, and which wake: below the mark, at it, at the stream's end.
    fn low_water(&mut self, a: usize, b: usize) {
        let Some(port) = self.own_port() else { return };
        let s = self.scene(a, b, port);
        self.meet(s, port);
        let (writer, reader) = self.sides(s);
        let mark = self.rng.pick(&[2, 10, 1000]);
        let below = self.rng.pick(&[1, mark - 1, mark / 2]);
        let early = self.rng.chance(50);
        if early {
            self.set(reader, "RCVLOWAT", mark);
        }
        self.push(writer.0, 0, Call::Send, &[writer.1, below, 0]);
        if !early {
            self.set(reader, "RCVLOWAT", mark);
        }
        self.push(reader.0, 0, Call::Poll, &[0, reader.1, IN]);
        let ep = self.vars(1);
        self.push(reader.0, ep, Call::EpollCreate, &[0]);
        let how = self.rng.pick(&[IN, IN | i64::from(libc::EPOLLET as u32)]);
        self.push(reader.0, 0, Call::EpollAdd, &[ep as i64, reader.1, how]);
        self.push(reader.0, 0, Call::EpollWait, &[ep as i64, 32, 0]);
        if writer.0 != reader.0 {
            match self.rng.below(5) {
                0 => self.push(reader.0, 0, Call::Recv, &[reader.1, 5000, 0]),
                1 => self.push(reader.0, 0, Call::Poll, &[-1, reader.1, IN]),
                2 => self.push(reader.0, 0, Call::Select, &[-1, reader.1, 1]),
                3 => self.push(reader.0, 0, Call::EpollWait, &[ep as i64, 32, -1]),
                _ => {}
            }
        }
        if self.rng.chance(75) {
            self.push(writer.0, 0, Call::Send, &[writer.1, mark - below, 0]);
        } else {
            self.push(writer.0, 0, Call::Shutdown, &[writer.1, 1]);
        }
        self.push(reader.0, 0, Call::EpollWait, &[ep as i64, 32, 0]);
        self.push(reader.0, 0, Call::Recv, &[reader.1, 5000, DONTWAIT]);
        self.push(reader.0, 0, Call::Close, &[ep as i64]);
        self.part(s);
    }

    /// SO_LINGER: a close that resets, or one that waits for a reader.
    fn lingers(&mut self, a: usize, b: usize) {
        let Some(port) = self.own_port() else { return };
        let s = self.scene(a, b, port);
        self.meet(s, port);
        let (closer, peer) = self.sides(s);
        let (on, seconds) = self.rng.pick(&[(1, 0), (1, 0), (1, 1), (0, 0), (0, 1)]);
        self.push(closer.0, 0, Call::SetLinger, &[closer.1, on, seconds]);
        if self.rng.chance(50) {
            self.push(closer.0, 0, Call::Send, &[closer.1, 10, 0]);
        }
        if self.rng.chance(20) {
            self.push(peer.0, 0, Call::Send, &[peer.1, 10, 0]);
        }
        self.push(closer.0, 0, Call::Close, &[closer.1]);
        self.push(peer.0, 0, Call::Poll, &[0, peer.1, IN | OUT | i64::from(libc::POLLRDHUP)]);
        self.push(peer.0, 0, Call::Recv, &[peer.1, 100, DONTWAIT]);
        self.push(peer.0, 0, Call::Recv, &[peer.1, 100, DONTWAIT]);
        self.push(peer.0, 0, Call::Send, &[peer.1, 1, DONTWAIT | i64::from(libc::MSG_NOSIGNAL)]);
        self.part(s);
    }

    /// TCP_INFO of a listener gives the number of waiting connections.
    fn queue_of(&mut self, a: usize, b: usize) {
        let Some(port) = self.own_port() else { return };
        let s = self.scene(a, b, port);
        self.push(b, 0, Call::Queue, &[s.listener.1]);
        let more = self.vars(3);
        let family = i64::from(libc::AF_INET);
        let n = self.rng.below(4);
        for v in more..more + n {
            self.push(a, v, Call::Socket, &[family, 0]);
            self.push(a, 0, Call::Connect, &[v as i64, 0, port]);
        }
        self.push(b, 0, Call::Queue, &[s.listener.1]);
        if n > 0 && self.rng.chance(50) {
            // (A connection that its client has closed still waits.)
            self.push(a, 0, Call::Close, &[more as i64]);
        }
        for _ in 0..self.rng.below(4) {
            self.push(b, s.server.1 as usize, Call::AcceptNull, &[s.listener.1]);
            self.push(b, 0, Call::Queue, &[s.listener.1]);
            self.push(b, 0, Call::Close, &[s.server.1]);
        }
        for v in more..more + n {
            self.push(a, 0, Call::Close, &[v as i64]);
        }
        self.part(s);
    }

    /// SO_ORIGINAL_DST: the address to which the peer wanted to connect.
    fn destination(&mut self, a: usize, b: usize) {
        let Some(port) = self.own_port() else { return };
        let s = self.scene(a, b, port);
        self.meet(s, port);
        for (actor, v) in [s.server, s.client, s.listener] {
            let level = self.rng.pick(&[0, 0, 41]);
            self.push(actor, 0, Call::OrigDst, &[v, level]);
        }
        self.part(s);
    }

    /// Options that change what a receive returns: SO_PEEK_OFF, TCP_INQ. (Not SO_TIMESTAMP: the kernel stamps no
    /// packets until some time after the machine's first use of it.)
    fn messages_of(&mut self, a: usize, b: usize) {
        let Some(port) = self.own_port() else { return };
        let s = self.scene(a, b, port);
        self.meet(s, port);
        let (writer, reader) = self.sides(s);
        let (level, name, value) =
            self.rng.pick(&[(SOCKET, SO_PEEK_OFF, 4), (SOCKET, SO_PEEK_OFF, 0), (TCP, TCP_INQ, 1)]);
        self.push(reader.0, 0, Call::SetAny, &[reader.1, level, name, 4, value]);
        self.push(writer.0, 0, Call::Send, &[writer.1, 20, 0]);
        for _ in 0..3 {
            let flags = self.rng.pick(&[0, i64::from(libc::MSG_PEEK)]) | DONTWAIT;
            self.push(reader.0, 0, Call::RecvMsg, &[reader.1, 6, 1, flags]);
        }
        self.part(s);
    }

    /// SO_OOBINLINE: the position of the urgent byte.
    fn inline(&mut self, a: usize, b: usize) {
        let Some(port) = self.own_port() else { return };
        let s = self.scene(a, b, port);
        self.meet(s, port);
        let (writer, reader) = self.sides(s);
        let on = self.rng.below(2) as i64;
        self.set(reader, "OOBINLINE", on);
        self.push(writer.0, 0, Call::Send, &[writer.1, 3, 0]);
        self.push(writer.0, 0, Call::Send, &[writer.1, 1, libc::MSG_OOB.into()]);
        self.push(reader.0, 0, Call::Poll, &[0, reader.1, IN | i64::from(libc::POLLPRI)]);
        for _ in 0..2 {
            self.push(reader.0, 0, Call::AtMark, &[reader.1]);
            self.push(reader.0, 0, Call::Recv, &[reader.1, 10, DONTWAIT]);
        }
        self.push(reader.0, 0, Call::Recv, &[reader.1, 1, libc::MSG_OOB.into()]);
        self.part(s);
    }

    /// IPV6_V6ONLY: can an IPv4 client connect?
    fn only_v6(&mut self, a: usize, b: usize) {
        let Some(port) = self.own_port() else { return };
        let first = self.vars(3);
        let (l, c, server) = (first as i64, first as i64 + 1, first + 2);
        self.push(b, first, Call::Socket, &[libc::AF_INET6.into(), libc::SOCK_NONBLOCK.into()]);
        let on = self.rng.below(2) as i64;
        self.set((b, l), "V6ONLY", on);
        self.push(b, 0, Call::Bind, &[l, 3, -1]);
        self.push(b, 0, Call::Listen, &[l, 16, port]);
        let (addr, family) = self.rng.pick(&[(0i64, libc::AF_INET), (5, libc::AF_INET6), (2, libc::AF_INET6)]);
        self.push(a, c as usize, Call::Socket, &[family.into(), 0]);
        self.push(a, 0, Call::Connect, &[c, addr, port]);
        self.push(b, server, Call::Accept, &[l]);
        for (actor, v) in [(b, server as i64), (a, c), (b, l)] {
            self.push(actor, 0, Call::Close, &[v]);
        }
    }
}
