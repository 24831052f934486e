//! Messages between the library and the monitor, and where they meet.
//!
//! Transport: one `SOCK_SEQPACKET` Unix socket per process (the *control
//! socket*); one [`Msg`] a packet, at most one descriptor attached
//! (`SCM_RIGHTS`). Requests marked *sync* are answered by a message of the same
//! `kind` and `seq`; others have no answer. The monitor may send the messages
//! under "from the monitor" at any time, also before a pending answer; after
//! each of them it bumps `pending` in the process's arena, if it has one.
//!
//! The end of the control socket is the end of the process (or its `exec`):
//! the monitor then takes back everything it held. A forked child that inherits
//! sockets gets its own control socket: the *parent*, before the fork, makes a
//! socket pair and sends one end with [`kind::ADOPT`] over its own control
//! socket, so that the order of what parent and child do later cannot matter.
//!
//! Long: the list of all messages.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

pub mod agent;
#[cfg(feature = "report")]
pub mod operate;
pub mod passed;
pub mod paths;
pub mod registry;
pub use registry::CLOSINGS_SIZE;
#[cfg(feature = "report")]
pub mod report;
#[cfg(feature = "report")]
pub mod steer;
pub mod switch;
pub mod unpublish;
pub mod waiter;
pub mod worker;

pub const VERSION: u16 = 1;

/// `arg0` of the answer to [`kind::HELLO`]: what the monitor understands beyond the first version. From this
/// number on it takes over what processes have from a monitor before it ([`kind::ATTACH`]).
pub const REATTACH: u64 = 1;

/// How long an answer to [`kind::CONNECT`] may be used, seconds.
pub const ROUTE_SECS: u64 = 2;

/// In [`kind::CONNECT`]: the socket differs from others in what a policy may tell it by.
pub const ODD: u64 = u64::MAX;

/// Channels of one listener, at most: a worker's table has room for so many.
pub const CHANNELS_OF_LISTENER: usize = 1024;

