"""
report: owner, signal, O_ASYNC, mode, port and shutdown of a closed socket show in the next one
kind: recycled sockets
stock: ^async flags same owner 0 signal 0 mode same port 0 hup same$
path: shm
"""
import fcntl
import os
import select
import signal
import socket
import struct

F_SETSIG, F_GETSIG, FIOASYNC = 10, 11, 0x5452
signal.signal(signal.SIGIO, signal.SIG_IGN)


def attributes(s):
    poll = select.poll()
    poll.register(s, 0)
    return {
        "flags": fcntl.fcntl(s, fcntl.F_GETFL), "owner": fcntl.fcntl(s, fcntl.F_GETOWN), "signal": fcntl.fcntl(s, F_GETSIG),
        "mode": os.fstat(s.fileno()).st_mode, "port": s.getsockname()[1], "hup": poll.poll(0)[0][1],
    }  # fmt: skip


CHANGES = {
    "async": lambda s: fcntl.ioctl(s, FIOASYNC, struct.pack("i", 1)),
    "owner": lambda s: fcntl.fcntl(s, fcntl.F_SETOWN, os.getpid()),
    "signal": lambda s: fcntl.fcntl(s, F_SETSIG, signal.SIGUSR1),
    "mode": lambda s: os.fchmod(s.fileno(), 0o600),
    "flags": lambda s: fcntl.fcntl(s, fcntl.F_SETFL, os.O_NONBLOCK | os.O_APPEND),
    "port": lambda s: s.bind(("127.0.0.1", 0)),
    "shutdown": lambda s: s.listen() or s.shutdown(socket.SHUT_RD),
    "nothing": lambda s: None,
}
clean = attributes(socket.socket())
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
for name, change in CHANGES.items():
    s = socket.socket()
    number = s.fileno()
    change(s)
    s.close()
    fresh = socket.socket()
    now = attributes(fresh)
    same = {k: "same" if k in ("flags", "mode", "hup") and now[k] == clean[k] else now[k] for k in now}
    print(name, *(f"{k} {v}" for k, v in same.items()))
    assert fresh.fileno() == number
    fresh.connect(listener.getsockname())
    accepted, _ = listener.accept()
    fresh.send(b"x")
    assert accepted.recv(9) == b"x"
    fresh.close()
    accepted.close()
