"""
report: a program that waits for all of its children hangs: `fastsocket run` has left it one
kind: processes of bystanders
stock: process 1 children reaped 3
path: any
monitor: own
before: unshare --pid --fork --mount-proc --kill-child
"""
import os
import socket

listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
client.send(b"x")
server.recv(1)
for number in range(3):
    if os.fork() == 0:
        os._exit(number)
reaped = 0
try:
    while True:
        os.wait()
        reaped += 1
except ChildProcessError:
    print("process", os.getpid(), "children reaped", reaped)