/// Kinds of messages.
pub mod kind {
    /// First message of a process. `id` nonce, `arg0` pid, `arg1` ABI version,
    /// `arg2` its rights as a number, `addr.ip` the name of its program (NUL padded), `addr.port` 1 after
    /// [`TO_KERNEL`], fd: none. *Sync*:
    /// answer `id` process number, fd: the registry (read-only memfd, [`crate::registry`]). Sent without
    /// waiting for the answer, which is read when first needed. A wrong ABI version is answered with `result`
    /// EPROTO, and the monitor's as `arg0`; else `arg0` is what it understands ([`REATTACH`](crate::REATTACH)),
    /// and `arg1` what the configuration says of the program ([`program`](crate::program)).
    pub const HELLO: u32 = 1;
    /// A forked child is about to exist. `id` the child's nonce, fd: its end of
    /// a socket pair that the monitor uses as its control socket. The child
    /// belongs to the parent's family, holds every listener that the parent
    /// holds, and every connection of the fork group whose `holders` name its
    /// nonce. The child itself sends HELLO (same nonce) on the new socket.
    /// `arg0` 1: the child is the *successor*, the program that replaces this one by
    /// `exec` (or that `posix_spawn` starts); of the listeners it gets those that
    /// [`KEEP`] names.
    pub const ADOPT: u32 = 2;
    /// The successor with nonce `id` holds listener `arg0`, too. No answer.
    pub const KEEP: u32 = 50;
    /// *Sync*: the `id`-th arena that the successor has inherited, fd: its memfd.
    /// `result` ENOENT: there are no more.
    pub const INHERITED_ARENA: u32 = 51;
    /// *Sync*: memory of channel `id` for a process that is on side `arg0` of it,
    /// fd: memfd, `arg0` its listener. `result` ENOENT.
    pub const CHANNEL_HANDLE: u32 = 52;
    /// *Sync*: the successor has taken over what it has descriptors for. What the
    /// replaced program had alone is closed when this is answered.
    pub const SETTLED: u32 = 53;
    /// Arena of this process: fd memfd sealed against shrink and grow, of
    /// exactly `ARENA_SIZE`. No answer. The monitor checks seals and size
    /// before it maps. `arg1` 1: another process has made it, and this one has inherited it. A process that
    /// shows the arena of another one with the same rights is of its fork group.
    pub const ARENA: u32 = 3;
    /// `fd` is a socket in the listening state. *Sync*: `id` listener number.
    /// The monitor takes address and network namespace from the descriptor
    /// itself (SO_ACCEPTCONN, SO_DOMAIN, SO_PROTOCOL, getsockname, IPV6_V6ONLY,
    /// SO_NETNS_COOKIE), so no process registers what it does not hold, and closes
    /// it at once (else the port would stay taken). `arg0` 1: processes may hold it that have not shown it
    /// ([`super::unpublish::UNLESS_SERVED`]). In the answer: the program that this one has replaced worked for it.
    pub const LISTEN: u32 = 4;
    /// This process closed its last descriptor of listener `id`. No answer.
    /// The last holder ends the listener. Answered if `seq` is not 0: then the
    /// connections that nobody accepted have been reset, as after the kernel's
    /// `close`. With a listening socket as fd it is that one's listener, if there is one: [`LISTEN`] was not
    /// answered in time.
    pub const UNLISTEN: u32 = 5;
    /// This process wants to accept on listener `id`. *Sync*. Before the answer
    /// come one [`CHANNEL_SRV`] for each channel that exists. Answer: `arg0`
    /// worker number w (queue 1 + w is its own), or `result` EAGAIN when there
    /// are more than 64 workers (it then only steals), EOPNOTSUPP when those that
    /// work for it have other rights (user, capabilities, groups): the kernel serves it. Later channels follow
    /// as they are made. `arg0` of the request: the number that it had under a monitor before this one, plus
    /// one; 0: any. `arg1`: of [`super::worker`]. In the answer `arg1` 1: see [`UNTAKEN`].
    pub const WORKER: u32 = 6;
    /// `addr` destination, fd: the socket to be connected (its network
    /// namespace counts): TCP, unused, of a family that reaches it; or, after ENOKEY, that very
    /// socket once the kernel has connected it. `arg0`: number of a channel to the same listener that
    /// is full, or 0. *Sync*: `id` channel, `arg0` listener, `arg1` size, fd
    /// memfd; or `result` ENOENT: no listener of ours, or one of the kernel's alone is nearer, EMFILE/ENOMEM: out of
    /// something, EPERM: another user's, EACCES: the administrator or the kernel is against it,
    /// ENOKEY: the kernel is to connect the socket first (its policy may be against it). What is
    /// answered holds for [`ROUTE_SECS`](crate::ROUTE_SECS), or until the registry changes. One process gets
    /// the same channel number back while it has it and does not call it full (without a descriptor attached:
    /// `arg2` = 1). A new channel comes with a first lease of ports, as by [`PORTS`]: `addr.port` is the
    /// first of 64 (0: all are out). `arg1`: what the kernel's policy may tell the socket by, as a number: a connection
    /// that the kernel has let through proves nothing for those with another one; [`ODD`](crate::ODD): none like it is
    /// expected. `addr.family` 1 in the answer: such a proof was needed, so the channel is for sockets with this number
    /// only. With `addr.v6only` begins what the answer holds for: it is the word of
    /// the port in [`CLOSINGS`] (0: there are none) before the listener was looked at.
    pub const CONNECT: u32 = 7;
    /// Of a monitor before this one: channel `id` is mapped on side `arg0` of it, fd its memfd. `arg1` its
    /// listener, for the server's side: a process that holds it may accept there. For the client's `arg2` 1: this process
    /// opens connections in it. No answer; [`WATCHED`] comes when both sides have been shown. Two that show
    /// the same memory are the two sides; one side is one family's, or those that hold the listener.
    pub const ATTACH: u32 = 80;
    /// From the monitor: it knows both sides of channel `id`, and tells of their ends.
    pub const WATCHED: u32 = 81;
    /// From the monitor: an operator wants (`arg0` 1) all connections of this process over shared memory to
    /// become the kernel's, or (0) lets those come back. It says in [`HELLO`] to a later monitor which it was.
    pub const TO_KERNEL: u32 = 82;
    /// *Sync*: fd: memfd with a request as JSON ([`crate::operate`]), `arg0` its length; answered likewise.
    /// `result` ENOENT: no process of that kind, EPERM: not the requester's. Needs no HELLO.
    pub const OPERATE: u32 = 83;
    /// *Sync*: lease of client ports, for the channel `id`: `arg0` first, `arg1` count (64).
    /// `result` EAGAIN when all are out. Channels of one process to different destinations may have the same one;
    /// returned at the end of the last of them. With a bound TCP
    /// socket as fd: its port is the channel's from now on (`arg1` 1); `result` EADDRINUSE:
    /// another channel has it. `arg2` not 0: the lease with this first port is the channel's since a monitor
    /// before this one; `result` EADDRINUSE: another one has it.
    pub const PORTS: u32 = 8;
    /// fd: a TCP socket that is to be bound to `addr`, or (`arg0` 1) one that is bound and is to be connected to
    /// it by the kernel. *Sync*: `result` EADDRINUSE, EADDRNOTAVAIL: a connection over shared memory is in the way.
    pub const IN_USE: u32 = 73;
    /// The peers of this process have rung thread `id` (the waker's index) by way of the monitor for
    /// some time; it asks for a pipe of its own with one of them. `arg0` channel, `arg1` the waiter
    /// ([`super::waiter`]), `arg2` the process that rings ([`WOKEN`]). No answer but
    /// [`WAKER_READ`], and that once only for the same pair.
    pub const WAKER: u32 = 9;
    /// The read end of [`WAKER_READ`] is watched. Same arguments. The process that rings gets its
    /// end ([`WAKER_WRITE`]). No answer.
    pub const WAKER_READY: u32 = 10;
    /// Wake the thread with key `id` ([`fsocket_abi::channel::waker_key`]), which waits as waiter
    /// `arg1` ([`super::waiter`]) of channel `arg0`. The requester is on either side of it. No
    /// answer. The first times: cheaper than a pipe for a connection that may be the only one.
    pub const RING: u32 = 13;
    /// A connection goes over to kernel TCP. `id` channel, `arg0` slot in the low
    /// half and the requester's side in the high one, `arg1` generation of the
    /// slot; see [`switch`](crate::switch) for `arg2`. *Sync*: `result` EALREADY when the two
    /// ends exist (the requester then takes its own by CLAIM), EXDEV when the
    /// monitor cannot make sockets in the connection's network namespace.
    pub const SWITCH: u32 = 14;
    /// *Sync*: the requester's end of a connection that has been switched; `id` channel,
    /// `arg0` slot and side, `arg1` generation. `result` ENOENT. Nobody is given the other
    /// side's end.
    pub const CLAIM: u32 = 15;
    /// Nobody on the side given needs its end from the monitor any more: it
    /// closes it. Arguments as for CLAIM. *Sync*, or with `seq` 0: no answer.
    pub const RELEASE: u32 = 16;
    /// Listener `id` was handed to a process that may not have the library. *Sync*:
    /// when it is answered no connection comes to it over shared memory any more
    /// but those that wait in its queues; new ones use the kernel. `arg0`: of [`super::unpublish`]; where that
    /// is not so, `result` EBUSY. fd: the listener, which says in which network namespace it is: the monitor moves what
    /// waits in its queues into the kernel's.
    pub const UNPUBLISH: u32 = 18;
    /// *Sync*: steering of devices ([`crate::steer`]). fd: memfd with a request
    /// as JSON, `arg0` its length; answered by a memfd with the answer as JSON,
    /// `arg0` its length. The devices are those of the network namespace from
    /// which the requester has connected to us. `result` EPERM unless the requester is root.
    /// Needs no HELLO.
    pub const STEER: u32 = 17;
    /// *Sync*: report as JSON in a memfd; `arg0` length; see
    /// [`crate::report`]. For the command line; needs no HELLO. `arg1` 1: the
    /// counters of zones are zero afterwards. `arg2` 1: without the list of connections.
    pub const REPORT: u32 = 12;
    /// `fd` is the global listen socket of a listener with local ones beside it
    /// (at least one exists). *Sync*: `id` group, fd: the program that selects
    /// among them, to be attached to `fd`. `result` EOPNOTSUPP: no BPF here.
    /// `arg0` 1: one of several sockets that the program itself makes share the
    /// address. Every one is to be shown. Without fd: strangers have some there;
    /// [`LOOK`] says when to ask again.
    pub const GROUP: u32 = 20;
    /// `fd` is a local listen socket of group `id`, whose worker runs on CPU
    /// `arg0`. `arg1` 1: others of its kind may be on probation and have only the
    /// global one. `arg0` all ones: on any CPU. *Sync*: `arg0` its place, `arg1` the CPU.
    /// Only after [`GROUP`] of this process.
    /// The monitor keeps no descriptor: the socket dies with the worker.
    pub const LOCAL: u32 = 21;
    /// The local listen socket at place `arg0` of group `id` is closed; the
    /// worker goes on without. *Sync* (the monitor holds no descriptor of it any more) or
    /// without an answer.
    pub const LEFT: u32 = 22;
    /// Make what this process may not: `fd` is the global listen socket.
    /// `arg0` 0: a local listen socket, 1: a reservation (see the crate zones).
    /// *Sync*: fd the socket, or `result`.
    pub const CLONE: u32 = 23;

