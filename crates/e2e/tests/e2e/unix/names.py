"""A server at several Unix sockets with a client of each. Prints how `fastsocket ss` names their
connections. names.py CLI OVER NAME...

OVER: number of connections that move to shared memory. A name that begins with @ is abstract."""

import json
import os
import select
import socket
import subprocess
import sys
import time


def address(name):
    return "\0" + name[1:] if name.startswith("@") else name


def serve(names):
    poll, served = select.poll(), {}
    for name in names:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address(name))
        listener.listen()
        poll.register(listener, select.POLLIN)
        served[listener.fileno()] = listener
    print("listening", flush=True)
    while True:
        for fd, _ in poll.poll():
            s = served[fd]
            if s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                s = s.accept()[0]
                poll.register(s, select.POLLIN)
                served[s.fileno()] = s
            elif b := s.recv(100):
                s.sendall(b)
            else:
                return


def over(cli):
    report = json.loads(subprocess.run([cli, "ss", "--json"], check=True, capture_output=True).stdout)
    return sorted((c["local"], c["peer"]) for c in report["connections"])


def main(cli, wanted, names):
    command = [sys.executable, __file__, "serve", *names]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    server.stdout.readline()
    clients = []
    for name in names:
        clients.append(socket.socket(socket.AF_UNIX))
        clients[-1].connect(address(name))
    until = time.monotonic() + 60
    while True:
        for s in clients:
            for _ in range(100):
                s.sendall(b"ping")
                assert s.recv(100) == b"ping"
        seen = over(cli)
        if len(seen) >= 2 * wanted or time.monotonic() > until:
            break
    # The connections that are not to move have now made all their attempts.
    for s in clients:
        for _ in range(1000):
            s.sendall(b"ping")
            assert s.recv(100) == b"ping"
    print(json.dumps(over(cli)))
    server.kill()
    server.wait()


if sys.argv[1] == "serve":
    serve(sys.argv[2:])
else:
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
