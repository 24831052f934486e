//! The table of all messages. Add a new message here. Its kind must be new within its part of the
//! table, and a number that was used once must not be used again.
//!
//! `fd` is the descriptor that comes with the packet. `errno` is the reason that an answer gives
//! for a refusal.
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
        /// The process is about to fork. fd: the child's end of a socket pair, which becomes the
        /// child's control socket. The child belongs to the parent's family. It holds every
        /// listener that the parent holds, and every connection of the fork group whose `holders`
        /// contain its nonce. The child itself sends [`Hello`] with the same nonce over the new
        /// socket.
        2 Adopt {
            /// The child's nonce.
            nonce: u64 = Id,
            /// The child is the *successor*: the program that replaces this one by `exec`, or that `posix_spawn`
            /// starts. The successor gets only those listeners that [`Keep`] names.
            successor: bool = Arg0,
        };
        /// The successor holds this listener, too.
        50 Keep {
            /// The successor's nonce.
            nonce: u64 = Id,
            listener: u64 = Arg0,
        };
        /// The arena of this process. fd: a memfd of exactly `ARENA_SIZE` bytes, sealed against
        /// shrink and grow. The monitor checks seals and size before it maps the memfd. If
        /// another process with the same rights has made the arena, this process belongs to that
        /// process's fork group.
        3 Arena {
            size: u64 = Arg0,
            /// Another process has made the arena, and this process has inherited it.
            inherited: bool = Arg1,
        };
        /// This process has a channel that a former monitor made. fd: the channel's memfd. The
        /// monitor sends [`Watched`](super::notice::Watched) when both sides have shown the
        /// channel. Two processes that show the same memory are its two sides. A side belongs to
        /// one fork group, or to the processes that hold the listener.
        80 Attach {
            channel: u32 = Id,
            /// The side of this process.
            side: Side = Arg0,
            /// For the server's side: a process that holds this listener may accept in the
            /// channel.
            listener: u64 = Arg1,
            /// For the client's side: this process opens connections in the channel.
            opens: bool = Arg2,
        };
        /// Peers of this process have woken one of its threads through the monitor for some time.
        /// The process now asks for a pipe between the thread and one of these peers. The monitor
        /// answers only with [`WakerRead`](super::notice::WakerRead), and only once for the same
        /// pair.
        9 Waker {
            /// Index of the thread's waker.
            waker: u8 = Id,
            channel: u32 = Arg0,
            waiter: Waiter = Arg1,
            /// The process that wakes the thread, as in [`Woken`](super::notice::Woken).
            ringer: u64 = Arg2,
        };
        /// The thread waits on the read end that came with
        /// [`WakerRead`](super::notice::WakerRead). The monitor sends the write end to the
        /// process that wakes the thread ([`WakerWrite`](super::notice::WakerWrite)). Fields as
        /// in [`Waker`].
        10 WakerReady {
            waker: u8 = Id,
            channel: u32 = Arg0,
            waiter: Waiter = Arg1,
            ringer: u64 = Arg2,
        };
        /// Asks the monitor to wake a thread that waits in a channel. The requester is on either
        /// side of the channel. This is cheaper than a pipe for a connection that may remain the
        /// only one.
        13 Ring {
            /// The thread's [`waker_key`](fsocket_abi::channel::waker_key).
            key: u64 = Id,
            channel: u32 = Arg0,
            waiter: Waiter = Arg1,
        };
        /// A thread waits for connections on the local listen socket fd. Other processes of the
        /// group that wait likewise may steal from this socket, and this process gets their
        /// sockets.
        25 Share {
            group: u64 = Id,
            place: u32 = Arg0,
        };
        /// This process has closed a socket that [`PeerGone`](super::notice::PeerGone) has named.
        /// If it was the last process that had the socket, the kernel has moved the connections
        /// that waited there.
        26 PeerClosed {
            group: u64 = Id,
        };
        /// There are new connections in a channel whose [`idle`](fsocket_abi::channel::Header::idle) was set.
        27 Arrives {
            channel: u32 = Id,
        };
        /// A process without an arena reports its counts since the last such message.
        61 Counts {
            counts: [Option<Counted>; 4] = Words,
        };
        /// The other side of this channel has broken the protocol, and this process does not use
        /// the channel any more. All connections in the channel are reset. For a while the
        /// monitor gives the other side no new channel.
        58 Broken {
            channel: u32 = Id,
        };
        /// This process has handled [`Transfer`]. The process that takes the connection sends the
        /// same message when it has done its part.
        57 Transferred {
            number: u64 = Id,
        };
        /// The credentials of this process have changed. fd: the monitor's end of a new socket
        /// pair, which was made with the new credentials and replaces the control socket. The
        /// process still holds the same listeners, but nothing else that it had. [`Hello`]
        /// follows on the new socket. If the monitor refuses, it closes that socket.
        70 Renew {};
        /// A program has begun to listen on this port in the kernel only. For some destinations
        /// its listener may be a better match than a listener of the library, so all clients must
        /// ask again.
        72 Nearer {
            addr: Addr = Address,
        };
        /// A process reports what became of a descriptor of a connected kernel socket.
        74 Passed {
            /// The socket's SO_COOKIE.
            cookie: u64 = Id,
            what: Passing = Arg0,
        };
        /// The sender, the client of this channel, has had no connection in it for a while. If
        /// there is no connection at all, the monitor ends the channel
        /// ([`ChannelGone`](super::notice::ChannelGone), which the sender gets as well).
        91 Rest {
            channel: u32 = Id,
        };
        /// From the agent, right before [`Pair`]: the number of bytes that the other host's end has sent and
        /// received.
        87 RemoteCounts {
            /// SO_COOKIE of the stand-in.
            name: u64 = Id,
            sent: u64 = Arg0,
            received: u64 = Arg1,
        };
        /// From the agent: a stand-in fulfils the wish of [`Open`](super::notice::Open). (A stand-in is a kernel
        /// connection of the agent to itself, which takes the place of the other host's end of a connection.)
        88 Take {
            wish: u64 = Id,
            /// SO_COOKIE of the stand-in's socket.
            cookie: u64 = Arg0,
            /// Bytes that the stand-in's socket has sent, and received.
            sent: u64 = Arg1,
            received: u64 = Arg2,
        };
        /// From the agent: no stand-in will fulfil this wish.
        89 Refuse {
            wish: u64 = Id,
        };
    }
    // Requests with an answer.
    answered {
        /// The first message of a process. The sender does not wait for the answer, and reads it when it first needs
        /// it. fd of the answer: the registry, a read-only memfd ([`crate::registry`]). Errno EPROTO: the monitor has
        /// another ABI version.
        1 Hello {
            nonce: u64 = Id,
            pid: u32 = Arg0,
            /// ABI version of the library.
            version: u64 = Arg1,
            /// The rights of the process, as a number that the library computes.
            rights: u64 = Arg2,
            /// Name of the program, padded with NUL.
            name: [u8; 16] = Ip,
            /// An operator has moved the connections of this process to the kernel
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
        /// The process listens on the socket fd. The monitor takes address and network namespace
        /// from the descriptor itself (SO_ACCEPTCONN, SO_DOMAIN, SO_PROTOCOL, getsockname,
        /// IPV6_V6ONLY, SO_NETNS_COOKIE), so a process can register only what it holds. The
        /// monitor closes its copy of the descriptor at once (otherwise the port would stay in
        /// use).
        4 Listen {
            /// Processes that have not shown the listener to the monitor may hold it, too
            /// ([`Unpublishing::UnlessServed`]).
            held_elsewhere: bool = Arg0,
        } -> {
            listener: u64 = Id,
            /// The program that this one has replaced by `exec` was a worker of the listener.
            worked: bool = Arg0,
        };
        /// This process has closed its last descriptor of a listener. When the last holder does
        /// so, the listener ends. The monitor answers a request with a number other than 0, after
        /// connections that nobody accepted have been reset (as after the kernel's `close`). If
        /// fd is a listening socket, the request concerns the listener of that socket, if there
        /// is one: the answer to [`Listen`] has come too late.
        5 Unlisten {
            listener: u64 = Id,
            /// The listener ends even if other processes hold it.
            for_all: bool = Arg0,
        } -> {};
        /// This process wants to accept. Before the answer the monitor sends one
        /// [`ChannelSrv`](super::notice::ChannelSrv) for each existing channel; later channels
        /// follow when they are made. Errno EAGAIN: there are more than 64 workers, so this one
        /// can only steal. EOPNOTSUPP: the existing workers have other rights (user,
        /// capabilities, groups), so the kernel serves the listener.
        6 Worker {
            listener: u64 = Id,
            /// The number that the worker had under the former monitor.
            number: Option<u32> = PlusOne<Arg0>,
            work: Work = Arg1,
        } -> {
            listener: u64 = Id,
            /// Number w of the worker. Its own queue is queue 1 + w.
            number: u32 = Arg0,
            /// New connections must use the kernel's queue: [`Untaken`](super::notice::Untaken).
            untaken: bool = Arg1,
        };
        /// Asks for the channel to a listener. fd: the socket to be connected (its network
        /// namespace counts): TCP, unused, of a family that reaches the destination; or, after
        /// ENOKEY, that very socket once the kernel has connected it. The answer holds for
        /// [`ROUTE_SECS`](crate::ROUTE_SECS), or until the registry changes. A process gets the
        /// same channel again (without fd) until it reports that the channel is full. fd of the
        /// answer: the channel's memfd.
        ///
        /// | errno | meaning |
        /// | --- | --- |
        /// | ENOENT | no program with the library listens there, or a listener that only the kernel serves is nearer |
        /// | EMFILE, ENOMEM | something has run out |
        /// | EPERM | the listener belongs to another user |
        /// | EACCES | the administrator or the kernel forbids the connection |
        /// | ENOKEY | the kernel must connect the socket first, because its policy may forbid the connection |
        7 Connect {
            to: Addr = Address,
            /// A channel to the same listener, which is full.
            full: Option<u32> = OrZero<Arg0>,
            /// A number for the properties by which a policy of the kernel may tell sockets
            /// apart. A connection that the kernel has allowed proves nothing about sockets with
            /// another number. [`ODD`](crate::ODD): the properties are unusual, so no other
            /// socket is expected to share them.
            identity: u64 = Arg1,
        } -> {
            channel: u32 = Id,
            listener: u64 = Arg0,
            size: u64 = Arg1,
            /// The process has this channel already.
            known: bool = Arg2,
            /// The first port lease of a new channel, as from [`Ports`]; 0: no lease is left.
            first_port: u16 = Port,
            /// The kernel had to connect a socket first, so only sockets with this identity may
            /// use the channel.
            proved: bool = Family,
            /// The port's word in [`Closings`](super::notice::Closings) before the monitor looked
            /// at the listener. 0: there is no such word. The answer holds as long as the word
            /// has this value.
            closings: u32 = V6only,
        };
        /// Asks for a lease of client ports for a channel. Channels of one process to different
        /// destinations may share a lease; the lease is returned when the last of them ends.
        /// Errno EAGAIN: no lease is left. With a bound TCP socket as fd, the request concerns
        /// that socket's port: it belongs to the channel from now on. Errno EADDRINUSE: another
        /// channel has the port.
        8 Ports {
            channel: u32 = Id,
            /// The channel has had the lease with this first port since a former monitor. Errno
            /// EADDRINUSE: another channel has the lease.
            again: Option<u16> = OrZero<Arg2>,
        } -> {
            first: u16 = Arg0,
            count: u32 = Arg1,
        };
        /// Does a connection over shared memory use this address? fd: a TCP socket that the
        /// program is about to bind to the address. Errno EADDRINUSE, EADDRNOTAVAIL: there is
        /// such a connection.
        73 InUse {
            addr: Addr = Address,
            /// The socket is bound, and the kernel is about to connect it to the address.
            connects: bool = Arg0,
        } -> {};
        /// A connection moves to kernel TCP. Errno EALREADY: the two kernel ends exist already
        /// (the sender then gets its own one by [`Claim`]). EXDEV: the monitor cannot make
        /// sockets in the connection's network namespace.
        14 Switch {
            channel: u32 = Id,
            /// The requester's end.
            end: End = Arg0,
            generation: u32 = Low<Arg1>,
            /// The actions of [`Switching::Act`].
            acts: Acts = High<Arg1>,
            what: Switching = Arg2,
        } -> {};
        /// Asks for the sender's kernel end of a connection that has moved. fd of the answer:
        /// that end. Errno ENOENT: there is none. A process does not get the other side's end.
        15 Claim {
            channel: u32 = Id,
            end: End = Arg0,
            generation: u32 = Arg1,
            /// The sender itself sends on the bytes that the other side has not read. The monitor
            /// then ignores this part of a later [`Switching::Act`] (whose answer nobody awaits).
            pours: bool = Arg2,
        } -> {};
        /// No process on this side needs its kernel end from the monitor any more, so the monitor
        /// closes its copy. The monitor does not answer a request without a number.
        16 Release {
            channel: u32 = Id,
            end: End = Arg0,
            generation: u32 = Arg1,
            /// The side closes, and has read all of the ring. The kernel end may contain the same
            /// bytes ([`has_carried`]). They must not count as unread, because the kernel would
            /// then answer with a reset.
            ///
            /// [`has_carried`]: fsocket_abi::path_switch::PeerStatus::has_carried
            read_all: bool = Arg2,
        } -> {};
        /// The listener was handed to a process that may not have the library. After the answer,
        /// no connection reaches it over shared memory except those that wait in its queues; new
        /// ones use the kernel. fd: the listener, which shows its network namespace. The monitor
        /// moves the connections that wait in its queues to the kernel's queue. Errno EBUSY: the
        /// condition in `how` is not met.
        18 Unpublish {
            listener: u64 = Id,
            how: Unpublishing = Arg0,
        } -> {};
        /// A request about steering of devices ([`crate::steer`]). fd: a memfd with the request
        /// as JSON; the answer has a memfd with JSON, too. The devices are those of the network
        /// namespace from which the requester has connected. Errno EPERM: the requester is not
        /// root. [`Hello`] need not come before.
        17 Steer {
            length: u64 = Arg0,
        } -> {
            length: u64 = Arg0,
        };
        /// Asks for a report as JSON ([`crate::report`]), for commands. fd of the answer: a
        /// memfd. [`Hello`] need not come before.
        12 Report {
            /// Sets the counters of zones to zero after the report.
            reset: bool = Arg1,
            /// Leaves out the list of connections.
            brief: bool = Arg2,
        } -> {
            length: u64 = Arg0,
        };
        /// An operator's request ([`crate::operate`]). fd, and fd of the answer: a memfd with
        /// JSON. Errno ENOENT: there is no such process. EPERM: the process belongs to another
        /// user. [`Hello`] need not come before.
        83 Operate {
            length: u64 = Arg0,
        } -> {
            length: u64 = Arg0,
        };
        /// Asks for the selecting program of a group. fd: the global listen socket of a listener
        /// that has at least one local socket beside it. fd of the answer: the BPF program that
        /// selects among these sockets; the process has to attach it to the socket. The answer
        /// has no fd if other users' processes hold some of those sockets;
        /// [`Look`](super::notice::Look) says when to ask again. Errno EOPNOTSUPP: BPF is not
        /// available.
        20 Group {
            /// The program itself has set SO_REUSEPORT, and this is one of its sockets at the
            /// address. The process has to show each of them.
            own: bool = Arg0,
        } -> {
            group: u64 = Id,
        };
        /// Registers a worker. fd: a local listen socket of a group that this process has shown.
        /// The monitor keeps no descriptor of it, so the kernel closes the socket when the worker
        /// dies.
        21 Local {
            group: u64 = Id,
            /// CPU of the worker; none: any CPU.
            cpu: Option<u32> = OrOnes<Arg0>,
            /// Other workers of the same kind may be on probation, and use only the global
            /// socket.
            on_trial: bool = Arg1,
        } -> {
            group: u64 = Id,
            place: u32 = Arg0,
            cpu: u32 = Arg1,
        };
        /// The worker has closed its local listen socket, and goes on without one. After the
        /// answer the monitor has no descriptor of the socket any more. The monitor does not
        /// answer a request without a number.
        22 Left {
            group: u64 = Id,
            place: u32 = Arg0,
        } -> {};
        /// Asks the monitor to make a socket that this process may not make itself. fd: the
        /// global listen socket. fd of the answer: the new socket.
        23 Clone {
            /// Make a reservation (see the crate zones), not a local listen socket.
            reservation: bool = Arg0,
        } -> {};
        /// Asks for the counts of a group, whose global listen socket this process has shown. fd
        /// of the answer: the BPF array to map (`fsocket_abi::balance`). Errno EOPNOTSUPP: there
        /// is none.
        24 Balance {
            group: u64 = Id,
        } -> {};
        /// This process is about to change options of a listener. The monitor stores `mark`
        /// (`Prod::options`) in connections that wait in the listener's queues and have no mark
        /// yet.
        28 Options {
            listener: u64 = Id,
            /// 0: no connection is marked, and the answer has the number of waiting connections.
            mark: u32 = Arg0,
        } -> {
            /// Number of connections that were marked, or that wait.
            marked: u32 = Arg0,
        };
        /// This process has no local socket, and accepts in a group whose global socket it has
        /// shown. fd of the answer: a local socket in which a connection waits. Errno EAGAIN: no
        /// connection waits, and the monitor will send one [`WakeHint`](super::notice::WakeHint).
        /// ENOENT: the monitor will not send one.
        29 Waiting {
            group: u64 = Id,
        } -> {
            place: u32 = Arg0,
        };
        /// The process is about to shut down the global listen socket of a group that it has
        /// shown. The monitor shuts down the local sockets that it holds, and notifies their
        /// workers.
        30 Shut {
            group: u64 = Id,
            /// A process without the library continues to use the global socket, and gets all
            /// connections.
            goes_on: bool = Arg0,
        } -> {};
        /// This process offers a connection. fd: a kernel connection that it has accepted, and
        /// that may move to shared memory. After the answer no other process has fd any more.
        /// Errno EXDEV: the other end is on another host, or the connection cannot move. EAGAIN:
        /// this process has received the connection from another one, which may still hold it.
        54 Offer {
            /// The process's name for the connection.
            name: u64 = Id,
            /// The other end may be in another network namespace.
            across: bool = Arg0,
            /// The process has received it from another one ([`Passed`]).
            received: bool = Arg1,
        } -> {};
        /// This process has opened a connection whose other end was offered. fd: its end. The
        /// connection moves to a slot of a channel, which is in state OFFERED. When the answer
        /// comes, the other side was notified. Errno ENOENT: nobody has offered the other end.
        /// EXDEV: the connection can never move.
        55 Upgrade {
            channel: u32 = Id,
            slot: usize = Below<Arg0, SLOTS_END>,
            generation: u32 = Arg1,
            /// The channel comes from [`Meet`].
            met: bool = Arg2,
            /// As in [`Offer`].
            received: bool = V6only,
        } -> {
            /// Not 0: the other side is on another host, and may take up to this many
            /// milliseconds.
            patience: u64 = Arg2,
        };
        /// Asks for a channel. fd: a kernel connection that this process has opened, whose other
        /// end may be in another network namespace of this host. The answer is a channel to the
        /// listener that has accepted it, as for [`Connect`]. Errno ENOENT: nobody has offered
        /// the other end (yet). EXDEV: the other end is on another host, or cannot move. EPERM,
        /// EACCES: as for [`Connect`].
        59 Meet {
            /// The other end is in this network namespace, and was passed to a process other than
            /// the one that listens.
            here: bool = Arg1,
        } -> {
            channel: u32 = Id,
            listener: u64 = Arg0,
            size: u64 = Arg1,
            known: bool = Arg2,
            first_port: u16 = Port,
        };
        /// This process takes a descriptor from another process (pidfd_getfd). fd: the pidfd of
        /// that process. Errno ENOENT: that process is no client. EPERM: it belongs to another
        /// user. Once the taker has the socket, it sends the message again with `shown` and with
        /// the socket as fd, and the monitor notifies the holder. Errno ENOENT: ask again.
        56 Transfer {
            /// With `shown`: the number from the first answer.
            number: u64 = Id,
            /// Number of the descriptor in the holder.
            descriptor: u32 = Arg0,
            /// The holder's pid, as the taker numbers it.
            pid: u32 = Arg1,
            shown: bool = Arg2,
        } -> {
            number: u64 = Id,
            /// In the message to the holder (which has no number): the descriptor, and the
            /// socket's SO_COOKIE.
            descriptor: u32 = Arg0,
            cookie: u64 = Arg1,
        };
        /// Asks for one of the arenas that the successor has inherited. fd of the answer: its memfd. Errno ENOENT:
        /// there are no more.
        51 InheritedArena {
            index: u64 = Id,
        } -> {};
        /// Asks for the memory of a channel, for a process on one of its sides. fd of the answer: the memfd. Errno
        /// ENOENT.
        52 ChannelHandle {
            channel: u32 = Id,
            side: Side = Arg0,
        } -> {
            listener: u64 = Arg0,
        };
        /// The successor has taken over everything for which it has descriptors. Before the
        /// answer, the monitor closes what else the replaced program had.
        53 Settled {} -> {};
        /// This process is the agent of this host: it carries connections to other hosts
        /// ([`crate::agent`]). It talks to the monitor over a socket of its own, without
        /// [`Hello`]; its library has another one. fd of the answer: the agent's part of the
        /// configuration as JSON. Errno EPERM: the process does not run as root (or, with a
        /// private monitor, as the monitor's user). EOPNOTSUPP: the configuration has no such
        /// part.
        84 Agent {} -> {
            length: u64 = Arg0,
        };
        /// From the agent: the host with this address can be reached (`up`), or cannot. Errno
        /// ENOENT: the monitor knows no listener of this agent through which programs could reach
        /// that host. EINVAL: the configuration does not name it.
        85 Link {
            up: bool = Arg0,
            host: [u8; 16] = Ip,
        } -> {};
        /// From the agent: a stand-in shall move to shared memory in place of the other host's
        /// end of a connection. That end is at rest, with the counts of [`RemoteCounts`]. Errno
        /// ENOENT: no process here has offered this host's end.
        90 Pair {
            /// SO_COOKIE of the stand-in.
            name: u64 = Id,
            /// Both addresses, as this host sees the connection.
            ends: Ends = BothEnds,
        } -> {};
    }
    notices {
        /// The monitor knows both sides of this channel, and will send a message when one of them
        /// ends.
        81 Watched {
            channel: u32 = Id,
        };
        /// An operator wants all connections of this process over shared memory to move to the
        /// kernel (`off`), or allows them to come back. The process tells a later monitor the
        /// present state in [`Hello`](super::request::Hello).
        82 ToKernel {
            off: bool = Arg0,
        };
        /// fd: the local listen socket of another worker of the group. This process may steal from
        /// it.
        41 Peer {
            group: u64 = Id,
            place: u32 = Arg0,
            /// The worker's zone.
            cpu: u32 = Arg1,
        };
        /// A worker of the group has exited or closed its local listen socket. Any process may
        /// take the connections that wait there. The process closes the descriptor once the queue
        /// is empty, so that the kernel moves unfinished handshakes.
        42 PeerGone {
            group: u64 = Id,
            place: u32 = Arg0,
        };
        /// Connections of the group wait for a worker that does not accept.
        43 WakeHint {
            group: u64 = Id,
        };
        /// A local listen socket of the group was closed, and its waiting connections have moved
        /// to the global socket. The process must look there, because the kernel wakes no thread
        /// for moved connections.
        40 Look {
            group: u64 = Id,
        };
        /// A connection that this process has offered moves to shared memory. fd: the memory of the
        /// channel.
        34 UpgradeSrv {
            channel: u32 = Id,
            listener: u64 = Arg0,
            slot: usize = Below<Low<Arg1>, SLOTS_END>,
            generation: u32 = High<Arg1>,
            /// The process's name for the connection.
            name: u64 = Arg2,
            /// After [`Meet`](super::request::Meet).
            met: bool = V6only,
        };
        /// The holder has handled the [`Transfer`](super::request::Transfer) of this number.
        57 Transferred {
            number: u64 = Id,
        };
        /// A process with other rights wants to accept on this listener, so new connections use
        /// the kernel. The process has to move waiting connections to the kernel's queue.
        71 OtherRights {
            listener: u64 = Id,
        };
        /// Connections to this listener waited in its queues, and no process accepted them. The
        /// process moves them to the kernel's queue. New connections use that queue, too, until a
        /// process reports that it has emptied it ([`Work::Accepts`]).
        92 Untaken {
            listener: u64 = Id,
        };
        /// A client connects to a listener for which this process works. fd: the memory of the channel.
        32 ChannelSrv {
            channel: u32 = Id,
            listener: u64 = Arg0,
            size: u64 = Arg1,
        };
        /// The other side of this channel has ended, and every connection in the channel has been
        /// closed or reset. The process unmaps the channel when it has read the remaining bytes.
        33 ChannelGone {
            channel: u32 = Id,
            /// The other side broke the protocol ([`Broken`](super::request::Broken)).
            broken: bool = Arg0,
        };
        /// Wakes a thread of this process.
        35 Woken {
            waker: u8 = Id,
            /// The channel in which a peer woke the thread; none: one of the channels that are
            /// not named.
            channel: Option<u32> = OrZero<Arg0>,
            waiter: Waiter = Arg1,
            /// The process that asked for the wake-up; none: the monitor itself.
            ringer: Option<u64> = OrZero<Arg2>,
        };
        /// Answers [`Waker`](super::request::Waker), with the same fields. fd: the read end of a
        /// pipe (`O_NONBLOCK`) that no other process has.
        36 WakerRead {
            waker: u8 = Id,
            channel: u32 = Arg0,
            waiter: Waiter = Arg1,
            ringer: u64 = Arg2,
        };
        /// Follows the other side's [`WakerReady`](super::request::WakerReady). fd: the same
        /// pipe, opened once more to write. It is open for reading, too, so that a write after
        /// the reader's death causes no SIGPIPE.
        37 WakerWrite {
            /// The key of the thread at the other end.
            key: u64 = Id,
            channel: u32 = Arg0,
            waiter: Waiter = Arg1,
        };
        /// Comes before the first answer to [`Connect`](super::request::Connect) that depends on
        /// it. fd, for a read-only mapping: one word for each port
        /// ([`CLOSINGS_SIZE`](crate::CLOSINGS_SIZE)). When a socket stops or starts to listen on
        /// a port, a BPF program in the kernel changes the port's word. It does so before another
        /// socket can use the port.
        38 Closings {};
        /// To the agent: a process wants its connection to a linked host to move to shared
        /// memory. [`RemoteCounts`] comes right before. The agent may answer with
        /// [`Take`](super::request::Take) or [`Refuse`](super::request::Refuse).
        86 Open {
            wish: u64 = Id,
            ends: Ends = BothEnds,
        };
        /// To the agent, right before [`Open`]: the number of bytes that the program's end has sent and
        /// received.
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
    /// The monitor's refusal of this packet. `errno` is positive. A refused
    /// [`Hello`](request::Hello) also gets the ABI version of the monitor.
    #[must_use]
    pub fn refused(&self, errno: i32) -> Msg {
        let arg0 = if self.is::<request::Hello>() { fsocket_abi::VERSION.into() } else { 0 };
        Msg { result: errno, arg0, ..Msg::new(self.kind).numbered(self.seq) }
    }
}

#[cfg(test)]
mod tests;
