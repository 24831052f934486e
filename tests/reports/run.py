#!/usr/bin/env python3
"""Faults that users reported of socket layers, each as a small program: stock beside ours.

    tests/reports/run.py [NAME…] [--bin DIR] [--jobs N] [--keep DIR]

Each case runs in namespaces of its own, first on kernel sockets, then under the library. It passes if the stock run prints
what the head of the case says, if our run prints the same and ends with the same status, and if our connections took the
path that the head names. Exit status 1 otherwise. Needs root. README.md describes the form of a case.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "programs"), str(HERE.parent / "suites")]

import harness  # noqa: E402
from lab import PYTHON, Lab  # noqa: E402

CASES = HERE / "cases"
#: Seconds for one run of one case. The limit only ends a run that hangs.
LIMIT = 60
KEYS = {"report", "kind", "stock", "path", "run", "needs", "monitor", "before"}
PATHS = {"shm", "kernel", "any"}
MONITORS = {"private", "system", "own"}


class Case:
    """A program, and the settings in its head. `runs` has one list of arguments for each run."""

    def __init__(self, path):
        self.file, self.name = path, path.stem
        head = {}
        for line in path.read_text().splitlines():
            found = re.match(r'^[#/*" ]*(\w+): (.*)$', line)
            if found and found[1] in KEYS:
                head.setdefault(found[1], []).append(found[2].strip())
            elif head:
                break
        for key in ("report", "kind", "stock", "path"):
            if key not in head:
                raise SystemExit(f"reports: {path.name}: the head lacks `{key}:`")
        self.report, self.kind, self.path = head["report"][0], head["kind"][0], head["path"][0]
        if self.path not in PATHS:
            raise SystemExit(f"reports: {path.name}: path {self.path} is none of {', '.join(sorted(PATHS))}")
        self.stock = [re.compile(pattern, re.MULTILINE) for pattern in head["stock"]]
        self.runs = [arguments.split() for arguments in head.get("run", [""])]
        self.monitor = head.get("monitor", ["private"])[0]
        if self.monitor not in MONITORS:
            raise SystemExit(f"reports: {path.name}: monitor {self.monitor} is none of {', '.join(sorted(MONITORS))}")
        self.before = head.get("before", [""])[0].split()
        self.needs = [word for line in head.get("needs", ()) for word in line.split()]

    def missing(self):
        """Commands or files that the case needs and this machine lacks."""
        return [n for n in self.needs if not (pathlib.Path(n).exists() if n.startswith("/") else shutil.which(n))]

    def command(self, bin_dir):
        if self.file.suffix == ".c":
            return [str(bin_dir / self.name)]
        return [{".py": PYTHON, ".sh": "bash"}[self.file.suffix], str(self.file)]

    def compile(self, bin_dir):
        if self.file.suffix == ".c":
            build = ["cc", "-O1", "-Wall", "-o", bin_dir / self.name, self.file, "-lpthread"]
            subprocess.run([str(word) for word in build], check=True)


def one_side(case, arguments, side, out):
    """Returns the exit status, the output and the counters (of our side) of one run."""
    spec = {"argv": [*case.command(out.parents[2] / "bin"), *arguments], "side": side, "out": str(out), "monitor": case.monitor, "before": case.before}
    out.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, HERE / "run.py", "--inside", json.dumps(spec)]
    harness.run(argv, "stock", out, timeout=LIMIT + 20)
    try:
        result = json.loads((out / "case.json").read_text())
    except (OSError, ValueError):
        raise RuntimeError("the run left no result: " + (out / "log").read_text(errors="replace")[-800:]) from None
    return result["status"], (out / "output").read_text(errors="replace"), result["counters"]


def inside(spec):
    """Runs in the namespaces: one run under a monitor, or on stock sockets."""
    out = pathlib.Path(spec["out"])
    lab = Lab(spec["side"] if spec["monitor"] == "system" else "stock", out)
    lab.side = spec["side"]
    if (lab.side, spec["monitor"]) == ("ours", "private"):
        socket, lab.monitor = harness.start_monitor(lab.path / "private")
        lab.env["FASTSOCKET_SOCKET"] = str(socket)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "case", "/tmp"], check=True)
    try:
        with open(out / "output", "wb") as output:
            process = subprocess.Popen(
                [*spec["before"], *lab.command(spec["argv"])], cwd="/tmp", env=lab.env, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            try:
                status = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
                status = "no end"
        (out / "case.json").write_text(json.dumps({"status": status, "counters": counters(lab, spec)}))
    finally:
        lab.end()


def counters(lab, spec):
    """The counters of the run. A monitor that the program starts ends with it, and only the kernel's count is left."""
    if spec["monitor"] == "own":
        lab.side = "stock"
    return lab.counters()


