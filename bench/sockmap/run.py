#!/usr/bin/env python3
"""The experiment of ADR 56: TCP connections of one host through a sockmap, beside stock.

    bench/sockmap/run.py [--secs 0.5] [--turns 5]

Needs root, clang-19, gcc, libbpf.so.1, a cgroup2 mount; go, redis-server and redis-benchmark for their rows. The
programs run without the library: for static ones and Go the kernel's side is the same. Turns alternate, medians
are printed, and the ratio of stock to sockmap (above 1: sockmap is better), of time and of CPU time.
"""

import argparse
import ctypes
import itertools
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
SIZES = (64, 1024, 16384, 65536)
SIDES = ("stock", "sockmap")
ports = itertools.count(21000 + os.getpid() % 5000)


class Sockmap:
    """The programs of sockmap.bpf.c on a cgroup of our own."""

    SK_MSG_VERDICT, SOCK_OPS = 7, 3  # enum bpf_attach_type

    def __init__(self, compiled):
        mounts = (line.split() for line in open("/proc/mounts"))
        root = next(m[1] for m in mounts if m[2] == "cgroup2")
        self.cgroup = pathlib.Path(root) / f"sockmap-{os.getpid()}"
        self.bpf = ctypes.CDLL("libbpf.so.1")
        pointer = ctypes.c_void_p
        for name in ("open_file", "find_map_by_name", "find_program_by_name"):
            getattr(self.bpf, f"bpf_object__{name}").restype = pointer
        loaded = pointer(self.bpf.bpf_object__open_file(str(compiled).encode(), None))
        self.check(self.bpf.bpf_object__load(loaded))

        def one(kind, get, name):
            found = getattr(self.bpf, f"bpf_object__find_{kind}_by_name")(loaded, name)
            return getattr(self.bpf, get)(pointer(found))

        self.counters = one("map", "bpf_map__fd", b".bss")
        ends = one("map", "bpf_map__fd", b"ends")
        self.cgroup.mkdir()
        self.fd = os.open(self.cgroup, os.O_RDONLY)
        redirect, add = (one("program", "bpf_program__fd", name) for name in (b"redirect", b"add"))
        self.check(self.bpf.bpf_prog_attach(redirect, ends, self.SK_MSG_VERDICT, 0))
        self.check(self.bpf.bpf_prog_attach(add, self.fd, self.SOCK_OPS, 0))

    @staticmethod
    def check(result):
        if result:
            raise SystemExit(f"libbpf: {result}")

    def redirected(self):
        """Messages that did not go through TCP."""
        value, key = (ctypes.c_uint64 * 2)(), ctypes.c_int(0)
        self.check(self.bpf.bpf_map_lookup_elem(self.counters, ctypes.byref(key), value))
        return value[0]

    def enter(self):
        (self.cgroup / "cgroup.procs").write_text(str(os.getpid()))

    def close(self):
        self.bpf.bpf_prog_detach(self.fd, self.SOCK_OPS)
        os.close(self.fd)
        for _ in range(50):
            try:
                return self.cgroup.rmdir()
            except OSError:
                time.sleep(0.1)


