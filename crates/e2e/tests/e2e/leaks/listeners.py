#!/usr/bin/env python3
"""One process connects to many listeners, one after the other, as a load balancer does whose
backends come and go. Each lives for more than 10 ms: the library leaves loops of shorter ones to the kernel (ADR 45).

    listeners.py COUNT
"""

import socket
import sys
import time

for n in range(int(sys.argv[1])):
    listener = socket.create_server(("127.0.0.1", 0))
    c = socket.create_connection(listener.getsockname())
    s, _ = listener.accept()
    c.sendall(b"%d" % n)
    assert s.recv(10) == b"%d" % n
    time.sleep(0.011)
    for x in (s, c, listener):
        x.close()
print("ok", flush=True)
