//! SocksDirect's figures and tables.

use super::section::{listed, Kind, Paper, Section, Why};
use super::{micro, programs, rpc, several};

fn section(name: &'static str, item: &'static str, title: &'static str, says: &'static str, kind: Kind) -> Section {
    Section { name, paper: Paper::SocksDirect, item, title, says, differs: "", kind }
}

fn drawing(name: &'static str, item: &'static str, title: &'static str) -> Section {
    let text = "The figure shows how the paper's system is built.";
    section(name, item, title, "A drawing.", Kind::Listed(listed(Why::NoMeasurement, text)))
}

/// The sections in the order of the report: those that are measured, then those that are only listed.
pub fn sections() -> Vec<Section> {
    let mut all = measured();
    all.extend(only_listed());
    all
}

// Long: a table.
fn measured() -> Vec<Section> {
    vec![
        Section {
            differs: "The sender uses blocking send and recv of libc. The receiver of the one-way rows takes up to \
                      64 KiB at once. Ours copies at each size; the paper remaps pages from 16 KiB on (ADR 64).",
            ..section(
                "socksdirect-fig-7",
                "figure 7",
                "messages inside a host by size",
                "8 bytes: round trip of 0.3 us (1/35 of Linux), 23 M messages/s (20 times). 8 KiB: 1/4 of the latency, \
                 1.6 times the rate. 1 MiB: 1/13 of the latency, 26 times the rate.",
                Kind::Measured(micro::sizes, None),
            )
        },
        Section {
            differs: "Two processes exchange 8 bytes; each has a CPU of its own. The rows of the bare machine use two \
                      threads.",
            ..section(
                "socksdirect-table-2",
                "table 2",
                "cost of operations",
                "Round trip and rate of 8 bytes: SocksDirect 0.30 us and 22 M/s, a lockless queue 0.25 us and 27 M/s, \
                 TCP inside a host 11 us and 0.9 M/s. Opening a socket takes 1.6 us.",
                Kind::Measured(
                    micro::operations,
                    Some(listed(Why::Rdma, "The rows between hosts and of the card.").by("make test-rdma-hosts")),
                ),
            )
        },
        Section {
            differs: "A packet is half a round trip of 8 bytes. A KiB is what each of 256 KiB adds to that. A \
                      connection is the time of connect() to a listener that this process has connected to before.",
            ..section(
                "socksdirect-table-4",
                "table 4",
                "breakdown of latency",
                "Inside a host, SocksDirect and Linux: an operation (fcntl) 53 and 413 ns, a packet 150 and 5,800 ns, \
                 a KiB 13 and 160 ns, a connection 700 and 14,700 ns.",
                Kind::Measured(
                    micro::breakdown,
                    Some(
                        listed(Why::Rdma, "The rows between hosts and of the card.").by("make test-rdma-hosts"),
                    ),
                ),
            )
        },
        Section {
            differs: "Client, server and all pairs are processes on one CPU. Messages of 8 bytes; each client waits for \
                      its answer. The bare queue is a pair of processes that sleep on a futex.",
            ..section(
                "socksdirect-fig-10",
                "figure 10",
                "several threads on one core",
                "Latency grows almost linearly with the number of threads, and stays 1/20 to 1/30 of Linux's.",
                Kind::Measured(several::pairs, None),
            )
        },
        Section {
            differs: "Two threads of one process send messages of 8 bytes. In turns, on one CPU, each message includes a \
                      take-over and a switch of threads. At once, the scheduler places the threads, and the receiver \
                      has one of the two CPUs. Ours takes over without the monitor.",
            ..section(
                "socksdirect-4.1.1",
                "section 4.1.1",
                "token take-over",
                "A take-over takes 0.6 us, so that two senders on one socket reach 1.6 M messages/s; one sender reaches \
                 27 M/s.",
                Kind::Measured(micro::take_over, None),
            )
        },
        Section {
            differs: "Each connection also carries 64 bytes each way and is closed. Ours needs no monitor for a \
                      connection once its channel exists, so the monitor's rate has no counterpart.",
            ..section(
                "socksdirect-6",
                "section 6",
                "new connections a second",
                "A thread creates 1.4 M connections/s, 20 times Linux. The monitor creates 5.3 M/s.",
                Kind::Measured(micro::connections, None),
            )
        },
        Section {
            differs: "Load generator, proxy and origin are on one host, because a second host needs RDMA. One \
                      keep-alive connection; wrk measures the latency. wrk has one CPU, the two servers the other.",
            ..section(
                "socksdirect-fig-11",
                "figure 11",
                "a proxy by size of the answer",
                "Latency falls to 1/5.5 of Linux's for small answers, and to 1/20 for large ones.",
                Kind::Measured(
                    programs::proxies,
                    Some(listed(
                        Why::Elsewhere,
                        "The three programs in network namespaces of their own. Another command has nginx so.",
                    )
                    .by("make bench-containers")),
                ),
            )
        },
        Section {
            differs: "redis-benchmark has no first percentile: the bench's own client measures it, with the same \
                      requests. One connection.",
            ..section(
                "socksdirect-5.3.2",
                "section 5.3.2",
                "redis, GET of 8 bytes",
                "Mean, 1st and 99th percentile: Linux 38.9, 31.6 and 56.1 us; SocksDirect 14.1, 8.4 and 19.1 us.",
                Kind::Measured(programs::redis, None),
            )
        },
        Section {
            differs: "The RPC libraries are Python's multiprocessing.managers, which uses plain sockets, and gRPC, of Python and \
                      of C++. Most of a call's time is theirs.",
            ..section(
                "socksdirect-5.3.3",
                "section 5.3.3",
                "an RPC library, calls of 1 KiB",
                "RPClib: 45 us with Linux, 21 us with SocksDirect.",
                Kind::Measured(
                    rpc::calls,
                    Some(listed(Why::NotMeasuredYet, "RPClib itself.")),
                ),
            )
        },
        Section {
            differs: "Each function is a process that receives 64 bytes, counts them and sends them on, over sockets \
                      with descriptors above 2, sockets as standard input and output, or pipes. The processes are not \
                      pinned.",
            ..section(
                "socksdirect-fig-12",
                "figure 12",
                "pipeline of network functions",
                "15 times the packets of Linux pipes, 20 times those of Linux TCP sockets.",
                Kind::Measured(
                    several::pipeline,
                    None,
                ),
            )
        },
    ]
}

