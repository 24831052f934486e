"""Clients of a real server. programs.py redis|http PORT HOST N keeps one connection. It prints the checksum of all
answers, which does not depend on the path. programs.py many PORT HOST N STOP keeps N connections to redis, sends
requests on all of them again and again until the file STOP exists, and then once more."""
import hashlib
import http.client
import os
import signal
import socket
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../apps"))
from streams import exactly

what, port, host, n = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
sha = hashlib.sha256()
if what == "http":
    client = http.client.HTTPConnection(host, port)
    for _ in range(n):
        client.request("GET", "/page")
        answer = client.getresponse()
        sha.update(b"%d" % answer.status + answer.read())
    assert client.sock, "it was closed"
elif what == "many":
    SIZES = [1, 20, 100, 300, 100, 1000, 50, 8000]
    PATTERN = bytes(range(256)) * 33
    conns = [socket.create_connection((host, port)) for _ in range(n)]

    def turn():
        """Uses all connections at once: each sets its own value and reads it back. Returns the answers' checksum."""
        sha = hashlib.sha256()
        for i in range(len(SIZES)):
            expected = []
            for k, conn in enumerate(conns):
                begin, size, key = (k * 31 + i * 7) & 255, SIZES[(k + i) % len(SIZES)], b"%04d" % k
                value = b"$%d\r\n%s\r\n" % (size, PATTERN[begin:begin + size])
                conn.sendall(b"*3\r\n$3\r\nSET\r\n$4\r\n%s\r\n%s*2\r\n$3\r\nGET\r\n$4\r\n%s\r\n" % (key, value, key))
                expected.append(b"+OK\r\n" + value)
            for conn, answer in zip(conns, expected):
                # If a connection gets no more answers, this ends the program.
                signal.alarm(120)
                got = exactly(conn, len(answer))
                assert got == answer, (conn, got, answer)
                sha.update(got)
        print(time.strftime("%T"), "asked", file=sys.stderr, flush=True)
        return sha

    first, last = turn(), False
    while not last:
        last = os.path.exists(sys.argv[5])
        sha = turn()
        assert sha.digest() == first.digest(), "other answers"
else:
    sock = socket.create_connection((host, port))
    answers = sock.makefile("rb")

    def ask(*words):
        sock.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words))
        head = answers.readline()
        return head + (answers.read(int(head[1:]) + 2) if head[:1] == b"$" else b"")

    for i in range(n):
        key, value = b"key%d" % (i % 7), bytes((i * 31 + k) & 255 for k in range(256)) * [1, 4, 64, 256][i % 4]
        sha.update(ask(b"SET", key, value) + ask(b"GET", key))
        assert ask(b"GET", key)[-len(value) - 2:-2] == value
print(what, n, sha.hexdigest())
