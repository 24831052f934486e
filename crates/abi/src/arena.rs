//! The arena: one per process, made by the library, sealed, shared with its
//! forked children and with the monitor. Counters, and the state of sockets
//! that several processes can hold after a fork.
//!
//! Long: one layout, and the list of all counters.

use crate::sock::Sock;
use fsocket_sync::atomic::{AtomicU32, AtomicU64, AtomicU8};
use fsocket_sync::news::News;

pub const MAGIC: u64 = u64::from_le_bytes(*b"fsockAR1");
/// Sockets per arena.
pub const SOCKS: usize = 65536;
pub const STATS_OFF: usize = 4096;
/// What the fork group learns of its connections; the library's alone (`fsocket_listeners::short_lived`).
pub const LEARNED_OFF: usize = STATS_OFF + 1024;
pub const LEARNED_SIZE: usize = SOCK_OFF - LEARNED_OFF;
pub const SOCK_OFF: usize = 8192;
const _: () = assert!(core::mem::size_of::<Stats>() <= LEARNED_OFF - STATS_OFF);
/// Accepts by zone.
pub const ZONE_OFF: usize = SOCK_OFF + SOCKS * core::mem::size_of::<Sock>();
/// Zones that are told apart; CPUs beyond share with lower ones.
pub const ZONES: usize = 1024;
/// Size of the memfd of an arena, bytes; sparse.
pub const ARENA_SIZE: usize = ZONE_OFF + ZONES * core::mem::size_of::<Zone>();

/// In [`Header::pending`]: the monitor has more for this process than the kernel takes before some of it is read.
pub const HELD: u32 = 1 << 31;

#[repr(C)]
pub struct Header {
    pub magic: u64,
    pub version: u32,
    pub pid: AtomicU32,
    /// Counted up by the monitor after it has sent something unasked to this
    /// process; saves the library a system call when there is nothing. With [`HELD`].
    pub pending: AtomicU32,
    /// One more than the highest socket ever used; bounds every scan.
    pub high_water: AtomicU32,
    /// A robust futex that the monitor holds (its thread's number, and [`FUTEX_WAITERS`]): when the
    /// monitor dies the kernel sets [`FUTEX_OWNER_DIED`] and wakes one of those that sleep here.
    /// 0: it does not hold it.
    pub monitor: AtomicU32,
    /// The second word of a sleep on a word of a channel ([`news_of`]): no peer maps it. The monitor changes it when it
    /// closes a connection in the name of a peer.
    pub news: [News; NEWS],
}
/// Words that connections are spread over.
pub const NEWS: usize = 512;
/// Which of [`Header::news`] belongs to the connection in this slot of a channel.
pub const fn news_of(channel: u32, slot: usize) -> usize {
    (channel as usize).wrapping_mul(37).wrapping_add(slot) % NEWS
}

/// Bits of a robust futex (linux/futex.h).
pub const FUTEX_OWNER_DIED: u32 = 0x4000_0000;
pub const FUTEX_WAITERS: u32 = 0x8000_0000;