    /// The balance of group `id`, of which this process has shown the global listen
    /// socket. *Sync*: fd the BPF array to be mapped (`fsocket_abi::balance`); `result`
    /// EOPNOTSUPP: there is none.
    pub const BALANCE: u32 = 24;
    /// The local listen socket at place `arg0` of group `id` is waited for: others of
    /// the group that do the same may steal from it, and this process gets theirs. No
    /// answer.
    pub const SHARE: u32 = 25;

    /// This process has closed a socket it was told of by [`PEER_GONE`], of group `id`. If it
    /// was the last to do so, the kernel has moved what waited there. No answer.
    pub const PEER_CLOSED: u32 = 26;

    /// New connections in channel `id`, whose [`idle`](fsocket_abi::channel::Header::idle) was
    /// set. No answer.
    pub const ARRIVES: u32 = 27;

    /// New connections to listener `id`, which this process holds, had better begin in the kernel (`arg0` 1):
    /// its processes are forked for them, and they are short. 0: no longer. No answer.
    /// `arg1`: what its children say in [`JOIN`].
    pub const BRIEF: u32 = 62;
    /// This process, of which nobody has told the monitor, is a child of one that has said `id` in [`BRIEF`]: it
    /// has inherited what only that one's fork group can know. No answer.
    pub const JOIN: u32 = 63;

