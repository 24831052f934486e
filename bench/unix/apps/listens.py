"""A service that is started with its socket (LISTEN_FDS: descriptor 3): a thread for each connection echoes lines, in
capitals. listens.py ask PATH: three connections with 400 lines each; prints a digest of the answers."""

import hashlib
import os
import socket
import sys
import threading


def echo(c):
    with c, c.makefile("rwb") as f:
        for line in f:
            f.write(line.upper())
            f.flush()


def serve():
    assert os.environ["LISTEN_FDS"] == "1" and os.environ["LISTEN_PID"] == str(os.getpid())
    listener = socket.socket(fileno=3)
    while True:
        threading.Thread(target=echo, args=(listener.accept()[0],), daemon=True).start()


def ask(path):
    said = hashlib.sha256()
    files = []
    for _ in range(3):
        c = socket.socket(socket.AF_UNIX)
        c.connect(path)
        files.append(c.makefile("rwb"))
    for i in range(400):
        for n, f in enumerate(files):
            f.write(b"line %d of %d %s\n" % (i, n, b"x" * (i * 7)))
            f.flush()
            said.update(f.readline())
    print(said.hexdigest())


if __name__ == "__main__":
    ask(sys.argv[2]) if sys.argv[1:2] == ["ask"] else serve()
