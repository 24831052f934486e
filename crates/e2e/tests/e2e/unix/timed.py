"""Servers whose blocking receives have SO_RCVTIMEO: the connection lasts, and a receive ends in time when nothing comes.
timed.py"""

import os
import socket
import struct
import time

ROUNDS = 300


def serve(s, limit):
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(limit), int(limit % 1 * 1e6)))
    errors, early = set(), 0
    while True:
        begun = time.monotonic()
        try:
            b = s.recv(100)
        except OSError as e:
            errors.add(e.errno)
            early += time.monotonic() - begun < 0.9 * limit
            continue
        if not b:
            return print("server", limit, sorted(errors), "early", early, flush=True)
        s.sendall(b)


def ask(path, pause):
    with socket.socket(socket.AF_UNIX) as c:
        c.connect(path)
        for i in range(ROUNDS):
            c.sendall(b"%d" % i)
            assert c.recv(100) == b"%d" % i
            if i % 60 == 59:
                time.sleep(pause)


for limit, pause in ((60, 0), (0.05, 0.3)):
    path = f"\0timed-{os.getpid()}-{limit}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    child = os.fork()
    if child == 0:
        ask(path, pause)
        os._exit(0)
    s, _ = listener.accept()
    listener.close()
    serve(s, limit)
    s.close()
    print("client's status", os.waitpid(child, 0)[1], flush=True)
print("ok", flush=True)
