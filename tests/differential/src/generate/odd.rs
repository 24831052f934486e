//! Odd arguments: bad pointers, odd counts and lengths, options by number with any length, negative timeouts. Also
//! calls that bypass libc's functions.

use super::model::{Fd, What};
use super::Gen;
use crate::actor::{form, ANY, INNER};
use crate::call::Call;
use crate::symbols::NOWHERE;

/// Options that are set to good values elsewhere, or (docs/limits.md) nowhere, because their effect takes time or
/// depends on the kernel.
const NOT_SET: &[(i32, i32)] = &[
    (libc::SOL_SOCKET, libc::SO_RCVLOWAT),
    (libc::SOL_SOCKET, libc::SO_SNDBUF),
    (libc::SOL_SOCKET, libc::SO_SNDBUFFORCE),
    (libc::SOL_SOCKET, libc::SO_RCVBUF),
    (libc::SOL_SOCKET, libc::SO_RCVBUFFORCE),
    (libc::SOL_SOCKET, libc::SO_LINGER),
    (libc::SOL_SOCKET, libc::SO_RCVTIMEO),
    (libc::SOL_SOCKET, libc::SO_SNDTIMEO),
    (libc::SOL_SOCKET, libc::SO_LOCK_FILTER),
    (libc::SOL_SOCKET, libc::SO_ATTACH_FILTER),
    (libc::SOL_SOCKET, libc::SO_ATTACH_BPF),
    (libc::SOL_SOCKET, libc::SO_BUSY_POLL),
    (libc::IPPROTO_TCP, libc::TCP_CORK),
    (libc::IPPROTO_TCP, libc::TCP_NODELAY),
    (libc::IPPROTO_TCP, libc::TCP_LINGER2),
    (libc::IPPROTO_TCP, libc::TCP_MAXSEG),
    (libc::IPPROTO_TCP, libc::TCP_WINDOW_CLAMP),
    (libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT),
    (libc::IPPROTO_TCP, libc::TCP_REPAIR),
    (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT),
];

const ONE: i64 = 2;
const EDGE: i64 = 4;

impl Gen {
    pub(super) fn odd(&mut self, actor: usize) {
        match self.rng.below(10) {
            0..=6 => self.any_call(actor),
            7 | 8 => self.any_option(actor),
            _ => {
                let Some(fd) = self.socket_of(actor) else { return };
                let call = self.rng.pick(&[Call::SetRcvTimeo, Call::SetSndTimeo]);
                let ms = self.rng.pick(&[-1, -1000, -2500, 10_000_000_000_000, 0]);
                // `getsockopt` shows a negative time limit as no limit. A forked process only has what `getsockopt`
                // shows, so listeners get no negative limit.
                let ms = if matches!(fd.what, What::Listener { .. }) { ms.max(0) } else { ms };
                self.push(actor, 0, call, &[fd.var as i64, ms]);
                if ms < 0 && call == Call::SetRcvTimeo {
                    self.push(actor, 0, Call::Recv, &[fd.var as i64, 10, 0]);
                }
            }
        }
    }

