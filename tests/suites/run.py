#!/usr/bin/env python3
"""Published test suites, on kernel sockets and under the library.

    tests/suites/run.py SUITE[:STEP]… [--stock | --ours | --both] [--keep DIR]

Fetches and builds what is not in the cache, runs, compares by the names of the
tests, and writes docs/conformance.md and docs/conformance.json (for whole
suites on both sides). Exit status 1 when something that passes on stock does
not on ours and known.toml does not say why. Needs root, for the namespaces.
"""

import argparse
import collections
import importlib
import json
import os
import pathlib
import shutil
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import harness  # noqa: E402
import report  # noqa: E402
import sources  # noqa: E402

SUITES = ["cpython", "libevent", "crates", "libuv", "redis", "memcached", "node", "curl", "tornado"]
DOCS = harness.ROOT / "docs"


def arguments():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("suites", nargs="*", metavar="SUITE[:STEP]", help=f"default: all of {', '.join(SUITES)}")
    side = p.add_mutually_exclusive_group()
    side.add_argument("--stock", dest="sides", action="store_const", const=["stock"], help="kernel sockets only")
    side.add_argument("--ours", dest="sides", action="store_const", const=["ours"], help="under the library only")
    side.add_argument("--both", dest="sides", action="store_const", const=["stock", "ours"], help="the default")
    p.add_argument("--keep", metavar="DIR", help="logs and results go here (default: CACHE/out)")
    p.add_argument("--cache", metavar="DIR", default=harness.ROOT / "target" / "suites", help="sources and builds")
    p.add_argument("--prepare", action="store_true", help="fetch and build only")
    args = p.parse_args()
    args.sides = args.sides or ["stock", "ours"]
    args.suites = args.suites or SUITES
    for s in args.suites:
        if s.split(":")[0] not in SUITES:
            p.error(f"unknown suite {s}")
    return args


def run_step(suite, step, side, out):
    """Returns the results by "STEP/NAME", and the counters."""
    place = out / suite.NAME / side / step.name
    place.mkdir(parents=True, exist_ok=True)
    for old in place.iterdir():
        old.unlink()
    argv = [str(a).replace("{out}", str(place)) for a in step.argv]
    status, seconds, counters = harness.run(
        argv, side, place, cwd=step.cwd, env=step.env, timeout=step.timeout, user=step.user
    )
    results = {f"{step.name}/{name}": r for name, r in step.parse(place).items()}
    if not results and status != 0:
        results = {f"{step.name}/(whole)": "fail"}
    if status is None or status < 0:
        # The suite was killed, so the tests that it did not report are missing from the results.
        results[f"{step.name}/(end)"] = "fail"
    else:
        results[f"{step.name}/(end)"] = "pass"
    c = report.counts(results)
    shm = f", shm {counters['connect_shm']}+{counters['accept_shm']}" if counters else ""
    end = "timeout" if status is None else f"exit {status}"
    print(f"  {side:5} {step.name}: {c['pass']} pass, {c['fail']} fail, {c['skip']} skip, {end}, {seconds:.0f} s{shm}", flush=True)
    return results, counters or {}


def run_suite(name, wanted, args, out, known):
    suite = importlib.import_module(f"suites.{name}")
    print(f"{name}: fetching and building", flush=True)
    version, steps = suite.prepare(sources.Cache(args.cache))
    if args.prepare:
        return True
    steps = [s for s in steps if not wanted or s.name in wanted]
    print(f"{name} {version}: {len(steps)} steps", flush=True)
    wrong, done = [], []
    for step in steps:
        # The sides take turns, so that both see the same machine.
        results = {side: run_step(suite, step, side, out) for side in args.sides}
        if len(args.sides) < 2:
            for test, result in sorted(results[args.sides[0]][0].items()):
                if result == "fail":
                    print(f"    fails: {test}", flush=True)
            continue
        (stock, _), (ours, counters) = results["stock"], results["ours"]
        record = report.record(name, stock, ours, counters, known)
        for d in record["differences"]:
            print(f"    {d['test']}: stock {d['stock']}, ours {d['ours']} ({d['reason'] or 'no reason known'})")
        for w in record["wrong"]:
            print(f"    WRONG {w}", flush=True)
        wrong += record["wrong"]
        done.append(record)
        report.keep(DOCS, name, version, step.name, record, None if wanted else [s.name for s in steps])
    if not done:
        return True
    total = report.total(done)
    if not wanted and not total["counters"].get("connect_shm") and not total["counters"].get("accept_shm"):
        wrong.append("no connection went over shared memory: this run says nothing")
        print(f"  WRONG {wrong[-1]}")
    print(f"{name}: stock {total['stock']}, ours {total['ours']}, {'OK' if not wrong else 'FAILED'}", flush=True)
    return not wrong


def main():
    args = arguments()
    if os.geteuid() != 0 and not args.prepare:
        raise SystemExit("suites: needs root, for network namespaces")
    os.umask(0o022)
    known = report.load_known(HERE / "known.toml")
    out = pathlib.Path(args.keep or pathlib.Path(args.cache) / "out").resolve()
    wanted = collections.defaultdict(list)
    for s in args.suites:
        name, _, step = s.partition(":")
        wanted[name] += [step] if step else []
    good = True
    tested = pathlib.Path(args.cache).resolve() / f"tested-{os.getpid()}"
    if not args.prepare:
        harness.snapshot(tested)
    try:
        for name, steps in wanted.items():
            try:
                good &= run_suite(name, steps, args, out, known)
            except RuntimeError as error:
                print(f"{name}: NOT RUN: {error}", flush=True)
                good = False
    finally:
        shutil.rmtree(tested, ignore_errors=True)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
