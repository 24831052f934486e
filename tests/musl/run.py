#!/usr/bin/env python3
"""Servers of Debian's sources, built with musl-gcc and with gcc, stock and under the library in turns.

    tests/musl/run.py [NAME…] [--artifacts DIR] [--rounds N] [--time S] [--strict] [--json FILE]

A row is one shape of load on one server: the medians of the rounds, and the ratio of ours to stock for each libc. Exit
status 1 where an answer is wrong or a connection took another path, and with --strict where musl's ratio is below 0.9 of
glibc's. Client and server of redis have the same libc; nginx's client is `wrk`, which has glibc. A client of Python, which
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
#: Of the ratio that a build with glibc has.
LEAST = 0.9
INSIDE = "FASTSOCKET_TEST_MUSL_NAMESPACE"


class Wrong(Exception):
    """A server or a path is not what it has to be."""


def said(argv, env=None, timeout=120):
    done = subprocess.run(list(map(str, argv)), env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)
    if done.returncode != 0:
        raise Wrong(f"{argv[0]}: {done.returncode}: {done.stdout[-500:]} {done.stderr[-500:]}")
    return done.stdout


def exchange(port, request, end):
    """The whole answer: up to `end` bytes, or (0) until the server closes."""
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
            # (musl in Debian has no crypt. nginx includes the header all the same, and calls nothing of it here.)
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


class Side:
    """Stock, or the library of `artifacts` with a monitor of its own."""

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
    """The same comparison from a program of its own, which has the library."""
    code = f"import run; run.{type(program).__name__}().check()"
    said([sys.executable, "-c", code], side.preloaded | {"PYTHONPATH": str(pathlib.Path(__file__).parent)})


def measured(program, place, artifacts, seconds):
    """Rates of each load."""
    with tempfile.TemporaryDirectory() as directory:
        directory = pathlib.Path(directory)
        side = Side(directory, artifacts)
        argv = list(map(str, program.command(place, directory)))
        server = subprocess.Popen(argv, env=side.preloaded, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            until(lambda: server.poll() is not None or is_there(program.port), program.name)
            before = side.counters()
            check_under(side, program)
            rates = {name: program.rate(place, words, seconds, side.preloaded) for name, words in program.loads.items()}
            after = side.counters()
            change = {name: after[name] - before.get(name, 0) for name in after}
            if side.monitor and (change.get("connect_kernel") or change.get("accept_kernel") or not change.get("connect_shm")):
                raise Wrong(f"{program.name}: not over shared memory: { {k: v for k, v in change.items() if v} }")
            return rates
        finally:
            server.terminate()
            server.wait()
            side.end()


def compare(program, cache, options):
    """Rows of one server."""
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
    programs = [p for p in (Redis(), Nginx()) if p.name in options.names or not options.names]
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
