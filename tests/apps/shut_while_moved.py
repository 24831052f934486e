"""A server whose client has stopped in the middle of a path switch.

usage: shut_while_moved.py PORT SHUT LOOK
When the file SHUT exists, the server shuts down for writing. When the file LOOK exists, it reads again.
"""

import os
import select
import socket
import sys
import time

port, shut, look = int(sys.argv[1]), *sys.argv[2:]


def until(path):
    while not os.path.exists(path):
        time.sleep(0.01)


listener = socket.create_server(("127.0.0.1", port))
print("listening", flush=True)
c, _ = listener.accept()
c.setblocking(False)
select.select([c], [], [])
print("first", c.recv(100), flush=True)
until(shut)
c.shutdown(socket.SHUT_WR)
c.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
print("shut", flush=True)
until(look)
try:
    print("second", c.recv(100), flush=True)
except BlockingIOError:
    print("second nothing", flush=True)
