"""libuv's run_tests."""

import parse
from suites import Step

NAME = "libuv"


def prepare(cache):
    tree, version = cache.debian_source("libuv1")
    build = tree / "build-suites"
    if not cache.done("build-libuv"):
        build.mkdir(exist_ok=True)
        cache.sh(["cmake", "..", "-DBUILD_TESTING=ON"], cwd=build)
        cache.sh(["make", "-j2", "uv_run_tests"], cwd=build)
        cache.mark("build-libuv")
    # libuv's tests refuse to run as root unless this variable allows it.
    env = {"UV_RUN_AS_ROOT": "1", "UV_TEST_TIMEOUT_MULTIPLIER": "3"}
    return version, [Step("tests", [build / "uv_run_tests"], parse.tap, cwd=tree, env=env, timeout=1200)]
