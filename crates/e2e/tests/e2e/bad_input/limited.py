#!/usr/bin/python3
"""limited.py PORT {nofile|as} VALUE: sets a resource limit on itself, then
uses sockets. Under `nofile` it opens connections until EMFILE, closes them
all, and goes on; under `as` it has 20 at once. Prints "ok"."""
import errno
import os
import resource
import socket
import sys

sys.path.append(os.path.join(os.path.dirname(__file__), "../../../../../tests/apps"))
from streams import trip

port, what, value = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
name = {"nofile": resource.RLIMIT_NOFILE, "as": resource.RLIMIT_AS}[what]
resource.setrlimit(name, (value, value))

if what == "nofile":
    for _ in range(3):
        socks = []
        while True:
            try:
                socks.append(socket.create_connection(("127.0.0.1", port), timeout=20))
            except OSError as error:
                if error.errno != errno.EMFILE:
                    raise
                break
        print("open at EMFILE", len(socks))
        if not socks:
            raise SystemExit("not one connection possible")
        for i, sock in enumerate(socks):
            trip(sock, b"%d\n" % i)
        for sock in socks:
            sock.close()
else:
    socks = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(20)]
    for i, sock in enumerate(socks):
        trip(sock, b"%d" % i * 5000)
print("ok")
