#!/usr/bin/env python3
"""Builds servers from Debian's sources with musl-gcc and with gcc, and compares stock runs with runs under the library.

    tests/musl/run.py [NAME…] [--artifacts DIR] [--rounds N] [--time S] [--strict] [--json FILE]

A row is one shape of load on one server: the medians of the rounds, and the ratio of ours to stock for each libc. Exit
status 1 if an answer is wrong or a connection took another path, and with --strict if musl's ratio is below 0.9 of
glibc's. Client and server of redis have the same libc; nginx's client is `wrk`, which has glibc. A Python client, which
has glibc, compares answers. Needs root (a network namespace). Sources and builds stay in target/musl.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "suites"))

import sources  # noqa: E402

LIBCS = {"musl": "musl-gcc", "glibc": "gcc"}
#: The least ratio for musl, as a share of the ratio for glibc.
LEAST = 0.9
#: The environment of a Python program that imports this file.
PATH = {"PYTHONPATH": str(pathlib.Path(__file__).parent)}
INSIDE = "FASTSOCKET_TEST_MUSL_NAMESPACE"


class Wrong(Exception):
    """A server or a path is not as it must be."""


def said(argv, env=None, timeout=120):
    done = subprocess.run(list(map(str, argv)), env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)
    if done.returncode != 0:
        raise Wrong(f"{argv[0]}: {done.returncode}: {done.stdout[-500:]} {done.stderr[-500:]}")
    return done.stdout


def exchange(port, request, end):
    """Sends a request. Returns the whole answer: `end` bytes or, if `end` is 0, all bytes until the server closes."""
    with socket.create_connection(("127.0.0.1", port), 20) as s:
        s.sendall(request)
        answer = b""
        while not end or len(answer) < end:
            more = s.recv(65536)
            if not more:
                break
            answer += more
        return answer


class Redis:
    name = "redis"
    port = 7201
    loads = {"get, 50 clients": ["-t", "get", "-c", "50"], "set 1 KiB, pipelines of 8": ["-t", "set", "-c", "20", "-d", "1024", "-P", "8"]}

    def build(self, cache, libc):
        tree, _ = cache.debian_source("redis")
        place = cache.root / f"redis-{libc}"
        if not cache.done(place.name):
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(tree, place, symlinks=True)
            options = ["MALLOC=libc", "USE_SYSTEMD=no", "BUILD_TLS=no", "OPTIMIZATION=-O2"]
            programs = ["redis-server", "redis-benchmark"]
            cache.sh(["make", "-C", "src", f"-j{os.cpu_count()}", f"CC={LIBCS[libc]}", *options, *programs], cwd=place)
            cache.mark(place.name)
        return place / "src"

    def command(self, place, directory):
        return [place / "redis-server", "--port", self.port, "--save", "", "--dir", directory]

    def rate(self, place, words, seconds, env):
        def run(n):
            text = said([place / "redis-benchmark", "-p", self.port, "-n", n, "--csv", *words], env)
            return float(re.search(r'^"[^"]*","([\d.]+)"', text.splitlines()[-1])[1])

        return run(max(int(run(5000) * seconds), 5000))

    def check(self):
        for size in (1, 100, 20000, 1 << 20):
            value = bytes(i * 7 % 251 for i in range(size))
            told = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n%s\r\n*2\r\n$3\r\nGET\r\n$1\r\nk\r\n" % (size, value)
            want = b"+OK\r\n$%d\r\n%s\r\n" % (size, value)
            if exchange(self.port, told, len(want)) != want:
                raise Wrong(f"redis: another value than was set, {size} bytes")


class Nginx:
    name = "nginx"
    port = 7202
    loads = {"1 KiB, 40 connections": ["-c", "40", "-t", "1"]}

    def build(self, cache, libc):
        tree, _ = cache.debian_source("nginx")
        place = cache.root / f"nginx-{libc}"
        if not cache.done(place.name):
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(tree, place, symlinks=True)
            without = [f"--without-http_{module}_module" for module in ("rewrite", "gzip", "auth_basic")]
            # (Debian's musl has no crypt. nginx includes the header all the same, and uses nothing
            # of it here.)
            (place / "lacking").mkdir()
            if libc == "musl":
                (place / "lacking" / "crypt.h").touch()
            options = [f"--with-cc={LIBCS[libc]}", f"--with-cc-opt=-O2 -I{place}/lacking"]
            cache.sh(["./configure", *options, *without], cwd=place)
            cache.sh(["make", f"-j{os.cpu_count()}"], cwd=place)
            cache.mark(place.name)
        return place / "objs"

    def command(self, place, directory):
        (directory / "logs").mkdir()
        for size in (1024, 300000):
            (directory / str(size)).write_bytes(bytes(i * 3 % 256 for i in range(size)))
        conf = directory / "nginx.conf"
        conf.write_text(
            "daemon off; worker_processes 2; user root; error_log stderr; pid logs/pid; events { }\n"
            f"http {{ access_log off; server {{ listen 127.0.0.1:{self.port}; root {directory}; }} }}\n"
        )
        return [place / "nginx", "-p", directory, "-c", conf]

    def rate(self, place, words, seconds, env):
        text = said(["wrk", *words, "-d", f"{seconds}s", f"http://127.0.0.1:{self.port}/1024"], env)
        if "Non-2xx" in text or "Socket errors" in text:
            raise Wrong(text)
        return float(re.search(r"Requests/sec:\s*([\d.]+)", text)[1])

    def check(self):
        for size in (1024, 300000):
            answer = exchange(self.port, b"GET /%d HTTP/1.0\r\n\r\n" % size, 0)
            if answer.split(b"\r\n\r\n", 1)[1] != bytes(i * 3 % 256 for i in range(size)):
                raise Wrong(f"nginx: another file, {size} bytes")


def copied(cache, package, libc):
    """Returns the directory of a package's build for one libc, and the same directory again if it is not built yet."""
    place = cache.root / f"{package}-{libc}"
    if cache.done(place.name):
        return place, None
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(cache.debian_source(package)[0], place, symlinks=True)
    return place, place


