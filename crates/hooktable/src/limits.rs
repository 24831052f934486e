//! Limits that belong to no single function. Those that do stand with it, in the library's
//! table of hooks; cases that a counter counts stand with the counter, in `fsocket_abi::arena`.

/// A section of docs/limits.md.
pub struct Section {
    /// Its title; also the word in the table of hooks.
    pub name: &'static str,
    /// Beginnings of the names of the counters of its table.
    pub counters: &'static [&'static str],
    pub limits: &'static [&'static str],
}

/// All sections, in order.
pub const SECTIONS: &[Section] = &[
    Section {
        name: "Zones",
        counters: &["fallback.zone_"],
        limits: &[
            "A worker that is away for more than 10 ms loses connections that wait for it \
             to one that is idle (ADR 26); `--no-balance` leaves them. There is no stealing \
             without the monitor's program, beyond 64 workers of a listener, and by programs \
             that call `epoll_wait` past libc. Where the monitor has died, workers that wait in \
             `epoll_wait` find the next one, but not processes that have connections over \
             shared memory. A single client on the same host sends all its SYNs \
             from one CPU at a time.",
            "Of several processes that wait for connections in `poll`, `select` or epoll, a \
             connection wakes the one that it is for, in the kernel all (a thundering herd). \
             The others are woken when that one has not taken it within 0.2 s, with \
             `--no-balance` only when it looks again, ends, or closes the listener.",
            "With the classic selector nothing migrates. A worker that ends or closes the \
             listener in good order hands what waits to the others; a killed one cannot, \
             and its queue is reset, as with SO_REUSEPORT on any kernel, and so are \
             handshakes under way in either case. Set `net.ipv4.tcp_migrate_req` to 1 where \
             no monitor can run.",
            "A listener that is inherited through `exec` (a binary upgrade, socket \
             activation) is zoned in the program that inherits it, if that loads the \
             library; and not where it inherits an epoll instance, too.",
            "A program's own SO_REUSEPORT sockets: a process without the library that joins \
             them is noticed after up to a second of connections (8 s after quiet), and \
             gets none before.",
            "The pinning of a worker is looked at when it joins; one that is moved later \
             keeps its zone.",
            "When the monitor ends, workers that are there keep their zones, and new ones \
             serve the global queue until it is back. A private monitor (`fastsocket run`) \
             keeps nothing for another one, unless started with `--keep`.",
        ],
    },
    Section {
        name: "Programs",
        counters: &[],
        limits: &[
            "Statically linked programs and those that make raw system calls (Go) do not \
             call libc: they use the kernel, also as peers of accelerated ones.",
            "Set-user-ID programs are not preloaded. Programs that rebuild the environment \
             before `exec` of another program (postfix) lose the library at that point; of \
             their own binary (nginx's upgrade) they do not.",
            "A channel maps 2.1 GiB of address space (sparse; resident is what was used); up \
             to 64 ranges of channels that have ended stay reserved. Under a smaller \
             `RLIMIT_AS` everything goes over the kernel. A program that sets one later, \
             and has one thread, gets the space back: its connections become the kernel's \
             (`path_switch`) and its listeners too; with several threads it keeps what is \
             mapped, and the limit is reached sooner. About 160 MiB stay reserved in any \
             case; in one that starts under a limit, up to a 32nd of it for each of four \
             tables, and its sockets beyond what they hold are the kernel's.",
            "A connection that began in the kernel goes over to shared memory \
             (`path_upgrade`) if it lives for some calls and has a moment of rest; not if \
             two processes share it or something other than the usual calls uses it (ADR \
             27). `FASTSOCKET_UPGRADE=0` leaves them where they are. If it must be the \
             kernel's again it shows other port numbers.",
            "Connections that nobody has accepted when the last process that listens over \
             shared memory leaves the listener to others (a program without the library, a \
             system-call filter) are put into the kernel's queue, behind what waits there.",
            "An inherited connection is a client of its own: `accept` keeps the order of \
             connections that a program has opened before its `exec`, and of those that the \
             next one opens, not among both.",
            "When the monitor dies, the kernel tells each side of a connection of the end of \
             the other's processes, if both are in one process namespace. Later: within 80 ms \
             where a blocking call cannot sleep on a futex and a descriptor (before Linux 6.7, \
             no io_uring, more than 64 threads asleep); within 2 s where it has a time \
             limit (SO_RCVTIMEO), began before the monitor died, and a signal handler restarts \
             calls. Not noticed: the end of a peer before Linux 5.16 while a call without a limit \
             waits that began before the monitor died; a connection that nobody had accepted yet; \
             the death of more than 8 processes that share one end.",
            "Sanitizers whose runtime is a library (gcc's default; `-static-libasan`, \
             `-static-libtsan` and clang put it into the program) come behind this library: \
             calls that it serves are not checked by AddressSanitizer, and ThreadSanitizer \
             does not see that `accept` comes after `connect` within one process. \
             `LD_PRELOAD=libtsan.so.2 fastsocket run …` keeps the runtime in front. Where \
             the library is preloaded by hand, AddressSanitizer wants \
             `ASAN_OPTIONS=verify_asan_link_order=0`; `fastsocket run` sets it.",
            "Connections that are opened before the library's constructor runs (by \
             constructors of the libraries that a program needs, by `.preinit_array`) are \
             the kernel's, and not counted.",
            "A thread that is cancelled while it sends or receives on a connection whose path is \
             being switched, in that very call, is cancelled when the call ends. One that is \
             made to leave a call of ours by `pthread_exit` in a signal handler ends the \
             program; `siglongjmp` out of a sleep is fine, out of the few instructions that \
             move bytes it leaves the direction unusable to that thread (`EAGAIN`). A `clone` \
             that is not a thread's and cancellation in `sendfile` and `syscall` are as in a \
             cancellation point.",
        ],
    },
    Section {
        name: "Sockets",
        counters: &[],
        limits: &[
            "TCP streams (`SOCK_STREAM`, IPv4 and IPv6) to loopback and the host's own \
             addresses. UDP, Unix and raw sockets are the kernel's.",
            "A process that is killed in the middle of a send or receive on a connection \
             that its forked processes of the fork group use too resets that connection.",
            "Packet captures, netfilter and traffic control do not see these connections; \
             `ss -t` does not list them, `fastsocket ss` does.",
            "A connection is not visible in `/proc/net/tcp`, and its client port is taken \
             from a range of the monitor's, unique among live connections of ours.",
            "The sockets of a switched connection are made by the monitor: memory and traffic \
             count for its control group, not for the program's. If the client had bound its \
             port itself, and the kernel is older than 6.8, they show other port numbers.",
        ],
    },
    Section {
        name: "Containers",
        counters: &[],
        limits: &[
            "A connection to another network namespace of the host is the kernel's until its third \
             request (docs/containers.md), and stays so if a side only sends, is behind SYNPROXY, or if \
             some 65,000 others were opened before. On kernels and monitors without BPF all are.",
            "Such a connection ends with ECONNRESET within 5 s after a rule or a link stops its packets; \
             in the kernel it would be repeated for minutes, and then time out. Byte quotas, string matches and accounting \
             see its first requests only.",
            "It sends a keep-alive probe a second, whatever the program has chosen for SO_KEEPALIVE.",
            "If it has to become the kernel's after its peer is gone, and something is left to be read, it cannot \
             (`fallback.switch`).",
        ],
    },
    Section {
        name: "Steering",
        counters: &["slice_"],
        limits: &[
            "Only programs with the library take their ports from slices; connections of \
             others, and those with a port that the program chose, stay where RSS puts \
             them (with `connect-cpu` they are steered, too).",
            "A device that takes neither rules nor XDP is steered by RPS with RFS \
             (docs/steering.md, \"Ways\").",
            "A listener of a program without the library, on a port within a slice, is \
             taken for active connections until the next `fastsocket steer` looks; \
             `--precise` never errs.",
            "While the kernel takes a CPU offline (40 ms; on an overloaded machine seconds) \
             steered packets for it wait; afterwards, and until it is back, another one \
             handles them.",
            "Packets in tunnels, fragments, and all that is not TCP stay where they are.",
        ],
    },
];
