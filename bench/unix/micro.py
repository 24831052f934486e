"""Rows of two C programs, redis-benchmark and pgbench."""

import pathlib
import re
import shutil
import subprocess
import time

from side import ROOT, Figure, Row


class Pair:
    """The C programs. They print nanoseconds."""

    def __init__(self, sides):
        self.program = sides[0].place.parent / "pair"
        subprocess.run(["cc", "-O2", "-o", self.program, ROOT / "bench/unix/pair.c"], check=True)
        for s in sides:
            s.start([self.program, "serve", s.place / "pair"], (s.place / "pair").exists)

    def rows(self, quick):
        n = 5 if quick else 1
        yield Row("round trip of 8 bytes", lambda s: self.took(s, "rtt", 8, 100000 // n, 2))
        yield Row("round trip of 16 KiB", lambda s: self.took(s, "rtt", 16384, 20000 // n, 2))
        yield Row("64 KiB one way", lambda s: self.took(s, "way", 65536, 40000 // n, 1), bar=2)
        yield Row("1 MiB one way", lambda s: self.took(s, "way", 1 << 20, 3000 // n, 1), bar=2)
        yield Row("a connection a request", lambda s: self.took(s, "connects", 8, 20000 // n, 0), "any", 0.97)

    def took(self, s, what, size, count, ways):
        ns = float(s.ask([self.program, what, s.place / "pair", size, count]))
        return Figure(1e9 / ns, count, ways * size * count)


class Redis:
    def __init__(self, sides):
        for s in sides:
            args = ["redis-server", "--port", "0", "--unixsocket", s.place / "redis", "--save", "", "--appendonly", "no"]
            s.start(args, (s.place / "redis").exists)

    def rows(self, quick):
        n = 20000 if quick else 200000
        for clients, bar in ((1, 5), (50, 4)):
            for test in ("get", "set"):
                measure = lambda s, c=clients, t=test: self.rate(s, c, t, n if c > 1 else n // 4)  # noqa: E731
                yield Row(f"redis {test.upper()}, {clients} clients", measure, bar=bar if test == "get" else 0)

    def rate(self, s, clients, test, n):
        out = s.ask(["redis-benchmark", "-s", s.place / "redis", "-c", clients, "-n", n, "-t", test, "--csv"])
        return Figure(float(out.splitlines()[-1].split(",")[1].strip('"')), n)


class Postgres:
    def __init__(self, sides, user="postgres"):
        self.tools = sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin/postgres"))[-1].parent
        for s in sides:
            data = s.place / "data"
            data.mkdir()
            for path in (data, s.runtime):
                shutil.chown(path, user)
            s.lower = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
            subprocess.run([*s.lower, self.tools / "initdb", "-D", data, "-A", "trust"], check=True, stdout=subprocess.DEVNULL)
            with open(data / "postgresql.conf", "a") as f:
                f.write(f"listen_addresses=''\nunix_socket_directories='{data}'\nfsync=off\nmax_connections=200\n")
            s.start([self.tools / "postgres", "-D", data], (data / ".s.PGSQL.5432").exists)
            time.sleep(1)
            self.bench(s, "-i", "-q")

    def bench(self, s, *args):
        return s.ask([self.tools / "pgbench", "-h", s.place / "data", *args, "postgres"])

    def rows(self, quick):
        seconds = 3 if quick else 8
        for clients, bar in ((1, 2), (8, 1.2), (32, 1.2)):
            yield Row(f"pgbench -S, {clients} clients", lambda s, c=clients: self.rate(s, seconds, "-S", "-M", "prepared", "-c", c), bar=bar)
        yield Row("pgbench TPC-B, 8 clients", lambda s: self.rate(s, seconds, "-c", 8), bar=1.1)
        yield Row("psql -c in a loop", lambda s: self.loop(s, 25 if quick else 60), "any", 0.95, rounds=2)

    def rate(self, s, seconds, *args):
        out = self.bench(s, "-n", "-T", str(seconds), *map(str, args))
        rate = float(re.search(r"tps = ([\d.]+)", out)[1])
        # (A prepared query and its answer have more than 80 bytes.)
        return Figure(rate, rate * seconds, 80 * rate * seconds)

    def loop(self, s, n):
        """The time of the loop, without the start of `fastsocket run`, which the shell pays only once."""
        query = f"for i in $(seq {n}); do psql -XAt -h {s.place}/data -c \"select $i, md5('$i')\" postgres || exit 1; done"
        out = s.ask(["bash", "-c", f"a=$EPOCHREALTIME; {query}; echo $a $EPOCHREALTIME"])
        said, times = out.rstrip("\n").rsplit("\n", 1)
        began, ended = map(float, times.split())
        return Figure(n / (ended - began), n, said=said)
