#!/usr/bin/env python3
"""Real programs with real clients, on kernel sockets and under the library.

    tests/programs/run.py [NAME…] [--stock | --ours] [--keep DIR]

Each program serves its client (bytes compared), is reloaded and restarted under
load, and shut down, in network, process and mount namespaces of its own; under
the library the path of the connections is judged by the counters. Writes
docs/programs.md and docs/programs.json. Exit status 1 when a step fails under
the library. Needs root. NAME: the beginning of a program's name.
"""

import argparse
import importlib
import json
import os
import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "suites")]

import harness  # noqa: E402
import report  # noqa: E402

PROGRAMS = [
    ("web", "Nginx"),
    ("web", "NginxUpgrade"),
    ("web", "Haproxy"),
    ("web", "Apache"),
    ("stores", "Redis"),
    ("stores", "Memcached"),
    ("stores", "Postgres"),
    ("stores", "Mariadb"),
    ("web", "PhpFpm"),
    ("web", "PhpFpmUnix"),
    ("runtimes", "Node"),
    ("runtimes", "NodeCluster"),
    ("runtimes", "Gunicorn"),
    ("runtimes", "Uvicorn"),
    ("remote", "Openssh"),
    ("remote", "Vsftpd"),
    ("runtimes", "Java"),
    ("runtimes", "Go"),
]
LIMIT = 240  # seconds for one program on one side


def version(cls):
    try:
        done = subprocess.run(cls.version, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=harness.plain_env(), timeout=30)
    except OSError:
        return None
    if done.returncode != 0 or not done.stdout.strip():
        return None
    return report.short_version(done.stdout.decode(errors="replace").splitlines()[0])


def try_one(module, cls, side, out):
    place = out / report.key(cls.name) / side
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    argv = [sys.executable, HERE / "trial.py", module, cls.__name__, side, place]
    # The trial runs in the namespaces of the suites, and never loads the library itself.
    status, seconds, _ = harness.run(argv, "stock", place, timeout=LIMIT)
    try:
        result = json.loads((place / "trial.json").read_text())
    except (OSError, ValueError):
        tail = (place / "log").read_text(errors="replace")[-600:]
        why = "no end within the limit" if status is None else f"the trial ended with {status}: {tail}"
        result = {"steps": {"start": {"ok": False, "why": why}}, "path": {}}
    for name, step in result["steps"].items():
        if not step["ok"]:
            print(f"  {side:5} {name}: FAILED: {step['why']}", flush=True)
    words = ", ".join(f"{n} {'ok' if s['ok'] else 'FAILED'}" for n, s in result["steps"].items() if not s.get("none"))
    print(f"  {side:5} {words}; {seconds:.0f} s {report.share(result['path'])}", flush=True)
    return result


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("names", nargs="*", metavar="NAME")
    side = p.add_mutually_exclusive_group()
    side.add_argument("--stock", dest="sides", action="store_const", const=["stock"])
    side.add_argument("--ours", dest="sides", action="store_const", const=["ours"])
    p.add_argument("--keep", metavar="DIR", default=harness.ROOT / "target" / "programs", help="logs go here")
    p.add_argument("--bin", metavar="DIR", help="where the library and its programs are [default: target/release]")
    p.add_argument("--no-docs", action="store_true", help="do not write docs/programs.*")
    args = p.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("programs: needs root, for namespaces and for servers that give it up")
    os.umask(0o022)
    if args.bin:
        harness.BIN = pathlib.Path(args.bin)
    sides = args.sides or ["stock", "ours"]
    out = pathlib.Path(args.keep).resolve()
    tested = out / f"tested-{os.getpid()}"
    harness.snapshot(tested)
    good, ran = True, 0
    try:
        for module, name in PROGRAMS:
            cls = getattr(importlib.import_module(f"programs.{module}"), name)
            if args.names and not any(cls.name.startswith(n) for n in args.names):
                continue
            ran += 1
            number = version(cls)
            print(f"{cls.name} {number}", flush=True)
            if number is None:
                print(f"SKIPPED: {cls.name} is not installed (scripts/deps.sh programs)", flush=True)
                good = False
                continue
            results = {s: try_one(module, cls, s, out) for s in sides}
            good &= all(step["ok"] for r in results.values() for step in r["steps"].values())
            if len(results) == 2 and not args.no_docs:
                report.keep(harness.ROOT / "docs", cls, number, results, [c for _, c in PROGRAMS])
    finally:
        shutil.rmtree(tested, ignore_errors=True)
    print(f"programs: {ran} tried, {'all steps passed' if good and ran else 'FAILED'}", flush=True)
    raise SystemExit(0 if good and ran else 1)


if __name__ == "__main__":
    main()
