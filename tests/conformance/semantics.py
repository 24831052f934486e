#!/usr/bin/python3
"""Socket semantics as transcripts: what each call returned, on each side.

Kernel TCP is the specification: the same cases run on stock sockets and under
the library, and the transcripts must be equal. `cases` has them, by family.

    semantics.py list
    semantics.py run [--server lib|stock] [--client lib|stock] [--together]
                     [--cases a,b] > transcripts.json
    semantics.py compare A.json B.json

`run` starts a process per side (one for both with --together: two threads,
so that a process talks to itself). A side with "lib" gets LD_PRELOAD from
FS_PRELOAD. The two sides keep step over pipes, never over sockets.
"""
import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from cases import CASES, Log

# Time limit of a case, in seconds.
LIMIT = 20
AT_ONCE = 3


def listen_for(case_name):
    _, _, family, _, bind = CASES[case_name]
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((bind or "127.0.0.1", 0))
    listener.listen(128)
    return listener


def run_server(case_name, t):
    server, _, _, raw, bind = CASES[case_name]
    listener = listen_for(case_name)
    address = listener.getsockname()
    host = {"::": "::1", "0.0.0.0": "127.0.0.1"}.get(address[0], address[0])
    t.tell(json.dumps([host, address[1]]))
    if raw:
        server(t, listener)
    else:
        conn, _ = listener.accept()
        with conn:
            server(t, conn)
    t.log("end")


def run_client(case_name, t):
    _, client, family, raw, _ = CASES[case_name]
    address = tuple(json.loads(t.hear()))
    if raw:
        client(t, address)
    else:
        with socket.socket(family) as s:
            s.connect(address)
            client(t, s)
    t.log("end")


def side(case_name, role, rfd, wfd):
    def out(text):
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    t = Log(out, rfd, wfd)
    t.together = False
    {"server": run_server, "client": run_client}[role](case_name, t)


def together(case_name):
    c2s, s2c = os.pipe(), os.pipe()
    logs = {"server": [], "client": []}

    def start(role, rfd, wfd):
        t = Log(lambda text: logs[role].append(text), rfd, wfd)
        t.together = True
        try:
            {"server": run_server, "client": run_client}[role](case_name, t)
        except BaseException as error:
            logs[role].append(json.dumps(["FAILED", repr(error)]))

    threads = [
        threading.Thread(target=start, args=("server", c2s[0], s2c[1]), daemon=True),
        threading.Thread(target=start, args=("client", s2c[0], c2s[1]), daemon=True),
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + LIMIT - 5
    for thread, role in zip(threads, ("server", "client")):
        thread.join(max(0.1, end - time.monotonic()))
        if thread.is_alive():
            logs[role].append(json.dumps(["HANG", where(thread)]))
    print(json.dumps(logs), flush=True)
    os._exit(0)


def where(thread):
    """The source lines that a thread is executing."""
    frame, lines = sys._current_frames().get(thread.ident), []
    while frame:
        lines.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines[:4])


def environment(which):
    env = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "FS_PRELOAD")}
    if which == "lib":
        env["LD_PRELOAD"] = os.environ["FS_PRELOAD"]
    return env


def finish(child, limit):
    try:
        out, err = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
        return out, err, "HANG"
    return out, err, child.returncode


def run_case(name, server, client, both):
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    me = [sys.executable, os.path.abspath(__file__)]
    if both:
        child = subprocess.Popen(me + ["together", name], env=environment(server), **options)
        out, err, status = finish(child, LIMIT + 5)
        result = json.loads(out) if status == 0 and out else {"server": [], "client": []}
        if status != 0:
            result["status"] = f"{status} {err[-300:]}"
        return result
    c2s, s2c = os.pipe(), os.pipe()
    children = {}
    for role, which, rfd, wfd in (("server", server, c2s[0], s2c[1]), ("client", client, s2c[0], c2s[1])):
        children[role] = subprocess.Popen(
            me + ["side", name, role, str(rfd), str(wfd)], env=environment(which), pass_fds=(rfd, wfd), **options
        )
    for fd in (*c2s, *s2c):
        os.close(fd)
    result = {}
    end = time.monotonic() + LIMIT
    for role, child in children.items():
        out, err, status = finish(child, max(1, end - time.monotonic()))
        result[role] = out.splitlines()
        if status != 0:
            result[f"{role} status"] = f"{status} {err[-300:]}"
    return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=("list", "run", "compare", "side", "together"))
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--server", default="stock", choices=("lib", "stock"))
    parser.add_argument("--client", default="stock", choices=("lib", "stock"))
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--cases", default="")
    parser.add_argument("--known", default="", help="cases that are known to differ")
    args = parser.parse_args()
    if args.verb == "list":
        print("\n".join(CASES))
    elif args.verb == "side":
        side(args.rest[0], args.rest[1], int(args.rest[2]), int(args.rest[3]))
    elif args.verb == "together":
        together(args.rest[0])
    elif args.verb == "run":
        wanted = [c for c in args.cases.split(",") if c] or list(CASES)
        # A case mostly waits, so several run at the same time.
        with ThreadPoolExecutor(AT_ONCE) as pool:
            done = pool.map(lambda name: run_case(name, args.server, args.client, args.together), wanted)
            result = dict(zip(wanted, done))
        json.dump(result, sys.stdout, indent=1)
    else:
        a, b = (json.load(open(path)) for path in args.rest[:2])
        different = 0
        known = [c for c in args.known.split(",") if c]
        for name in a:
            if a[name] == b.get(name):
                if name in known:
                    different += 1
                    print(f"EQUAL {name}: not a known difference any more, take it off the list")
                continue
            if name in known:
                print(f"KNOWN DIFFERENCE {name}: see docs/limits.md")
                continue
            different += 1
            print(f"DIFFERENT {name}")
            for key in sorted({*a[name], *b.get(name, {})}):
                one, two = a[name].get(key), b.get(name, {}).get(key)
                if one == two:
                    continue
                if isinstance(one, str) or isinstance(two, str):
                    print(f"  {key}: kernel {one!r}, ours {two!r}")
                    continue
                one, two = one or [], two or []
                for i in range(max(len(one), len(two))):
                    x = one[i] if i < len(one) else "(nothing)"
                    y = two[i] if i < len(two) else "(nothing)"
                    if x != y:
                        print(f"  {key} line {i}: kernel {x}, ours {y}")
        print(f"{len(a) - different} of {len(a)} cases equal")
        sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
