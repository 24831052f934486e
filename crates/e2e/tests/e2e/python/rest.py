"""A client that keeps using one of three servers, but not the other two.

usage: rest.py SECONDS

Prints how many channels the client has mapped, at first and after SECONDS of sleep. Then it uses
all three servers again.
"""

import os
import select
import socket
import sys
import time


def serve(s):
    while True:
        c, _ = s.accept()
        while said := c.recv(100):
            c.sendall(said)
        c.close()


def channels():
    with open("/proc/self/maps") as f:
        return len({line.split()[5] for line in f if "memfd:fastsocket-channel" in line})


def ask(c):
    c.sendall(b"x" * 50)
    assert c.recv(100) == b"x" * 50


listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
children = []
for s in listeners:
    child = os.fork()
    if child == 0:
        serve(s)
    children.append(child)
addresses = [s.getsockname() for s in listeners]
for s in listeners:
    s.close()
opened = [socket.create_connection(a) for a in addresses]
for c in opened:
    ask(c)
print("channels", channels())
for c in opened[1:]:
    c.close()
instance = select.epoll()
instance.register(opened[0].fileno(), select.EPOLLIN)
end = time.monotonic() + float(sys.argv[1])
while (left := end - time.monotonic()) > 0:
    assert instance.poll(left) == []
print("channels", channels())
opened[1:] = [socket.create_connection(a) for a in addresses[1:]]
for c in opened:
    ask(c)
print("channels", channels())
for child in children:
    os.kill(child, 9)
    os.wait()
print("ok")