    fn any_call(&mut self, actor: usize) {
        let end = self.end_of(actor).map(|(fd, _)| fd);
        let epoll = self.epoll_of(actor).filter(|_| self.rng.chance(20));
        let any = self.any_of(actor).filter(|_| self.rng.chance(35));
        let epoll = epoll.map(|var| Fd { var, what: What::Epoll(0) });
        let (Some(fd), Some(other)) = (epoll.or(any).or(end), self.any_of(actor)) else { return };
        let call = match fd.what {
            What::Epoll(_) if self.rng.chance(80) => {
                ANY.iter().rposition(|(n, _)| n.starts_with("epoll")).unwrap_or(0) - self.rng.below(4)
            }
            _ => self.rng.below(ANY.len()),
        };
        let name = ANY[call].0;
        let ready = match fd.what {
            What::End(side) => self.m.conns[side.conn].bytes[side.side] > 0,
            What::Listener { port } => self.m.queued(port) > 0,
            _ => false,
        };
        let may_block =
            name.starts_with("accept") || name.starts_with("read") || name.starts_with("pread") || name == "sendfile";
        if (may_block && !ready && !self.m.is_nonblock(fd.var))
            || (name == "sendfile" && matches!(other.what, What::PipeWrite(_))) // kernel: EBADF; here: ESPIPE
            || (name == "bind" && fd.what.side().is_some())
            || (name == "connect" && self.m.is_nonblock(fd.var)) // docs/limits.md
            || (name == "epoll_ctl" && matches!(other.what, What::Epoll(_)))
            || self.m.is_slept_on(fd.what)
            // Bytes sent from a file (`sendfile`) change with the file.
            || (fd.what == What::File && name.contains("write"))
        {
            return;
        }
        let raw = self.rng.chance(40);
        let letters = form(call as i64, raw);
        let inner = match name {
            _ if letters.contains('i') => 2,
            _ if letters.contains(['m', 'M']) => 4,
            _ => 0,
        };
        let pselect = usize::from(letters.contains('6'));
        let bad = self.rng.below(letters.len() + inner + pselect + 1);
        let bad = match bad.checked_sub(letters.len() + 1) {
            None => bad,
            Some(k) if k < inner => INNER + k,
            Some(_) => INNER + 4,
        };
        if name.starts_with("accept") && ready && bad != 0 {
            return; // the connection ends, and the model does not know it
        }
        let receives = name.contains("recv") || name.contains("read");
        let letter = letters.as_bytes().get(bad.wrapping_sub(1));
        let how = 1 + self.rng.below(NOWHERE.len() - 1) as i64;
        let (bad, how) = match letter {
            // The number of bytes: only values that are not larger than the object.
            Some(b'n') => (bad, self.rng.pick(&[1, 2, 4])),
            // (The order of events is not compared, so there must be room for all.)
            Some(b'E') if how == ONE => (bad, 0),
            // (If the second vector is bad, the bytes before it are received in pieces: docs/limits.md.)
            None if bad == INNER + 1 && receives => (INNER, if how == EDGE { how + 1 } else { how }),
            _ if how == EDGE && receives => (bad, how + 1),
            Some(b'f' | b'g' | b'F' | b'T' | b'N' | b'A') => (0, 0),
            _ if bad == 0 => (0, 0),
            _ => (bad, how),
        };
        // A null timeout waits for ever. If libc itself reads or writes a bad time or mask, the program ends.
        let waits = name.contains("poll") || name.contains("select");
        if waits && matches!(letter, Some(b't' | b'v')) && (how == 1 || (!raw && !name.starts_with("epoll"))) {
            return;
        }
        let n = self.rng.pick(&[8, 9, 3, 12, 100]);
        let ms = self.rng.pick(&[0, 0, 20]);
        let args = [fd.var as i64, other.var as i64, call as i64, raw.into(), bad as i64, how, n, ms];
        self.push(actor, 0, Call::Any, &args);
        let sends = bad == 0 && (name.starts_with("send") || name.contains("write"));
        match fd.what {
            // (It is not known how much was received. A side that the model believes to sleep may be awake.)
            What::End(side) if receives => self.m.conns[side.conn].bytes[side.side] = 0,
            What::End(side) if sends => self.m.conns[side.conn].bytes[1 - side.side] += n as usize,
            _ => {}
        }
    }

    fn any_option(&mut self, actor: usize) {
        let Some(fd) = self.socket_of(actor) else { return };
        let level = self.rng.pick(&[
            libc::SOL_SOCKET,
            libc::SOL_SOCKET,
            libc::IPPROTO_TCP,
            libc::IPPROTO_TCP,
            libc::IPPROTO_IP,
            libc::IPPROTO_IPV6,
            77,
        ]);
        let name = self.rng.below(85) as i32;
        let len = self.rng.pick(&[-1, 0, 1, 2, 3, 4, 4, 5, 8, 16, 17, 300]);
        let v = fd.var as i64;
        // (Some options of IPv6 take a negative length for a large one.) After a reset the kernel may still know the
        // MTU of the route.
        let route = level == libc::IPPROTO_IP && name == libc::IP_MTU;
        if self.rng.chance(50) && (len >= 0 || level != libc::IPPROTO_IPV6) && !route {
            return self.push(actor, 0, Call::GetAny, &[v, level.into(), name.into(), len]);
        }
        // (Nor the header options of IPv6: headers are in packets, and shared memory has no packets.)
        let headers = level == libc::IPPROTO_IPV6 && (54..=59).contains(&name);
        if headers || len >= 4 && NOT_SET.contains(&(level, name)) {
            return;
        }
        let value = self.rng.pick(&[0, 1, -1, 2, 7, i32::MAX, i32::MIN]);
        self.push(actor, 0, Call::SetAny, &[v, level.into(), name.into(), len, value.into()]);
    }
}
