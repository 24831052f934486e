#!/usr/bin/python3
"""accept_and_wait.py PORT: accepts, echoes one message, then waits until the client closes.
Prints "EOF" or the name of the errno."""
import errno
import socket
import sys

server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", int(sys.argv[1])))
server.listen()
conn, _ = server.accept()
conn.settimeout(20)
conn.sendall(conn.recv(100))
try:
    print("EOF" if conn.recv(100) == b"" else "data", flush=True)
except socket.timeout:
    print("TIMEOUT", flush=True)
except OSError as error:
    print(errno.errorcode[error.errno], flush=True)
