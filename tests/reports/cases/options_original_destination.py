"""
report: SO_ORIGINAL_DST of an accepted connection says ENOENT
kind: options that act
stock: 7000: \('127.0.0.1', 7000\)
path: any
needs: nft
"""
import errno
import socket
import struct
import subprocess

SO_ORIGINAL_DST = 80
for command in (
    "add table ip n",
    "add chain ip n o { type nat hook output priority -100; }",
    "add rule ip n o tcp dport 7001 redirect to :7000",
):
    subprocess.run(["nft", command], check=True)
listener = socket.socket()
listener.bind(("127.0.0.1", 7000))
listener.listen()


def original(s, level):
    try:
        answer = s.getsockopt(level, SO_ORIGINAL_DST, 28)
        return socket.inet_ntop(socket.AF_INET, answer[4:8]), struct.unpack(">H", answer[2:4])[0]
    except OSError as error:
        return errno.errorcode[error.errno]


for port in (7000, 7001, 7001, 7000):
    client = socket.create_connection(("127.0.0.1", port))
    server, _ = listener.accept()
    client.send(b"a")
    server.recv(1)
    print(f"{port}:", original(server, 0), original(server, 41))
