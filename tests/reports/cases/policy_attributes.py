"""
report: a firewall rule about the socket's mark, priority, TOS or TTL is passed after one plain connection
kind: policy by socket
stock: mark: plain ok ok ok; matched ECONNREFUSED ECONNREFUSED ECONNREFUSED
path: shm
needs: nft
"""
import errno
import socket
import subprocess

RULES = (
    ("mark", "meta mark 7", (socket.SOL_SOCKET, socket.SO_MARK, 7)),
    ("priority", "meta priority 0:6", (socket.SOL_SOCKET, socket.SO_PRIORITY, 6)),
    ("tos", "ip dscp 0x04", (socket.IPPROTO_IP, socket.IP_TOS, 0x10)),
    ("ttl", "ip ttl 9", (socket.IPPROTO_IP, socket.IP_TTL, 9)),
)
listener = socket.socket()
listener.bind(("0.0.0.0", 7300))
listener.listen(64)


def nft(command):
    subprocess.run(["nft", command], check=True)


def one(option):
    client = socket.socket()
    client.settimeout(2)
    if option:
        client.setsockopt(*option)
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


for _ in range(3):
    one(None)
nft("add table ip t")
nft("add chain ip t o { type filter hook output priority 0; }")
for name, rule, option in RULES:
    nft("flush chain ip t o")
    nft(f"add rule ip t o {rule} tcp dport 7300 reject")
    print(f"{name}: plain", " ".join(one(None) for _ in range(3)), end="; matched ")
    print(" ".join(one(option) for _ in range(3)))
