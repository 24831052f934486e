#!/usr/bin/env python3
"""Robustness of the listen queues: workers killed, or the server reloaded, under load.

    robust.py kill   [--seconds 30]   kill -9 of a worker every second, with its queue filled
    robust.py reload [--seconds 30]   a reload every second

One after the other, under the same load (2 client processes pinned to 2 CPUs, one
connection a request): stock nginx with one shared socket ("shared"); stock nginx with
SO_REUSEPORT, whose master holds all sockets ("reuseport"); a small server whose workers
make their own SO_REUSEPORT sockets, as applications do ("separate"); nginx with local
listen sockets ("ours"). JSON on standard output. Exit status 1 if ours lost a
connection that no dead worker had accepted.

kill: a worker is stopped for 30 ms, so that its queue fills, counted (connections
that it had accepted, connections that wait in a queue that only it holds), then
killed. A request may fail only if the worker had accepted it.
"""
import argparse
import json
import os
import signal
import sys
import time

import load
import servers


def killing(server, run):
    accepted = queued = kills = 0
    killed = set()
    following = time.monotonic() + 0.7
    while run.running():
        time.sleep(0.01)
        if time.monotonic() < following:
            continue
        # One that was killed may take a while to go on a busy machine.
        workers = [w for w in server.workers() if w not in killed]
        if len(workers) < 2 or run.until - time.monotonic() < 0.5:
            continue
        victim = workers[kills % len(workers)]
        os.kill(victim, signal.SIGSTOP)
        time.sleep(0.03)
        accepted += server.accepted_by(victim)
        queued += server.queued_of(victim)
        os.kill(victim, signal.SIGKILL)
        killed.add(victim)
        kills += 1
        following = time.monotonic() + 1.0
    return {"kills": kills, "accepted_by_the_dead": accepted, "queued_at_the_dead": queued}


def reloading(server, run):
    reloads = 0
    following = time.monotonic() + 0.7
    while run.running():
        time.sleep(0.01)
        if time.monotonic() >= following and run.until - time.monotonic() > 0.5:
            following += 1.0
            server.reload()
            reloads += 1
    return {"reloads": reloads}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("kill", "reload"))
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--kinds", default="shared,reuseport,separate,ours")
    args = parser.parse_args()
    result = {"what": args.what, "seconds": args.seconds, "cpus": os.cpu_count(), "kernel": os.uname().release, "runs": []}
    bad = False
    for kind in args.kinds.split(","):
        with servers.Place() as place:
            server = place.nginx(kind)
            run = load.Load(("127.0.0.1", server.port), args.seconds)
            did = (killing if args.what == "kill" else reloading)(server, run)
            row = {"kind": kind, **did, **run.result(), "crashed": server.crashed()}
            if kind == "ours":
                zones = place.zones()
                total = lambda name: sum(sum(g["selections"].get(name, [])) for g in zones["groups"])
                row["selections"] = {n: total(n) for n in ("lookups", "self", "other", "beside", "to_global", "migrated")}
                row["accepted"] = {n: sum(z["accepted"][n] for z in zones["zones"]) for n in ("local", "global")}
                row["fallbacks"] = zones["fallbacks"]
                bad = row["crashed"] > 0 or row["failed"] > row.get("accepted_by_the_dead", 0) or row["accepted"]["local"] == 0
        result["runs"].append(row)
        print(json.dumps(row), file=sys.stderr)
    print(json.dumps(result, indent=1))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
