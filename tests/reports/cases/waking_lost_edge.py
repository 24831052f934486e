"""
report: an edge-triggered listener says nothing of a connection that comes after an earlier client process has ended
kind: equal means nothing new
stock: lost 0 of 6
path: shm
"""
import select
import socket
import subprocess
import sys
import time

CLIENT = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); s.send(b'x'); s.recv(10)"
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen(16)
listener.setblocking(False)
epoll = select.epoll()
epoll.register(listener, select.EPOLLIN | select.EPOLLET)
lost = 0
for _ in range(6):
    client = subprocess.Popen([sys.executable, "-c", CLIENT, str(listener.getsockname()[1])])
    time.sleep(0.5)  # The server is busy while the client connects.
    if not epoll.poll(3):
        lost += 1
    while True:
        try:
            server, _ = listener.accept()
            break
        except BlockingIOError:
            time.sleep(0.01)
    server.setblocking(True)
    server.recv(1)
    server.send(b"y")
    server.close()
    client.wait()
print("lost", lost, "of 6")