def kernel_headers(cache):
    """Returns a directory with the kernel's headers and without glibc's. musl-gcc itself looks at neither."""
    place = cache.root / "kernel-headers"
    place.mkdir(exist_ok=True)
    asm = pathlib.Path("/usr/include") / said(["gcc", "-print-multiarch"]).strip() / "asm"
    for name, at in (("linux", pathlib.Path("/usr/include/linux")), ("asm-generic", pathlib.Path("/usr/include/asm-generic")), ("asm", asm)):
        if not (place / name).exists():
            (place / name).symlink_to(at)
    return place


class Memcached:
    name = "memcached"
    port = 7203
    loads = {"get and set, 8 connections": []}

    def build(self, cache, libc):
        """Builds memcached with a static libevent of the same libc."""
        event, todo = copied(cache, "libevent", libc)
        if todo:
            options = ["--disable-openssl", "--disable-shared", "--disable-samples", "--disable-libevent-regress"]
            cache.sh(["./configure", f"CC={LIBCS[libc]}", f"CFLAGS=-O2 -idirafter {kernel_headers(cache)}", *options], cwd=todo)
            # Debian patches files whose dates make automake and its tools run, so the tools are
            # replaced.
            frozen = [f"{tool}=:" for tool in ("AUTOMAKE", "AUTOCONF", "ACLOCAL", "AUTOHEADER")]
            cache.sh(["make", f"-j{os.cpu_count()}", *frozen], cwd=todo)
            cache.mark(todo.name)
        place, todo = copied(cache, "memcached", libc)
        if todo:
            flags = [f"CPPFLAGS=-I{event}/include -idirafter {kernel_headers(cache)}", f"LDFLAGS=-L{event}/.libs"]
            cache.sh(["./configure", f"CC={LIBCS[libc]}", *flags, "--disable-coverage", "--disable-docs"], cwd=todo)
            cache.sh(["make", f"-j{os.cpu_count()}", "memcached"], cwd=todo)
            cache.mark(todo.name)
        return place

    def command(self, place, directory):
        return [place / "memcached", "-u", "root", "-l", "127.0.0.1", "-p", self.port, "-t", "2"]

    def rate(self, place, words, seconds, env):
        return float(said([sys.executable, "-c", f"import run; print(run.memcached_rate({self.port}, {seconds}))"], env | PATH))

    def check(self):
        for size in (1, 1000, 100000, 1000000):
            value = bytes(i * 11 % 251 for i in range(size))
            want = b"STORED\r\nVALUE k 5 %d\r\n%s\r\nEND\r\n" % (size, value)
            if exchange(self.port, b"set k 5 0 %d\r\n%s\r\nget k\r\n" % (size, value), len(want)) != want:
                raise Wrong(f"memcached: another value than was set, {size} bytes")


