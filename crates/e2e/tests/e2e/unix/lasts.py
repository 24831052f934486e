"""Makes requests to a redis server on a Unix socket until a signal: over one connection that
lasts, and over new ones, each used long enough to move to shared memory. Prints "started", and
"ok" at the end. lasts.py PATH"""

import signal
import socket
import sys

# More requests than a connection makes before it tries to move.
ROUNDS = 600
ends = False


def end(*_):
    global ends
    ends = True


def connected():
    c = socket.socket(socket.AF_UNIX)
    c.connect(sys.argv[1])
    return c


def ask(c, word):
    c.sendall(b"ECHO %s\r\n" % word)
    expected = b"$%d\r\n%s\r\n" % (len(word), word)
    got = b""
    while len(got) < len(expected):
        b = c.recv(100)
        assert b, got
        got += b
    assert got == expected, got


signal.signal(signal.SIGTERM, end)
lasting, n = connected(), 0
while not ends:
    with connected() as c:
        for _ in range(ROUNDS):
            n += 1
            ask(c, b"new%d" % n)
            ask(lasting, b"old%d" % n)
    if n == ROUNDS:
        print("started", flush=True)
print("ok", n > 0)
