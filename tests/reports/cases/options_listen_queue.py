"""
report: TCP_INFO of a listener says an empty queue (php-fpm's status page)
kind: options that act
stock: state 10 waiting 5 of 16
path: any
"""
import socket
import struct
import time

TCP_INFO = 11
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen(16)
clients = [socket.create_connection(listener.getsockname()) for _ in range(5)]


def queue():
    info = listener.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 104)
    return (info[0], *struct.unpack_from("II", info, 24))


end = time.monotonic() + 10
while queue()[1] != 5 and time.monotonic() < end:
    time.sleep(0.02)
print("state {} waiting {} of {}".format(*queue()))
for _ in clients:
    listener.accept()
print("state {} waiting {} of {}".format(*queue()))
