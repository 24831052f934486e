"""
report: TCP_DEFER_ACCEPT has no effect: a server with few workers waits for idle clients
kind: options that act
stock: idle: accept waits; ready False
path: any
run: before
run: after
"""
import select
import socket
import sys

TCP_DEFER_ACCEPT = 9
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
if sys.argv[1] == "before":
    listener.setsockopt(socket.IPPROTO_TCP, TCP_DEFER_ACCEPT, 5)
listener.listen(16)
if sys.argv[1] == "after":
    listener.setsockopt(socket.IPPROTO_TCP, TCP_DEFER_ACCEPT, 5)
idle = socket.create_connection(listener.getsockname())
listener.setblocking(False)
ready = bool(select.select([listener], [], [], 0.5)[0])
try:
    listener.accept()
    print("idle: accepted; ready", ready)
except BlockingIOError:
    print("idle: accept waits; ready", ready)
for number in range(3):
    client = socket.create_connection(listener.getsockname())
    client.send(b"GET")
    assert select.select([listener], [], [], 20)[0]
    server, _ = listener.accept()
    server.setblocking(False)
    try:
        print("with data:", server.recv(10))
    except BlockingIOError:
        print("with data: nothing at accept")