class Runner:
    def __init__(self, sockmap, build, args):
        self.sockmap, self.build, self.args = sockmap, build, args
        self.processes = []

    def start(self, side, *command, **more):
        enter = self.sockmap.enter if side == "sockmap" else None
        process = subprocess.Popen(
            [str(word) for word in command], preexec_fn=enter, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, **more
        )
        self.processes.append(process)
        return process

    def output(self, side, *command, timeout=30):
        return self.start(side, *command).communicate(timeout=timeout)[0]

    def row(self, what, measure, rate):
        """`measure(side)`: a time or a rate, and CPU time, of one turn."""
        seen = {side: [] for side in SIDES}
        for _ in range(self.args.turns):
            for side in SIDES:
                seen[side].append(measure(side))
        middle = {side: [statistics.median(part) for part in zip(*seen[side])] for side in SIDES}
        (stock, stock_cpu), (ours, ours_cpu) = middle["stock"], middle["sockmap"]
        ratio = ours / stock if rate else stock / ours
        print(f"{what:26} stock {stock:10.2f} sockmap {ours:10.2f} ratio {ratio:5.2f}   CPU {stock_cpu:8.2f} {ours_cpu:8.2f} ratio {stock_cpu / ours_cpu:5.2f}", flush=True)

    def pairs(self):
        for kind, size in itertools.product(("rtt", "bulk"), SIZES):
            command = (self.build / "sockets", kind, size, self.args.secs)
            self.row(f"{kind} {size}", lambda side: [float(x) for x in self.output(side, *command).split()], kind == "bulk")

    def servers(self, name, command, client):
        """A server a side; `client(side, port, size, connections)`: its command. Prints requests a second, us of CPU of both."""
        at = {side: next(ports) for side in SIDES}
        running = {side: self.start(side, *command(at[side])) for side in SIDES}
        time.sleep(0.5)

        def measure(side, size, connections):
            before = children() + used(running[side].pid)
            process = self.start(side, *client(at[side], size, connections))
            rate, number = self.figures(process.communicate(timeout=60)[0])
            return rate, (children() + used(running[side].pid) - before) / number * 1e6

        for size, connections in itertools.product(SIZES, (1, 16)):
            self.row(f"{name} {size}, {connections} conn", lambda side: measure(side, size, connections), True)
        return at

    def figures(self, text):
        """Requests a second, and how many there were."""
        if '"' in text:  # redis-benchmark --csv
            rate = float(text.splitlines()[-1].split(",")[1].strip('"'))
            return rate, self.requests
        rate, failed = text.split()
        if failed != "0":
            raise SystemExit(f"{failed} requests failed")
        return float(rate), float(rate) * self.args.secs

    def semantics(self):
        answers = [self.output(side, self.build / "sockets", "semantics", "splice").splitlines() for side in SIDES]
        for stock, ours in zip(*answers):
            print(f"{stock}   (sockmap: {'the same' if ours == stock else ours})")

    def end(self):
        for process in self.processes:
            process.kill()
            process.wait()


def children():
    t = os.times()
    return t.children_user + t.children_system


def used(pid):
    """CPU seconds of a process that runs."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def go_rows(runner):
    program = runner.build / "gohttp"
    subprocess.run(["go", "build", "-o", program, "."], cwd=HERE / "gohttp", check=True, env=os.environ | {"CGO_ENABLED": "0"})
    milliseconds = int(runner.args.secs * 1000)
    at = runner.servers("go http", lambda port: (program, "server", port), lambda *a: (program, "client", *a[:2], milliseconds, a[2]))
    for side in SIDES:
        port = next(ports)
        runner.start(side, program, "proxy", port, at[side])
        time.sleep(0.3)
        rate, failed = runner.output(side, program, "client", port, 1024, 3000, 1).split()
        print(f"through a Go proxy (io.Copy), {side}: {float(rate):.0f} requests/s, {failed} failed")


def redis_rows(runner):
    runner.requests = int(40000 * runner.args.secs)

    def command(port):
        return "redis-server", "--port", port, "--save", "", "--bind", "127.0.0.1"

    def client(port, size, connections):
        return "redis-benchmark", "-p", port, "-d", size, "-c", connections, "-n", runner.requests, "-t", "set", "--csv"

    runner.servers("redis set", command, client)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--secs", type=float, default=0.5)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as build:
        build = pathlib.Path(build)
        clang = ["clang-19", "-g", "-O2", "-target", "bpf", "-mcpu=v3", "-I/usr/include/x86_64-linux-gnu"]
        subprocess.run([*clang, "-c", HERE / "sockmap.bpf.c", "-o", build / "sockmap.bpf.o"], check=True)
        subprocess.run(["gcc", "-O2", "-static", "-o", build / "sockets", HERE / "sockets.c"], check=True)
        sockmap = Sockmap(build / "sockmap.bpf.o")
        runner = Runner(sockmap, build, args)
        try:
            runner.semantics()
            runner.pairs()
            if shutil.which("go"):
                go_rows(runner)
            if shutil.which("redis-benchmark"):
                redis_rows(runner)
            print(f"{sockmap.redirected()} messages were redirected")
        finally:
            runner.end()
            sockmap.close()


if __name__ == "__main__":
    main()
