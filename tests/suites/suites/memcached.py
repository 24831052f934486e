"""memcached's t/*.t."""

import parse
from suites import Step

NAME = "memcached"


def prepare(cache):
    tree, version = cache.debian_source("memcached")
    if not cache.done("build-memcached"):
        cache.sh(["./configure", "--disable-docs"], cwd=tree)
        cache.sh(["make", "-j2", "memcached", "memcached-debug", "timedrun", "sizes", "testapp"], cwd=tree)
        cache.mark("build-memcached")
    tests = sorted(str(p.relative_to(tree)) for p in tree.glob("t/*.t"))
    # Not about memcached: whether its source is tidy.
    tests = [t for t in tests if t not in ("t/whitespace.t",)]
    return version, [Step("prove", ["prove", "-j2", *tests], parse.prove, cwd=tree, timeout=1500)]
