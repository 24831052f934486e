"""tokio's network tests, hyper's, those of polling and async-io, and tests of mio (tests/suites/mio)."""

import pathlib

import parse
from suites import Step

NAME = "crates"

#: mio's published crate has no tests.
MIO = pathlib.Path(__file__).resolve().parents[1] / "mio"
MIO_VERSION = "1.0.4"

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
    places = [(name, cache.crate(name, version), args) for name, version, args in CRATES]
    for name, place, args in [*places, ("mio", cache.copy(MIO), ["--test", "net"])]:
        for target, path in sorted(cache.cargo_tests(place, args).items()):
            argv = [path, "--test-threads=2"]
            steps.append(Step(f"{name}-{target}", argv, parse.libtest, cwd=place, timeout=300))
    versions = [*((n, v) for n, v, _ in CRATES), ("mio", MIO_VERSION)]
    return ", ".join(f"{n} {v}" for n, v in versions), steps