    /// This process is about to change options of listener `id`, which it holds: connections
    /// that wait in its queues are marked with `arg0` (`Prod::options`), but for those that
    /// are already. *Sync*: `arg0` how many. With `arg0` 0 none is marked, and the answer is how many wait.
    pub const OPTIONS: u32 = 28;

    /// This process accepts without a local listen socket beside those of group `id`, of which
    /// it has shown the global one. *Sync*: fd a local one at which a connection waits;
    /// `result` EAGAIN: there is none, and it is told once by [`WAKE_HINT`]; ENOENT: nobody tells.
    pub const WAITING: u32 = 29;

    /// The global listen socket of group `id`, which this process has shown, is about to be
    /// shut down: the local ones that the monitor holds are, and their workers are told.
    /// `arg0` 1: it goes on, for somebody without the library, and gets everything. *Sync*.
    pub const SHUT: u32 = 30;

    /// What a process has counted that has no arena, since it said so last: a counter and its number
    /// in each of `id`, `arg0`, `arg1`, `arg2` ([`counted`](crate::counted)). No answer.
    pub const COUNTED: u32 = 61;

    /// The other side of channel `id` breaks the protocol: this process uses it no more. No answer.
    /// All connections in the channel are reset, and for a while that other side gets no new one.
    pub const BROKEN: u32 = 58;

