"""When one side closes a connection, the connection must end at that moment (here by a reset). It
begins in the kernel, because its client is bound in a way that only the kernel supports. The
closed end has just been shown to the monitor, in order to move to shared memory."""

import select
import socket
import struct

ROUNDS = 300
LINGER = [None, (1, 0), (1, 5)]

s = socket.socket()
s.bind(("127.0.0.1", 0))
s.listen(8)


def ends_late(server, linger):
    c = socket.socket()
    c.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    c.bind(("127.0.0.1", 0))
    c.connect(s.getsockname())
    a, _ = s.accept()
    first, second = (a, c) if server else (c, a)
    second.send(b"unread")
    if linger:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", *linger))
    first.send(b"x")
    first.close()
    p = select.poll()
    p.register(second, select.POLLIN)
    events = dict(p.poll(0)).get(second.fileno(), 0)
    second.close()
    return not events & select.POLLHUP


for server in (True, False):
    for linger in LINGER:
        print(server, linger, "late", sum(ends_late(server, linger) for _ in range(ROUNDS)))
print("ok")
