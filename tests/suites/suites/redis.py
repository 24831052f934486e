"""redis's own tests: the units that are about connections, clients and servers."""

import parse
from suites import Step

NAME = "redis"

UNITS = """
    unit/networking unit/protocol unit/auth unit/info unit/introspection unit/introspection-2 unit/limits unit/obuf-limits
    unit/client-eviction unit/querybuf unit/pubsub unit/pubsubshard unit/multi unit/tracking unit/pause unit/wait
    unit/shutdown unit/replybufsize unit/quit unit/acl unit/cluster/cli integration/redis-cli
    integration/redis-benchmark integration/logging integration/replication
""".split()


def prepare(cache):
    tree, version = cache.debian_source("redis")
    if not cache.done("build-redis"):
        cache.sh(["make", "-j2", "MALLOC=libc", "REDIS_CFLAGS=-O1"], cwd=tree)
        cache.mark("build-redis")
    units = [u for u in UNITS if (tree / "tests" / f"{u}.tcl").exists()]
    argv = ["./runtest", "--clients", "1", "--no-latency", "--timeout", "300", "--single"]
    return version, [
        Step(u.replace("/", "-"), [*argv, u], parse.redis, cwd=tree, env={"TERM": "dumb"}, timeout=420) for u in units
    ]
