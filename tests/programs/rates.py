#!/usr/bin/env python3
"""Requests a second of real programs under full load, on kernel sockets and under the library, in turns.

    tests/programs/rates.py [NAME…] [--paths stock,ours,kernel] [--rounds N] [--time S] [--strict] [--json FILE]

All sides run in namespaces of their own at once, and each waits until it is its turn. A row is one
shape of load on one program: the medians of the rounds, the ratio of ours to stock with the range of
the rounds' own ratios, CPU time per request (of the whole machine, so run it alone), and the share of the
connections that used shared memory. Exit status 1 if a load failed or its connections took
another path, and with --strict if a ratio is below 1 by more than its spread. Needs root.
NAME: the beginning of a row's name.

`--paths kernel` adds connections that stay in the kernel, to compare with stock: the library at the server only, at
the client only, at both in two worlds (postgresql), and stock a second time, the control. A table at the end has their
rates, CPU time (of the program's and the client's processes), context switches and system calls per request. strace
counts the system calls, in a separate round. --strict fails if a way is below stock by more than the control is.
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

import cost  # noqa: E402
import harness  # noqa: E402
import kernel  # noqa: E402
from lab import Lab, Wrong  # noqa: E402
from loads import CASES, rows  # noqa: E402
from program import difference  # noqa: E402


def busy():
    """CPU time that the whole machine has used, in seconds."""
    words = pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()
    user, nice, system, _idle, _wait, irq, softirq = (int(w) for w in words[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def inside(name, side, out):
    """Runs one program on one side. Reads a load from each line of the FIFO `asked`, and writes an answer to `told`."""
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
                label, seconds, end = json.loads(line)
                try:
                    load = rows()[label][1]
                    if end:
                        answer = {"calls": cost.system_calls(program, load, seconds, end)}
                        print(json.dumps(answer), file=told, flush=True)
                        continue
                    if label not in begun:
                        # This run fills caches and finds the size of the load.
                        begun.add(label)
                        load(program, seconds)
                    before, used, cpu, began = lab.counters(), cost.now(lab), busy(), time.monotonic()
                    program.requests = None
                    rate = load(program, seconds)
                    cpu = (busy() - cpu) / (time.monotonic() - began)
                    used, switches = (b - a for a, b in zip(used, cost.now(lab), strict=True))
                    answer = {"rate": rate, "cpu": cpu, "path": difference(before, lab.counters()),
                              "used": used, "switches": switches, "requests": program.requests or rate * seconds}  # fmt: skip
                except Wrong as e:
                    answer = {"wrong": str(e)}
                print(json.dumps(answer), file=told, flush=True)
        except Exception as e:
            print(json.dumps({"wrong": f"{type(e).__name__}: {e}"}), file=told, flush=True)
            raise
        finally:
            lab.end()


class Side:
    """A program on one side, which waits for its turns."""

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
            raise Wrong(f"{self.out.name}: {answer['wrong']}")
        return answer

    def turn(self, label, seconds, end=None):
        """Runs a load. With `end`, only the system calls of that end are counted."""
        print(json.dumps([label, seconds, end]), file=self.asked, flush=True)
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
    # (If a server has found that its connections are too short, kernel TCP is the right path for
    # them.)
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


def arguments():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("names", nargs="*", metavar="NAME")
    p.add_argument("--paths", default="stock,ours", help="of stock, ours, kernel; stock is always measured [default: stock,ours]")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--time", type=int, default=2, help="seconds of one load")
    p.add_argument("--strict", action="store_true", help="a ratio below 1 fails")
    p.add_argument("--json", metavar="FILE", help="all figures")
    p.add_argument("--bin", metavar="DIR", help="where the library and its programs are [default: target/release]")
    args = p.parse_args()
    args.paths = args.paths.split(",")
    if set(args.paths) - {"stock", "ours", "kernel"}:
        p.error(f"--paths {','.join(args.paths)}: there are stock, ours and kernel")
    return args


def system_calls(sides, label, seconds):
    """Maps each way to its system calls per request, at the ends that have the library. Stock has all compared ends."""
    ends = {"kernel": ["server"], "client": ["client"], "worlds": ["server", "client"], "stock": ["server", "client"]}
    calls = {}
    for way in (w for w in ends if w in sides):
        for end in ends[way]:
            try:
                counted = sides[way].turn(label, seconds, end)["calls"]
                calls.setdefault(way, {}).update({end: counted} if counted is not None else {})
            except Wrong as e:
                print(f"  {label}, {way}: system calls of the {end} are not known: {e}", flush=True)
    return calls


def program_rows(cls, labels, args, place):
    """Measures the loads of one program, one after the other. Each gives a row of both tables, and what was wrong."""
    ways = ["stock", *(["ours"] if "ours" in args.paths else []), *(kernel.ways_of(cls.name) if "kernel" in args.paths else [])]
    sides = {}
    try:
        for side in ways:
            sides[side] = Side(cls, side, place)
            sides[side].answer()
        for label in labels:
            turns = []
            for i in range(args.rounds):
                # Each way is the first one once.
                order = [ways[(i + k) % len(ways)] for k in range(len(ways))]
                turns.append({side: sides[side].turn(label, args.time) for side in order})
            row = measured(label, cls, turns) if "ours" in ways else None
            wrong = [f"{way}: {why}" for t in turns for way in ways if (why := kernel.check(way, t[way]["path"]))]
            if row and row["shm_expected"] and row["shm"] < 0.99:
                wrong.append(f"not over shared memory: {row['path']}")
            beside = None
            if "kernel" in ways:
                beside = kernel.measured(label, turns, system_calls(sides, label, 1))
            yield label, row, beside, wrong
    finally:
        for side in sides.values():
            side.end()


def main():
    if sys.argv[1:2] == ["--inside"]:
        inside(sys.argv[2], sys.argv[3], pathlib.Path(sys.argv[4]))
        return
    args = arguments()
    if os.geteuid() != 0:
        raise SystemExit("rates: needs root, for namespaces and for servers that give it up")
    os.umask(0o022)
    if args.bin:
        harness.BIN = pathlib.Path(args.bin)
    out = harness.ROOT / "target" / "rates"
    tested = out / f"tested-{os.getpid()}"
    harness.snapshot(tested)
    results, besides, good = [], [], True
    if "ours" in args.paths:
        print(f"{'':48} {'stock/s':>10} {'ours/s':>10}  ratio (of the rounds)  CPU  shm", flush=True)
    try:
        for cls, loads in CASES:
            labels = [x for x in (f"{cls.name}: {k}" for k in loads) if not args.names or any(x.startswith(n) for n in args.names)]
            if not labels:
                continue
            try:
                for label, row, beside, wrong in program_rows(cls, labels, args, out / re.sub(r"[^a-z0-9]+", "-", cls.name.lower())):
                    if row:
                        results.append(row)
                        show(row)
                    if beside:
                        besides.append(beside)
                        print("\n".join(kernel.table([beside])[2 if len(besides) == 1 else 3 :]), flush=True)
                    for why in wrong:
                        print(f"  FAILED: {why}", flush=True)
                        good = False
            except Wrong as e:
                print(f"{cls.name}: FAILED: {e}", flush=True)
                good = False
    finally:
        shutil.rmtree(tested, ignore_errors=True)
    if args.json:
        figures = {"shm": results, "kernel": besides} if besides else results
        pathlib.Path(args.json).write_text(json.dumps(figures, indent=1) + "\n")
    if besides:
        print("\n".join(kernel.table(besides)))
    below = [r["row"] for r in results if r["ratio"] < 1 and r["high"] < 1]
    below += [f"{r['row']} ({what})" for r in besides for what in r["below"]]
    count = len(results) + len(besides)
    print(f"rates: {count} rows, {len(below)} below stock by more than their spread{': ' if below else ''}{'; '.join(below)}")
    raise SystemExit(0 if good and count and not (args.strict and below) else 1)


if __name__ == "__main__":
    main()
