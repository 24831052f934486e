#!/usr/bin/env python3
"""Two builds of Fastsocket in turns: what did a change cost?

    bench/builds.py OLD NEW [--rounds N] [-- OPTIONS OF fastsocket bench]

OLD and NEW are folders with `fastsocket` and what belongs to it (target/release of two
checkouts). Each round runs `fastsocket bench OPTIONS` (default: --quick --layout two-cpus
--paths ours) of both; the order changes every round. For each row it prints the median over
the rounds of both builds, and how many times better NEW is: the median of the ratios of each
round, whose two runs follow one another, and their middle half (a virtual machine may move to
other cores between rounds). A ratio below 0.97 whose middle half does not reach 0.97 is marked and
makes the exit status 1.
"""
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

BAR = 0.97


def run(build: Path, options: list[str]) -> dict[str, tuple[float, bool]]:
    """Runs the benchmark once. For each row: the value of ours, and True if higher is better."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [str(build / "fastsocket"), "bench", *options, "--json", out.name]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=3600)
        text = Path(out.name).read_text()
    if not text:
        sys.exit(f"{' '.join(command)}: no result")
    report = json.loads(text)
    rows = {}
    for row in report.get("results", []):
        if "ours" in row["medians"]:
            rows[f"{row['layout']} {row['measure']}"] = (row["medians"]["ours"], row["better"] == "higher")
    for shape in report.get("shapes", []):
        samples = dict(shape["samples"])["ours"]
        rows[f"{shape['shape']} rate"] = (statistics.median(sample["rate"] for sample in samples), True)
        rows[f"{shape['shape']} CPU"] = (statistics.median(sample["cpu_us"] for sample in samples), False)
    return rows


def main() -> None:
    arguments = sys.argv[1:]
    options = ["--quick", "--layout", "two-cpus", "--paths", "ours"]
    if "--" in arguments:
        at = arguments.index("--")
        arguments, options = arguments[:at], arguments[at + 1 :]
    rounds = 3
    if "--rounds" in arguments:
        at = arguments.index("--rounds")
        rounds = int(arguments[at + 1])
        del arguments[at : at + 2]
    if len(arguments) != 2:
        sys.exit(__doc__)
    builds = [Path(a) for a in arguments]
    seen: list[dict[str, list[float]]] = [{}, {}]
    higher: dict[str, bool] = {}
    for turn in range(rounds):
        for which in ([0, 1], [1, 0])[turn % 2]:
            for name, (value, more) in run(builds[which], options).items():
                seen[which].setdefault(name, []).append(value)
                higher[name] = more
        print(f"round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
    worse = []
    print(f"{'row':44} {'old':>12} {'new':>12} {'new vs old':>10}  middle half")
    for name in seen[0]:
        if name not in seen[1]:
            continue
        pairs = [n / o if higher[name] else o / n for o, n in zip(seen[0][name], seen[1][name]) if o and n]
        if len(pairs) < 2:
            continue
        middle = statistics.median(pairs)
        low, _, high = statistics.quantiles(pairs, n=4, method="inclusive")
        mark = ""
        if middle < BAR:
            mark = "  below" if high < BAR else "  below, within its spread"
        if high < BAR:
            worse.append(name)
        old, new = (statistics.median(s[name]) for s in seen)
        print(f"{name:44} {old:12.5g} {new:12.5g} {middle:10.2f}  {low:.2f} to {high:.2f}{mark}")
    sys.exit(1 if worse else 0)


if __name__ == "__main__":
    main()