def memcached_rate(port, seconds):
    """Gets and sets per second, over eight connections, each with a batch of requests under way."""
    request = b"set k 0 0 100\r\n" + b"x" * 100 + b"\r\n" + b"get k\r\n" * 8
    answer = b"STORED\r\n" + (b"VALUE k 0 100\r\n" + b"x" * 100 + b"\r\nEND\r\n") * 8
    connections = [socket.create_connection(("127.0.0.1", port), 20) for _ in range(8)]
    until, done = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        for s in connections:
            s.sendall(request)
        for s in connections:
            got = b""
            while len(got) < len(answer):
                got += s.recv(65536) or b"the end" * len(answer)
            if got != answer:
                raise Wrong("memcached: another answer")
        done += 9 * len(connections)
    return done / seconds


class Haproxy:
    """haproxy in front of an nginx of the same libc."""

    name = "haproxy"
    port = 7204
    loads = {"1 KiB, 40 connections": ["-c", "40", "-t", "1"]}
    behind = Nginx()

    def build(self, cache, libc):
        self.nginx = self.behind.build(cache, libc)
        place, todo = copied(cache, "haproxy", libc)
        if todo:
            target = "linux-musl" if libc == "musl" else "linux-glibc"
            without = ["USE_LUA=", "USE_PCRE=", "USE_OPENSSL=", "USE_SYSTEMD=", "USE_ZLIB=", "USE_SLZ=1", "USE_CRYPT_H=", "USE_LIBCRYPT=", "USE_BACKTRACE="]
            flags = [f"TARGET={target}", f"CC={LIBCS[libc]}", f"CPU_CFLAGS=-O2 -idirafter {kernel_headers(cache)}"]
            cache.sh(["make", f"-j{os.cpu_count()}", *flags, *without], cwd=todo)
            cache.mark(todo.name)
        return place

    def command(self, place, directory):
        argv = self.behind.command(self.nginx, directory)
        conf = directory / "haproxy.cfg"
        conf.write_text(
            "global\n  nbthread 1\ndefaults\n  mode http\n  timeout connect 5s\n  timeout client 20s\n  timeout server 20s\n"
            f"frontend f\n  bind 127.0.0.1:{self.port}\n  default_backend b\nbackend b\n  server s 127.0.0.1:{self.behind.port}\n"
        )
        # Both programs are in one process group, which the shell ends.
        both = 'trap "trap - TERM; kill 0" TERM; "$1" -p "$2" -c "$3" & "$4" -db -f "$5" & wait'
        return ["sh", "-c", both, "sh", argv[0], directory, argv[4], place / "haproxy", conf]

    def rate(self, place, words, seconds, env):
        return Nginx.rate(self, place, words, seconds, env)

    def check(self):
        for size in (1024, 300000):
            answer = exchange(self.port, b"GET /%d HTTP/1.0\r\n\r\n" % size, 0)
            if answer.split(b"\r\n\r\n", 1)[1] != bytes(i * 3 % 256 for i in range(size)):
                raise Wrong(f"haproxy: another file, {size} bytes")


class Side:
    """One side: stock, or the library of `artifacts` with a monitor of its own."""

    def __init__(self, directory, artifacts):
        self.env, self.artifacts = dict(os.environ), artifacts
        self.monitor = None
        if artifacts:
            path = directory / "monitor.sock"
            conf = directory / "monitor.toml"
            conf.write_text('[[rule]]\naction = "allow"\n')
            self.env |= {"FASTSOCKET_SOCKET": str(path)}
            self.monitor = subprocess.Popen(
                [artifacts / "fastsocketd", "--private", "--linger", "600", "--socket", path, "--config", conf], env=self.env
            )
            until(path.exists, "the monitor")
            self.preloaded = self.env | {"LD_PRELOAD": str(artifacts / "libfsocket.so")}
        else:
            self.preloaded = self.env

    def counters(self):
        if not self.monitor:
            return {}
        return json.loads(said([self.artifacts / "fastsocket", "stat", "--json"], self.env))["totals"]

    def end(self):
        if self.monitor:
            self.monitor.terminate()
            self.monitor.wait()


