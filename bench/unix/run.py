"""Unix stream sockets: stock, stock once more (the control) and ours, in turns.

run.py [--rounds N] [--quick]         a table of medians: figure of stock, ratios of the control and of ours, and their spread

Round trips and one-way messages of two C programs, redis-benchmark and pgbench, where they are installed. The path is
asserted from the counters: a row in which nothing went over fails, but that of short connections.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("FASTSOCKET_BUILD", ROOT / "target/release"))


class Side:
    """Servers and clients of one side; `ours`: with the library."""

    def __init__(self, name, place):
        self.name, self.ours = name, name == "ours"
        self.place = pathlib.Path(place, name)
        self.place.mkdir(mode=0o755)
        self.runtime = self.place / "run"
        self.runtime.mkdir(mode=0o700)
        self.servers = []
        # As which user.
        self.lower = []

    def command(self, args):
        run = [str(BUILD / "fastsocket"), "run", "--"] if self.ours else []
        return [*self.lower, *run, *map(str, args)]

    def environment(self):
        return {**os.environ, "XDG_RUNTIME_DIR": str(self.runtime)}

    def start(self, args, ready):
        log = open(self.place / "log", "a")
        server = subprocess.Popen(self.command(args), env=self.environment(), stdout=log, stderr=log, start_new_session=True)
        self.servers.append(server)
        end = time.monotonic() + 60
        while not ready():
            if server.poll() is not None or time.monotonic() > end:
                sys.exit(f"{args[0]} does not begin: {(self.place / 'log').read_text()[-2000:]}")
            time.sleep(0.05)

    def ask(self, args):
        done = subprocess.run(self.command(args), env=self.environment(), capture_output=True, text=True, timeout=300)
        if done.returncode:
            sys.exit(f"{args}: {done.stderr[-2000:]}")
        return done.stdout

    def upgraded(self):
        if not self.ours:
            return 0
        told = subprocess.run([*self.lower, BUILD / "fastsocket", "stat", "--json"], env=self.environment(), capture_output=True, text=True)
        return json.loads(told.stdout or "{}").get("totals", {}).get("path_upgrade", 0)

    def end(self):
        for server in reversed(self.servers):
            server.send_signal(signal.SIGTERM)
        for server in self.servers:
            server.wait(60)


class Pair:
    """The C programs. Less is better."""

    def __init__(self, sides, program):
        self.program = program
        for s in sides:
            s.start([program, "serve", s.place / "pair"], (s.place / "pair").exists)

    def rows(self, quick):
        n = 5 if quick else 1
        yield "round trip of 8 bytes", lambda s: self.took(s, "rtt", 8, 100000 // n)
        yield "round trip of 16 KiB", lambda s: self.took(s, "rtt", 16384, 20000 // n)
        yield "64 KiB one way", lambda s: self.took(s, "way", 65536, 40000 // n)
        yield "1 MiB one way", lambda s: self.took(s, "way", 1 << 20, 3000 // n)
        yield "SHORT a connection a request", lambda s: self.took(s, "connects", 8, 20000 // n)

    def took(self, s, what, size, count):
        return 1e9 / float(s.ask([self.program, what, s.place / "pair", size, count]))


class Redis:
    def __init__(self, sides):
        for s in sides:
            args = ["redis-server", "--port", "0", "--unixsocket", s.place / "redis", "--save", "", "--appendonly", "no"]
            s.start(args, (s.place / "redis").exists)

    def rows(self, quick):
        n = 20000 if quick else 200000
        for clients in (1, 50):
            for test in ("get", "set"):
                yield f"redis {test.upper()}, {clients} clients", lambda s, c=clients, t=test: self.rate(s, c, t, n if c > 1 else n // 4)

    def rate(self, s, clients, test, n):
        out = s.ask(["redis-benchmark", "-s", s.place / "redis", "-c", clients, "-n", n, "-t", test, "--csv"])
        return float(out.splitlines()[-1].split(",")[1].strip('"'))


class Postgres:
    def __init__(self, sides, tools, user):
        self.tools = tools
        for s in sides:
            data = s.place / "data"
            data.mkdir()
            for path in (data, s.runtime):
                shutil.chown(path, user)
            s.lower = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
            subprocess.run([*s.lower, tools / "initdb", "-D", data, "-A", "trust"], check=True, stdout=subprocess.DEVNULL)
            with open(data / "postgresql.conf", "a") as f:
                f.write(f"listen_addresses=''\nunix_socket_directories='{data}'\nfsync=off\nmax_connections=200\n")
            s.start([tools / "postgres", "-D", data], (data / ".s.PGSQL.5432").exists)
            time.sleep(1)
            self.bench(s, "-i", "-q")

    def bench(self, s, *args):
        return s.ask([self.tools / "pgbench", "-h", s.place / "data", *args, "postgres"])

    def rows(self, quick):
        seconds = 3 if quick else 8
        for clients in (1, 8, 32):
            yield f"pgbench -S, {clients} clients", lambda s, c=clients: self.rate(s, seconds, "-S", "-M", "prepared", "-c", c)
        yield "pgbench TPC-B, 8 clients", lambda s: self.rate(s, seconds, "-c", 8)

    def rate(self, s, seconds, *args):
        out = self.bench(s, "-n", "-T", str(seconds), *map(str, args))
        return float(re.search(r"tps = ([\d.]+)", out)[1])


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--quick", action="store_true")
    arguments.add_argument("--only", default="")
    a = arguments.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        program = pathlib.Path(place, "pair")
        subprocess.run(["cc", "-O2", "-o", program, ROOT / "bench/unix/pair.c"], check=True)
        postgres = sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin/postgres"))
        parts = [lambda sides: Pair(sides, program)]
        if shutil.which("redis-server"):
            parts.append(Redis)
        if postgres and os.geteuid() == 0:
            parts.append(lambda sides: Postgres(sides, postgres[-1].parent, "postgres"))
        print(f"{'':36} {'stock/s':>12} {'control':>16} {'ours':>16}")
        for i, part in enumerate(parts):
            sides = [Side(name, tempfile.mkdtemp(dir=place, prefix=f"{i}-")) for name in ("stock", "control", "ours")]
            for s in sides:
                os.chmod(s.place.parent, 0o755)
            try:
                for name, measure in part(sides).rows(a.quick):
                    if a.only and not re.search(a.only, name):
                        continue
                    before, figures = sides[2].upgraded(), {s.name: [] for s in sides}
                    for turn in range(a.rounds):
                        for s in sides[turn % 3 :] + sides[: turn % 3]:
                            figures[s.name].append(measure(s))
                    stock = statistics.median(figures["stock"])
                    ratio = lambda k: "{:.2f} ({:.2f}-{:.2f})".format(*(f(figures[k]) / stock for f in (statistics.median, min, max)))  # noqa: E731
                    went = sides[2].upgraded() > before
                    note = "" if went or name.startswith("SHORT") else "  NOTHING WENT OVER"
                    failed |= bool(note)
                    print(f"{name.removeprefix('SHORT '):36} {stock:12.0f} {ratio('control'):>16} {ratio('ours'):>16}{note}", flush=True)
            finally:
                for s in sides:
                    s.end()
    return failed


if __name__ == "__main__":
    sys.exit(main())
