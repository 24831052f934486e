#!/usr/bin/python3
"""Acts as a monitor of another version, as far as a client can tell: other_version.py SOCKET.
It sends every message back, refused with EPROTO."""
import errno
import socket
import struct
import sys
import threading

RESULT = 12  # offset in a message


def refuse(client):
    while message := bytearray(client.recv(4096)):
        struct.pack_into("=i", message, RESULT, errno.EPROTO)
        client.send(message)


server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.bind(sys.argv[1])
server.listen()
print("ok", flush=True)
while True:
    threading.Thread(target=refuse, args=(server.accept()[0],), daemon=True).start()