def took(path, counters):
    """Did our connections take the path that the case names?"""
    shm = counters.get("connect_shm", 0) + counters.get("accept_shm", 0)
    return {"any": True, "shm": shm > 0, "kernel": shm == 0 and counters["tcp_opens"] > 0}[path]


def judge(case, arguments, out):
    """What is wrong with one run of a case; empty if nothing is."""
    sides = {side: one_side(case, arguments, side, out / side) for side in ("stock", "ours")}
    (status, text, _), (our_status, our_text, counters) = sides["stock"], sides["ours"]
    wrong = [f"stock does not print `{p.pattern}`, but:\n{text}" for p in case.stock if not p.search(text)]
    if our_text != text:
        wrong.append(f"the output differs. stock:\n{text}ours:\n{our_text}")
    if our_status != status:
        wrong.append(f"exit status {our_status}, stock {status}")
    if not took(case.path, counters):
        shown = {k: v for k, v in counters.items() if v and k.startswith(("connect", "accept", "fallback", "tcp_opens"))}
        wrong.append(f"the connections did not take the path `{case.path}`: {shown}")
    return wrong


def try_one(case, out):
    """Lines about one case, and whether it passed (None: skipped)."""
    missing = case.missing()
    if missing:
        return [f"SKIPPED: {case.name}: missing {' '.join(missing)}"], None
    lines, good = [], True
    for arguments in case.runs:
        title = " ".join([case.name, *arguments])
        try:
            wrong = judge(case, arguments, out / "runs" / re.sub(r"\W+", "_", title))
        except (RuntimeError, OSError) as error:
            wrong = [str(error)]
        good &= not wrong
        lines.append(f"{'FAILED' if wrong else 'ok    '} {title} ({case.kind}): {case.report}")
        lines += ["       " + line for text in wrong for line in text.rstrip().splitlines()]
    return lines, good


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("names", nargs="*", metavar="NAME", help="cases whose name begins so (default: all)")
    p.add_argument("--bin", metavar="DIR", help="where the library and its programs are [default: target/release]")
    p.add_argument("--jobs", type=int, default=4, help="cases at once [default: 4]")
    p.add_argument("--keep", metavar="DIR", default=harness.ROOT / "target" / "reports", help="logs go here")
    p.add_argument("--inside", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.inside:
        return inside(json.loads(args.inside))
    if os.geteuid() != 0:
        raise SystemExit("reports: needs root, for namespaces")
    if args.bin:
        harness.BIN = pathlib.Path(args.bin)
    out = pathlib.Path(args.keep).resolve() / str(os.getpid())
    harness.snapshot(out / "tested")
    (out / "bin").mkdir()
    cases = [Case(f) for f in sorted(CASES.iterdir()) if f.suffix in (".py", ".c", ".sh")]
    cases = [c for c in cases if not args.names or any(c.name.startswith(n) for n in args.names)]
    for case in cases:
        case.compile(out / "bin")
    results = []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for lines, good in pool.map(lambda case: try_one(case, out), cases):
            print("\n".join(lines), flush=True)
            results.append(good)
    shutil.rmtree(out / "tested")
    passed, failed, skipped = results.count(True), results.count(False), results.count(None)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    raise SystemExit(0 if passed and not failed and not skipped else 1)


if __name__ == "__main__":
    main()
