#!/usr/bin/env python3
"""Mixed programs under the library with random kills, and what is left of them.

    tests/soak/soak.py [--time SECONDS] [--seed N] [--json FILE]

nginx, redis, haproxy, Python servers of several styles, and clients of each, in
namespaces of their own. Clients, servers, single workers and the monitor are
killed (-9) at random and started again. No client may get a wrong byte or hang.
Two servers and the last monitor are watched: at the quiet end their descriptors
and memory must be back where they were at the quiet beginning, and when
everything has ended the monitor may hold nothing. Writes one JSON object. Exit
status 1 when something is wrong. Needs root.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "programs"), str(HERE.parent / "suites")]

import harness  # noqa: E402
from lab import PYTHON, Lab, Wrong, free_port, noise  # noqa: E402
from program import difference  # noqa: E402
from programs.stores import Redis  # noqa: E402
from programs.web import Haproxy, Nginx, sha  # noqa: E402

APPS = HERE.parent / "apps"
#: Seconds between two kills.
PAUSE = (0.3, 1.5)
#: A monitor is killed about once in this many seconds. Then the servers are started again one by
#: one.
MONITOR_EVERY = 60
#: What may be left: descriptors kept for reuse, heap that an allocator does not return.
SPARE_DESCRIPTORS = 40
SPARE_MEMORY = 16 << 20
#: 64 ranges of ended channels, and a few of live ones (docs/limits.md).
SPARE_SPACE = 72 * (2 << 30)


class Server:
    """A server that is killed and started again. `start` returns its process."""

    def __init__(self, name, port, start, clients):
        self.name, self.port, self.start_, self.clients = name, port, start, clients
        self.process = None

    def start(self):
        self.process = self.start_()

    def up(self):
        return self.process is not None and self.process.poll() is None


def children(pid):
    try:
        return [int(w) for w in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def usage(pid):
    """Descriptors; anonymous memory, shared memory and address space in bytes."""
    rows = dict(r.split(":", 1) for r in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines())
    kb = lambda name: int(rows[name].split()[0]) * 1024  # noqa: E731
    return {
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "memory": kb("RssAnon"),
        "shared_memory": kb("RssShmem"),
        "address_space": kb("VmSize"),
    }


def usage_of_monitor(pid):
    """The sum of both processes of a monitor."""
    children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    parts = [usage(p) for p in [pid, *children]]
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def memfds():
    """The library's shared memory that any process maps or holds, by inode."""
    found = set()
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            for line in (entry / "maps").read_text().splitlines():
                if "memfd:fastsocket" in line:
                    found.add(line.split()[4])
            for fd in (entry / "fd").iterdir():
                if "memfd:fastsocket" in os.readlink(fd):
                    found.add(str(fd.stat().st_ino))
        except OSError:
            pass
    return len(found)


