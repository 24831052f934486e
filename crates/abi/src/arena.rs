//! The arena: counters, and the state of sockets that several processes can hold after a fork. The
//! library makes one arena for a process, seals it, and shares it with forked children and the
//! monitor.
//!
//! Long: one layout, and the list of all counters.

use crate::sock::Sock;
use fsocket_sync::atomic::{AtomicU32, AtomicU64, AtomicU8};
use fsocket_sync::news::News;

pub const MAGIC: u64 = u64::from_le_bytes(*b"fsockAR1");
/// The number of sockets in an arena.
pub const SOCKS: usize = 65536;
pub const STATS_OFF: usize = 4096;
/// Facts that the fork group has learned about its connections. Only the library uses them
/// (`fsocket_listeners::short_lived`).
pub const LEARNED_OFF: usize = STATS_OFF + 1024;
pub const LEARNED_SIZE: usize = SOCK_OFF - LEARNED_OFF;
pub const SOCK_OFF: usize = 8192;
const _: () = assert!(core::mem::size_of::<Stats>() <= LEARNED_OFF - STATS_OFF);
/// Counts of accepted connections by zone.
pub const ZONE_OFF: usize = SOCK_OFF + SOCKS * core::mem::size_of::<Sock>();
/// The number of zones with their own counts. CPUs with higher numbers share counts with lower
/// ones.
pub const ZONES: usize = 1024;
/// Size of the arena's memfd in bytes. The file is sparse.
pub const ARENA_SIZE: usize = ZONE_OFF + ZONES * core::mem::size_of::<Zone>();

/// Bit of [`Header::pending`]: the monitor holds back messages, because the kernel takes no more
/// until the process reads some.
pub const HELD: u32 = 1 << 31;

#[repr(C)]
pub struct Header {
    pub magic: u64,
    pub version: u32,
    pub pid: AtomicU32,
    /// The monitor increments this after each message that the process has not asked for. So the
    /// library makes no system call when there is no message. Also has the bit [`HELD`].
    pub pending: AtomicU32,
    /// One more than the highest socket that was ever used. Scans end here.
    pub high_water: AtomicU32,
    /// A robust futex that the monitor holds: the number of the monitor's thread, with
    /// [`FUTEX_WAITERS`]. When the monitor dies, the kernel sets [`FUTEX_OWNER_DIED`] and wakes
    /// one sleeper. 0: the monitor does not hold it.
    pub monitor: AtomicU32,
    /// The second futex words for sleeps on a word of a channel ([`news_of`]). No peer maps them.
    /// The monitor changes such a word when it closes a connection on behalf of a dead peer.
    pub news: [News; NEWS],
}
/// The number of words over which connections are spread.
pub const NEWS: usize = 512;
/// The index in [`Header::news`] for the connection in this slot of a channel.
pub const fn news_of(channel: u32, slot: usize) -> usize {
    (channel as usize).wrapping_mul(37).wrapping_add(slot) % NEWS
}

/// Bits of a robust futex (linux/futex.h).
pub const FUTEX_OWNER_DIED: u32 = 0x4000_0000;
pub const FUTEX_WAITERS: u32 = 0x8000_0000;

