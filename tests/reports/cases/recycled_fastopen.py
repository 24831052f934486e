"""
report: after a connect by MSG_FASTOPEN and close, the next socket is connected to the old peer
kind: recycled sockets
stock: next: ENOTCONN state 7
path: any
run: plain
run: server
run: listener
run: keep
"""
import errno
import socket
import subprocess
import sys

TCP_FASTOPEN, TCP_INFO, MSG_FASTOPEN = 23, 11, 0x20000000
how = sys.argv[1]
if how in ("server", "listener"):
    subprocess.run(["sysctl", "-qw", "net.ipv4.tcp_fastopen=3"], check=True)
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
if how == "listener":
    listener.setsockopt(socket.IPPROTO_TCP, TCP_FASTOPEN, 16)
listener.listen(16)
address = listener.getsockname()


def tried(call, *arguments):
    try:
        call(*arguments)
        return "ok"
    except OSError as error:
        return errno.errorcode[error.errno]


client = socket.socket()
print("sent", client.sendto(b"hello", MSG_FASTOPEN, address))
server, _ = listener.accept()
print("received", server.recv(9))
print("again:", tried(client.sendto, b"x", MSG_FASTOPEN, address))
client.close()
if how != "keep":
    server.close()
fresh = socket.socket()
print("next:", tried(fresh.getpeername), "state", fresh.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 1)[0])
print("connect:", tried(fresh.connect, address))