/// Name of a counter of [`Stats`], in order. One table for the library, the
/// monitor, the command line and the documentation.
macro_rules! counters {
    ($($(#[doc = $doc:literal])* $id:ident = $name:literal $(reason $reason:ident)? $(when $case:literal)?),* $(,)?) => {
        /// Index of a counter.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub enum Counter { $($(#[doc = $doc])* $id),* }
        /// Why something that could have been ours is the kernel's: a counter each.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub enum Reason { $($(#[doc = $name] $reason = Counter::$id as usize,)?)* }
        /// Names of all counters, by index.
        pub const COUNTERS: &[&str] = &[$($name),*];
        /// What each counts, by index.
        pub const COUNTER_HELP: &[&str] = &[$(concat!($($doc),*)),*];
        /// In which cases those grow that a program cannot do anything about, by index, for
        /// docs/limits.md; empty: it is no limit.
        pub const COUNTER_CASES: &[&str] = &[$(concat!($($case)?)),*];
    };
}
counters! {
    /// Connections opened over shared memory.
    ConnectShm = "connect_shm",
    /// Connections opened over kernel TCP.
    ConnectKernel = "connect_kernel",
    /// Connections accepted over shared memory.
    AcceptShm = "accept_shm",
    /// Connections accepted over kernel TCP, on a listener that the monitor knows.
    AcceptKernel = "accept_kernel",
    /// Listeners registered.
    Listen = "listen",
    /// Bytes sent over shared memory by sockets already closed.
    TxBytes = "tx_bytes",
    /// Bytes received over shared memory by sockets already closed.
    RxBytes = "rx_bytes",
    /// Connections over shared memory closed.
    CloseShm = "close_shm",
    /// Connections over shared memory reset.
    ResetShm = "reset_shm",
    /// Times a thread went to sleep in the library.
    Sleeps = "sleeps",
    /// Times a peer was woken.
    Wakes = "wakes",
    /// Waits that ended while spinning.
    SpinHits = "spin_hits",
    /// Waits that gave up spinning.
    SpinMisses = "spin_misses",
    /// SYNs taken from another worker's queue.
    Steals = "steals",
    /// Descriptors served from the placeholder pool.
    PoolHits = "pool_hits",
    /// Take-overs of a token.
    TakeOvers = "take_overs",
    /// A peer broke the protocol; its connection was reset.
    HostilePeer = "hostile_peer",
    /// Connections whose path was switched from shared memory to kernel TCP.
    PathSwitch = "path_switch",
    /// Kernel connections that went over to shared memory.
    PathUpgrade = "path_upgrade",
    /// Fallback: a path could not be switched; the connection was reset.
    FbSwitch = "fallback.switch" reason Switch
        when "a connection could not be switched to the kernel: there was no monitor, or its peer had left with a full ring unread",
    /// Fallback: no monitor since the program began, or it refused.
    FbNoMonitor = "fallback.no_monitor" reason NoMonitor
        when "there has been no monitor since the program began, or it refused",
    /// Fallback: no process with the library listens there.
    FbNoListener = "fallback.no_listener" reason NoListener
        when "no process with the library listens there",
    /// Fallback: destination is not this host, as far as its address says.
    FbRemote = "fallback.remote" reason Remote
        when "the destination is another host, or another network namespace (such a connection may move to shared memory: `path_upgrade`)",
    /// Fallback: the socket was bound before connect.
    FbBound = "fallback.bound" reason Bound
        when "the client socket was bound before `connect`",
    /// Fallback: no slot, port or SYN queue entry free.
    FbFull = "fallback.full" reason Full
        when "a channel has 1,024 connections and there is no other one; no client port is free; the SYN queue is full",
    /// Fallback: out of memory, descriptors or address space.
    FbResource = "fallback.resource" reason Resource
        when "`RLIMIT_NOFILE`, `RLIMIT_AS`, or the monitor's memory and descriptors are used up; a listener has more than 1,024 client processes; more than 8 threads of a process call `listen` at once (this counts for a second), or a process asks for more than 32 destinations at once",
    /// Fallback: an option or operation that only the kernel has.
    FbOption = "fallback.option" reason Option
        when "an option or operation that only the kernel has",
    /// Fallback: a connection or a listener used on an io_uring, or a ring that cannot be looked into.
    FbUring = "fallback.io_uring" reason Uring
        when "a connection or listener used on an io_uring; a ring that cannot be looked into",
    /// Fallback: called from a signal handler that interrupted us.
    FbReentry = "fallback.reentry" reason Reentry
        when "called from a signal handler that interrupted the library",
    /// Fallback: switched off (--no-shm, unshare, setns, seccomp, Landlock, RLIMIT_AS, RLIMIT_DATA, mlockall).
    FbDisabled = "fallback.disabled" reason Disabled
        when "`--no-shm`, `FASTSOCKET_DISABLE=shm`, `unshare`, `setns`, seccomp, Landlock, `RLIMIT_AS` or `RLIMIT_DATA` that leave less than 64 MiB, `mlockall`",
    /// Connections accepted from the worker's own local listen socket.
    AcceptLocal = "accept_local",
    /// Connections accepted from the global listen socket of a zoned listener.
    AcceptGlobal = "accept_global",
    /// Connections accepted from the local listen socket of another thread.
    AcceptRemote = "accept_remote",
    /// Connections accepted from the local listen socket of another process.
    AcceptStolen = "accept_stolen",
    /// Local listen sockets made.
    ZoneJoin = "zone_joins",
    /// Local listen sockets given up while the listener stayed open.
    ZoneLeave = "zone_leaves",
    /// Fallback, zones: the program itself shares the address (SO_REUSEPORT), and there is no BPF, or a stranger.
    FbZoneShared = "fallback.zone_shared" reason ZoneShared
        when "the program itself sets SO_REUSEPORT, and there is no monitor with BPF, the program has its own selector (SO_ATTACH_REUSEPORT_*), or a process without the library has a socket at the address: the kernel's hash selects",
    /// Fallback, zones: neither the process nor a monitor may make a local listen socket.
    FbZoneDenied = "fallback.zone_denied" reason ZoneDenied
        when "without a monitor of root: the worker has another user or network namespace than its listener, the port is below 1024, or the listener is a dual-stack wildcard (`[::]`) and the worker lacks CAP_NET_ADMIN",
    /// Fallback, zones: something on the listener cannot be copied (a filter, TCP MD5).
    FbZoneOption = "fallback.zone_option" reason ZoneOption
        when "the listener has a socket filter, or TCP MD5 or AO keys; Multipath TCP (not counted)",
    /// Fallback, zones: no BPF program; the classic selector instead, without migration.
    FbZoneClassic = "fallback.zone_classic" reason ZoneClassic
        when "there is no monitor or no BPF: the classic selector is used, and no queue migrates",
    /// Fallback, zones: out of descriptors, memory or places.
    FbZoneResource = "fallback.zone_resource" reason ZoneResource
        when "more than 128 zoned listeners or 128 threads in a process, more than 1,023 workers of a listener, or no descriptor left",
    /// Fallback, zones: the worker takes turns with others (accept mutex, one-shot events).
    FbZoneTurns = "fallback.zone_turns" reason ZoneTurns
        when "a process of the fork group uses one-shot events, or a worker stopped watching the listener (`accept_mutex`, a connection limit)",
    /// Fallback, zones: it is not seen how the worker waits for connections.
    FbZoneUnseen = "fallback.zone_unseen" reason ZoneUnseen
        when "a non-blocking listener is neither polled nor in an epoll instance that the library knows",
    /// Fallback, zones: the worker is not pinned, and --pin require or its own SO_REUSEPORT asks for it.
    FbZoneUnpinned = "fallback.zone_unpinned" reason ZoneUnpinned
        when "the worker is not pinned, with `--pin require` or with the program's own SO_REUSEPORT sockets (`--pin auto` pins it): the kernel's hash selects",
    /// Kernel connections opened with a source port from their CPU's slice.
    ConnectSlice = "connect_slice",
    /// Slices without a free port: the kernel took any.
    SliceFull = "slice_full"
        when "all ports of a slice are in use to one destination: any port is taken",
    /// Slices not used: the socket does not take a port range.
    SliceRefused = "slice_refused"
        when "the socket takes no port range (a system-call filter): any port is taken",
    /// Waits without a waker: the thread polls, at growing intervals.
    SleepsCut = "sleeps_cut"
        when "more than 63 threads of a process wait in `poll`, `select` or epoll on one channel, or more than 255 in all: the others poll every 2 to 100 ms",
    /// Fallback: the server runs as another user, and the administrator has not named both.
    FbOtherUser = "fallback.other_user" reason OtherUser
        when "the server runs as another user, and no `share` line names both (docs/policy.md)",
    /// Fallback: a rule denies it, or the kernel redirects the connection.
    FbPolicy = "fallback.policy" reason Policy
        when "a `[[rule]]` denies it, a `[[program]]` or `fastsocket off` has switched an end off, or the kernel redirects the connection (docs/policy.md)",
    /// Fallback: the kernel comes first, because its policy may refuse the connection.
    FbKernelFirst = "fallback.kernel_first" reason KernelFirst
        when "the kernel's policy may refuse it (netfilter, `ip rule`, cgroup programs, a sandboxed process), or a rule says so: one connection to each destination in 2 s uses the kernel (docs/policy.md)",
    /// Fallback: the monitor has died or is being restarted, and no other one has come yet.
    FbMonitorGone = "fallback.monitor_restarted" reason MonitorGone
        when "the monitor has died or restarts, until the next one knows both sides",
    /// Fallback: the monitor has another version than the library; its log names both.
    FbVersion = "fallback.version" reason Version
        when "library and monitor have different versions (an upgrade while the program runs): restart the program",
    /// Fallback: the other end is in another network namespace of this host, and does not take part.
    FbNamespace = "fallback.namespace" reason Namespace
        when "the other end is in another network namespace of this host, and has no library or no listener that the monitor knows (docs/containers.md)",
    /// Fallback: no process with the library accepted the connection for a second.
    FbUntaken = "fallback.untaken" reason Untaken
        when "no process with the library accepted the connection for a second, or its listener went to a program without the library: it moved to the kernel's queue, which also takes new ones until a process with the library has emptied it",
    /// Fallback: the server forks for each connection, and they end after a few requests: they begin in the kernel.
    FbShortLived = "fallback.short_lived" reason ShortLived
        when "a server forks for each connection, and most ended after fewer than some 12 requests: its listener uses the kernel from then on",
    /// Fallback: a monitor is there, but takes longer than a program waits for it.
    FbMonitorBusy = "fallback.monitor_busy" reason MonitorBusy
        when "the monitor did not accept or answer within 250 ms in all: it is stopped or overloaded",
}

#[repr(C, align(64))]
pub struct Stats {
    pub counter: [AtomicU64; 64],
    /// Name of the program (comm), NUL padded.
    pub comm: [AtomicU8; 16],
}

/// What the workers of one zone accepted, by [`zone_accept`].
#[repr(C)]
pub struct Zone {
    pub accepted: [AtomicU64; 4],
}

/// Indices of [`Zone::accepted`].
pub mod zone_accept {
    /// From the zone's own local listen socket.
    pub const LOCAL: usize = 0;
    /// From the global listen socket.
    pub const GLOBAL: usize = 1;
    /// From another zone's, in the same process.
    pub const REMOTE: usize = 2;
    /// From another process's.
    pub const STOLEN: usize = 3;
    pub const NAMES: [&str; 4] = ["local", "global", "remote", "stolen"];
}

#[cfg(not(loom))]
const _: () = {
    use core::mem::size_of;
    assert!(size_of::<Header>() <= STATS_OFF);
    assert!(COUNTERS.len() <= 64);
    assert!(size_of::<Stats>() <= 4096);
};