    /// From the monitor: fd is the local listen socket at place `arg0` of group `id`,
    /// whose worker has zone `arg1`, to steal from.
    pub const PEER: u32 = 41;
    /// From the monitor: the worker at place `arg0` of group `id` is gone or has given up
    /// its local listen socket. What waits there is anybody's; the descriptor is to be
    /// closed once it is empty, so that the kernel moves what is still in a handshake.
    pub const PEER_GONE: u32 = 42;
    /// From the monitor: connections of group `id` wait for a worker that does not look.
    pub const WAKE_HINT: u32 = 43;
    /// From the monitor: a local listen socket of group `id` was closed and what
    /// waited there has moved to the global one. The kernel wakes nobody for it.
    pub const LOOK: u32 = 40;
    /// `fd` is a kernel connection that this process has accepted and that may go over to
    /// shared memory; `id` is what it calls it. *Sync*: nobody holds fd any more. `arg0` 1: the other end
    /// may be in another network namespace; `result` EXDEV: it is on another host, or cannot go over. `arg1` 1: it was
    /// received from another process ([`PASSED`]); `result` EAGAIN: others may have it.
    pub const OFFER: u32 = 54;
    /// `fd` is the other end of one: it is to go over into slot `arg0` (generation `arg1`)
    /// of channel `id`, which is in state OFFERED. *Sync*: the other side has been told;
    /// `result` ENOENT: nobody has offered it, EXDEV: it never can. `arg2` 1: the channel is the one of [`MEET`]. In the
    /// answer `arg2`, if it is not 0: the other side is on another host, and may take so many milliseconds.
    /// `addr.v6only` 1: as `arg1` of [`OFFER`].
    pub const UPGRADE: u32 = 55;
    /// From the monitor: UPGRADE of the connection that this process calls `arg2`, into
    /// slot (low half of `arg1`, generation in the high one) of channel `id` of listener
    /// `arg0`, fd memfd. `addr.v6only` 1: after [`MEET`].
    pub const UPGRADE_SRV: u32 = 34;
    /// This process takes descriptor `arg0` of the process of which fd is a pidfd (`arg1` its
    /// pid, as this one numbers it). *Sync*: `id` a number; `result` ENOENT: it is none of ours, EPERM: it is another
    /// user's. `arg2` 1: fd is the socket that this process has got from there, `id` that number. *Sync*: the holder is
    /// told, by the same message with `id`, `arg0`, and the socket's SO_COOKIE as `arg1`; `result` ENOENT: ask again.
    pub const TRANSFER: u32 = 56;
    /// This process has looked after TRANSFER `id`. No answer. The taker gets the same message.
    pub const TRANSFERRED: u32 = 57;
    /// `fd` is a kernel connection that this process has opened, whose other end may be in another
    /// network namespace of this host. *Sync*: a channel to the listener that has accepted it, as in
    /// the answer to [`CONNECT`]; `result` ENOENT: nobody has offered the other end (yet), EXDEV: it is
    /// on another host, or cannot go over, EPERM and EACCES as for [`CONNECT`]. `arg1` 1: the other end is in this
    /// network namespace, and was passed to another process than the one that listens.
    pub const MEET: u32 = 59;
    /// The credentials of this process have changed. fd: its end of a new socket pair, made with
    /// the new ones, which is its control socket from here on. It holds the same listeners,
    /// and nothing else of what it had; HELLO follows on the new socket. No answer: a refusal is
    /// the end of that.
    pub const RENEW: u32 = 70;
    /// From the monitor: a process with other rights wants to accept on listener `id`, and new
    /// connections use the kernel. What waits in its queues is to be put into the kernel's.
    pub const OTHER_RIGHTS: u32 = 71;
    /// From the monitor: connections to listener `id` waited in its queues, and nobody took them. They go into the
    /// kernel's queue, as new ones do until a process that has emptied it says so ([`super::worker::ACCEPTS`]).
    pub const UNTAKEN: u32 = 92;
    /// A listener that is the kernel's alone has come to port `addr.port`. For some destinations it may
    /// be nearer than one of ours: everybody asks again. No answer.
    pub const NEARER: u32 = 72;
    /// What became of a descriptor of the connected kernel socket with the number (SO_COOKIE) `id`: `arg0`, of
    /// [`super::passed`]. No answer.
    pub const PASSED: u32 = 74;
    /// This process is the agent of this host: it carries connections to other hosts ([`super::agent`]). On a socket of
    /// its own, without HELLO; its library has another one. *Sync*: fd, its part of the configuration as JSON, `arg0`
    /// the length; `result` EPERM: it is not root's (nor, if the monitor is private, the monitor's user's); EOPNOTSUPP: the
    /// configuration has none. The other messages of [`super::agent`] follow.
    pub const AGENT: u32 = 84;
    /// The requester, the client of channel `id`, has had no connection in it for a while. If it has none, the channel
    /// ends ([`CHANNEL_GONE`], to it as well). No answer.
    pub const REST: u32 = 91;
    /// From the monitor: channel `id` of listener `arg0`, `arg1` size, fd
    /// memfd: somebody connects to a listener this process works for.
    pub const CHANNEL_SRV: u32 = 32;
    /// From the monitor: wake the thread with waker `id`. `arg0`, `arg1` as in [`RING`], `arg2` the
    /// process that asked; 0: the monitor itself. `arg0` 0: in channels that are not named.
    pub const WOKEN: u32 = 35;
    /// From the monitor, after [`WAKER`], same arguments: fd, the read end of a pipe (`O_NONBLOCK`)
    /// that nobody else has.
    pub const WAKER_READ: u32 = 36;
    /// From the monitor, after the other side's [`WAKER_READY`]: `id` the key, `arg0`, `arg1` as in
    /// [`RING`]; fd, the same pipe, opened once more to write. It can be read, too, so that the end of
    /// the reader is no SIGPIPE.
    pub const WAKER_WRITE: u32 = 37;
    /// From the monitor, before the first answer to [`CONNECT`] that depends on it: fd, to be mapped
    /// to read, one word for each port ([`CLOSINGS_SIZE`](crate::CLOSINGS_SIZE)). The kernel changes the word
    /// of a port, before anybody else can have the port, when a socket there stops to listen; also when
    /// one begins to.
    pub const CLOSINGS: u32 = 38;
    /// From the monitor: the other side of channel `id` is gone and every
    /// connection in it has been closed or reset; unmap when drained. `arg0` 1: it
    /// broke the protocol ([`BROKEN`]).
    pub const CHANNEL_GONE: u32 = 33;
}

