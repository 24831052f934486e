//! The table of all messages. Add one here: the kind must be new within its table, and numbers are never used again.
//!
//! `fd` is the descriptor that comes with the packet. `errno` is what an answer refuses with.
//!
//! Long: the list of all messages.

use crate::packet::{
    wire, Address, Arg0, Arg1, Arg2, Asks, Below, BothEnds, Family, High, Id, Ip, Low, Malformed, Msg, OrOnes, OrZero,
    Payload, PlusOne, Port, Slot, V6only, Wire, Words,
};
use crate::values::{Acts, Counted, End, Passing, Side, Switching, Unpublishing, Waiter, Work};
use crate::{Addr, Ends};
use fsocket_abi::channel::SLOTS;

const SLOTS_END: u64 = SLOTS as u64;

wire! {
    // Requests without an answer.
    requests {
        /// A forked child is about to exist. fd: its end of a socket pair, which becomes its control socket. The child
        /// belongs to the parent's family. It holds every listener that the parent holds, and every connection of the
        /// fork group whose `holders` name its nonce. The child itself sends [`Hello`] with the same nonce there.
        2 Adopt {
            /// The child's nonce.
            nonce: u64 = Id,
            /// The child is the *successor*: the program that replaces this one by `exec`, or that `posix_spawn` starts. It
            /// gets only those listeners that [`Keep`] names.
            successor: bool = Arg0,
        };
        /// The successor holds this listener, too.
        50 Keep {
            /// The successor's nonce.
            nonce: u64 = Id,
            listener: u64 = Arg0,
        };
        /// The arena of this process. fd: a memfd of exactly `ARENA_SIZE` bytes, sealed against shrink and grow. The monitor
        /// checks seals and size before it maps. A process that shows the arena of another one with the same rights is of
        /// its fork group.
        3 Arena {
            size: u64 = Arg0,
            /// Another process has made the arena, and this process has inherited it.
            inherited: bool = Arg1,
        };
        /// This process has a channel from a monitor before this one. fd: its memfd. [`Watched`](super::notice::Watched)
        /// comes when both sides have shown it. Two processes that show the same memory are the two sides. One side is one
        /// family's, or belongs to the processes that hold the listener.
        80 Attach {
            channel: u32 = Id,
            /// The side of this process.
            side: Side = Arg0,
            /// For the server's side: a process that holds this listener may accept there.
            listener: u64 = Arg1,
            /// For the client's side: this process opens connections in it.
            opens: bool = Arg2,
        };
        /// The peers of this process have rung one of its threads by way of the monitor for some time. It asks for a pipe of
        /// its own with one of them. The only answer is [`WakerRead`](super::notice::WakerRead), once for the same pair.
        9 Waker {
            /// Index of the thread's waker.
            waker: u8 = Id,
            channel: u32 = Arg0,
            waiter: Waiter = Arg1,
            /// The process that rings, as in [`Woken`](super::notice::Woken).
            ringer: u64 = Arg2,
        };
        /// The read end that came with [`WakerRead`](super::notice::WakerRead) is watched, and the process that rings gets
        /// its end ([`WakerWrite`](super::notice::WakerWrite)). The fields are those of [`Waker`].
        10 WakerReady {
            waker: u8 = Id,
            channel: u32 = Arg0,
            waiter: Waiter = Arg1,
            ringer: u64 = Arg2,
        };
        /// Wake a thread that waits in a channel. The requester is on either side of it. This is cheaper than a pipe for a
        /// connection that may be the only one.
        13 Ring {
            /// The thread's [`waker_key`](fsocket_abi::channel::waker_key).
            key: u64 = Id,
            channel: u32 = Arg0,
            waiter: Waiter = Arg1,
        };
        /// The local listen socket (fd) is waited for. Others of the group that do the same may steal from it, and this
        /// process gets theirs.
        25 Share {
            group: u64 = Id,
            place: u32 = Arg0,
        };
        /// This process has closed a socket that [`PeerGone`](super::notice::PeerGone) has named. If it was the last process
        /// to do so, the kernel has moved the connections that waited there.
        26 PeerClosed {
            group: u64 = Id,
        };
        /// There are new connections in a channel whose [`idle`](fsocket_abi::channel::Header::idle) was set.
        27 Arrives {
            channel: u32 = Id,
        };
        /// A process without an arena tells what it has counted since the last such message.
        61 Counts {
            counts: [Option<Counted>; 4] = Words,
        };
        /// The other side of this channel breaks the protocol, and this process does not use it any more. All connections in
        /// the channel are reset. For a while that other side gets no new one.
        58 Broken {
            channel: u32 = Id,
        };
        /// This process has looked after [`Transfer`]. The taker gets the same message.
        57 Transferred {
            number: u64 = Id,
        };
        /// The credentials of this process have changed. fd: its end of a new socket pair, made with the new ones, which is
        /// its control socket from here on. It holds the same listeners, and nothing else of what it had. [`Hello`] follows
        /// on the new socket. If the monitor refuses, that socket ends.
        70 Renew {};
        /// A listener that only the kernel serves has come to this port. For some destinations it may be nearer than one of
        /// ours: everybody asks again.
        72 Nearer {
            addr: Addr = Address,
        };
        /// A process tells what became of a descriptor of a connected kernel socket.
        74 Passed {
            /// The socket's SO_COOKIE.
            cookie: u64 = Id,
            what: Passing = Arg0,
        };
        /// The requester, the client of this channel, has had no connection in it for a while. If there is none, the channel
        /// ends ([`ChannelGone`](super::notice::ChannelGone), to the requester as well).
        91 Rest {
            channel: u32 = Id,
        };
        /// From the agent, right before [`Pair`]: how many bytes the end of the other host has sent and received.
        87 RemoteCounts {
            /// SO_COOKIE of the stand-in.
            name: u64 = Id,
            sent: u64 = Arg0,
            received: u64 = Arg1,
        };
        /// From the agent: a wish is fulfilled by a stand-in.
        88 Take {
            wish: u64 = Id,
            /// SO_COOKIE of the stand-in's socket.
            cookie: u64 = Arg0,
            /// Bytes that the stand-in has sent, and received.
            sent: u64 = Arg1,
            received: u64 = Arg2,
        };
        /// From the agent: a wish is not fulfilled.
        89 Refuse {
            wish: u64 = Id,
        };
    }
    // Requests with an answer.
    answered {
        /// The first message of a process. The sender does not wait for the answer, and reads it when first needed. fd of the
        /// answer: the registry, a read-only memfd ([`crate::registry`]). Errno EPROTO: the monitor has another ABI version.
        1 Hello {
            nonce: u64 = Id,
            pid: u32 = Arg0,
            /// ABI version of the library.
            version: u64 = Arg1,
            /// The rights of the process as a number.
            rights: u64 = Arg2,
            /// Name of the program, padded with NUL.
            name: [u8; 16] = Ip,
            /// An operator has sent the connections of this process to the kernel
            /// ([`ToKernel`](super::notice::ToKernel)).
            off: bool = Port,
        } -> {
            /// Number of the process.
            process: u64 = Id,
            /// Features of the monitor beyond the first version: [`REATTACH`](crate::REATTACH).
            understands: u64 = Arg0,
            /// Settings that the configuration has for the program: bits of [`program`](crate::program).
            program: u64 = Arg1,
        };
        /// fd: a socket that listens. The monitor takes address and network namespace from the descriptor itself
        /// (SO_ACCEPTCONN, SO_DOMAIN, SO_PROTOCOL, getsockname, IPV6_V6ONLY, SO_NETNS_COOKIE), so no process registers what
        /// it does not hold. The monitor closes it at once (else the port would stay taken).
        4 Listen {
            /// Processes that have not shown it may hold it ([`Unpublishing::UnlessServed`]).
            held_elsewhere: bool = Arg0,
        } -> {
            listener: u64 = Id,
            /// The program that this one has replaced worked for it.
            worked: bool = Arg0,
        };
        /// This process has closed its last descriptor of a listener. The last holder ends the listener. It is answered if
        /// its number is not 0: then the connections that nobody accepted have been reset, as after the kernel's `close`. With
        /// a listening socket as fd that one's listener is meant, if there is one: [`Listen`] was not answered in time.
        5 Unlisten {
            listener: u64 = Id,
            /// The listener ends although others hold it.
            for_all: bool = Arg0,
        } -> {};
        /// This process wants to accept. Before the answer comes one [`ChannelSrv`](super::notice::ChannelSrv) for each
        /// channel that exists; later channels follow as they are made. Errno EAGAIN: there are more than 64 workers, and this
        /// one only steals. EOPNOTSUPP: the processes that work for it have other rights (user, capabilities, groups), and the
        /// kernel serves it.
        6 Worker {
            listener: u64 = Id,
            /// The number that it had under a monitor before this one.
            number: Option<u32> = PlusOne<Arg0>,
            work: Work = Arg1,
        } -> {
            listener: u64 = Id,
            /// Number w of the worker: queue 1 + w is its own.
            number: u32 = Arg0,
            /// New connections go into the kernel's queue: [`Untaken`](super::notice::Untaken).
            untaken: bool = Arg1,
        };
        /// fd: the socket to be connected (its network namespace counts): TCP, unused, of a family that reaches the
        /// destination; or, after ENOKEY, that very socket once the kernel has connected it. The answer holds for
        /// [`ROUTE_SECS`](crate::ROUTE_SECS), or until the registry changes. A process gets the same channel again (then
        /// without fd) until it calls that one full. fd of the answer: the channel's memfd.
        ///
        /// | errno | meaning |
        /// | --- | --- |
        /// | ENOENT | there is no listener of ours, or one that only the kernel serves is nearer |
        /// | EMFILE, ENOMEM | something has run out |
        /// | EPERM | the listener is another user's |
        /// | EACCES | the administrator or the kernel is against it |
        /// | ENOKEY | the kernel must connect the socket first, because its policy may be against it |
        7 Connect {
            to: Addr = Address,
            /// A channel to the same listener that is full.
            full: Option<u32> = OrZero<Arg0>,
            /// A number for the properties by which a policy of the kernel may tell sockets apart. A connection that the kernel has let through
            /// proves nothing for sockets with another number. [`ODD`](crate::ODD): no other socket like it is expected.
            identity: u64 = Arg1,
        } -> {
            channel: u32 = Id,
            listener: u64 = Arg0,
            size: u64 = Arg1,
            /// The channel is one that the process has.
            known: bool = Arg2,
            /// The first lease of a new channel, as by [`Ports`]; 0: all are out.
            first_port: u16 = Port,
            /// A proof was needed, so the channel is only for sockets with this identity.
            proved: bool = Family,
            /// The word of the port in [`Closings`](super::notice::Closings) before the monitor looked at the listener. 0:
            /// there are none. The answer holds while the word is the same.
            closings: u32 = V6only,
        };
        /// A lease of client ports for a channel. Channels of one process to different destinations may have the same lease; it
        /// is returned at the end of the last of them. Errno EAGAIN: all are out. With a bound TCP socket as fd: the socket's
        /// port is the channel's from now on; EADDRINUSE: another channel has it.
        8 Ports {
            channel: u32 = Id,
            /// The channel has had the lease with this first port since a monitor before this one. Errno EADDRINUSE: another
            /// channel has it.
            again: Option<u16> = OrZero<Arg2>,
        } -> {
            first: u16 = Arg0,
            count: u32 = Arg1,
        };
        /// Has a connection over shared memory this address? fd: a TCP socket that is to be bound to it. Errno EADDRINUSE,
        /// EADDRNOTAVAIL: such a connection is in the way.
        73 InUse {
            addr: Addr = Address,
            /// The socket is bound, and the kernel is to connect it to the address.
            connects: bool = Arg0,
        } -> {};
        /// A connection goes over to kernel TCP. Errno EALREADY: the two ends exist (the requester then takes its own by
        /// [`Claim`]). EXDEV: the monitor cannot make sockets in the connection's network namespace.
        14 Switch {
            channel: u32 = Id,
            /// The requester's end.
            end: End = Arg0,
            generation: u32 = Low<Arg1>,
            /// For [`Switching::Act`].
            acts: Acts = High<Arg1>,
            what: Switching = Arg2,
        } -> {};
        /// The requester's end of a connection that has been switched is wanted. fd of the answer: that end. Errno ENOENT:
        /// there is none. Nobody is given the other side's end.
        15 Claim {
            channel: u32 = Id,
            end: End = Arg0,
            generation: u32 = Arg1,
            /// The requester sends itself what the other side has not read. A [`Switching::Act`] that comes later (nobody
            /// waited for it) does not.
            pours: bool = Arg2,
        } -> {};
        /// Nobody on this side needs its end from the monitor any more, and the monitor closes it. Without a number it is not
        /// answered.
        16 Release {
            channel: u32 = Id,
            end: End = Arg0,
            generation: u32 = Arg1,
            /// The side closes, and has read all of the ring. The same bytes in its end ([`CARRIED`]) are not unread ones,
            /// which the kernel would answer with a reset.
            ///
            /// [`CARRIED`]: fsocket_abi::channel::status::CARRIED
            read_all: bool = Arg2,
        } -> {};
        /// A listener was handed to a process that may not have the library. When it is answered, no connection comes to it over
        /// shared memory but those that wait in its queues; new ones use the kernel. fd: the listener, which says in which
        /// network namespace it is. The monitor moves what waits in its queues into the kernel's. Errno EBUSY: the condition
        /// in `how` is not met.
        18 Unpublish {
            listener: u64 = Id,
            how: Unpublishing = Arg0,
        } -> {};
        /// Steering of devices ([`crate::steer`]). fd: a memfd with a request as JSON; the answer has a memfd with the answer as
        /// JSON. The devices are those of the network namespace from which the requester has connected. Errno EPERM: the
        /// requester is not root. Needs no [`Hello`].
        17 Steer {
            length: u64 = Arg0,
        } -> {
            length: u64 = Arg0,
        };
        /// A report as JSON ([`crate::report`]), for commands. fd of the answer: a memfd. Needs no [`Hello`].
        12 Report {
            /// The counters of zones are zero afterwards.
            reset: bool = Arg1,
            /// Without the list of connections.
            brief: bool = Arg2,
        } -> {
            length: u64 = Arg0,
        };
        /// An operator's request ([`crate::operate`]). fd, and fd of the answer: a memfd with JSON. Errno ENOENT: there is no
        /// process of that kind. EPERM: it is not the requester's. Needs no [`Hello`].
        83 Operate {
            length: u64 = Arg0,
        } -> {
            length: u64 = Arg0,
        };
        /// fd: the global listen socket of a listener that has at least one local one beside it. fd of the answer: the program
        /// that selects among them, to be attached to the socket. No fd there: strangers have some of those sockets, and
        /// [`Look`](super::notice::Look) says when to ask again. Errno EOPNOTSUPP: there is no BPF here.
        20 Group {
            /// The socket is one of several that the program itself makes share the address. Every one is to be shown.
            own: bool = Arg0,
        } -> {
            group: u64 = Id,
        };
        /// fd: a local listen socket of a group that this process has shown. The monitor keeps no descriptor: the socket dies
        /// with the worker.
        21 Local {
            group: u64 = Id,
            /// CPU of the worker; none: any CPU.
            cpu: Option<u32> = OrOnes<Arg0>,
            /// Others of its kind may be on probation and have only the global socket.
            on_trial: bool = Arg1,
        } -> {
            group: u64 = Id,
            place: u32 = Arg0,
            cpu: u32 = Arg1,
        };
        /// A local listen socket is closed, and the worker goes on without it. When it is answered, the monitor holds no
        /// descriptor of it any more. Without a number it is not answered.
        22 Left {
            group: u64 = Id,
            place: u32 = Arg0,
        } -> {};
        /// Make what this process may not make itself. fd: the global listen socket. fd of the answer: the new socket.
        23 Clone {
            /// A reservation (see the crate zones); else a local listen socket.
            reservation: bool = Arg0,
        } -> {};
        /// The balance of a group of which this process has shown the global listen socket. fd of the answer: the BPF array to
        /// be mapped (`fsocket_abi::balance`). Errno EOPNOTSUPP: there is none.
        24 Balance {
            group: u64 = Id,
        } -> {};
        /// This process is about to change options of a listener that it holds. Connections that wait in its queues are marked
        /// with `mark` (`Prod::options`), but for those that have a mark.
        28 Options {
            listener: u64 = Id,
            /// 0: none is marked, and the answer is how many wait.
            mark: u32 = Arg0,
        } -> {
            /// Number of connections that were marked, or that wait.
            marked: u32 = Arg0,
        };
        /// This process accepts without a local listen socket beside those of a group of which it has shown the global one. fd
        /// of the answer: a local one at which a connection waits. Errno EAGAIN: there is none, and the process gets one
        /// [`WakeHint`](super::notice::WakeHint). ENOENT: it gets none.
        29 Waiting {
            group: u64 = Id,
        } -> {
            place: u32 = Arg0,
        };
        /// The global listen socket of a group, which this process has shown, is about to be shut down. The local ones that the
        /// monitor holds are shut down, and their workers are told.
        30 Shut {
            group: u64 = Id,
            /// The socket goes on, for a process without the library, and gets everything.
            goes_on: bool = Arg0,
        } -> {};
        /// fd: a kernel connection that this process has accepted, and that may go over to shared memory. When it is answered,
        /// nobody else holds fd any more. Errno EXDEV: it is on another host, or cannot go over. EAGAIN: it was received, and
        /// others may have it.
        54 Offer {
            /// How this process calls the connection.
            name: u64 = Id,
            /// The other end may be in another network namespace.
            across: bool = Arg0,
            /// It was received from another process ([`Passed`]).
            received: bool = Arg1,
        } -> {};
        /// fd: the other end of an offered connection. It is to go over into a slot of a channel, which is in state OFFERED.
        /// When it is answered, the other side has been told. Errno ENOENT: nobody has offered it. EXDEV: it never can.
        55 Upgrade {
            channel: u32 = Id,
            slot: usize = Below<Arg0, SLOTS_END>,
            generation: u32 = Arg1,
            /// The channel is the one of [`Meet`].
            met: bool = Arg2,
            /// As in [`Offer`].
            received: bool = V6only,
        } -> {
            /// Not 0: the other side is on another host, and may take so many milliseconds.
            patience: u64 = Arg2,
        };
        /// fd: a kernel connection that this process has opened, whose other end may be in another network namespace of this
        /// host. The answer is a channel to the listener that has accepted it, as for [`Connect`]. Errno ENOENT: nobody has
        /// offered the other end (yet). EXDEV: it is on another host, or cannot go over. EPERM, EACCES: as for [`Connect`].
        59 Meet {
            /// The other end is in this network namespace, and was passed to another process than the one that listens.
            here: bool = Arg1,
        } -> {
            channel: u32 = Id,
            listener: u64 = Arg0,
            size: u64 = Arg1,
            known: bool = Arg2,
            first_port: u16 = Port,
        };
        /// This process takes a descriptor of another one. fd: that one's pidfd. Errno ENOENT: it is none of ours. EPERM: it is
        /// another user's. Once the taker has the socket, it sends the message again with `shown` and with the socket as fd:
        /// the holder is told. Errno ENOENT: ask again.
        56 Transfer {
            /// With `shown`: the number in the answer before.
            number: u64 = Id,
            /// Number of the descriptor in the holder.
            descriptor: u32 = Arg0,
            /// The holder's pid, as the taker numbers it.
            pid: u32 = Arg1,
            shown: bool = Arg2,
        } -> {
            number: u64 = Id,
            /// In what the holder is told, unasked and with no number: the descriptor, and the socket's SO_COOKIE.
            descriptor: u32 = Arg0,
            cookie: u64 = Arg1,
        };
        /// One of the arenas that the successor has inherited is wanted. fd of the answer: its memfd. Errno ENOENT: there are no
        /// more.
        51 InheritedArena {
            index: u64 = Id,
        } -> {};
        /// The memory of a channel is wanted, for a process on a side of it. fd of the answer: the memfd. Errno ENOENT.
        52 ChannelHandle {
            channel: u32 = Id,
            side: Side = Arg0,
        } -> {
            listener: u64 = Arg0,
        };
        /// The successor has taken over what it has descriptors for. When it is answered, what only the replaced program had is
        /// closed.
        53 Settled {} -> {};
        /// This process is the agent of this host: it carries connections to other hosts ([`crate::agent`]). It speaks on a
        /// socket of its own, without [`Hello`]; its library has another one. fd of the answer: its part of the configuration as
        /// JSON. Errno EPERM: it is not root's (nor, if the monitor is private, the monitor's user's). EOPNOTSUPP: the
        /// configuration has none.
        84 Agent {} -> {
            length: u64 = Arg0,
        };
        /// From the agent: one of the host with this address can be reached, or cannot. Errno ENOENT: the monitor knows no
        /// listener of this agent's, by which programs could reach it. EINVAL: the configuration does not name that host.
        85 Link {
            up: bool = Arg0,
            host: [u8; 16] = Ip,
        } -> {};
        /// From the agent: a stand-in is to go over in place of the other host's end of a connection. That end is at rest, as
        /// [`RemoteCounts`] has said. Errno ENOENT: nobody here has offered this host's end.
        90 Pair {
            /// SO_COOKIE of the stand-in.
            name: u64 = Id,
            /// As this host sees the connection.
            ends: Ends = BothEnds,
        } -> {};
    }
    notices {
        /// The monitor knows both sides of this channel, and tells of their ends.
        81 Watched {
            channel: u32 = Id,
        };
        /// An operator wants all connections of this process over shared memory to become the kernel's, or lets those come
        /// back. The process says in [`Hello`](super::request::Hello) to a later monitor which it was.
        82 ToKernel {
            off: bool = Arg0,
        };
        /// fd: the local listen socket of another worker of the group, to steal from.
        41 Peer {
            group: u64 = Id,
            place: u32 = Arg0,
            /// The worker's zone.
            cpu: u32 = Arg1,
        };
        /// A worker of the group is gone or has given up its local listen socket. Anybody may take what waits there. The
        /// descriptor is to be closed once it is empty, so that the kernel moves what is still in a handshake.
        42 PeerGone {
            group: u64 = Id,
            place: u32 = Arg0,
        };
        /// Connections of the group wait for a worker that does not look.
        43 WakeHint {
            group: u64 = Id,
        };
        /// A local listen socket of the group was closed, and what waited there has moved to the global one. The kernel wakes
        /// nobody for it.
        40 Look {
            group: u64 = Id,
        };
        /// A connection that this process has offered goes over. fd: the memory of the channel.
        34 UpgradeSrv {
            channel: u32 = Id,
            listener: u64 = Arg0,
            slot: usize = Below<Low<Arg1>, SLOTS_END>,
            generation: u32 = High<Arg1>,
            /// How this process calls the connection.
            name: u64 = Arg2,
            /// After [`Meet`](super::request::Meet).
            met: bool = V6only,
        };
        /// The holder has looked after the [`Transfer`](super::request::Transfer) of this number.
        57 Transferred {
            number: u64 = Id,
        };
        /// A process with other rights wants to accept on this listener, and new connections use the kernel. What waits in its
        /// queues is to be put into the kernel's.
        71 OtherRights {
            listener: u64 = Id,
        };
        /// Connections to this listener waited in its queues, and nobody took them. They go into the kernel's queue, as new ones
        /// do until a process that has emptied it says so ([`Work::Accepts`]).
        92 Untaken {
            listener: u64 = Id,
        };
        /// Somebody connects to a listener for which this process works. fd: the memory of the channel.
        32 ChannelSrv {
            channel: u32 = Id,
            listener: u64 = Arg0,
            size: u64 = Arg1,
        };
        /// The other side of this channel is gone, and every connection in it has been closed or reset. The process unmaps it
        /// when it has read what is there.
        33 ChannelGone {
            channel: u32 = Id,
            /// The other side broke the protocol ([`Broken`](super::request::Broken)).
            broken: bool = Arg0,
        };
        /// Wake a thread of this process.
        35 Woken {
            waker: u8 = Id,
            /// The channel in which it was rung; none: in channels that are not named.
            channel: Option<u32> = OrZero<Arg0>,
            waiter: Waiter = Arg1,
            /// The process that asked; none: the monitor itself.
            ringer: Option<u64> = OrZero<Arg2>,
        };
        /// After [`Waker`](super::request::Waker), with the same fields. fd: the read end of a pipe (`O_NONBLOCK`) that nobody
        /// else has.
        36 WakerRead {
            waker: u8 = Id,
            channel: u32 = Arg0,
            waiter: Waiter = Arg1,
            ringer: u64 = Arg2,
        };
        /// After the other side's [`WakerReady`](super::request::WakerReady). fd: the same pipe, opened once more to write. It
        /// can be read, too, so that the end of the reader is no SIGPIPE.
        37 WakerWrite {
            /// The key of the thread at the other end.
            key: u64 = Id,
            channel: u32 = Arg0,
            waiter: Waiter = Arg1,
        };
        /// Comes before the first answer to [`Connect`](super::request::Connect) that depends on it. fd, to be mapped to read:
        /// one word for each port ([`CLOSINGS_SIZE`](crate::CLOSINGS_SIZE)). The kernel changes the word of a port, before
        /// anybody else can have the port, when a socket there stops to listen; also when one begins to.
        38 Closings {};
        /// To the agent: a process wants its connection to a linked host to go over. [`RemoteCounts`] comes right before.
        /// An answer is [`Take`](super::request::Take) or [`Refuse`](super::request::Refuse), or none.
        86 Open {
            wish: u64 = Id,
            ends: Ends = BothEnds,
        };
        /// To the agent, right before [`Open`]: how many bytes the program's end has sent and received.
        87 RemoteCounts {
            wish: u64 = Id,
            sent: u64 = Arg0,
            received: u64 = Arg1,
        };
    }
}

/// [`request::Meet`] is answered like [`request::Connect`].
impl From<answer::Connect> for answer::Meet {
    fn from(answer: answer::Connect) -> answer::Meet {
        let answer::Connect { channel, listener, size, known, first_port, .. } = answer;
        answer::Meet { channel, listener, size, known, first_port }
    }
}

impl Msg {
    /// The monitor does not do what this packet asks for. `errno` is positive. A [`Hello`](request::Hello) is also
    /// told the ABI version of the monitor.
    #[must_use]
    pub fn refused(&self, errno: i32) -> Msg {
        let arg0 = if self.is::<request::Hello>() { fsocket_abi::VERSION.into() } else { 0 };
        Msg { result: errno, arg0, ..Msg::new(self.kind).numbered(self.seq) }
    }
}

#[cfg(test)]
mod tests;
