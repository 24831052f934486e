"""curl's tests 1 to 320 with the system's curl, and their servers."""

import shutil

import parse
from suites import Step

NAME = "curl"


def prepare(cache):
    tree, version = cache.debian_source("curl")
    if not cache.done("build-curl"):
        cache.sh(["./configure", "--without-ssl", "--disable-shared", "--disable-ldap"], cwd=tree)
        cache.sh(["make", "-j2", "-C", "lib"], cwd=tree)
        cache.sh(["make", "-j2", "-C", "src"], cwd=tree)
        cache.sh(["make", "-j2", "-C", "tests/server"], cwd=tree)
        cache.mark("build-curl")
    client = shutil.which("curl")
    # The tests run in parts of 80. If a test hangs, only its part ends.
    argv = ["perl", "runtests.pl", "-n", "-a", "-c", client, "!TLS-SRP"]
    return version, [
        Step(f"{a}-{a + 79}", [*argv, str(a), "to", str(a + 79)], parse.curl, cwd=tree / "tests", timeout=900)
        for a in range(1, 320, 80)
    ]