fn only_listed() -> Vec<Section> {
    let rdma = |text| Kind::Listed(listed(Why::Rdma, text).by("make test-rdma-hosts"));
    vec![
        drawing("socksdirect-fig-1", "figure 1", "architecture"),
        drawing("socksdirect-fig-2", "figure 2", "token-based sharing of a socket"),
        drawing("socksdirect-fig-3", "figure 3", "memory after a fork"),
        drawing("socksdirect-fig-4", "figure 4", "ring buffers inside a host"),
        drawing("socksdirect-fig-5", "figure 5", "sending a page without a copy"),
        drawing("socksdirect-fig-6", "figure 6", "states of a connection"),
        section(
            "socksdirect-fig-8",
            "figure 8",
            "messages between hosts by size",
            "8 bytes: 18 M messages/s (15 times Linux), round trip of 1.7 us (1/17). From 16 KiB on it fills 100 Gbit/s.",
            rdma("Two hosts with RDMA cards. The check runs soft-RoCE between two emulated machines."),
        ),
        section(
            "socksdirect-fig-9",
            "figure 9",
            "8-byte messages by number of cores",
            "Almost linear: 306 M messages/s between 16 pairs of cores inside a host, 40 times Linux.",
            Kind::Listed(
                listed(Why::MoreCores, "A pair of cores for each of 1 to 16 connections.").by("make test-manycore"),
            ),
        ),
        section(
            "socksdirect-table-1",
            "table 1",
            "overheads in Linux sockets",
            "A list of overheads and of what removes each.",
            Kind::Listed(listed(Why::NoMeasurement, "The table names causes; table 4 has their costs.")),
        ),
        section(
            "socksdirect-table-3",
            "table 3",
            "systems by compatibility, isolation and removed overheads",
            "SocksDirect: transparent, epoll, TCP peers, inside a host, shared ports, fork; no container migration.",
            Kind::Listed(
                listed(Why::NoMeasurement, "The table lists properties. The tests of this project check them.")
                    .by("make test"),
            ),
        ),
    ]
}
