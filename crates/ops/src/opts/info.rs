//! TCP_INFO: the fields that programs read.

use super::answer;
use crate::chan;
use crate::listen;
use crate::table::Desc;
use crate::{ctl, user, zone};
use core::sync::atomic::Ordering;
use fsocket_abi::channel::WORKERS;
use fsocket_proto::request;
use fsocket_ring as ring;
use fsocket_sys::{self as sys, Result};

/// The struct grows with the kernel: 280 bytes in 6.18.
pub type Info = [u8; 512];

/// Offsets into `struct tcp_info` (include/uapi/linux/tcp.h).
mod at {
    pub const SND_MSS: usize = 16;
    pub const RCV_MSS: usize = 20;
    pub const UNACKED: usize = 24;
    pub const SACKED: usize = 28;
    pub const RTT: usize = 68;
    pub const RTTVAR: usize = 72;
    pub const BYTES_ACKED: usize = 120;
    pub const BYTES_RECEIVED: usize = 128;
    pub const NOTSENT_BYTES: usize = 144;
    pub const MIN_RTT: usize = 148;
    pub const BYTES_SENT: usize = 200;
}

/// Round-trip time of a connection over the loopback device, and its variation, in microseconds.
const RTT: u32 = 30;
const RTTVAR: u32 = 10;
/// Largest segment of such a connection, bytes.
const MSS: u32 = 32756;

fn below(fd: i32) -> Result<(Info, usize)> {
    let mut info = [0u8; 512];
    let n = sys::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info)?;
    Ok((info, n))
}

fn put<const N: usize>(info: &mut Info, at: usize, v: [u8; N]) {
    info[at..at + N].copy_from_slice(&v);
}

/// The kernel's answer for the placeholder, with the state, counts and times of the connection.
pub fn of_connection(fd: i32, d: &Desc) -> Result<(Info, usize)> {
    let (mut info, n) = below(fd)?;
    info[0] = answer::tcp_state(d);
    let (_, tx, h) = d.tx();
    let sent = h.bytes();
    let notsent = ring::unacknowledged(tx, h).min(sent);
    let (r, rx, rxh) = d.rx();
    let waiting = match crate::token::enter(rxh) {
        Ok(_t) => ring::available(r, rx, rxh, usize::MAX).unwrap_or(0) as u64,
        Err(_) => 0,
    };
    let received = rxh.bytes() + waiting;
    for (offset, v) in
        [(at::SND_MSS, MSS), (at::RCV_MSS, MSS), (at::RTT, RTT), (at::RTTVAR, RTTVAR), (at::MIN_RTT, RTT)]
    {
        put(&mut info, offset, v.to_ne_bytes());
    }
    put(&mut info, at::NOTSENT_BYTES, (notsent as u32).to_ne_bytes());
    for (offset, v) in
        [(at::BYTES_SENT, sent - notsent), (at::BYTES_ACKED, sent - notsent), (at::BYTES_RECEIVED, received)]
    {
        put(&mut info, offset, v.to_ne_bytes());
    }
    Ok((info, n))
}

/// Number of connections that wait in the queues. Only a worker has queues; the monitor knows their
/// length.
fn queued(l: &listen::Listener) -> u32 {
    if l.is_worker() {
        let of = |c: &chan::Chan| (0..=WORKERS).map(|q| fsocket_ring::syn::len(c.queue(q))).sum::<u32>();
        return l.chans().map(of).sum();
    }
    let ask = request::Options { listener: l.id.load(Ordering::Relaxed), mark: 0 };
    ctl::request(ask, None).map_or(0, |(answer, _)| answer.marked)
}

/// For a listener, `tcpi_unacked` is the number of connections that wait to be accepted, and
/// `tcpi_sacked` is the backlog.
///
/// # Safety
/// `out` and `len` come from the program; they may be bad.
pub unsafe fn of_listener(fd: i32, d: &Desc, out: *mut u8, len: *mut u32) -> Result<()> {
    let (mut info, n) = below(fd)?;
    let int = |info: &Info, at: usize| info[at..].first_chunk().map_or(0, |b| u32::from_ne_bytes(*b));
    let mut waiting = int(&info, at::UNACKED);
    if let Some(own) = zone::of(d).and_then(|z| z.own_fd()) {
        waiting += below(own).map_or(0, |(info, _)| int(&info, at::UNACKED));
    }
    if let Some(l) = listen::of(d) {
        waiting += queued(l);
        if let Some(backlog) = l.backlog() {
            put(&mut info, at::SACKED, backlog.to_ne_bytes());
        }
    }
    put(&mut info, at::UNACKED, waiting.to_ne_bytes());
    // SAFETY: the program says that this is its memory; the copy returns EFAULT where nothing is.
    unsafe {
        let room = user::get(len)?;
        let n = n.min(room as usize);
        user::give(&info[..n], out, len, n as u32)
    }
}
