"""memcached's t/*.t, twice: unchanged, which means mostly over Unix sockets, and over TCP."""

import shutil

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
    # This test only checks the layout of memcached's source.
    tests = [t for t in tests if t not in ("t/whitespace.t",)]
    steps = []
    for name, where in (("prove", "t"), ("tcp", over_tcp(tree))):
        files = [t.replace("t/", f"{where}/", 1) for t in tests]
        steps.append(Step(name, ["prove", "-j2", *files], parse.prove, cwd=tree, timeout=1500))
    return version, steps


def over_tcp(tree):
    """Copies the tests, and makes the copy believe that there are no Unix sockets."""
    place = tree / "t-tcp"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(tree / "t", place)
    module = place / "lib" / "MemcachedTest.pm"
    text = module.read_text()
    here = "sub supports_unix_socket {\n"
    if here not in text:
        raise RuntimeError("MemcachedTest.pm is not as expected: no supports_unix_socket")
    module.write_text(text.replace(here, here + "    return 0;\n"))
    return place.name
