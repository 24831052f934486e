"""kernel_epoll.py PORT TRIGGER: serves one connection. An epoll instance, level- or
edge-triggered, watches only the connection, and each message is sent back."""

import select
import socket
import sys

listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", int(sys.argv[1])))
listener.listen()
connection, _ = listener.accept()
listener.close()
connection.setblocking(False)
epoll = select.epoll()
epoll.register(connection, select.EPOLLIN | (select.EPOLLET if sys.argv[2] == "edge" else 0))
while True:
    epoll.poll()
    try:
        data = connection.recv(100)
    except BlockingIOError:
        continue
    if not data:
        break
    connection.send(data)
print("ok")
