#!/usr/bin/env python3
"""Servers whose listener or connections go to another process, reloaded once a second under load.

    tests/programs/handover.py [NAME…] [--time SECONDS] [--stock | --ours]

haproxy (its workers pass the listeners in a message), a node cluster of four (the primary passes each
connection), nginx's binary upgrade (exec), and a service that is started with the socket of a manager without the
library. Only connections that are opened after the first reload count. Exit status 1 if a request fails, or if less
than 99 % of the connections use shared memory. Needs root. Writes target/handover.json.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "suites")]

import harness  # noqa: E402
from lab import PYTHON, Lab, Wrong  # noqa: E402
from program import difference  # noqa: E402
from programs.runtimes import APPS, NodeCluster  # noqa: E402
from programs.web import Haproxy, Http, NginxUpgrade  # noqa: E402

PAGE = b"handed over\n" * 100
SHARE = 0.99


class HaproxyAlone(Haproxy):
    """haproxy answers requests itself, so there is no other leg."""

    pages = {"/": PAGE}

    def prepare(self):
        self.conf = self.lab.file("haproxy.cfg", self.text())

    def text(self):
        self.lab.file("page", PAGE)
        return (
            f"global\n  maxconn 500\n  nbthread 2\n  stats socket /run/lab/haproxy.sock expose-fd listeners\n"
            f"defaults\n  mode http\n  timeout connect 5s\n  timeout client 20s\n  timeout server 20s\n"
            f"frontend f\n  bind 127.0.0.1:{self.port}\n"
            f"  http-request return status 200 content-type text/plain file {self.lab.path}/page\n"
        )

    def after(self):
        pass


class Cluster(NodeCluster):
    name = "node cluster of 4"
    pages = {"/1000": (b"0123456789abcdef" * 63)[:1000]}
    keep = True

    def argv(self):
        return ["node", APPS / "web.js", self.port, "4"]


class Upgrade(NginxUpgrade):
    pages = {"/1200": PAGE}


class Activated(Http):
    """A manager holds the socket, and on a reload starts the service again with it."""

    name = "socket activation"
    version = (PYTHON, "--version")
    pages = {"/": PAGE}

    def argv(self):
        return self.lab.command([PYTHON, APPS / "activated.py"])

    def start(self):
        self.lab.file("page", PAGE)
        self.process = self.lab.start([PYTHON, APPS / "manager.py", self.port, *self.argv()], side="stock", name="manager")
        self.lab.listens(self.port, self.process)

    def reload(self):
        self.process.send_signal(signal.SIGHUP)


PROGRAMS = (HaproxyAlone, Cluster, Upgrade, Activated)


def share(moved):
    """Returns the number of connections that clients opened, and how many of them use shared memory at some time."""
    get = lambda name: moved.get(name, 0)  # noqa: E731
    opened = get("connect_shm") + get("connect_kernel")
    # Both ends count a change of the path, and the end that begins the change may count it twice.
    there = get("connect_shm") + get("path_upgrade") // 2 - get("path_switch") // 2
    return opened, max(0, there)


def measure(program, seconds):
    lab = program.lab
    program.prepare()
    program.start()
    what = {"threads": program.threads, "keep": getattr(program, "keep", False), **program.load()}
    # A program treats its first connections differently, so the measurement begins after these.
    first = lab.load(what)
    time.sleep(1.0)
    program.reload()
    time.sleep(1.0)
    lab.ended_load(first)
    before = lab.counters()
    load = lab.load(what)
    end = time.monotonic() + seconds
    reloads = 0
    while time.monotonic() < end:
        time.sleep(1.0)
        program.reload()
        program.alive()
        reloads += 1
    time.sleep(1.0)
    said = lab.ended_load(load)
    lab.settled_connections()
    moved = difference(before, lab.counters())
    opened, there = share(moved)
    program.stop()
    return {"reloads": reloads, "requests": said["ok"], "failed": said["failed"], "wrong": said["wrong"], "opened": opened, "shared_memory": there, "counters": moved}


def inside(name, side, out, seconds):
    lab = Lab(side, out)
    try:
        cls = next(c for c in PROGRAMS if c.__name__ == name)
        result = measure(cls(lab), seconds)
    except Wrong as e:
        result = {"wrong": [str(e)]}
    finally:
        lab.end()
    (pathlib.Path(out) / "handover.json").write_text(json.dumps(result, indent=1))


def one(cls, side, out, seconds):
    place = out / cls.__name__.lower() / side
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    argv = [sys.executable, HERE / "handover.py", "--inside", cls.__name__, side, place, str(seconds)]
    harness.run(argv, "stock", place, timeout=seconds + 120)
    try:
        return json.loads((place / "handover.json").read_text())
    except (OSError, ValueError):
        return {"wrong": [(place / "log").read_text(errors="replace")[-600:]]}


def verdict(side, r):
    if r["wrong"] or r.get("failed") or not r.get("requests"):
        return False
    return side == "stock" or r["opened"] > 0 and r["shared_memory"] >= SHARE * r["opened"]


def main():
    if sys.argv[1:2] == ["--inside"]:
        name, side, out, seconds = sys.argv[2:]
        return inside(name, side, out, int(seconds))
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("names", nargs="*", metavar="NAME", help="the beginning of a program's name")
    p.add_argument("--time", type=int, default=60, help="seconds for each [default: 60]")
    which = p.add_mutually_exclusive_group()
    which.add_argument("--stock", dest="sides", action="store_const", const=["stock"])
    which.add_argument("--ours", dest="sides", action="store_const", const=["ours"])
    p.add_argument("--bin", metavar="DIR", help="where the library and its programs are [default: target/release]")
    args = p.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("handover: needs root, for namespaces")
    os.umask(0o022)
    if args.bin:
        harness.BIN = pathlib.Path(args.bin)
    out = harness.ROOT / "target" / "handover"
    tested = out / f"tested-{os.getpid()}"
    harness.snapshot(tested)
    good, results = True, {}
    try:
        for cls in PROGRAMS:
            if args.names and not any(cls.name.startswith(n) for n in args.names):
                continue
            if subprocess.run(cls.version, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
                print(f"SKIPPED: {cls.name} is not installed (scripts/deps.sh programs)", flush=True)
                good = False
                continue
            for side in args.sides or ["stock", "ours"]:
                r = results.setdefault(cls.name, {})[side] = one(cls, side, out, args.time)
                fine = verdict(side, r)
                good &= fine
                print(f"{cls.name}, {side}: {'ok' if fine else 'FAILED'}: {json.dumps(r)}", flush=True)
    finally:
        shutil.rmtree(tested, ignore_errors=True)
    (harness.ROOT / "target" / "handover.json").write_text(json.dumps(results, indent=1))
    raise SystemExit(0 if good and results else 1)


if __name__ == "__main__":
    main()
