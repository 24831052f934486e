"""A server that accepts and forks for each connection, and a client in another process. forks.py
CONNECTIONS"""

import os
import socket
import subprocess
import sys
import tempfile

ROUNDS = 60


def serve(path, n):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    print("listening", flush=True)
    for _ in range(n):
        s, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            while b := s.recv(100):
                s.sendall(b[::-1])
            os._exit(0)
        s.close()
    for _ in range(n):
        os.wait()


def main(n):
    with tempfile.TemporaryDirectory() as place:
        path = os.path.join(place, "s")
        other = subprocess.Popen([sys.executable, __file__, "serve", path, str(n)], stdout=subprocess.PIPE, text=True)
        other.stdout.readline()
        for i in range(n):
            c = socket.socket(socket.AF_UNIX)
            c.connect(path)
            answers = []
            for k in range(ROUNDS):
                c.sendall(b"%d.%d" % (i, k))
                answers.append(c.recv(100))
            c.shutdown(socket.SHUT_WR)
            print(i, answers[0], answers[-1], len(set(answers)), c.recv(1))
            c.close()
        print("server", other.wait())
    print("ok")


if sys.argv[1] == "serve":
    serve(sys.argv[2], int(sys.argv[3]))
else:
    main(int(sys.argv[1]))
