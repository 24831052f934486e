"""Loads on real programs. Each gives a rate of requests, by the program's usual client."""

import re
import time

from lab import Wrong
from programs import runtimes, stores, web


def number(text, pattern, what):
    found = re.search(pattern, text)
    if not found:
        raise Wrong(f"{what}: {text[-400:]}")
    return float(found.group(1))


def wrk(path, connections, threads=1, close=False):
    """A closed loop of HTTP requests. With `close`, each request has a connection of its own."""

    def load(p, seconds):
        header = ["-H", "Connection: close"] if close else []
        said = p.lab.run(["wrk", "-t", threads, "-c", connections, "-d", f"{seconds}s", *header, p.url(path)]).decode()
        # (If a server ends a connection after a number of requests, `wrk` reports a read error.)
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
    """A load with a given number of requests: `run(p, n)` returns the rate. The first turn finds the number that takes
    long enough."""

    def load(p, seconds):
        sizes = p.__dict__.setdefault("sizes", {})
        if load not in sizes:
            n = first
            for _ in range(4):
                n = max(first, int(run(p, n) * seconds))
            sizes[load] = n
        # (Fewer requests under strace, because a system call takes many times as long.)
        n = max(first, sizes[load] // 8) if p.lab.tracer else sizes[load]
        rate = run(p, n)
        p.requests = n
        return rate

    return load


def sysbench(clients, test="oltp_point_select"):
    def load(p, seconds):
        said = p.lab.run(p.sysbench(test, f"--threads={clients}", f"--time={seconds}", "run")).decode()
        return number(said, r"transactions:\s+\d+\s+\(([\d.]+) per sec", "sysbench")

    return load


def slap(clients):
    """Each query has a connection of its own."""

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
    """The clients of load.py, which compare the answers."""

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


class HaproxyThread(web.Haproxy):
    name = "haproxy, 1 thread"

    def text(self):
        return super().text().replace("nbthread 2", "nbthread 1")


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
    """MariaDB with a thread for each connection."""

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
#: Each program, with its loads.
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
    (HaproxyThread, {k: HTTP[k] for k in ("32 connections", "a connection a request")}),
    (web.Apache, HTTP),
    (ApacheWorker, SHORT | {"256 connections": HTTP["256 connections"]}),
    (ApachePrefork, SLOW | {"a connection a request": HTTP["a connection a request"]}),
    (web.PhpFpm, {"4 KiB": wrk("/page.php?n=4096", 16, 2), "64 KiB": wrk("/page.php?n=65536", 16, 2)}),
    (runtimes.Node, SLOW | {"a connection a request": HTTP["a connection a request"]}),
    (runtimes.NodeCluster, SLOW),
    (runtimes.Gunicorn, {"a connection a request": wrk("/1000", 16, 2, close=True)}),
    (runtimes.Uvicorn, SLOW),
    (runtimes.Java, SLOW),
]  # fmt: skip


def rows():
    return {f"{cls.name}: {label}": (cls, load) for cls, loads in CASES for label, load in loads.items()}
