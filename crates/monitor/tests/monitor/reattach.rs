//! Tests with a second monitor: processes show it what they have from the first one.

use super::rights::{as_user, for_users};
use crate::support::*;
use fsocket_abi::arena::ARENA_SIZE;
use fsocket_abi::channel::{slot_state, status, CHANNEL_SIZE, CLIENT, SERVER};
use fsocket_monitor::memory::memfd;
use fsocket_proto::raw::Packet;
use fsocket_proto::registry::{Registry, CHANNELS_OF_ONE};
use fsocket_proto::{notice, request, Payload};
use fsocket_sync::atomic::Ordering;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::SealFlags;
use rustix::net::{AddressFamily, SocketType};
use std::mem::offset_of;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};

/// The state of a server and a client whose monitor has ended.
struct Before {
    socket: TcpListener,
    listener: u64,
    port: u16,
    ch: ChannelView,
}

fn before() -> Before {
    let d = Daemon::start();
    let (mut server, _client, Listener { socket, port, id: listener }, ch) = d.acquainted();
    assert!(server.wait_unasked().1.is_some());
    Before { socket, listener, port, ch }
}

fn attach(p: &mut Proc, b: &Before, side: usize, memory: &OwnedFd) {
    let m = Packet {
        id: b.ch.id.into(),
        arg0: side as u64,
        arg1: b.listener,
        arg2: 1,
        ..Packet::new(request::Attach::KIND)
    };
    p.tell(m, Some(memory.as_fd()));
    p.sync();
}

fn is_watched(p: &mut Proc, b: &Before) -> bool {
    p.sync();
    p.unasked.iter().any(|(m, _)| m.kind == notice::Watched::KIND && m.id == u64::from(b.ch.id))
}

#[test]
fn both_sides_are_told_and_a_death_closes_the_connection() {
    let b = before();
    b.ch.set_state(0, slot_state::ESTABLISHED);
    let d = Daemon::start();
    let (mut server, mut client) = (d.process_with_arena(), d.process_with_arena());
    client.open_sock(0, b.ch.id, 0, CLIENT, &[client.nonce]);
    attach(&mut client, &b, CLIENT, &b.ch.fd);
    assert!(!is_watched(&mut client, &b), "the server is not there");
    assert_eq!(server.listen(&b.socket), b.listener, "the same number");
    attach(&mut server, &b, SERVER, &b.ch.fd);
    assert!(is_watched(&mut server, &b) && is_watched(&mut client, &b));
    // The worker gets its former number, and no other channel.
    let (a, _) = server.request(Packet { id: b.listener, arg0: 1 + 5, ..Packet::new(request::Worker::KIND) }, None);
    assert_eq!((a.result, a.arg0, b.ch.workers()), (0, 5, 1 << 5));
    let (a, fd) = client.connect_to(v4([127, 0, 0, 1], b.port), 0);
    assert_eq!((a.result, a.id, fd.is_none()), (0, b.ch.id.into(), true), "the channel of before");
    drop(client);
    wait_until("it is closed", || b.ch.status(0, CLIENT) & status::CLOSED != 0);
}

#[test]
fn a_channel_of_one_side_is_not_used_and_ends_with_it() {
    let b = before();
    let d = Daemon::start();
    let (mut server, mut client) = (d.process(), d.process());
    attach(&mut client, &b, CLIENT, &b.ch.fd);
    server.listen(&b.socket);
    server.work(b.listener);
    assert!(server.unasked.is_empty(), "its memory is given to nobody");
    let (a, fd) = client.connect_to(v4([127, 0, 0, 1], b.port), 0);
    assert!(a.result == 0 && a.id != u64::from(b.ch.id) && fd.is_some(), "a new one");
    drop(client);
    // From here on the number of the channel is free.
    let mut other = d.process();
    wait_until("it is gone", || {
        attach(&mut other, &b, CLIENT, &b.ch.fd);
        attach(&mut other, &b, SERVER, &b.ch.fd);
        is_watched(&mut other, &b)
    });
}

#[test]
fn a_side_is_one_familys() {
    let b = before();
    let d = Daemon::start();
    let (mut server, mut client, mut stranger) = (d.process(), d.process(), d.process());
    attach(&mut client, &b, CLIENT, &b.ch.fd);
    attach(&mut stranger, &b, CLIENT, &b.ch.fd);
    server.listen(&b.socket);
    attach(&mut server, &b, SERVER, &b.ch.fd);
    attach(&mut stranger, &b, SERVER, &b.ch.fd);
    assert!(is_watched(&mut client, &b) && is_watched(&mut server, &b));
    assert!(!is_watched(&mut stranger, &b));
    let (a, _) = stranger
        .request(Packet { id: b.ch.id.into(), arg0: SERVER as u64, ..Packet::new(request::ChannelHandle::KIND) }, None);
    assert_ne!(a.result, 0);
}

