"""Unix stream sockets: stock, stock once more (the control) and ours, in turns.

run.py [PART…] [--rounds N] [--quick] [--only RE] [--json FILE]     run.py --parts

A table of medians: what stock does a second, the ratios of the control and of ours to stock in the same round with their
spread, and CPU time a request of ours to that of stock. The path is asserted from the counters. Exit status 1: an answer
differs, a program does not end, or bytes went another way than the row says. A ratio below the bar of issue 46 is marked.
PART: all but `shapes`, if none is named. Programs that are not installed are left out, and named.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import signal
import statistics
import sys
import tempfile

import micro
import passing
import shapes
import stores
import web
from side import Build, Side, Wrong, difference, wrong_path

POSTGRES = "/usr/lib/postgresql/15/bin/postgres"
#: Part, and the programs that it needs.
PARTS = {
    "pair": (micro.Pair, ()),
    "redis": (micro.Redis, ("redis-server",)),
    "postgres": (micro.Postgres, (POSTGRES, "psql")),
    "mariadb": (stores.Mariadb, ("mariadbd", "sysbench", "mariadb-slap")),
    "gunicorn": (web.Gunicorn, ("nginx", "wrk", "/usr/bin/gunicorn")),
    "uwsgi": (web.Uwsgi, ("nginx", "wrk", "/usr/bin/uwsgi", "/usr/lib/uwsgi/plugins/python3_plugin.so")),
    "php-fpm": (web.PhpFpm, ("nginx", "wrk", "php-fpm8.2")),
    "multiprocessing": (passing.Multiprocessing, ("/usr/bin/python3",)),
    "dbus": (passing.Dbus, ("dbus-daemon", "/usr/bin/python3")),
    "activation": (passing.Activation, ("systemd-socket-activate", "/usr/bin/python3")),
    "shapes": (shapes.Shapes, ()),
}
NAMES = ("stock", "control", "ours")


def measured(row, sides, rounds):
    """Figures of each side by round, CPU time of a request, the changed counters, and the least bytes of ours."""
    figures, cpu, delta, size = {n: [] for n in NAMES}, {n: [] for n in NAMES}, {}, 0
    said = None
    for turn in range(rounds):
        for s in sides[turn % 3 :] + sides[: turn % 3]:
            before, used = s.counters(), s.cpu()
            figure = row.measure(s)
            if figure.said and said not in (None, figure.said):
                raise Wrong(f"{s.name}: another answer: {figure.said[:300]} instead of {said[:300]}")
            said = figure.said or said
            used = figure.cpu if figure.cpu is not None else s.cpu() - used
            figures[s.name].append(figure.rate)
            cpu[s.name].append(used / max(figure.requests, 1))
            if s.ours:
                size += figure.size
                for name, n in difference(before, s.counters()).items():
                    delta[name] = delta.get(name, 0) + n
    return figures, cpu, delta, size


def summary(row, sides, rounds):
    figures, cpu, delta, size = measured(row, sides, rounds)
    ratios = {n: [f / s for f, s in zip(figures[n], figures["stock"], strict=True)] for n in ("control", "ours")}
    median = statistics.median
    costs = {n: median(o / s if s else 1 for o, s in zip(cpu[n], cpu["stock"], strict=True)) for n in ("control", "ours")}
    keep = ("path_upgrade", "path_switch", "tx_bytes", "connect_kernel", "accept_kernel")
    path = {n: v for n, v in delta.items() if n in keep or n.startswith("fallback.")}
    return {"row": row.name, "bar": row.bar, "stock": median(figures["stock"]), "ratio": median(ratios["ours"]), "ratios": ratios, "cpu": costs,
            "path": path, "wrong": wrong_path(row, delta, size)}  # fmt: skip


def shown(r):
    spread = lambda n: "{:.2f} ({:.2f}-{:.2f})".format(*(f(r["ratios"][n]) for f in (statistics.median, min, max)))  # noqa: E731
    over, back = (r["path"].get(n, 0) for n in ("path_upgrade", "path_switch"))
    # The end that moves back first is counted twice.
    over = f"{over} over, {2 * back // 3} back"
    below = f"  BELOW {r['bar']}" if r["ratio"] < r["bar"] else ""
    wrong = f"  {r['wrong']}" if r["wrong"] else ""
    cpu = "{:.2f} {:.2f}".format(*(r["cpu"][n] for n in ("control", "ours")))
    return f"{r['row']:38} {r['stock']:9.0f} {spread('control'):>17} {spread('ours'):>17} {cpu:>10}  {over}{below}{wrong}"


def missing(needs):
    return [n for n in needs if not (os.path.exists(n) if n.startswith("/") else shutil.which(n))]


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("parts", nargs="*", metavar="PART")
    p.add_argument("--parts", dest="list", action="store_true", help="name the parts, and end")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--quick", action="store_true")
    p.add_argument("--shapes", action="store_true", help="the part `shapes` as well")
    p.add_argument("--only", default="", metavar="RE", help="rows whose name it matches")
    p.add_argument("--json", metavar="FILE", help="all figures")
    p.add_argument("--bin", metavar="DIR", help="where the library and its programs are [default: target/release]")
    a = p.parse_args()
    if unknown := set(a.parts) - set(PARTS):
        p.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    a.parts = a.parts or [n for n in PARTS if n != "shapes"]
    if a.shapes and "shapes" not in a.parts:
        a.parts.append("shapes")
    return a


def one_part(name, place, a):
    """Measures the rows of one part; False where something is wrong."""
    sides = [Side(n, place) for n in NAMES]
    good = True
    try:
        for row in PARTS[name][0](sides).rows(a.quick):
            if a.only and not re.search(a.only, row.name):
                continue
            try:
                result = summary(row, sides, a.rounds * row.rounds)
            except Wrong as e:
                print(f"{row.name:38} FAILED: {e}", flush=True)
                good = False
                continue
            print(shown(result), flush=True)
            a.results.append(result)
            good &= not result["wrong"]
    except Wrong as e:
        print(f"{name:38} FAILED: {e}", flush=True)
        good = False
    finally:
        for s in sides:
            s.end()
    return good


def main():
    a = arguments()
    if a.list:
        print("\n".join(PARTS))
        return False
    if os.geteuid() != 0:
        sys.exit("bench-unix: needs root, for servers of other users")
    if a.bin:
        Build.at = pathlib.Path(a.bin).resolve()
    # sys.exit runs the clean-up, so that the servers end, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    a.results, good = [], True
    with tempfile.TemporaryDirectory(prefix="fsu-") as top:
        os.chmod(top, 0o755)
        print(f"{'':38} {'stock/s':>9} {'control':>17} {'ours':>17} {'CPU':>10}  ends of connections")
        for name in a.parts:
            if none := missing(PARTS[name][1]):
                print(f"{name:38} SKIPPED: there is no {', '.join(none)} (scripts/deps.sh programs)")
                continue
            place = pathlib.Path(top, name)
            place.mkdir(mode=0o755)
            good &= one_part(name, place, a)
    if a.json:
        pathlib.Path(a.json).write_text(json.dumps(a.results, indent=1) + "\n")
    return not good


if __name__ == "__main__":
    sys.exit(main())
