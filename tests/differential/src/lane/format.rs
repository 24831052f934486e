//! Answers as text that does not depend on chance: ports get names, and results that the kernel
//! leaves open are left out (see [`crate::free`]).

use crate::call::Call;
use crate::free;
use crate::program::{Step, PORTS};
use crate::shared::Slot;
use crate::symbols as sym;
use std::sync::atomic::Ordering::Relaxed;

/// Names for ports, in the order in which the program sees them.
#[derive(Default)]
pub struct Ports {
    /// The ports that `listen` steps stored.
    stored: [u16; PORTS],
    names: Vec<u16>,
}

impl Ports {
    pub fn number(&self, i: usize) -> i64 {
        self.stored[i].into()
    }
    pub fn listens(&mut self, i: usize, port: u16) {
        self.stored[i] = port;
    }
    /// A connection from `port` exists. From now on the name of the port means this connection.
    /// (The kernel lets a port rest before it uses it again. The library need not.)
    pub fn connects(&mut self, port: u16) {
        if port != 0 {
            self.names.push(port);
        }
    }
    fn name(&mut self, port: u16) -> String {
        if port == 0 {
            return "0".into();
        }
        if let Some(i) = self.stored.iter().position(|p| *p == port) {
            return format!("p{i}");
        }
        let at = self.names.iter().rposition(|p| *p == port).unwrap_or_else(|| {
            self.names.push(port);
            self.names.len() - 1
        });
        format!("port{at}")
    }
    fn address(&mut self, b: &[u8]) -> String {
        let Some(family) = b.get(..2).map(|f| u16::from_ne_bytes([f[0], f[1]])) else { return "no address".into() };
        let port = if b.len() >= 4 { u16::from_be_bytes([b[2], b[3]]) } else { 0 };
        match (i32::from(family), b.len()) {
            (libc::AF_INET, 16) => format!("{}.{}.{}.{}:{}", b[4], b[5], b[6], b[7], self.name(port)),
            (libc::AF_INET6, 28) => {
                let mut ip = [0u8; 16];
                ip.copy_from_slice(&b[8..24]);
                format!("[{}]:{}", std::net::Ipv6Addr::from(ip), self.name(port))
            }
            (libc::AF_UNIX, 2) => "unnamed".into(),
            (libc::AF_UNIX, _) => {
                let kind = if b[2] == 0 { "abstract" } else { "path" };
                // (Names without a "port" were made by the kernel.)
                let port = if b.len() < 12 { None } else { crate::actor::unix_port(&b[2..]) };
                format!("{kind}:{}", port.map_or("auto".into(), |p| self.name(p)))
            }
            (family, n) => format!("family {family}, {n} bytes"),
        }
    }
}

/// Bytes as text: all bytes if there are few, otherwise the first ones and a hash.
fn bytes(b: &[u8]) -> String {
    let hex = |b: &[u8]| b.iter().map(|x| format!("{x:02x}")).collect::<String>();
    if b.len() <= 12 {
        return format!("<{}>", hex(b));
    }
    let hash = b.iter().fold(0xcbf2_9ce4_8422_2325u64, |h, x| (h ^ u64::from(*x)).wrapping_mul(0x0100_0000_01b3));
    format!("<{}.. {hash:016x}>", hex(&b[..6]))
}

pub fn answer(step: &Step, slot: &Slot, ports: &mut Ports) -> String {
    let ret = slot.ret.load(Relaxed);
    let n = slot.n_aux.load(Relaxed) as usize;
    let aux: Vec<i64> = slot.aux.iter().take(n).map(|v| v.load(Relaxed)).collect();
    let aux = &aux[..];
    let len = slot.len.load(Relaxed) as usize;
    // SAFETY: the actor has answered, so its buffer belongs to this thread until the next order.
    let data = unsafe { &slot.data()[..len] };
    let mut text = match ret {
        ..0 => sym::errno(slot.errno.load(Relaxed)),
        _ if free::is_number(step.call) => "fd".into(),
        _ => ret.to_string(),
    };
    let listed = |names: sym::Names| {
        let first = step.call.spec().args.len() - 1;
        let found = step.args[first..].chunks_exact(2).zip(aux).filter(|(_, ev)| **ev != 0);
        found.map(|(pair, ev)| format!(" v{}:{}", pair[0], sym::bits(names, *ev))).collect::<String>()
    };
    use Call::*;
    match step.call {
        GetFl if ret >= 0 => text = sym::bits(sym::FILE_FLAGS, ret & !(libc::O_ACCMODE as i64)),
        _ if ret < 0 && !matches!(step.call, Recv | Read | ReadV | PreadV2 | RecvFrom | SpliceFrom | SpliceTo) => {}
        Reap => text += &format!(" {}", aux.first().map_or("?".into(), |e| sym::errno(*e as i32))),
        Fill => text = if ret > 0 { "much" } else { "little" }.into(),
        Accept | Accept4 | GetSockName | GetPeerName | OrigDst => text += &format!(" {}", ports.address(data)),
        Recv | Read | ReadV | PreadV2 | RecvFrom | RecvMsg | RecvMmsg | SpliceFrom => {
            if ret > 0 {
                text += &format!(" {}", bytes(data));
            }
            match step.call {
                RecvMsg if aux.len() >= 3 => {
                    text += &format!(" flags {} name {} control {}", sym::bits(sym::MSG, aux[0]), aux[1], aux[2]);
                }
                RecvFrom | RecvMmsg if !aux.is_empty() => text += &format!(" {aux:?}"),
                _ => {}
            }
            if aux.contains(&-99) {
                text += " WROTE BEYOND THE END";
            }
        }
        SendMmsg | SendFile | SendMore | SpliceTo | GetLinger | GetRcvTimeo | GetSndTimeo | FionRead | OutQ
        | GetAny | Any | Long | Attributes | Queue => text += &format!(" {aux:?}"),
        AcceptAll => {
            let of = |pair: &[i64]| match pair[0] {
                ..0 => sym::errno(-pair[0] as i32),
                n => format!("{n}<{:02x}>", pair[1]),
            };
            let all: Vec<String> = aux[1..].chunks_exact(2).map(of).collect();
            text += &format!(" {} {}", all.join(" "), sym::errno(aux[0] as i32));
        }
        GetOpt => text += &format!(" {}", free::option(step.args[1], aux)),
        TcpState => text += &format!(" {}", free::tcp_state(aux[0])),
        Poll | PPoll => text += &listed(sym::POLL),
        Select | PSelect => text += &listed(sym::SELECT),
        EpollWait | EpollPwait | EpollPwait2 => {
            for pair in aux.chunks_exact(2) {
                text += &format!(" v{}:{}", pair[0], sym::bits(sym::POLL, pair[1]));
            }
        }
        _ => {}
    }
    text
}
