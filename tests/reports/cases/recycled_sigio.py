"""
report: a socket that asked for signals once is recycled, and a later kernel connection kills the program by SIGIO
kind: recycled sockets
stock: talked b'data'
path: any
"""
import fcntl
import os
import socket
import struct
import subprocess
import sys

FIOASYNC = 0x5452
SERVER = """
import socket
l = socket.socket(); l.bind(("127.0.0.1", 7500)); l.listen(); print("ready", flush=True)
s, _ = l.accept(); s.recv(9); s.send(b"data"); s.recv(9)
"""
plain = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
server = subprocess.Popen([sys.executable, "-c", SERVER], env=plain, stdout=subprocess.PIPE)
server.stdout.readline()
s = socket.socket()
fcntl.ioctl(s, FIOASYNC, struct.pack("i", 1))
fcntl.fcntl(s, fcntl.F_SETOWN, os.getpid())
s.close()
client = socket.create_connection(("127.0.0.1", 7500))
client.send(b"x")
print("talked", client.recv(9))
client.close()
server.wait()
