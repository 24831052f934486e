#!/usr/bin/python3
"""turns.py first|last: a process accepts, and has the listener in an epoll instance that reports
it once (EPOLLONESHOT). A relative has the listener in an instance, too, but never polls. The
process that polls must get all connections. The relative adds the listener as the first or the
last of the two. Prints "ok", or how many seconds each connection waited."""
import os
import select
import socket
import subprocess
import sys
import time

CLIENT = """
import socket, sys, time
for _ in range(16):
    s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    s.sendall(repr(time.time()).encode())
    s.recv(1)
"""

server = socket.socket()
server.bind(("127.0.0.1", 0))
server.listen()
port = str(server.getsockname()[1])
# The library tells the monitor of a listener only when it has accepted a first connection.
first = socket.create_connection(server.getsockname())
server.accept()


def watch(how):
    instance = select.epoll()
    instance.register(server.fileno(), how)
    return instance


mine = watch(select.EPOLLIN | select.EPOLLET | select.EPOLLONESHOT) if sys.argv[1] == "last" else None
done, said = os.pipe()
relative = os.fork()
if relative == 0:
    theirs = watch(select.EPOLLIN)
    os.write(said, b"!")
    time.sleep(60)
    os._exit(0)
os.read(done, 1)
mine = mine or watch(select.EPOLLIN | select.EPOLLET | select.EPOLLONESHOT)
environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
client = subprocess.Popen([sys.executable, "-c", CLIENT, port], env=environment)
waited = []
while len(waited) < 16:
    connection, _ = server.accept()
    now = time.time()
    waited.append(now - float(connection.recv(100)))
    connection.sendall(b"!")
os.kill(relative, 9)
os.waitpid(relative, 0)
client.wait()
print("ok" if max(waited) < 2 else waited)
