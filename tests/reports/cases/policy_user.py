"""
report: a firewall rule about the socket's user is passed by a root program that takes the user's identity
kind: policy by socket
stock: seteuid: ECONNREFUSED ECONNREFUSED
path: shm
needs: nft
"""
import ctypes
import errno
import os
import socket
import subprocess
import threading

SYS_SETRESUID, SYS_SETFSUID = 117, 122
NOBODY = 65534
libc = ctypes.CDLL(None)
listener = socket.socket()
listener.bind(("0.0.0.0", 7300))
listener.listen(64)


def one():
    client = socket.socket()
    client.settimeout(2)
    try:
        client.connect(("127.0.0.1", 7300))
    except OSError as error:
        return errno.errorcode.get(error.errno, type(error).__name__)
    server, _ = listener.accept()
    client.send(b"x")
    server.recv(1)
    client.close()
    server.close()
    return "ok"


def twice(name):
    print(f"{name}:", one(), one(), flush=True)


def in_thread(name, call, take, back):
    def run():
        libc.syscall(call, *take)
        twice(name)
        libc.syscall(call, *back)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


for _ in range(3):
    one()
for rule in ("add table ip t", "add chain ip t o { type filter hook output priority 0; }",
             f"add rule ip t o meta skuid {NOBODY} tcp dport 7300 reject"):  # fmt: skip
    subprocess.run(["nft", rule], check=True)
twice("root")
os.seteuid(NOBODY)
twice("seteuid")
os.seteuid(0)
twice("root again")
libc.setfsuid(NOBODY)
twice("setfsuid")
libc.setfsuid(0)
twice("root again")
in_thread("a thread by setresuid", SYS_SETRESUID, (-1, NOBODY, -1), (-1, 0, -1))
in_thread("a thread by setfsuid", SYS_SETFSUID, (NOBODY,), (0,))
twice("root again")