class Soak:
    def __init__(self, lab, seed):
        self.lab, self.random = lab, random.Random(seed)
        self.kills = {"client": 0, "server": 0, "worker": 0, "monitor": 0}
        self.said = {"ok": 0, "failed": {}, "wrong": []}
        self.paths = {}
        self.servers, self.watched, self.clients = [], [], []

    # The programs that run.

    def build(self):
        lab = self.lab
        nginx, redis, haproxy = Nginx(lab), Redis(lab), Haproxy(lab)
        nginx.prepare()
        haproxy.backend = nginx
        pages = {p: sha(c) for p, c in nginx.pages.items() if 0 < len(c) <= 1000000}
        lab.directory("redis")
        self.add("nginx", nginx.port, nginx.argv(), [{"kind": "http", "paths": pages}, {"kind": "http", "paths": pages, "keep": True}])
        self.add("redis", redis.port, redis.argv(), [{"kind": "redis"}, {"kind": "redis"}])
        haproxy.conf = lab.file("haproxy.cfg", haproxy.text())
        self.add("haproxy", haproxy.port, haproxy.argv(), [{"kind": "http", "paths": pages}])
        for kind in ("threaded", "poll", "epoll-edge", "asyncio", "fork"):
            self.add(kind, port := free_port(), self.echo(kind, port), [{"kind": "echo"}, {"kind": "echo-fork", "threads": 1}])
        # These servers are never killed, nor started again after the monitor.
        for kind in ("epoll", "fork"):
            port = free_port()
            self.watched.append(Server(f"watched-{kind}", port, self.starter(self.echo(kind, port), f"w-{kind}"), [{"kind": "echo"}]))

    def echo(self, kind, port):
        return [PYTHON, APPS / "echo_server.py", kind, port]

    def starter(self, argv, name):
        return lambda: self.lab.start(argv, name=name)

    def add(self, name, port, argv, clients):
        self.servers.append(Server(name, port, self.starter(argv, name), clients))

    def start_client(self, server, spec):
        process = self.lab.load({"threads": 2, **spec, "port": server.port})
        self.clients.append((process, server, spec))

    def start_clients(self):
        for server in self.servers + self.watched:
            for spec in server.clients:
                self.start_client(server, spec)

    # Kills and restarts of the programs.

    def collect(self, process):
        said = self.lab.ended_load(process)
        self.said["ok"] += said["ok"]
        self.said["wrong"] += said["wrong"]
        for why, n in said["failed"].items():
            self.said["failed"][why] = self.said["failed"].get(why, 0) + n

    def kill(self, pid, what):
        try:
            os.kill(pid, signal.SIGKILL)
            self.kills[what] += 1
        except ProcessLookupError:
            pass

    def kill_client(self):
        i = self.random.randrange(len(self.clients))
        process, server, spec = self.clients.pop(i)
        if self.random.random() < 0.3:
            self.collect(process)
        else:
            self.kill(process.pid, "client")
            process.wait()
        process.result.close()
        self.lab.processes.remove(process)
        self.start_client(server, spec)

    def tree(self, pid):
        return [pid] + [p for c in children(pid) for p in self.tree(c)]

    def kill_server(self, server=None):
        server = server or self.random.choice(self.servers)
        everybody = self.tree(server.process.pid) if server.up() else []
        # The master first, or all processes at once in any order. Orphans of the master may live on
        # and hold the port, as they would without the library.
        for pid in everybody:
            self.kill(pid, "server")
        server.process.wait()
        self.lab.processes.remove(server.process)
        self.lab.until(lambda: not self.lab.sockets(server.port), 10, f"{server.name}: its port stays taken")
        server.start()

    def kill_worker(self):
        masters = [s for s in self.servers + self.watched if s.up() and children(s.process.pid)]
        if masters:
            of = self.random.choice(masters)
            pids = children(of.process.pid)
            if pids:
                self.kill(self.random.choice(pids), "worker")

    def kill_monitor(self):
        self.remember_paths()
        self.kill(self.lab.monitor.pid, "monitor")
        self.lab.monitor.wait()
        time.sleep(self.random.uniform(0.1, 1))
        self.lab.start_monitor()
        self.before = self.lab.counters()
        # Running processes use kernel TCP from now on; new processes do not.
        for server in self.random.sample(self.servers, len(self.servers)):
            self.kill_server(server)
            self.kill_client()

    def remember_paths(self):
        for name, n in difference(self.before, self.lab.counters()).items():
            self.paths[name] = self.paths.get(name, 0) + n

    def go_on(self, seconds, monitor_every):
        end = time.monotonic() + seconds
        last = time.monotonic()
        while time.monotonic() < end:
            time.sleep(self.random.uniform(*PAUSE))
            if time.monotonic() - last > monitor_every and end - time.monotonic() > 10:
                self.kill_monitor()
                last = time.monotonic()
                continue
            what = self.random.choices([self.kill_client, self.kill_server, self.kill_worker], [5, 2, 3])[0]
            what()
            for s in self.servers:
                if not s.up():
                    # The death of a worker has ended the server (haproxy's master ends then).
                    self.kill_server(s)
            for s in self.watched:
                if not s.up():
                    raise Wrong(f"{s.name} ended by itself with {s.process.returncode}")

    # Conditions that must hold at the end.

    def quiet(self):
        """Ends all clients. Returns what the watched servers and the monitor then use."""
        while self.clients:
            process, _, _ = self.clients.pop()
            self.collect(process)
            process.result.close()
            self.lab.processes.remove(process)
        time.sleep(3)
        self.lab.settled_connections()
        found = {s.name: usage(s.process.pid) for s in self.watched}
        found["monitor"] = usage_of_monitor(self.lab.monitor.pid)
        return found

    def end_all(self):
        self.remember_paths()
        for s in self.servers + self.watched:
            for pid in self.tree(s.process.pid):
                self.kill(pid, "server")
            s.process.wait()
        self.lab.until(lambda: not self.lab.left(), 20, lambda: f"processes are left: {self.lab.left()}")
        return self.lab.settled()


