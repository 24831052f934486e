"""libevent's regress, with each of its backends."""

import parse
from suites import Step

NAME = "libevent"

BACKENDS = {
    "epoll": {"EVENT_NOPOLL": "yes", "EVENT_NOSELECT": "yes"},
    "changelist": {"EVENT_NOPOLL": "yes", "EVENT_NOSELECT": "yes", "EVENT_EPOLL_USE_CHANGELIST": "yes"},
    "poll": {"EVENT_NOEPOLL": "yes", "EVENT_NOSELECT": "yes"},
    "select": {"EVENT_NOEPOLL": "yes", "EVENT_NOPOLL": "yes"},
}


def prepare(cache):
    tree, version = cache.debian_source("libevent")
    if not cache.done("build-libevent"):
        flags = ["--disable-openssl", "--disable-mbedtls", "--enable-static", "--disable-shared", "--disable-samples"]
        cache.sh(["./configure", *flags], cwd=tree)
        # Debian patches files whose dates make automake and its tools run, so the tools are
        # replaced.
        frozen = [f"{tool}=:" for tool in ("AUTOMAKE", "AUTOCONF", "ACLOCAL", "AUTOHEADER")]
        cache.sh(["make", "-j2", *frozen], cwd=tree)
        cache.mark("build-libevent")
    # The default time limit of the tests assumes one run on an idle machine.
    argv = [tree / "test" / "regress", "--timeout", "60"]
    return version, [
        Step(name, argv, parse.tinytest, cwd=tree / "test", env=env) for name, env in BACKENDS.items()
    ]
