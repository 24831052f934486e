"""Signals for sockets: `O_ASYNC`, owners, signals of choice."""
import fcntl
import os
import signal
import socket
import struct

from .kit import case, pair


def signals(set_up):
    """Prints which signals arrive. Waits with sigwait, so that no code of the library runs
    meanwhile."""
    for side in 0, 1:
        both = pair()
        x, other = both[side], both[1 - side]
        set_up(x)
        other.sendall(b"news")
        got = signal.sigtimedwait([signal.SIGIO, signal.SIGUSR1, signal.SIGURG], 5)
        print(side, got and (got.si_signo, got.si_code), x.recv(10))
        while signal.sigtimedwait([signal.SIGIO, signal.SIGUSR1], 0.05):
            pass
        x.close()
        other.close()
        while signal.sigtimedwait([signal.SIGIO, signal.SIGUSR1], 0.05):
            pass


def blocked(f):
    def g():
        old = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO, signal.SIGUSR1, signal.SIGURG])
        try:
            f()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old)

    g.__name__ = f.__name__
    return case(g)


@blocked
def signal_by_o_async():
    def set_up(s):
        fcntl.fcntl(s, fcntl.F_SETOWN, os.getpid())
        print("owner", fcntl.fcntl(s, fcntl.F_GETOWN) == os.getpid())
        fcntl.fcntl(s, fcntl.F_SETFL, fcntl.fcntl(s, fcntl.F_GETFL) | os.O_ASYNC)
        print("flag", fcntl.fcntl(s, fcntl.F_GETFL) & os.O_ASYNC != 0)

    signals(set_up)


@blocked
def signal_of_choice():
    def set_up(s):
        fcntl.fcntl(s, 10, signal.SIGUSR1)  # F_SETSIG
        print("signal", fcntl.fcntl(s, 11))
        fcntl.fcntl(s, 15, struct.pack("ii", 1, os.getpid()))  # F_SETOWN_EX
        fcntl.fcntl(s, fcntl.F_SETFL, os.O_ASYNC)

    signals(set_up)


@blocked
def signal_by_ioctl():
    def set_up(s):
        fcntl.ioctl(s, 0x8902, struct.pack("i", os.getpid()))  # SIOCSPGRP
        print("owner", struct.unpack("i", fcntl.ioctl(s, 0x8904, b"    "))[0] == os.getpid())
        fcntl.ioctl(s, 0x5452, struct.pack("i", 1))  # FIOASYNC

    signals(set_up)


@blocked
def signal_of_a_listener():
    for late in False, True:
        l = socket.create_server(("127.0.0.1", 0))
        early = socket.create_connection(l.getsockname()) if late else None
        fcntl.fcntl(l, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(l, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        if early:
            print("early", l.accept()[1] == early.getsockname())
            while signal.sigtimedwait([signal.SIGIO], 0.05):
                pass
        c = socket.create_connection(l.getsockname())
        got = signal.sigtimedwait([signal.SIGIO], 5)
        s, _ = l.accept()
        print(late, got and got.si_signo, fcntl.fcntl(s, fcntl.F_GETFL) & os.O_ASYNC)
        c.sendall(b"x")
        print(s.recv(2))
        while signal.sigtimedwait([signal.SIGIO], 0.05):
            pass


@blocked
def signal_for_urgent_data():
    def set_up(s):
        fcntl.fcntl(s, fcntl.F_SETOWN, os.getpid())

    both = pair()
    set_up(both[1])
    both[0].send(b"!", socket.MSG_OOB)
    got = signal.sigtimedwait([signal.SIGURG], 5)
    print(got and got.si_signo, both[1].recv(1, socket.MSG_OOB))


@blocked
def signal_before_connect():
    l = socket.create_server(("127.0.0.1", 0))
    c = socket.socket()
    fcntl.fcntl(c, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(c, fcntl.F_SETFL, os.O_ASYNC)
    c, s = pair(listener=l, client=c)
    while signal.sigtimedwait([signal.SIGIO], 0.05):
        pass
    s.sendall(b"z")
    got = signal.sigtimedwait([signal.SIGIO], 5)
    # settimeout and setblocking may have cleared O_ASYNC when they set the flags.
    print(bool(got) or not fcntl.fcntl(c, fcntl.F_GETFL) & os.O_ASYNC, c.recv(2))
