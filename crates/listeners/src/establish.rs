//! Fills in a new connection: its slot, for both sides, and the socket of this process.

use crate::chan::{Chan, Rings};
use crate::options::{REUSEADDR, V6ONLY};
use crate::table::Desc;
use crate::values;
use crate::{kept, name, peers, process, token};
use core::sync::atomic::Ordering;
use fsocket_abi::channel::{sharing, slot_state, CLIENT, TO_CLIENT, TO_SERVER};
use fsocket_abi::flags::FlagSet;
use fsocket_abi::sock::{Place, Sock};
use fsocket_proto::Addr;
use fsocket_ring::{init_dir, init_half, Mapped};

/// Fills in the shared part of a new connection, before another process can see it. `sharing`
/// comes from [`sharing_of`].
pub fn prepare_slot(chan: &Chan, slot: usize, rings: &Rings, dst: &Addr, port: u16, sharing: u8) {
    let s = chan.slot(slot);
    s.state.store(slot_state::FREE, Ordering::Relaxed);
    s.generation.fetch_add(1, Ordering::Relaxed);
    s.switching.store(0, Ordering::Relaxed);
    s.family.store(dst.family as u8, Ordering::Relaxed);
    s.sharing.store(sharing, Ordering::Relaxed);
    s.client_port.store(port, Ordering::Relaxed);
    name::store(&s.dst, &dst.ip);
    for dir in [TO_SERVER, TO_CLIENT] {
        // SAFETY: the channel stays mapped, and no other thread or process uses the slot yet.
        init_dir(unsafe { Mapped::new(rings.get(dir)) }, &s.dir[dir]);
    }
}

/// Whether a client's socket shares its address with other sockets, according to its options: bits
/// of [`sharing`].
pub fn sharing_of(d: &Desc, fd: i32) -> u8 {
    let is_on = |i: usize| d.options().value(i) != 0;
    let port = || {
        let mut v = [0u8; 4];
        fsocket_sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, &mut v).is_ok() && v != [0; 4]
    };
    (if is_on(REUSEADDR) { sharing::ADDRESS } else { 0 })
        | (if is_on(V6ONLY) { sharing::V6ONLY } else { 0 })
        | (if kept::any(d) && port() { sharing::PORT } else { 0 })
}

/// Records that an option of [`sharing`] has changed on the socket of a connection.
pub fn share(d: &Desc, what: u8, on: bool) {
    let (bit, changed) = match d.side() {
        CLIENT => (what, 0),
        _ => (what << sharing::SERVER_SHIFT, what << sharing::CHANGED_SHIFT),
    };
    let of = &d.slot().sharing;
    match on {
        true => of.fetch_or(bit | changed, Ordering::Relaxed),
        false => of.fetch_and(!bit, Ordering::Relaxed) & of.fetch_or(changed, Ordering::Relaxed),
    };
}

/// Properties of one end of a new connection.
pub struct End<'a> {
    pub chan: &'a Chan,
    pub slot: usize,
    pub rings: Rings,
    pub side: usize,
    pub family: u16,
    /// The client's and the server's address, as this side sees them.
    pub src: [u8; 16],
    pub dst: [u8; 16],
    pub client_port: u16,
    pub server_port: u16,
    /// The placeholder is connected to another network namespace, or this is the other end of such
    /// a connection.
    pub across: bool,
}

impl<'a> End<'a> {
    /// An end within one network namespace, where the client's address follows from the server's.
    pub fn usual(
        chan: &'a Chan,
        (slot, rings): (usize, Rings),
        side: usize,
        server: &Addr,
        client_port: u16,
    ) -> End<'a> {
        End {
            chan,
            slot,
            rings,
            side,
            family: server.family,
            src: name::source_for(&server.ip),
            dst: server.ip,
            client_port,
            server_port: server.port,
            across: false,
        }
    }
}

/// Fills in the socket, and turns the descriptor into a connection.
pub fn establish(d: &'static Desc, sock: &'static Sock, e: &End) {
    let nonblock = FlagSet::NONBLOCK.when(d.unconnected().nonblock());
    sock.flags.begin(nonblock.or(FlagSet::ACROSS.when(e.across)));
    sock.begin(Place { channel: e.chan.id.load(Ordering::Relaxed), slot: e.slot, side: e.side });
    let client = (e.src, e.client_port);
    let server = (e.dst, e.server_port);
    let (local, peer) = if e.side == CLIENT { (client, server) } else { (server, client) };
    sock.set_names(e.family, &local, &peer);
    sock.set_options(d.options().values());
    sock.set_receive_timeout(d.options().receive_timeout());
    sock.set_send_timeout(d.options().send_timeout());
    sock.add_holder(process::nonce());
    for h in [&sock.tx, &sock.rx] {
        init_half(h);
        token::reset(h);
    }
    let (tx, rx) = (e.rings.get(e.side), e.rings.get(1 - e.side));
    // SAFETY: channel and arena stay mapped while the description uses them, and the rings have
    // RING_CAP bytes.
    unsafe { d.attach(sock, e.chan.slot(e.slot), e.side, tx, rx) };
    d.conn().set_place(e.chan.index(), e.slot);
    peers::enter(d);
    values::size_buffers(d);
    e.chan.kept_memory.reuse(e.slot);
    e.chan.set_desc(e.slot, Some(d));
    d.connect();
}
