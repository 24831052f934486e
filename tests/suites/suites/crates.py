"""tokio's network tests, hyper's, and those of polling and async-io."""

import parse
from suites import Step

NAME = "crates"

TOKIO = "tcp_* udp* uds_* net_* io_async_fd* io_copy_bidirectional rt_common".split()

# name, version, arguments of `cargo test`. tokio's unit tests do not build from
# its crate; hyper's crate has its unit tests only.
CRATES = [
    ("tokio", "1.44.2", ["--features", "full", *(a for t in TOKIO for a in ("--test", t))]),
    ("polling", "3.7.4", []),
    ("async-io", "2.4.0", []),
    ("hyper", "1.6.0", ["--features", "full", "--lib"]),
]


def prepare(cache):
    steps = []
    for name, version, args in CRATES:
        place = cache.crate(name, version)
        for target, path in sorted(cache.cargo_tests(place, args).items()):
            argv = [path, "--test-threads=2"]
            steps.append(Step(f"{name}-{target}", argv, parse.libtest, cwd=place, timeout=300))
    return ", ".join(f"{n} {v}" for n, v, _ in CRATES), steps