def until(condition, what):
    for _ in range(500):
        if condition():
            return
        time.sleep(0.02)
    raise Wrong(f"{what} does not start")


def is_there(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def check_under(side, program):
    """Makes the same comparison in a separate program that has the library."""
    code = f"import run; run.{type(program).__name__}().check()"
    said([sys.executable, "-c", code], side.preloaded | PATH)


def measured(program, place, artifacts, seconds):
    """The rate of each load."""
    with tempfile.TemporaryDirectory() as directory:
        directory = pathlib.Path(directory)
        side = Side(directory, artifacts)
        argv = list(map(str, program.command(place, directory)))
        server = subprocess.Popen(
            argv, env=side.preloaded, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        )
        try:
            until(lambda: server.poll() is not None or is_there(program.port), program.name)
            until(lambda: not hasattr(program, "behind") or is_there(program.behind.port), program.name)
            before = side.counters()
            check_under(side, program)
            rates = {name: program.rate(place, words, seconds, side.preloaded) for name, words in program.loads.items()}
            after = side.counters()
            change = {name: after[name] - before.get(name, 0) for name in after}
            # haproxy drops privileges. Every two seconds it opens a connection in the kernel first,
            # which moves to shared memory. (A program without the library has connected to both
            # servers to see whether they are up.)
            first = change.get("fallback.kernel_first", 0) if hasattr(program, "behind") else 0
            connects, accepts = change.get("connect_kernel", 0), change.get("accept_kernel", 0)
            stays = connects > first or accepts > first + 2 * hasattr(program, "behind") or first and not change.get("path_upgrade")
            if side.monitor and (stays or not change.get("connect_shm")):
                raise Wrong(f"{program.name}: not over shared memory: { {k: v for k, v in change.items() if v} }")
            return rates
        finally:
            server.terminate()
            server.wait()
            side.end()


def compare(program, cache, options):
    """Measures one server, and returns its rows."""
    ratios = {}
    for libc in LIBCS:
        place = program.build(cache, libc)
        rounds = [[measured(program, place, side, options.time) for side in (None, options.artifacts)] for _ in range(options.rounds)]
        for load in program.loads:
            stock, ours = (statistics.median(r[i][load] for r in rounds) for i in (0, 1))
            ratios[load, libc] = ours / stock
            print(f"{program.name}, {load}: {libc:5} stock {stock:9.0f}  ours {ours:9.0f}  ratio {ours / stock:.2f}", flush=True)
    return [
        {"row": f"{program.name}, {load}", **{libc: ratios[load, libc] for libc in LIBCS}, "of_glibcs": ratios[load, "musl"] / ratios[load, "glibc"]}
        for load in program.loads
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--artifacts", type=pathlib.Path, default=ROOT / "target" / "quick")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--time", type=int, default=2)
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    options.artifacts = options.artifacts.resolve()
    programs = [p for p in (Redis(), Nginx(), Memcached(), Haproxy()) if p.name in options.names or not options.names]
    cache = sources.Cache(ROOT / "target" / "musl")
    if INSIDE not in os.environ:
        for program in programs:
            for libc in LIBCS:
                program.build(cache, libc)
        os.environ[INSIDE] = "1"
        words = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable]
        os.execvp(words[0], [*words, *sys.argv])
    rows = [row for program in programs for row in compare(program, cache, options)]
    for row in rows:
        print(f"{row['row']}: musl {row['musl']:.2f} of stock, glibc {row['glibc']:.2f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    low = [row["row"] for row in rows if row["of_glibcs"] < LEAST]
    if options.strict and low:
        sys.exit(f"below {LEAST} of glibc's ratio: {', '.join(low)}")


if __name__ == "__main__":
    try:
        main()
    except Wrong as wrong:
        sys.exit(f"tests/musl: {wrong}")