/// What the configuration of the monitor says of a program.
pub mod program {
    pub const NO_ZONES: u64 = 1;
    pub const NO_SPIN: u64 = 2;
}

/// A counter and its number in one word.
pub mod counted {
    const BITS: u32 = 56;
    /// `counter`: index of the counter.
    pub const fn pack(counter: usize, n: u64) -> u64 {
        let most = (1 << BITS) - 1;
        (counter as u64 + 1) << BITS | if n < most { n } else { most }
    }
    /// Index and number; `None`: nothing was counted.
    pub fn unpack(word: u64) -> Option<(usize, u64)> {
        let counter = ((word >> BITS) as usize).checked_sub(1)?;
        (counter < fsocket_abi::arena::COUNTERS.len()).then_some((counter, word & ((1 << BITS) - 1)))
    }
}

/// Address of a listener or destination; IPv4 in v4-mapped form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Addr {
    pub ip: [u8; 16],
    /// Host byte order.
    pub port: u16,
    /// AF_INET or AF_INET6.
    pub family: u16,
    /// IPV6_V6ONLY of a listener; else 0.
    pub v6only: u32,
}

/// One message, fixed size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Msg {
    pub kind: u32,
    /// Chosen by the requester, repeated in the answer.
    pub seq: u32,
    pub version: u16,
    pub _pad: u16,
    /// 0 or a positive errno.
    pub result: i32,
    pub id: u64,
    pub arg0: u64,
    pub arg1: u64,
    pub arg2: u64,
    pub addr: Addr,
}

/// Bytes of a message.
pub const MSG_SIZE: usize = core::mem::size_of::<Msg>();

impl Msg {
    pub fn new(kind: u32) -> Self {
        Msg { kind, version: VERSION, ..Default::default() }
    }
}

const _: () = assert!(MSG_SIZE == 72);
