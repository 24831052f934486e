"""A client with many upstreams, as a proxy has them: one process, one epoll instance, many listeners.

usage: upstreams.py SERVERS UPSTREAMS CONNECTIONS MESSAGES [DESCRIPTORS]

SERVERS processes have UPSTREAMS listeners in total. The client opens CONNECTIONS to the listeners in turn, and keeps
all open. It sends requests over randomly chosen connections, and checks each answer and the names of both ends. The
measurements go to stderr, as a line of words and numbers: times, and the CPU time of all these processes and of process
MONITOR (from the environment). CPU times can be compared on a machine with other load. DESCRIPTORS is the limit of the
client.
"""

import os
import random
import resource
import select
import socket
import subprocess
import sys
import time


def serve(n):
    listeners = {}
    for _ in range(n):
        s = socket.create_server(("127.0.0.1", 0), backlog=1024)
        s.setblocking(False)
        listeners[s.fileno()] = s
    connections = {}
    instance = select.epoll()
    for fd in listeners:
        instance.register(fd, select.EPOLLIN)
    print(*(s.getsockname()[1] for s in listeners.values()), flush=True)
    while True:
        for fd, _ in instance.poll():
            if fd in listeners:
                c, peer = listeners[fd].accept()
                c.setblocking(False)
                connections[c.fileno()] = (c, b"%d %d " % (peer[1], c.getsockname()[1]))
                instance.register(c.fileno(), select.EPOLLIN)
                continue
            c, names = connections[fd]
            said = c.recv(1 << 16)
            if said:
                c.sendall(names + said)
            else:
                del connections[fd]
                c.close()


def resident():
    """Resident memory in bytes."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def ask(instance, c, n):
    said = random.randbytes(n)
    c.sendall(said)
    want = b"%d %d " % (c.getsockname()[1], c.getpeername()[1]) + said
    got = b""
    while len(got) < len(want):
        for fd, _ in instance.poll(20) or sys.exit(f"no answer after {len(got)} of {len(want)} bytes"):
            assert fd == c.fileno()
            part = c.recv(1 << 16)
            assert part, "the end"
            got += part
    assert got == want


def cpu(processes):
    """CPU time of the processes in nanoseconds."""
    total = 0
    for pid in processes:
        with open(f"/proc/{pid}/schedstat") as f:
            total += int(f.read().split()[0])
    return total


def main(servers, upstreams, connections, messages, descriptors=0):
    share = [upstreams // servers + (i < upstreams % servers) for i in range(servers)]
    command = [sys.executable, __file__, "serve"]
    processes = [subprocess.Popen(command + [str(n)], stdout=subprocess.PIPE, text=True) for n in share]
    try:
        ports = [int(p) for s in processes for p in s.stdout.readline().split()]
        assert len(ports) == upstreams
        instance, opened = select.epoll(), []
        if descriptors:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
        everybody = ["self", *(s.pid for s in processes), *os.environ.get("MONITOR", "").split()]
        levels, times, work = [resident()], [time.monotonic()], [cpu(everybody)]
        for total in (min(upstreams, connections), connections):
            while len(opened) < total:
                c = socket.create_connection(("127.0.0.1", ports[len(opened) % upstreams]), timeout=20)
                instance.register(c.fileno(), select.EPOLLIN)
                opened.append(c)
                ask(instance, c, 64)
            levels.append(resident())
            times.append(time.monotonic())
            work.append(cpu(everybody))
        names = {(c.getsockname(), c.getpeername()) for c in opened}
        assert len(names) == connections, f"{len(names)} names of {connections} connections"
        began, worst, before = time.monotonic(), 0, cpu(everybody)
        for _ in range(messages):
            one = time.monotonic()
            ask(instance, random.choice(opened), random.choice((16, 200, 2000)))
            worst = max(worst, time.monotonic() - one)
        asked, asking = time.monotonic() - began, cpu(everybody) - before
        files = len(os.listdir("/proc/self/fd")) - connections
        for c in opened:
            c.close()
    finally:
        for s in processes:
            s.kill()
            s.wait()
    first, later = min(upstreams, connections), max(1, connections - upstreams)
    cpus = [(work[1] - work[0]) / first, (work[2] - work[1]) / later, asking / max(1, messages)]
    print(
        "bytes-an-upstream", (levels[1] - levels[0]) // first,
        "bytes-a-connection", (levels[2] - levels[1]) // later,
        "us-a-connect", int((times[1] - times[0]) * 1e6 / first),
        "us-a-later-connect", int((times[2] - times[1]) * 1e6 / later),
        "us-a-message", int(asked * 1e6 / max(1, messages)),
        "us-the-longest", int(worst * 1e6),
        "other-descriptors", files,
        "cpu-us", *(f"{ns / 1000:.1f}" for ns in cpus),
        file=sys.stderr,
    )
    print("ok", len(ports), connections)


if sys.argv[1] == "serve":
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    serve(int(sys.argv[2]))
else:
    main(*map(int, sys.argv[1:]))