#[test]
fn who_does_not_hold_the_listener_binds_nothing_to_it() {
    let b = before();
    let d = Daemon::start();
    let (mut server, mut liar) = (d.process(), d.process());
    server.listen(&b.socket);
    attach(&mut liar, &b, CLIENT, &b.ch.fd);
    attach(&mut liar, &b, SERVER, &b.ch.fd);
    assert!(is_watched(&mut liar, &b), "it shares memory with itself");
    server.work(b.listener);
    assert!(server.unasked.is_empty());
    // The process that really holds the listener comes too late for this channel.
    attach(&mut server, &b, SERVER, &b.ch.fd);
    assert!(!is_watched(&mut server, &b));
    let named = Packet { id: b.ch.id.into(), arg0: SERVER as u64, ..Packet::new(request::ChannelHandle::KIND) };
    assert_eq!(liar.request(named, None).0.arg0, 0, "of no listener");
    assert_ne!(server.request(named, None).0.result, 0);
}

#[test]
fn memory_that_could_shrink_or_is_none_ends_the_process() {
    let b = before();
    let d = Daemon::start();
    let loose = memfd("loose", CHANNEL_SIZE, SealFlags::GROW).unwrap();
    let short = memfd("short", 4096, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    let other = OwnedFd::from(listener().0);
    for fd in [loose, short, other] {
        let mut p = d.process();
        let m = Packet { id: b.ch.id.into(), ..Packet::new(request::Attach::KIND) };
        p.tell(m, Some(fd.as_fd()));
        assert!(p.is_dropped());
    }
    // A number that belongs to no client: in the registry it would mean a free port.
    let nobodys = u64::from(CHANNELS_OF_ONE) - 1;
    let mut p = d.process();
    p.tell(Packet { id: nobodys, ..Packet::new(request::Attach::KIND) }, Some(channel_memory(nobodys).as_fd()));
    assert!(p.is_dropped());
    // Other memory under a number that is in use.
    let (mut client, mut other) = (d.process(), d.process());
    attach(&mut client, &b, CLIENT, &b.ch.fd);
    attach(&mut other, &b, SERVER, &channel_memory(b.ch.id.into()));
    assert!(!is_watched(&mut other, &b));
}

/// Memory with the name, size and seals that a monitor gives to channel `id`.
fn channel_memory(id: u64) -> OwnedFd {
    memfd(&format!("fastsocket-channel-{id}"), CHANNEL_SIZE, SealFlags::SHRINK | SealFlags::GROW).unwrap()
}

/// A faster process shows memory of its own, or of another channel, under this number. It must not
/// keep the owner from its channel.
#[test]
fn memory_that_was_not_made_for_it_takes_no_channels_number() {
    let (b, another) = (before(), before());
    let Some(d) = for_users("memory_that_was_not_made_for_it_takes_no_channels_number", |_| {}) else { return };
    let mut liar = as_user(70_001, || d.process());
    for memory in [as_user(70_001, || channel_memory(b.ch.id.into())), another.ch.fd] {
        attach(&mut liar, &b, CLIENT, &memory);
        attach(&mut liar, &b, SERVER, &memory);
    }
    assert!(!is_watched(&mut liar, &b));
    let (mut server, mut client) = (d.process(), d.process());
    server.listen(&b.socket);
    attach(&mut client, &b, CLIENT, &b.ch.fd);
    attach(&mut server, &b, SERVER, &b.ch.fd);
    assert!(is_watched(&mut server, &b) && is_watched(&mut client, &b));
}

#[test]
fn who_shows_the_same_arena_is_related() {
    let b = before();
    b.ch.set_state(3, slot_state::ESTABLISHED);
    let d = Daemon::start();
    let (mut parent, mut child, mut server) = (d.process(), d.process(), d.process());
    let fd = memfd("arena", ARENA_SIZE, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    let holders = [parent.nonce, child.nonce];
    // The child announces the arena first.
    for (p, inherited) in [(&mut child, 1), (&mut parent, 0)] {
        p.arena = Some(label_arena(&fd));
        p.open_sock(0, b.ch.id, 3, CLIENT, &holders);
        p.tell(Packet { arg1: inherited, ..Packet::new(request::Arena::KIND) }, Some(fd.as_fd()));
        attach(p, &b, CLIENT, &b.ch.fd);
    }
    server.listen(&b.socket);
    attach(&mut server, &b, SERVER, &b.ch.fd);
    assert!(is_watched(&mut parent, &b) && is_watched(&mut child, &b));
    drop(parent);
    server.sync();
    assert_eq!(b.ch.status(3, CLIENT), 0, "the child has it");
    drop(child);
    wait_until("it is closed", || b.ch.status(3, CLIENT) & status::CLOSED != 0);
}

/// A forked child that has given up rights may still have the descriptors that it shared with its
/// parent.
#[test]
fn who_has_other_rights_is_not_related() {
    let Some(d) = for_users("who_has_other_rights_is_not_related", |_| {}) else { return };
    let fd = memfd("arena", ARENA_SIZE, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    label_arena(&fd);
    let show = |p: &mut Proc, inherited| {
        p.tell(Packet { arg1: inherited, ..Packet::new(request::Arena::KIND) }, Some(fd.as_fd()));
        p.sync();
    };
    let mut server = d.process();
    let (socket, port) = listener();
    let listener = server.listen(&socket);
    server.work(listener);
    let (mut child, mut parent, mut relative) = (as_user(70_001, || d.process()), d.process(), d.process());
    // The child announces the arena first.
    show(&mut child, 1);
    show(&mut parent, 0);
    show(&mut relative, 1);
    show(&mut child, 1);
    let ch = parent.connect(port);
    let named = Packet { id: ch.id.into(), arg0: CLIENT as u64, ..Packet::new(request::ChannelHandle::KIND) };
    assert!(relative.request(named, None).1.is_some());
    let (answer, memory) = child.request(named, None);
    assert!(answer.result == libc::ENOENT && memory.is_none());
}

#[test]
fn ports_in_use_are_nobody_elses() {
    let b = before();
    let d = Daemon::start();
    let mut client = d.process();
    client.make_arena();
    let mut other = d.process_with_arena();
    let elsewhere = if b.ch.port > 63_000 { b.ch.port - 64 } else { b.ch.port + 64 };
    {
        let s = other.open_sock(0, b.ch.id, 0, CLIENT, &[other.nonce]);
        s.set_names(libc::AF_INET as u16, &([0; 16], elsewhere + 3), &([0; 16], 0));
    }
    // (The monitor reads a process's connections when the process shows an arena.)
    let fd = memfd("arena", ARENA_SIZE, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    label_arena(&fd);
    other.tell(Packet { arg1: 1, ..Packet::new(request::Arena::KIND) }, Some(fd.as_fd()));
    other.sync();
    attach(&mut client, &b, CLIENT, &b.ch.fd);
    let again = |p: &mut Proc, first: u16| {
        p.request(Packet { id: b.ch.id.into(), arg2: first.into(), ..Packet::new(request::Ports::KIND) }, None).0.result
    };
    assert_eq!(again(&mut client, b.ch.port), 0);
    assert_eq!(again(&mut client, b.ch.port), libc::EADDRINUSE);
    assert_eq!(again(&mut client, elsewhere), libc::EADDRINUSE, "a connection of another process has it");
    assert_ne!(again(&mut client, b.ch.port + 1), 0, "not a block");
    assert_ne!(again(&mut other, b.ch.port), 0, "not its channel");
}

/// A user can show no more channels than it could have got from this monitor.
#[test]
fn channels_that_are_shown_are_bounded() {
    let Some(d) = for_users("channels_that_are_shown_are_bounded", |_| {}) else { return };
    let (mut client, mut server) = as_user(70_001, || (d.process(), d.process()));
    let number = |n: u64| u64::from(CHANNELS_OF_ONE) + n;
    // One user gets half of all descriptors, and a channel takes two.
    let open = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum.unwrap_or(u64::MAX);
    let all = open.min(60_000) / 4;
    for n in 1..=all {
        let id = number(n);
        let memory = channel_memory(id);
        for (p, side) in [(&client, CLIENT), (&server, SERVER)] {
            p.tell(
                Packet { id, arg0: side as u64, arg2: 1, ..Packet::new(request::Attach::KIND) },
                Some(memory.as_fd()),
            );
        }
        if n % 64 == 0 {
            client.sync();
            server.sync();
        }
    }
    let is_known = |p: &mut Proc, id: u64| {
        p.request(Packet { id, arg0: CLIENT as u64, ..Packet::new(request::ChannelHandle::KIND) }, None).1.is_some()
    };
    server.sync();
    assert!(is_known(&mut client, number(all / 2)) && !is_known(&mut client, number(all)));
    as_user(70_002, || d.process().sync());
}

/// The registry counts such a channel at its port: libraries ask the monitor before they bind that
/// port.
#[test]
fn a_channel_of_before_is_counted_at_its_port() {
    let b = before();
    let d = Daemon::start();
    let (mut server, mut client) = (d.stranger(), d.process());
    let registry = server.hello();
    attach(&mut client, &b, CLIENT, &b.ch.fd);
    server.listen(&b.socket);
    attach(&mut server, &b, SERVER, &b.ch.fd);
    attach(&mut server, &b, SERVER, &b.ch.fd);
    assert_eq!(word(&registry, offset_of!(Registry, served), b.port), 1);
    server.work(b.listener);
    let (answer, _) = client.connect_to(v4([127, 0, 0, 1], b.port), b.ch.id.into());
    assert_eq!((answer.result, word(&registry, offset_of!(Registry, served), b.port)), (0, 2));
    drop(client);
    wait_until("both are gone", || word(&registry, offset_of!(Registry, served), b.port) == 0);
}

/// A process can announce a former lease only if no other process has one of its ports.
#[test]
fn a_port_that_is_bound_is_in_nobody_elses_lease() {
    let b = before();
    let d = Daemon::start();
    let (mut server, mut liar, mut victim) = (d.process(), d.process(), d.stranger());
    let registry = victim.hello();
    attach(&mut liar, &b, CLIENT, &b.ch.fd);
    server.listen(&b.socket);
    server.work(b.listener);
    let ch = victim.connect(b.port);
    // A port in the block that the other channel had leased.
    let bound = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    let port = (b.ch.port..=b.ch.port + 63)
        .find(|port| rustix::net::bind(&bound, &SocketAddr::from((Ipv4Addr::LOCALHOST, *port))).is_ok())
        .expect("one of 64 ports is free");
    let own = Packet { id: ch.id.into(), ..Packet::new(request::Ports::KIND) };
    assert_eq!(victim.request(own, Some(bound.as_fd())).0.result, 0);
    let again = Packet { id: b.ch.id.into(), arg2: b.ch.port.into(), ..Packet::new(request::Ports::KIND) };
    assert_eq!(liar.request(again, None).0.result, libc::EADDRINUSE);
    assert_eq!(word(&registry, offset_of!(Registry, owner), port), fsocket_proto::registry::lessee(ch.id));
}

/// Clients write the slots. A port in a slot counts as used only if the monitor has leased it to
/// that channel.
#[test]
fn a_forged_port_keeps_nobody_from_binding_it() {
    let d = Daemon::start();
    let (_server, mut client, l, ch) = d.acquainted();
    let in_use = |p: &mut Proc, port: u16, arg0| {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        if arg0 == 1 {
            rustix::net::bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, port))).unwrap();
        }
        let to = if arg0 == 1 { l.port } else { port };
        p.request(
            Packet { addr: v4([127, 0, 0, 1], to), arg0, ..Packet::new(request::InUse::KIND) },
            Some(socket.as_fd()),
        )
        .0
        .result
    };
    let name = |port: u16, ip: [u8; 4]| {
        let slot = ch.slot(0);
        slot.client_port.store(port, Ordering::Relaxed);
        for (to, from) in slot.dst.iter().zip(v4(ip, 0).ip) {
            to.store(from, Ordering::Relaxed);
        }
        ch.set_state(0, slot_state::ESTABLISHED);
    };
    let mut other = d.process();
    name(ch.port, [127, 0, 0, 1]);
    assert_eq!(in_use(&mut other, ch.port, 0), libc::EADDRINUSE, "its own port");
    let (_, forged) = listener();
    name(forged, [127, 0, 0, 1]);
    assert_eq!((in_use(&mut other, forged, 0), in_use(&mut other, forged, 1)), (0, 0));
    // The listener has one address, even if the client claims to have reached another one.
    assert_eq!(in_use(&mut other, l.port, 0), libc::EADDRINUSE);
    name(ch.port, [127, 0, 0, 2]);
    assert_eq!(in_use(&mut other, l.port, 0), 0);
    client.sync();
}

/// The registry's word for a port in one of its arrays.
fn word(registry: &OwnedFd, array: usize, port: u16) -> u32 {
    let mut word = [0; 4];
    assert_eq!(rustix::io::pread(registry, &mut word, (array + usize::from(port) * 4) as u64), Ok(4));
    u32::from_ne_bytes(word)
}