def judge(before, after, empty, rest, shared):
    wrong = []
    for name, was in before.items():
        now = after[name]
        for what, spare in (
            ("descriptors", SPARE_DESCRIPTORS),
            ("memory", SPARE_MEMORY),
            ("shared_memory", SPARE_MEMORY),
            ("address_space", SPARE_SPACE),
        ):
            if now[what] > was[what] + spare:
                wrong.append(f"{name}: {what} {was[what]} -> {now[what]}")
    if rest:
        wrong.append(f"the monitor still holds {rest}")
    if shared > empty["memfds"]:
        wrong.append(f"shared memory objects {empty['memfds']} -> {shared}")
    return wrong


def inside(args):
    seed, out = args.seed, args.keep
    lab = Lab("ours", out)
    soak = Soak(lab, seed)
    wrong, record = [], {}
    try:
        empty = {"memfds": memfds(), "monitor": usage_of_monitor(lab.monitor.pid)}
        soak.before = lab.counters()
        soak.build()
        for s in soak.servers + soak.watched:
            s.start()
        for s in soak.servers + soak.watched:
            lab.listens(s.port, s.process)
        soak.start_clients()
        time.sleep(5)
        before = soak.quiet()
        soak.start_clients()
        began = time.monotonic()
        soak.go_on(args.time, args.monitor_every)
        took = time.monotonic() - began
        after = soak.quiet()
        rest = soak.end_all()
        shared = memfds()
        final = usage_of_monitor(lab.monitor.pid)
        wrong += judge(before, after, empty, rest, shared)
        # Compares the monitor at the end, without programs, with a monitor that has seen no
        # program.
        wrong += judge({"empty monitor": empty["monitor"]}, {"empty monitor": final}, empty, {}, 0)
        record = {"seconds": round(took), "before": before, "after": after, "empty_monitor": [empty["monitor"], final],
                  "memfds": [empty["memfds"], shared], "monitor_holds": rest}  # fmt: skip
    except Wrong as e:
        wrong.append(str(e))
    finally:
        lab.end()
    wrong += soak.said["wrong"]
    if not soak.said["ok"]:
        wrong.append("nothing was served")
    slow = {k: n for k, n in soak.said["failed"].items() if "timeout" in k or "timed out" in k}
    if slow:
        wrong.append(f"clients waited for too long: {slow}")
    if not soak.paths.get("connect_shm"):
        wrong.append("no connection went over shared memory: this run says nothing")
    record = {"seed": seed, "ok": not wrong, "wrong": wrong, "kills": soak.kills, "served": soak.said["ok"],
              "failed": soak.said["failed"], "paths": soak.paths, **record}  # fmt: skip
    (pathlib.Path(out) / "soak.json").write_text(json.dumps(record, indent=1) + "\n")


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--time", type=int, default=3600, help="seconds [3600]")
    p.add_argument("--monitor-every", type=int, default=MONITOR_EVERY, metavar="SECONDS", help=f"kill the monitor so often [{MONITOR_EVERY}]")
    p.add_argument("--seed", type=int, default=int(time.time()))
    p.add_argument("--json", metavar="FILE", help="the summary, also there")
    p.add_argument("--keep", metavar="DIR", default=harness.ROOT / "target" / "soak", help="logs go here")
    p.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.inside:
        return inside(args)
    if os.geteuid() != 0:
        raise SystemExit("soak: needs root, for namespaces and for servers that give it up")
    os.umask(0o022)
    out = pathlib.Path(args.keep).resolve()
    out.mkdir(parents=True, exist_ok=True)
    for old in out.iterdir():
        if old.is_file():
            old.unlink()
    tested = out / f"tested-{os.getpid()}"
    harness.snapshot(tested)
    print(f"soak: {args.time} s, seed {args.seed}, logs in {out}", flush=True)
    argv = [sys.executable, __file__, "--inside", "--time", args.time, "--seed", args.seed, "--keep", out]
    argv += ["--monitor-every", args.monitor_every]
    try:
        status, _, _ = harness.run(argv, "stock", out, timeout=args.time + 300)
    finally:
        shutil.rmtree(tested, ignore_errors=True)
    try:
        record = (out / "soak.json").read_text()
    except OSError:
        raise SystemExit(f"soak: ended with {status}:\n{(out / 'log').read_text(errors='replace')[-3000:]}") from None
    print(record, end="")
    if args.json:
        pathlib.Path(args.json).write_text(record)
    raise SystemExit(0 if json.loads(record)["ok"] else 1)


if __name__ == "__main__":
    main()
