"""
report: TCP_NOTSENT_LOWAT has no effect: megabytes are queued before a slow reader
kind: options that act
stock: poll says writable: False; less than half of what goes without it: True
path: any
"""
import select
import socket

TCP_NOTSENT_LOWAT = 25


def queued(lowat):
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32768)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    client = socket.socket()
    if lowat:
        client.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, lowat)
    client.connect(listener.getsockname())
    server, _ = listener.accept()
    client.setblocking(False)
    sent = 0
    poll = select.poll()
    poll.register(client, select.POLLOUT)
    try:
        while poll.poll(0) and sent < 64 << 20:
            sent += client.send(b"x" * 16384)
    except BlockingIOError:
        pass
    writable = bool(poll.poll(0))
    client.close()
    server.close()
    return sent, writable


plain, _ = queued(0)
bounded, writable = queued(16384)
print(f"poll says writable: {writable}; less than half of what goes without it: {bounded * 2 < plain}")