/// The names of the counters of [`Stats`], in order. One table serves the library, the monitor,
/// the command line and the documentation.
macro_rules! counters {
    ($($(#[doc = $doc:literal])* $id:ident = $name:literal $(reason $reason:ident)? $(when $case:literal)?),* $(,)?) => {
        /// Index of a counter.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub enum Counter { $($(#[doc = $doc])* $id),* }
        /// Why a connection or call used the kernel, although shared memory or a zone was possible. Each reason has a counter.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub enum Reason { $($(#[doc = $name] $reason = Counter::$id as usize,)?)* }
        /// Names of all counters, by index.
        pub const COUNTERS: &[&str] = &[$($name),*];
        /// The help text of each counter, by index.
        pub const COUNTER_HELP: &[&str] = &[$(concat!($($doc),*)),*];
        /// For the counter of a limit: the cases in which the counter grows, by index.
        /// docs/fallbacks.md shows this text instead of the help. The text is empty for all other
        /// counters.
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
        when "A connection could not be moved to the kernel: no monitor ran, or its peer had left a full ring unread.",
    /// Fallback: no monitor since the program began, or it refused.
    FbNoMonitor = "fallback.no_monitor" reason NoMonitor
        when "No monitor has run since the program began, or it refused.",
    /// Fallback: no process with the library listens there.
    FbNoListener = "fallback.no_listener" reason NoListener
        when "No process with the library listens there.",
    /// Fallback: destination is not this host, as far as its address says.
    FbRemote = "fallback.remote" reason Remote
        when "The destination is another host or network namespace. (The connection may still move to shared memory: `path_upgrade`.)",
    /// Fallback: the socket was bound before connect.
    FbBound = "fallback.bound" reason Bound
        when "The client bound its socket before `connect`.",
    /// Fallback: no slot, port or SYN queue entry free.
    FbFull = "fallback.full" reason Full
        when "The channel (1,024 connections), the client ports or the SYN queue are used up.",
    /// Fallback: out of memory, descriptors or address space.
    FbResource = "fallback.resource" reason Resource
        when "`RLIMIT_NOFILE`, `RLIMIT_AS`, or the monitor's memory or descriptors are used up, or a listener has over 1,024 client processes. Also: over 8 threads of a process call `listen` at once, or it asks for over 32 destinations at once.",
    /// Fallback: an option or operation that only the kernel has.
    FbOption = "fallback.option" reason Option
        when "An option or operation that only the kernel has.",
    /// Fallback: a connection or a listener used on an io_uring, or a ring that cannot be looked into.
    FbUring = "fallback.io_uring" reason Uring
        when "An io_uring uses the connection or listener, or the library cannot read a ring.",
    /// Fallback: called from a signal handler that interrupted us.
    FbReentry = "fallback.reentry" reason Reentry
        when "The call came from a signal handler that interrupted the library.",
    /// Fallback: switched off (--no-shm, unshare, setns, seccomp, Landlock, RLIMIT_AS, RLIMIT_DATA, mlockall).
    FbDisabled = "fallback.disabled" reason Disabled
        when "`--no-shm`, `FASTSOCKET_DISABLE=shm`, `unshare`, `setns`, seccomp, Landlock, `mlockall`, or an `RLIMIT_AS` or `RLIMIT_DATA` that leaves less than 64 MiB.",
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
        when "The program itself sets SO_REUSEPORT, so the kernel's hash selects. This counts without a monitor with BPF, with a selector of the program's own (SO_ATTACH_REUSEPORT_*), or with a socket of a process without the library there.",
    /// Fallback, zones: neither the process nor a monitor may make a local listen socket.
    FbZoneDenied = "fallback.zone_denied" reason ZoneDenied
        when "No monitor of root runs, and the worker has another user or network namespace than its listener, or the port is below 1024. The same holds for a listener at `[::]` for both IP versions if the worker lacks CAP_NET_ADMIN.",
    /// Fallback, zones: something on the listener cannot be copied (a filter, TCP MD5).
    FbZoneOption = "fallback.zone_option" reason ZoneOption
        when "The listener has a socket filter, or TCP MD5 or AO keys. (Multipath TCP is not counted.)",
    /// Fallback, zones: no BPF program; the classic selector instead, without migration.
    FbZoneClassic = "fallback.zone_classic" reason ZoneClassic
        when "No monitor or no BPF: the classic selector is used, and no queue migrates.",
    /// Fallback, zones: out of descriptors, memory or places.
    FbZoneResource = "fallback.zone_resource" reason ZoneResource
        when "A process has over 128 zoned listeners or 128 threads, a listener over 1,023 workers, or no descriptor is left.",
    /// Fallback, zones: the worker takes turns with others (accept mutex, one-shot events).
    FbZoneTurns = "fallback.zone_turns" reason ZoneTurns
        when "A process of the fork group uses one-shot events, or a worker stopped watching the listener (`accept_mutex`, a connection limit).",
    /// Fallback, zones: it is not seen how the worker waits for connections.
    FbZoneUnseen = "fallback.zone_unseen" reason ZoneUnseen
        when "A non-blocking listener is neither polled nor in an epoll instance that the library knows.",
    /// Fallback, zones: the worker is not pinned, and --pin require or its own SO_REUSEPORT asks for it.
    FbZoneUnpinned = "fallback.zone_unpinned" reason ZoneUnpinned
        when "The worker is not pinned, with `--pin require` or with SO_REUSEPORT sockets of the program's own. The kernel's hash selects. (`--pin auto` pins.)",
    /// Kernel connections opened with a source port from their CPU's slice.
    ConnectSlice = "connect_slice",
    /// Slices without a free port: the kernel took any.
    SliceFull = "slice_full"
        when "All ports of a slice are in use to one destination: any port is taken.",
    /// Slices not used: the socket does not take a port range.
    SliceRefused = "slice_refused"
        when "A system-call filter refuses a port range on the socket: any port is taken.",
    /// Waits without a waker: the thread polls, at growing intervals.
    SleepsCut = "sleeps_cut"
        when "Over 63 threads of a process wait in `poll`, `select` or epoll on one channel, or over 255 in all: the others poll every 2 to 100 ms.",
    /// Fallback: the server runs as another user, and the administrator has not named both.
    FbOtherUser = "fallback.other_user" reason OtherUser
        when "The server runs as another user, and no `share` line names both ([policy](policy.md)).",
    /// Fallback: a rule denies it, or the kernel redirects the connection.
    FbPolicy = "fallback.policy" reason Policy
        when "A `[[rule]]` denies it, a `[[program]]` or `fastsocket off` switched an end off, or the kernel redirects the connection ([policy](policy.md)).",
    /// Fallback: the kernel comes first, because its policy may refuse the connection.
    FbKernelFirst = "fallback.kernel_first" reason KernelFirst
        when "The kernel's policy may refuse it (netfilter, `ip rule`, cgroup programs, a sandboxed process), or a rule says so. To ask the policy again, one connection in 2 s to each destination uses the kernel ([policy](policy.md)).",
    /// Fallback: the monitor has died or is being restarted, and no other one has come yet.
    FbMonitorGone = "fallback.monitor_restarted" reason MonitorGone
        when "The monitor died or restarts, and the next one does not know both sides yet.",
    /// Fallback: the monitor has another version than the library; its log names both.
    FbVersion = "fallback.version" reason Version
        when "library and monitor have different versions, and no monitor of the library's version has stayed (docs/adr/0083-upgrades.md): restart the program",
    /// Fallback: the other end is in another network namespace of this host, and does not take part.
    FbNamespace = "fallback.namespace" reason Namespace
        when "The other end is in another network namespace of this host, and has no library or no listener that the monitor knows ([containers](containers.md)).",
    /// Fallback: no process with the library accepted the connection for a second.
    FbUntaken = "fallback.untaken" reason Untaken
        when "For a second no process with the library accepted the connection, or its listener went to a program without it. The connection moved to the kernel's queue, and so do new ones until a process with the library has emptied it.",
    /// Fallback: the server forks for each connection, and they end after a few requests: they begin in the kernel.
    FbShortLived = "fallback.short_lived" reason ShortLived
        when "A server forks for each connection, and most ended after fewer than some 12 requests. Its listener uses the kernel from then on.",
    /// Fallback: a monitor is there, but takes longer than a program waits for it.
    FbMonitorBusy = "fallback.monitor_busy" reason MonitorBusy
        when "The monitor did not accept or answer within 250 ms in all: it is stopped or overloaded.",
}

#[repr(C, align(64))]
pub struct Stats {
    pub counter: [AtomicU64; 64],
    /// Name of the program (comm), padded with NULs.
    pub comm: [AtomicU8; 16],
}

/// Connections that the workers of one zone accepted, by [`zone_accept`].
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
