//! Affinity-Accept's figures and tables.

use super::section::{listed, Kind, Listed, Paper, Section, Why};
use super::{build, kernel, web};

fn section(name: &'static str, item: &'static str, title: &'static str, says: &'static str, kind: Kind) -> Section {
    Section { name, paper: Paper::AffinityAccept, item, title, says, differs: "", kind }
}

const CURVES: &str = "nginx with two workers instead of Apache on 48 cores; wrk shares the two CPUs and the host. Fine-Accept \
                      is not built. In the way kernel-server only nginx has the library: that is the paper's case, zones in \
                      kernel TCP. In the way ours both ends have it, over shared memory.";

fn more_cores(text: &'static str) -> Listed {
    listed(Why::MoreCores, text).by("make test-manycore")
}

pub fn sections() -> Vec<Section> {
    let mut all = measured();
    all.extend(only_listed());
    all
}

fn measured() -> Vec<Section> {
    vec![
        Section {
            differs: "The project is the one that --build names, with a job for each of the CPUs, on which the server and \
                      its clients run, too: 64 clients think for 20 ms before each request. The build has no library.",
            ..section(
                "affinity-6.5",
                "section 6.5",
                "web server beside a parallel build",
                "Median latency: 200 ms alone, 10 s beside a kernel build on half of the cores, 230 ms with the load \
                 balancer. The build takes 125 s alone, 168 s beside the server, 130 s with flow group migration.",
                Kind::Measured(
                    build::experiments,
                    Some(
                        listed(Why::Elsewhere, "Connections from another host, beside a job of arithmetic.")
                            .by("make bench-balance"),
                    ),
                ),
            )
        },
        Section {
            differs: "nginx with two workers instead of Apache on 48 cores; wrk shares the two CPUs, so that its time is in \
                      that of a request. A connection for each request. The locks are all of the machine's but the \
                      scheduler's.",
            ..section(
                "affinity-table-2",
                "table 2",
                "time of a request",
                "Stock-Accept 590 us, of which 82 us spin on the listen socket's lock; Fine-Accept 178 us; \
                 Affinity-Accept 144 us, and none for the lock.",
                Kind::Measured(
                    kernel::request,
                    Some(more_cores("48 cores that contend for one lock; the idle time and the time that it is held.")),
                ),
            )
        },
        Section {
            differs: CURVES,
            ..section(
                "affinity-fig-7",
                "figure 7",
                "requests a connection",
                "Affinity-Accept is above Fine-Accept at each point, and above Stock-Accept up to 5,000 requests a \
                 connection; beyond that, stock is as Fine-Accept.",
                Kind::Measured(web::by_requests, None),
            )
        },
        Section {
            differs: CURVES,
            ..section(
                "affinity-fig-8",
                "figure 8",
                "time between requests",
                "Six requests a connection: Affinity-Accept is above Fine-Accept, and both keep their rate from 0 to 1 s \
                 of think time.",
                Kind::Measured(web::by_think_time, None),
            )
        },
        Section {
            differs: CURVES,
            ..section(
                "affinity-fig-9",
                "figure 9",
                "average size of a file",
                "Above 1 KiB the card is the limit for Fine-Accept and Affinity-Accept, above 10 KiB for Stock-Accept.",
                Kind::Measured(web::by_size, None),
            )
        },
    ]
}

// Long: a table.
fn only_listed() -> Vec<Section> {
    let cores = |text| Kind::Listed(more_cores(text));
    let counters = |text| Kind::Listed(listed(Why::Counters, text));
    vec![
        section(
            "affinity-fig-1",
            "figure 1",
            "a listen socket's request table and accept queue",
            "A drawing.",
            Kind::Listed(listed(Why::NoMeasurement, "The figure shows how Linux is built.")),
        ),
        section(
            "affinity-fig-2",
            "figure 2",
            "Apache on AMD by cores",
            "48 cores: Affinity-Accept is 24 % above Fine-Accept; Stock-Accept hardly grows with the cores.",
            cores("1 to 48 cores."),
        ),
        section(
            "affinity-fig-3",
            "figure 3",
            "lighttpd on AMD by cores",
            "48 cores: Affinity-Accept is 17 % above Fine-Accept, until the card is the limit.",
            cores("1 to 48 cores."),
        ),
        section(
            "affinity-fig-4",
            "figure 4",
            "latency of shared memory locations",
            "Affinity-Accept removes most of the slow accesses of Fine-Accept.",
            counters("The latency of single loads in the kernel, by DProf."),
        ),
        section(
            "affinity-fig-5",
            "figure 5",
            "Apache on Intel by cores",
            "Affinity-Accept is above Fine-Accept by less than on AMD.",
            cores("1 to 80 cores."),
        ),
        section(
            "affinity-fig-6",
            "figure 6",
            "lighttpd on Intel by cores",
            "Affinity-Accept is above Fine-Accept by less than on AMD.",
            cores("1 to 80 cores."),
        ),
        section(
            "affinity-fig-10",
            "figure 10",
            "requests a connection with flow steering by the card",
            "Twenty-Policy is as Affinity-Accept at 1,000 requests a connection, and below it at 500.",
            Kind::Listed(listed(Why::NetworkCard, "Flow steering of an Intel 82599.")),
        ),
        section(
            "affinity-table-1",
            "table 1",
            "access times of the memories",
            "L1 3 to 4, RAM 90 to 120, remote RAM 280 to 500 cycles.",
            Kind::Listed(listed(Why::MoreCores, "Several chips: a guest has one memory.")),
        ),
        section(
            "affinity-table-3",
            "table 3",
            "CPU counters by entry into the kernel",
            "softirq_net_rx: 97 K cycles and 352 L2 misses with Fine-Accept, 69 K and 178 with Affinity-Accept.",
            counters("Cycles and L2 misses by entry into the kernel."),
        ),
        section(
            "affinity-table-4",
            "table 4",
            "shared bytes by type",
            "tcp_sock: 30 % of the bytes are shared with Fine-Accept, 2 % with Affinity-Accept.",
            counters("DProf, which samples addresses of loads."),
        ),
        section(
            "affinity-table-5",
            "table 5",
            "features of network cards",
            "Rings and entries for flow steering of four cards.",
            Kind::Listed(listed(Why::NoMeasurement, "The table lists properties of cards.")),
        ),
    ]
}
