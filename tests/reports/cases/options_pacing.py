"""
report: SO_MAX_PACING_RATE has no effect (iperf3 --fq-rate)
kind: options that act
stock: bounded
path: any
"""
import os
import socket
import time

SO_MAX_PACING_RATE = 47
RATE, SIZE = 2_000_000, 3_000_000
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
pid = os.fork()
if pid == 0:
    client = socket.create_connection(listener.getsockname())
    client.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, RATE)
    client.sendall(bytes(SIZE))
    os._exit(0)
server, _ = listener.accept()
began, got = time.monotonic(), 0
while got < SIZE:
    got += len(server.recv(1 << 20))
# At full speed the bytes take some milliseconds.
print("bounded" if time.monotonic() - began > SIZE / RATE / 3 else "not bounded")
os.waitpid(pid, 0)
