"""A client of a real server, with one connection that it keeps: programs.py redis|http PORT HOST N. Prints the sum of all
answers, which does not depend on the path."""
import hashlib
import http.client
import socket
import sys

what, port, host, n = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
sha = hashlib.sha256()
if what == "http":
    client = http.client.HTTPConnection(host, port)
    for _ in range(n):
        client.request("GET", "/page")
        answer = client.getresponse()
        sha.update(b"%d" % answer.status + answer.read())
    assert client.sock, "it was closed"
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
