#!/usr/bin/python3
"""turns.py first|last: a process accepts, and has the listener in an epoll instance that reports it
once (EPOLLONESHOT); a relative has it in one of its own, too, and never looks. What comes goes to
who looks. The relative adds it as the first or the last of the two. Prints "ok", or how long
each connection waited, seconds."""
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
# Else there is nothing to be said of a listener yet.
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
