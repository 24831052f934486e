#!/usr/bin/env python3
"""Many threads of one process that open and close connections in loops; stock and ours in turns.

    tests/soak/convoy.py LIBRARY MONITOR [--how own,kept,one,epoll,alike] [--threads 1,10,50,200,500]
                         [--turns 20] [--rounds 3] [--strict]

For each way (see tests/apps/convoy.c) and number of threads: connections per second on stock, ours divided by stock
(the median of the rounds), and the longest call of both in milliseconds. `--strict`: exit status 1 if ours is below
0.95 of stock, or if a call took more than 1 s that did not on stock.

Each run has a network namespace of its own: connections in TIME_WAIT would leave few ports for the next run.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

SOURCE = pathlib.Path(__file__).parent.parent / "apps" / "convoy.c"


RUN = """
ip link set lo up
if [ -n "$1" ]; then
    "$1" --private --socket "$FASTSOCKET_SOCKET" & trap "kill $!; wait $!" EXIT
    while [ ! -e "$FASTSOCKET_SOCKET" ]; do sleep 0.01; done
    library=$2
fi
shift 2
LD_PRELOAD=$library "$@"
"""


def once(program, how, threads, turns, ours=("", "")):
    """Connections per second, and the longest call in milliseconds."""
    with tempfile.TemporaryDirectory() as directory:
        command = ["unshare", "--net", "sh", "-ec", RUN, "run", *ours, program, how, str(threads), str(turns)]
        env = dict(os.environ, FASTSOCKET_SOCKET=f"{directory}/monitor")
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    if done.returncode != 0 or done.stdout != "ok\n":
        sys.exit(f"{how}, {threads} threads: {done.stdout}{done.stderr}")
    words = done.stderr.splitlines()[-1].split()
    times = dict(zip(words[::2], map(int, words[1::2])))
    took = times.pop("all")
    return threads * turns / took * 1e6, max(times.values()) / 1e3


def main():
    p = argparse.ArgumentParser()
    p.add_argument("library")
    p.add_argument("monitor")
    p.add_argument("--how", default="own,kept,one,epoll,alike")
    p.add_argument("--threads", default="1,10,50,200,500")
    p.add_argument("--turns", type=int, default=20)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--strict", action="store_true")
    a = p.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as directory:
        program = f"{directory}/convoy"
        subprocess.run(["cc", "-O2", "-pthread", "-o", program, SOURCE], check=True)
        ours = (os.path.abspath(a.monitor), os.path.abspath(a.library))
        print(f"{'':8}{'threads':>8}{'stock/s':>10}{'ours':>7}   longest call, ms: stock, ours")
        for how in a.how.split(","):
            for threads in map(int, a.threads.split(",")):
                # With few threads the turns would end too soon.
                turns = max(a.turns, 1000 // threads)
                runs = [[once(program, how, threads, turns, *o) for o in ((), (ours,))] for _ in range(a.rounds)]
                rate = statistics.median(s[0] for s, _ in runs)
                ratio = statistics.median(o[0] / s[0] for s, o in runs)
                longest = [statistics.median(r[i][1] for r in runs) for i in (0, 1)]
                bad = ratio < 0.95 or longest[1] > max(1000, longest[0])
                wrong += bad
                mark = "  *" if bad else ""
                print(f"{how:8}{threads:8}{rate:10.0f}{ratio:7.2f}   {longest[0]:.0f}, {longest[1]:.0f}{mark}", flush=True)
    return 1 if a.strict and wrong else 0


sys.exit(main())
