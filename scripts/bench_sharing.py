"""What the owner of a socket pays for others being able to use it: 8-byte messages and round trips
with our library and with one that is built without tokens, in turns. Run by `make bench-sharing`."""

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
TURNS = int(sys.argv[1]) if len(sys.argv) > 1 else 7
LIBRARIES = {
    "with": ROOT / "target/release/libfsocket.so",
    "without": ROOT / "target/unshared/release/libfsocket.so",
}
# What is run, and the measure that counts.
SCENARIOS = {"rtt-8": "rtt-8 p50", "rate-8": "rate-8"}


def values(report, measure):
    rows = [r for r in report["results"] if r["measure"] == measure]
    assert rows, f"no {measure} in {[r['measure'] for r in report['results']]}"
    return [v for r in rows for v in r["values"]["ours"]]


def main():
    found = {(s, name): [] for s in SCENARIOS for name in LIBRARIES}
    with tempfile.TemporaryDirectory() as d:
        out = pathlib.Path(d, "out.json")
        for turn in range(TURNS):
            for name in sorted(LIBRARIES, reverse=turn % 2 == 1):
                command = [ROOT / "target/release/fastsocket", "bench", "--layout", "two-cpus", "--paths", "ours"]
                command += ["--reps", "1", "--only", ",".join(SCENARIOS), "--json", out, "--library", LIBRARIES[name]]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                report = json.loads(out.read_text())
                for s in SCENARIOS:
                    found[s, name] += values(report, SCENARIOS[s])
    for s in SCENARIOS:
        a, b = (statistics.median(found[s, name]) for name in ("with", "without"))
        print(f"{s:8} with sharing {a:14.4g}   without {b:14.4g}   ratio {a / b:.3f}   ({TURNS} turns)")


main()
