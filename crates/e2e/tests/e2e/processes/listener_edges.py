#!/usr/bin/env python3
"""Prints what epoll instances report for one listener while client processes come and go, and
servers are busy or asleep.

    listener_edges.py SEED WORKERS STEPS      the output must be the same on every path
"""

import os
import random
import select
import socket
import sys
import time

ONCE = select.EPOLLET | select.EPOLLONESHOT
MODES = {"level": 0, "edge": select.EPOLLET, "edge2": select.EPOLLET, "once": ONCE}
WEIGHTS = {"look": 6, "take": 4, "drop": 2, "connect": 5, "begin": 2, "end": 3, "close": 1, "arm": 1, "wait": 2}
EXCLUSIVE = {"only": select.EPOLLET | select.EPOLLEXCLUSIVE}


class Process:
    """A child that carries out the commands it receives as lines, and answers each with a line."""

    def __init__(self, work, others):
        (here, self.out), (self.into, there) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            for end in [self.out, self.into] + [n for o in others for n in (o.out, o.into)]:
                os.close(end)
            with os.fdopen(here) as lines:
                for line in lines:
                    os.write(there, b"%d\n" % work(*line.split()))
            os._exit(0)
        os.close(here), os.close(there)
        self.answers = os.fdopen(self.into, closefd=False)

    def tell(self, line):
        os.write(self.out, line.encode() + b"\n")

    def ask(self, line):
        self.tell(line)
        return int(self.answers.readline())

    def end(self):
        os.close(self.out)
        os.waitpid(self.pid, 0)
        os.close(self.into)


def worker(listener):
    """The worker makes its own instances. The instance `outer` watches the instance `edge`."""
    poll = {m: select.epoll() for m in [*MODES, *EXCLUSIVE, "outer"]}
    for m, events in {**MODES, **EXCLUSIVE}.items():
        poll[m].register(listener, select.EPOLLIN | events)
    poll["outer"].register(poll["edge2"], select.EPOLLIN | select.EPOLLET)
    kept = []

    def work(what, arg):
        if what == "look":
            return len(poll[arg].poll(0))
        if what == "wait":
            return len(poll[arg].poll(10))
        if what == "arm":
            poll["once"].modify(listener, select.EPOLLIN | ONCE)
            return 1
        if what == "drop":
            while kept:
                kept.pop().close()
            return 0
        taken = 0
        while taken < int(arg):
            try:
                kept.append(listener.accept()[0])
            except BlockingIOError:
                break
            taken += 1
        return taken

    return work


def client(port):
    kept = []

    def work(what, _):
        if what == "connect":
            kept.append(socket.create_connection(("127.0.0.1", port)))
            kept[-1].sendall(b"x")
        elif kept:
            kept.pop(0).close()
        return len(kept)

    return work


def main():
    seed, count, steps = map(int, sys.argv[1:])
    rng = random.Random(seed)
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    listener.setblocking(False)
    port = listener.getsockname()[1]
    workers = []
    for _ in range(count):
        workers.append(Process(lambda *a, w=[]: (w or w.append(worker(listener)) or w)[0](*a), workers))
    for w in workers:
        print("at first", [w.ask("look %s" % m) for m in poll_names()])
    listener.close()
    clients, said = [], []
    for _ in range(steps):
        what = rng.choices([*WEIGHTS], WEIGHTS.values())[0]
        w = rng.choice(workers)
        if not clients and what in ("connect", "end", "close", "wait"):
            what = "begin"
        if what in ("look", "wait"):
            mode = rng.choice(poll_names())
        if what == "look":
            said.append("look %s %d" % (mode, w.ask("look " + mode)))
        elif what == "take":
            most = rng.choice([1, 2, 99])
            said.append("take %d" % w.ask("take %d" % most))
        elif what == "begin" and len(clients) < 4:
            clients.append(Process(client(port), workers + clients))
        elif what in ("connect", "close"):
            said.append("%s %d" % (what, rng.choice(clients).ask(what + " 0")))
        elif what == "end":
            clients.pop(rng.randrange(len(clients))).end()
            time.sleep(rng.choice([0, 0.03]))  # the server learns of it at some time
        elif what == "drop":
            for each in workers:
                each.ask("drop 0")
        elif what == "arm":
            said.append("arm %d" % w.ask("arm 0"))
        elif what == "wait":
            # No connection waits, so the next client ends the sleep.
            mode = rng.choice(["level", "edge", "edge2", "outer"])
            while w.ask("take 99"):
                pass
            w.ask("look " + mode)
            w.tell("wait " + mode)
            time.sleep(rng.choice([0, 0.02]))
            rng.choice(clients).ask("connect 0")
            said.append("wait %s %s" % (mode, w.answers.readline().strip()))
    print("\n".join(said))
    for p in clients + workers:
        p.end()


def poll_names():
    return [*MODES, *EXCLUSIVE, "outer"]


if __name__ == "__main__":
    main()
