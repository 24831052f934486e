"""What the owner of a socket pays for others being able to use it: single calls by a thread that sends to
itself, and round trips and messages of 8 bytes between two CPUs; with our library, with one for a single
thread and its signal handlers (no tokens), and with one in which not even a signal handler may call, in
turns. Run by `make bench-sharing`."""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
TURNS = int(sys.argv[1]) if len(sys.argv) > 1 else 7
LIBRARIES = {
    "shared": ROOT / "target/release/libfsocket.so",
    "one thread": ROOT / "target/unshared/release/libfsocket.so",
    "no handler": ROOT / "target/unguarded/release/libfsocket.so",
}
# What is run, and the measure that counts.
SCENARIOS = {"rtt-8": "rtt-8 p50", "rate-8": "rate-8"}


def values(report, measure):
    rows = [r for r in report["results"] if r["measure"] == measure]
    assert rows, f"no {measure} in {[r['measure'] for r in report['results']]}"
    return [v for r in rows for v in r["values"]["ours"]]


def turns():
    """Each library in turn, and back again."""
    for turn in range(TURNS):
        yield from sorted(LIBRARIES, reverse=turn % 2 == 1)


def show(what, found, lower_is_better):
    for name in list(LIBRARIES)[1:]:
        # Neighbours in time, so that what the machine does meanwhile is in both.
        ratios = [b / a if lower_is_better else a / b for a, b in zip(found["shared"], found[name])]
        shared, other = (statistics.median(found[n]) for n in ("shared", name))
        print(f"{what:22} shared {shared:10.4g}   {name} {other:10.4g}   speed {statistics.median(ratios):.3f} of it")


def calls(directory):
    """What single calls take, nanoseconds."""
    program, path = directory / "owner", directory / "monitor"
    subprocess.run(["cc", "-O2", "-o", program, ROOT / "bench/sharing/owner.c"], check=True)
    monitor = subprocess.Popen([ROOT / "target/release/fastsocketd", "--socket", path], stderr=subprocess.DEVNULL)
    measures = ["write of 8 bytes, ns", "read of 8 bytes, ns", "both of 100 bytes, ns"]
    found = [{name: [] for name in LIBRARIES} for _ in measures]
    try:
        while not path.exists() and monitor.poll() is None:
            time.sleep(0.01)
        for name in turns():
            env = dict(os.environ, LD_PRELOAD=str(LIBRARIES[name]), FASTSOCKET_SOCKET=str(path))
            out = subprocess.run(["taskset", "-c", "1", program], env=env, check=True, capture_output=True, text=True)
            for f, value in zip(found, out.stdout.split()):
                f[name].append(float(value))
    finally:
        monitor.terminate()
        monitor.wait()
    for what, f in zip(measures, found):
        assert all(v < 200 for v in f["shared"]), f"not over shared memory: {f}"
        show(what, f, True)


def between_cpus(directory):
    out = directory / "out.json"
    found = {s: {name: [] for name in LIBRARIES} for s in SCENARIOS}
    for name in turns():
        command = [ROOT / "target/release/fastsocket", "bench", "--layout", "two-cpus", "--paths", "ours"]
        command += ["--reps", "1", "--only", ",".join(SCENARIOS), "--json", out, "--library", LIBRARIES[name]]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        report = json.loads(out.read_text())
        for s in SCENARIOS:
            found[s][name] += values(report, SCENARIOS[s])
    show("round trip, ns", found["rtt-8"], True)
    show("messages a second", found["rate-8"], False)


def main():
    with tempfile.TemporaryDirectory() as d:
        calls(pathlib.Path(d))
        between_cpus(pathlib.Path(d))


main()
