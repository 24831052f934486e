#!/usr/bin/env python3
"""Programs that open no socket: a shell that starts one after the other.

    tests/soak/starts.py LIBRARY MONITOR [--rounds N] [--programs N] [--program PATH] [--before LIBRARY] [--strict]

`bash -c 'for i in $(seq 500); do /bin/true; done'` on stock, with an empty library preloaded, and with ours and a
private monitor, in turns; medians of N rounds (7). Prints wall time, CPU time and page faults a program, and the speed
as a share of stock. --program starts another one (that has musl). --before measures another build beside. --strict:
exit status 1 below 0.93 in CPU time.
"""

import argparse
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

BAR = 0.93


def measure(env, program, programs):
    """Wall time, CPU time (us) and page faults of one program."""
    loop = ["bash", "-c", f"for i in $(seq {programs}); do {program}; done"]
    was, since = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(loop, env=env, check=True)
    wall, now = time.monotonic() - since, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = now.ru_utime + now.ru_stime - was.ru_utime - was.ru_stime
    return wall * 1e6 / programs, cpu * 1e6 / programs, (now.ru_minflt - was.ru_minflt) / programs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("monitor")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--program", default="/bin/true")
    parser.add_argument("--before")
    parser.add_argument("--strict", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        (pathlib.Path(directory) / "empty.c").write_text("int fsocket_empty;\n")
        empty, socket = f"{directory}/empty.so", f"{directory}/monitor"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", empty, f"{directory}/empty.c"], check=True)
        libraries = {"stock": None, "empty": empty, "before": options.before, "ours": options.library}
        if not options.before:
            del libraries["before"]
        served = subprocess.Popen([os.path.abspath(options.monitor), "--private", "--socket", socket])
        try:
            while not os.path.exists(socket):
                if served.poll() is not None:
                    sys.exit("the monitor has ended")
                time.sleep(0.01)
            results = {name: [] for name in libraries}
            for _ in range(options.rounds):
                for name, library in libraries.items():
                    env = dict(os.environ, FASTSOCKET_SOCKET=socket)
                    env.pop("LD_PRELOAD", None)
                    if library:
                        env["LD_PRELOAD"] = os.path.abspath(library)
                    results[name].append(measure(env, options.program, options.programs))
        finally:
            served.terminate()
            served.wait()
    medians = {name: [statistics.median(r[i] for r in rounds) for i in range(3)] for name, rounds in results.items()}
    (stock_wall, stock_cpu, _), load = medians["stock"], os.getloadavg()[0]
    print(f"{options.programs} programs, {options.rounds} rounds, load {load:.1f}; microseconds and faults a program")
    for name, (wall, cpu, faults) in medians.items():
        print(f"{name:6} wall {wall:6.0f} ({stock_wall / wall:.2f})  cpu {cpu:6.0f} ({stock_cpu / cpu:.2f})  faults {faults:5.1f}")
    return 1 if options.strict and stock_cpu / medians["ours"][1] < BAR else 0


sys.exit(main())
