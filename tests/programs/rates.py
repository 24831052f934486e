#!/usr/bin/env python3
"""Requests a second of real programs under full load, on kernel sockets and under the library, in turns.

    tests/programs/rates.py [NAME…] [--rounds N] [--time S] [--strict] [--json FILE]

Both sides run in namespaces of their own at once; the one whose turn it is not waits. A row is one
shape of load on one program: the medians of the rounds, the ratio of ours to stock with the range of
the rounds' own ratios, CPU time a request (of the whole machine: run it alone), and the share of the
connections that went over shared memory. Exit status 1 where a load failed or its connections took
another path, and with --strict where a ratio is below 1 by more than its spread. Needs root.
NAME: the beginning of a row's name.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import statistics
import sys
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "suites")]

import harness  # noqa: E402
from lab import Lab, Wrong  # noqa: E402
from program import difference  # noqa: E402
from programs import runtimes, stores, web  # noqa: E402


def number(text, pattern, what):
    found = re.search(pattern, text)
    if not found:
        raise Wrong(f"{what}: {text[-400:]}")
    return float(found.group(1))


def wrk(path, connections, threads=1, close=False):
    """A closed loop of HTTP requests; `close`: each over a connection of its own."""

    def load(p, seconds):
        header = ["-H", "Connection: close"] if close else []
        said = p.lab.run(["wrk", "-t", threads, "-c", connections, "-d", f"{seconds}s", *header, p.url(path)]).decode()
        # (That a server ends a connection after so many requests `wrk` calls an error of reading.)
        if "Non-2xx" in said or re.search(r"Socket errors: (?!connect 0, read \d+, write 0, timeout 0)", said):
            raise Wrong(f"wrk: {said}")
        return number(said, r"Requests/sec:\s*([\d.]+)", "wrk")

    return load


def pgbench(clients, threads, *words):
    def load(p, seconds):
        where = ["-h", "127.0.0.1", "-p", str(p.port), "-U", "postgres", "postgres"]
        said = p.lab.run([f"{p.BIN}/pgbench", "-n", "-c", clients, "-j", threads, "-T", seconds, *words, *where]).decode()
        return number(said, r"tps = ([\d.]+) \((?:without|including)", "pgbench")

    return load


def counted(run, first):
    """A load by its number of requests: `run(p, n)` is the rate. The number that takes long enough is found at the
    first turn."""

    def load(p, seconds):
        sizes = p.__dict__.setdefault("sizes", {})
        if load not in sizes:
            n = first
            for _ in range(4):
                n = max(first, int(run(p, n) * seconds))
            sizes[load] = n
        return run(p, sizes[load])

    return load


def sysbench(clients, test="oltp_point_select"):
    def load(p, seconds):
        said = p.lab.run(p.sysbench(test, f"--threads={clients}", f"--time={seconds}", "run")).decode()
        return number(said, r"transactions:\s+\d+\s+\(([\d.]+) per sec", "sysbench")

    return load


def slap(clients):
    """A connection for each query."""

    def run(p, n):
        n = max(n // clients, 1) * clients
        said = p.lab.run(
            ["mariadb-slap", "--no-defaults", "-h", "127.0.0.1", "-P", p.port, "-u", "root", "--create-schema=rates", "--no-drop", "--detach=1",
             f"--concurrency={clients}", f"--number-of-queries={n}", "--query=select c from sbtest1 where id=500"]
        ).decode()  # fmt: skip
        return n / max(number(said, r"Average number of seconds to run all queries: ([\d.]+)", "mariadb-slap"), 0.001)

    return counted(run, 512)


def redis(clients, kind, *words):
    def run(p, n):
        said = p.lab.run(["redis-benchmark", "-p", p.port, "-c", clients, "-n", n, "-t", kind, "--csv", *words]).decode()
        return number(said.splitlines()[-1], r'^"[^"]*","([\d.]+)"', "redis-benchmark")

    return counted(run, 2000)


def own(threads):
    """Clients of load.py, which compare the answers."""

    def load(p, seconds):
        running = p.lab.load({"threads": threads, **p.load()})
        time.sleep(seconds)
        said = p.lab.ended_load(running)
        if said["failed"] or said["wrong"]:
            raise Wrong(f"load: {said}")
        return said["ok"] / seconds

    return load


class RedisThreads(stores.Redis):
    name = "redis, 2 io-threads"

    def argv(self):
        return [*super().argv(), "--io-threads", "2", "--io-threads-do-reads", "yes"]


class MemcachedThreads(stores.Memcached):
    name = "memcached, 4 threads"

    def argv(self):
        return [*super().argv(), "-t", "4"]


class ApachePrefork(web.Apache):
    name = "apache2 (prefork)"

    def prepare(self):
        super().prepare()
        text = self.conf.read_text().replace("mpm_event", "mpm_prefork").replace("ThreadsPerChild 16\n", "")
        self.conf.write_text(text.replace("StartServers 2\n", "StartServers 8\n"))


class ApacheWorker(web.Apache):
    """A process with 256 threads, each of which waits in the queue of one acceptor thread."""

    name = "apache2 (worker)"

    def prepare(self):
        super().prepare()
        text = self.conf.read_text().replace("mpm_event", "mpm_worker").replace("StartServers 2", "StartServers 1")
        text = text.replace("ThreadsPerChild 16", "ThreadLimit 256\nThreadsPerChild 256").replace("MaxRequestWorkers 64", "MaxRequestWorkers 256")
        self.conf.write_text(text)


class PostgresRates(stores.Postgres):
    def ready(self):
        super().ready()
        where = ["-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres", "postgres"]
        self.lab.run([f"{self.BIN}/pgbench", "-q", "-i", "-s", "5", *where], side="stock")


class MariadbRates(stores.Mariadb):
    """With a thread for each connection."""

    def argv(self):
        return [*super().argv(), "--max-connections=400"]

    def sysbench(self, test, *words):
        return ["sysbench", test, "--db-driver=mysql", "--mysql-host=127.0.0.1", f"--mysql-port={self.port}", "--mysql-user=root",
                "--mysql-db=rates", "--table-size=10000", "--db-ps-mode=disable", *words]  # fmt: skip

    def ready(self):
        super().ready()
        self.lab.run(self.client("-e", "create database rates"), side="stock")
        self.lab.run(self.sysbench("oltp_point_select", "prepare"), side="stock")


PREPARED = ("-S", "-M", "prepared")
HTTP = {
    "1 connection": wrk("/1000", 1), "32 connections": wrk("/1000", 32, 2), "256 connections": wrk("/1000", 256, 2),
    "64 KiB": wrk("/65536", 16, 2), "a connection a request": wrk("/1000", 16, 2, close=True),
}  # fmt: skip
SHORT = {f"a connection a request, c={c}": wrk("/1000", c, min(c, 2), close=True) for c in (1, 8, 64, 256)}
SHORT_QUERIES = {f"a connection a query, c={c}": slap(c) for c in (1, 8, 64, 256)}
SLOW = {k: HTTP[k] for k in ("1 connection", "32 connections", "64 KiB")}
#: Program and the loads it is put under.
CASES = [
    (PostgresRates, {f"-S prepared c={c} j={j}": pgbench(c, j, *PREPARED) for c, j in ((1, 1), (2, 2), (8, 1), (16, 2), (64, 2))}
     | {"-S simple c=8 j=2": pgbench(8, 2, "-S"), "TPC-B c=8 j=2": pgbench(8, 2),
        "-S a connection a transaction": pgbench(4, 2, "-S", "-C")}),
    (MariadbRates, {f"select c={c}": sysbench(c) for c in (1, 8, 64)} | {"read_write c=8": sysbench(8, "oltp_read_write")} | SHORT_QUERIES),
    (stores.Redis, {"get c=1": redis(1, "get"), "get c=50": redis(50, "get"), "get c=50 -P 16": redis(50, "get", "-P", "16"),
                    "lrange_600 c=20": redis(20, "lrange_600"), "set 16 KiB c=20": redis(20, "set", "-d", "16384")}),
    (RedisThreads, {"get c=50": redis(50, "get", "--threads", "2")}),
    (MemcachedThreads, {"8 clients": own(8), "32 clients": own(32)}),
    (web.Nginx, HTTP),
    (web.Haproxy, HTTP),
    (web.Apache, HTTP),
    (ApacheWorker, SHORT | {"256 connections": HTTP["256 connections"]}),
    (ApachePrefork, SLOW | {"a connection a request": HTTP["a connection a request"]}),
    (web.PhpFpm, {"4 KiB": wrk("/page.php?n=4096", 16, 2), "64 KiB": wrk("/page.php?n=65536", 16, 2)}),
    (runtimes.Node, SLOW),
    (runtimes.NodeCluster, SLOW),
    (runtimes.Gunicorn, {"a connection a request": wrk("/1000", 16, 2, close=True)}),
    (runtimes.Uvicorn, SLOW),
    (runtimes.Java, SLOW),
]  # fmt: skip


def rows():
    return {f"{cls.name}: {label}": (cls, load) for cls, loads in CASES for label, load in loads.items()}


def busy():
    """CPU time that the whole machine has used, seconds."""
    words = pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()
    user, nice, system, _idle, _wait, irq, softirq = (int(w) for w in words[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def inside(name, side, out):
    """One program on one side: does what the FIFO `asked` says, a load a line; an answer a line to `told`."""
    cls = next(c for c, _ in CASES if c.name == name)
    with open(out / "asked") as asked, open(out / "told", "w") as told:
        lab = Lab(side, out)
        try:
            program = cls(lab)
            program.prepare()
            program.start()
            begun = set()
            print(json.dumps({}), file=told, flush=True)
            for line in asked:
                label, seconds = json.loads(line)
                try:
                    load = rows()[label][1]
                    if label not in begun:
                        # Caches fill, and the size of the load is found.
                        begun.add(label)
                        load(program, seconds)
                    before, cpu, began = lab.counters(), busy(), time.monotonic()
                    rate = load(program, seconds)
                    cpu = (busy() - cpu) / (time.monotonic() - began)
                    answer = {"rate": rate, "cpu": cpu, "path": difference(before, lab.counters())}
                except Wrong as e:
                    answer = {"wrong": str(e)}
                print(json.dumps(answer), file=told, flush=True)
        except Exception as e:
            print(json.dumps({"wrong": f"{type(e).__name__}: {e}"}), file=told, flush=True)
            raise
        finally:
            lab.end()


class Side:
    """A program that waits for its turns."""

    def __init__(self, cls, side, out):
        self.out = out / side
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir(parents=True)
        for name in ("asked", "told"):
            os.mkfifo(self.out / name)
        argv = [sys.executable, __file__, "--inside", cls.name, side, self.out]
        self.thread = threading.Thread(target=harness.run, args=(argv, "stock", self.out), kwargs={"timeout": 3600}, daemon=True)
        self.thread.start()
        self.asked, self.told = open(self.out / "asked", "w"), open(self.out / "told")

    def answer(self):
        line = self.told.readline()
        answer = json.loads(line) if line else {"wrong": (self.out / "log").read_text(errors="replace")[-600:]}
        if "wrong" in answer:
            raise Wrong(answer["wrong"])
        return answer

    def turn(self, label, seconds):
        print(json.dumps([label, seconds]), file=self.asked, flush=True)
        return self.answer()

    def end(self):
        self.asked.close()
        self.thread.join(60)


def measured(label, cls, turns):
    stock, ours = ([t[side] for t in turns] for side in ("stock", "ours"))
    rate = lambda ts: statistics.median(t["rate"] for t in ts)  # noqa: E731
    cost = lambda ts: statistics.median(t["cpu"] / t["rate"] for t in ts) * 1e6  # noqa: E731
    ratios = sorted(o["rate"] / s["rate"] for s, o in zip(stock, ours, strict=True))
    path = {}
    for t in ours:
        for name, n in t["path"].items():
            path[name] = path.get(name, 0) + n
    # (Connections to a server that has seen that they are too short are where they belong.)
    meant = path.get("fallback.no_listener", 0) if path.get("fallback.short_lived") else 0
    shm, kernel = path.get("connect_shm", 0) + meant, path.get("connect_kernel", 0) - meant
    return {
        "row": label, "stock": rate(stock), "ours": rate(ours), "ratio": rate(ours) / rate(stock), "low": ratios[0], "high": ratios[-1],
        "cpu": cost(ours) / cost(stock), "shm": shm / (shm + kernel) if shm + kernel else 0.0, "path": path,
        "shm_expected": cls.path == "shm" and not cls.kernel_too,
    }  # fmt: skip


def show(r):
    mark = "" if r["ratio"] >= 1 or r["high"] >= 1 else "  BELOW STOCK"
    print(
        f"{r['row']:48} {r['stock']:10.0f} {r['ours']:10.0f} {r['ratio']:6.2f} ({r['low']:.2f} to {r['high']:.2f})"
        f" {r['cpu']:5.2f} {100 * r['shm']:4.0f} %{mark}",
        flush=True,
    )


def main():
    if sys.argv[1:2] == ["--inside"]:
        inside(sys.argv[2], sys.argv[3], pathlib.Path(sys.argv[4]))
        return
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("names", nargs="*", metavar="NAME")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--time", type=int, default=2, help="seconds of one load")
    p.add_argument("--strict", action="store_true", help="a ratio below 1 fails")
    p.add_argument("--json", metavar="FILE", help="all figures")
    p.add_argument("--bin", metavar="DIR", help="where the library and its programs are [default: target/release]")
    args = p.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("rates: needs root, for namespaces and for servers that give it up")
    os.umask(0o022)
    if args.bin:
        harness.BIN = pathlib.Path(args.bin)
    out = harness.ROOT / "target" / "rates"
    tested = out / f"tested-{os.getpid()}"
    harness.snapshot(tested)
    results, good = [], True
    print(f"{'':48} {'stock/s':>10} {'ours/s':>10}  ratio (of the rounds)  CPU  shm", flush=True)
    try:
        for cls, loads in CASES:
            labels = [x for x in (f"{cls.name}: {k}" for k in loads) if not args.names or any(x.startswith(n) for n in args.names)]
            if not labels:
                continue
            sides = {}
            try:
                place = out / re.sub(r"[^a-z0-9]+", "-", cls.name.lower())
                for side in ("stock", "ours"):
                    sides[side] = Side(cls, side, place)
                    sides[side].answer()
                for label in labels:
                    turns = []
                    for i in range(args.rounds):
                        order = ("stock", "ours") if i % 2 == 0 else ("ours", "stock")
                        turns.append({side: sides[side].turn(label, args.time) for side in order})
                    row = measured(label, cls, turns)
                    results.append(row)
                    show(row)
                    if row["shm_expected"] and row["shm"] < 0.99:
                        print(f"  FAILED: not over shared memory: {row['path']}", flush=True)
                        good = False
            except Wrong as e:
                print(f"{cls.name}: FAILED: {e}", flush=True)
                good = False
            finally:
                for side in sides.values():
                    side.end()
    finally:
        shutil.rmtree(tested, ignore_errors=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    below = [r["row"] for r in results if r["ratio"] < 1 and r["high"] < 1]
    print(f"rates: {len(results)} rows, {len(below)} below stock by more than their spread{': ' if below else ''}{'; '.join(below)}")
    raise SystemExit(0 if good and results and not (args.strict and below) else 1)


if __name__ == "__main__":
    main()
