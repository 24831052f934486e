"""
report: the connection that woke a super-server is lost if the child drops rights before it executes the server
kind: a listener that only programs without the library accept from
stock: client 2: served
path: any
run: epoll none
run: epoll early
run: poll late
run: select chroot
"""
import os
import select
import socket
import subprocess
import sys

SERVER = """
import socket
listener = socket.socket(fileno=7)
listener.setblocking(True)
for _ in range(3):
    connection, _ = listener.accept()
    connection.sendall(b"served")
    connection.close()
"""
CLIENT = """
import socket, sys
for number in range(3):
    s = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=8)
    try:
        print(f"client {number}:", s.recv(100).decode() or "end")
    except OSError as error:
        print(f"client {number}:", type(error).__name__)
    s.close()
"""
how, rights = sys.argv[1:]
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen(16)
listener.setblocking(False)
client = subprocess.Popen([sys.executable, "-c", CLIENT, str(listener.getsockname()[1])])
if how == "epoll":
    epoll = select.epoll()
    epoll.register(listener, select.EPOLLIN)
    epoll.poll()
elif how == "poll":
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.poll()
else:
    select.select([listener], [], [])


def drop():
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)


pid = os.fork()
if pid == 0:
    if rights == "early":
        drop()
    os.dup2(listener.fileno(), 7)
    os.set_inheritable(7, True)
    if rights == "late":
        drop()
    if rights == "chroot":
        os.chroot("/")
    os.execve(sys.executable, ["python3", "-c", SERVER], {"PATH": "/usr/bin"})
# A client that is not served within its time limit counts as not served.
client.wait()
os.kill(pid, 9)
os.waitpid(pid, 0)
