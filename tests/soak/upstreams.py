#!/usr/bin/env python3
"""A client with many upstreams: stock and ours in turns.

    tests/soak/upstreams.py TARGET [--servers 2] [--count 250] [--connections 2500] [--messages 5000] [--rounds 3]

TARGET is the directory of the binaries (target/release). The program is tests/apps/upstreams.py, which describes the
numbers. Exit status 1 if ours had a connection that is not over shared memory.

Each run has a network namespace of its own. Ours also has a private monitor.
"""

import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile

PROGRAM = pathlib.Path(__file__).parent.parent / "apps" / "upstreams.py"

RUN = """
ip link set lo up
if [ "$1" ]; then
    "$1/fastsocketd" --private --socket "$FASTSOCKET_SOCKET" & trap "kill $!; wait $!" EXIT
    while [ ! -e "$FASTSOCKET_SOCKET" ]; do sleep 0.01; done
    library=$1/libfsocket.so
fi
LD_PRELOAD=$library MONITOR=$! "$2" "$3" $4
[ ! "$1" ] || "$1/fastsocket" stat --json > "$5"
"""


def once(target, args):
    with tempfile.TemporaryDirectory() as directory:
        stat = f"{directory}/stat"
        words = [target, sys.executable, str(PROGRAM), args, stat]
        env = dict(os.environ, FASTSOCKET_SOCKET=f"{directory}/monitor")
        done = subprocess.run(["unshare", "--net", "sh", "-ec", RUN, "run", *words], env=env, text=True, timeout=1800,
                              capture_output=True)
        if done.returncode != 0 or not done.stdout.startswith("ok"):
            sys.exit(done.stdout + done.stderr)
        line = [line for line in done.stderr.splitlines() if line.startswith("bytes-an-upstream")]
        return line[0], json.loads(pathlib.Path(stat).read_text()) if target else {}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    for name, default in (("servers", 2), ("count", 250), ("connections", 2500), ("messages", 5000), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if args.connections > 900:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    words = f"{args.servers} {args.count} {args.connections} {args.messages}"
    whole = True
    for _ in range(args.rounds):
        print("stock", once("", words)[0], flush=True)
        said, stat = once(os.path.abspath(args.target), words)
        over = stat["totals"].get("connect_shm", 0)
        whole &= over == args.connections
        print("ours ", said, f"over-shared-memory {over} of {args.connections}", flush=True)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
