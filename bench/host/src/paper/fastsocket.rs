//! Fastsocket's figures and tables.

use super::section::{listed, Kind, Paper, Section, Why};
use super::{kernel, programs, web};

fn section(name: &'static str, item: &'static str, title: &'static str, says: &'static str, kind: Kind) -> Section {
    Section { name, paper: Paper::Fastsocket, item, title, says, differs: "", kind }
}

// Long: a table.
pub fn sections() -> Vec<Section> {
    let drawing = listed(Why::NoMeasurement, "The figure shows how the paper's system is built.");
    vec![
        section("fastsocket-fig-1", "figure 1", "architecture", "A drawing.", Kind::Listed(drawing)),
        section("fastsocket-fig-2", "figure 2", "local listen table", "A drawing.", Kind::Listed(drawing)),
        Section {
            differs: "Two CPUs, on which the clients and the origin run, too: 64 clients send a request every 40 ms over \
                      loopback, a connection each. Use is the whole machine's. In the way kernel-server only haproxy has \
                      the library.",
            ..section(
                "fastsocket-fig-3",
                "figure 3",
                "use of each core by haproxy in production",
                "At 18:30: 45.1 % of 8 cores with Linux, from 31.7 to 57.7 %; 34.3 % with Fastsocket, from 32.7 to \
                 37.6 %. 53.5 % more effective capacity.",
                Kind::Measured(
                    kernel::cores,
                    Some(
                        listed(Why::MoreCores, "A day of production traffic on 8 cores with a network card.")
                            .by("make test-manycore"),
                    ),
                ),
            )
        },
        Section {
            differs: "One and two workers instead of 24; the load generator shares the CPUs and the host. In the way \
                      kernel-server only nginx has the library: that is the paper's case, zones in kernel TCP. In the \
                      way ours both ends have it, over shared memory.",
            ..section(
                "fastsocket-fig-4",
                "figure 4",
                "connections a second of nginx and haproxy by cores",
                "nginx with 24 cores: 475 K/s with Fastsocket, 283 K/s with Linux 3.13, 178 K/s with Linux 2.6.32. \
                 haproxy: 139 K/s more than Linux 3.13, 370 K/s more than Linux 2.6.32. One core: about equal.",
                Kind::Measured(
                    web::by_cores,
                    Some(
                        listed(Why::MoreCores, "The points from 4 to 24 cores. The check is for correctness.")
                            .by("make test-manycore"),
                    ),
                ),
            )
        },
        section(
            "fastsocket-fig-5",
            "figure 5",
            "locality of packets by what the card does",
            "Local packets: 6.2 % with RSS, 76.5 % with FDir in ATR mode, 100 % with perfect filtering. RFD adds 6.1 % to \
             the rate of RSS.",
            Kind::Listed(
                listed(
                    Why::NetworkCard,
                    "The card's modes. Another command counts local packets between network namespaces.",
                )
                .by("make bench-zones"),
            ),
        ),
        Section {
            differs: "haproxy with two threads on two cores, which hardly contend. Linux 6 has no dcache_lock and no \
                      inode_lock for sockets. All parts are on in the way kernel-server. The count is the whole \
                      machine's.",
            ..section(
                "fastsocket-table-1",
                "table 1",
                "contended locks by part of Fastsocket",
                "60 s of haproxy on 24 cores: dcache_lock 26.4 M, slock 4.2 M, ep.lock 1.0 M contentions with Linux; 0 \
                 with all parts of Fastsocket.",
                Kind::Measured(
                    kernel::locks,
                    Some(
                        listed(Why::MoreCores, "The parts one by one: locks are hardly contended on two cores.")
                            .by("fastsocket stat --locks"),
                    ),
                ),
            )
        },
        Section {
            differs: "The time of a whole connection on loopback by the number of listen sockets. kernel-server is our \
                      selection in constant time, stock is SO_REUSEPORT.",
            ..section(
                "fastsocket-2.1",
                "section 2.1",
                "cost of finding a listen socket",
                "With SO_REUSEPORT, __inet_lookup_listener takes 0.26 % of the CPU on one core, and 24.2 % on 24 cores.",
                Kind::Measured(kernel::listen_lookup, None),
            )
        },
        Section {
            differs: "Loopback instead of a network card; the clients share the two CPUs. Only the direction can be \
                      compared: the paper's system works on connections from the network.",
            ..section(
                "fastsocket-readme",
                "README",
                "eight redis instances",
                "20 % more requests with a card that has RSS, 45 % with one that has Flow Director.",
                Kind::Measured(programs::eight_redis, None),
            )
        },
    ]
}
