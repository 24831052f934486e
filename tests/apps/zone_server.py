#!/usr/bin/env python3
"""A server with several workers on one listen socket, for the tests of zones.

    zone_server.py MODE ADDRESS PORT WORKERS [OPTION...]

MODE is fork or thread, and how a worker waits: fork-block, fork-nonblock (polls, with pauses), fork-epoll, fork-edge,
fork-oneshot, fork-exclusive, fork-poll, fork-select, and the same with thread-. The worker sends on each connection
"PID TID CPU SNDBUF KEEPIDLE TTL\\n" (CPU: the one that the worker is pinned to, or -1; then options of the accepted
socket) and closes it.

Options:
    pin        worker i pins itself to CPU i modulo the number of CPUs
    dual       an IPv6 socket that accepts IPv4, too
    tune       sets options on the listener before forking
    user=UID   workers change to that user
    respawn    a worker that dies is started again
    quit       a worker that gets SIGUSR1 exits in good order
    fd3        the socket is descriptor 3, as from systemd
SO_REUSEPORT by the program itself:
    reuseport  one shared socket
    sockets    a socket for each worker, made before the first fork, as nginx does
    each       each worker makes its own socket
    early      with each: when the first worker's socket listens, those of the other workers listen already, because
               a program without the library has called listen. The workers call listen again when the first one
               waits, as if all had started at the same moment.
With epoll:
    another    a worker's first thread adds the listener, a second one waits; on SIGUSR1 the first thread removes the
               listener while the second one sleeps
    itself     with another and pin: only the second thread is pinned
    several    three threads wait in one instance
With block:
    never      a worker's first thread adds the listener to an epoll instance in which no thread ever waits, and a
               second one accepts, as Apache does with one listener
"""
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time

mode, address, port, workers = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
options = sys.argv[5:]
kind, wait = mode.split("-")
cpus = sorted(os.sched_getaffinity(0))
early, waits = [], []
EPOLL = {"epoll": 0, "edge": select.EPOLLET, "oneshot": select.EPOLLONESHOT, "exclusive": select.EPOLLEXCLUSIVE}


def answer(conn):
    mine = os.sched_getaffinity(0)
    cpu = min(mine) if len(mine) == 1 else -1
    get = conn.getsockopt
    told = (
        os.getpid(),
        threading.get_native_id(),
        cpu,
        get(socket.SOL_SOCKET, socket.SO_SNDBUF),
        get(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
        get(socket.IPPROTO_IP, socket.IP_TTL),
    )
    conn.setblocking(True)
    conn.sendall((" ".join(map(str, told)) + "\n").encode())
    conn.close()


def drain(listener):
    while True:
        try:
            # A worker exits between two connections, never while it holds one.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
            conn, _ = listener.accept()
            answer(conn)
        except BlockingIOError:
            return
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def pin(cpu):
    # Tests that run at the same time may have taken the CPU away for a while.
    for _ in range(1000):
        try:
            return os.sched_setaffinity(0, {cpu})
        except OSError:
            time.sleep(0.02)
    os.sched_setaffinity(0, {cpu})


def work(listener, index):
    if "pin" in options and "itself" not in options:
        pin(cpus[index % len(cpus)])
    if "early" in options and index > 0:
        os.read(waits[0], 1)
        time.sleep(0.05)
        listener = early[index - 1]
        listener.listen(512)
    elif "each" in options:
        listener = listen()
    elif "sockets" in options:
        listener = listener[index]
    user = [o for o in options if o.startswith("user=")]
    if user:
        os.setgroups([])
        os.setresuid(*[int(user[0][5:])] * 3)
    if "quit" in options:
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
    if "early" in options and index == 0 and wait not in EPOLL:
        os.write(waits[1], b"." * workers)
    if wait == "block":
        if "never" in options:
            epoll = select.epoll()
            epoll.register(listener, select.EPOLLIN)
            threading.Thread(target=accept, args=(listener,), daemon=True).start()
            threading.Event().wait()
        accept(listener)
    listener.setblocking(False)
    if wait == "nonblock":
        while True:
            drain(listener)
            time.sleep(0.002)
    if wait == "poll":
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        while True:
            if poll.poll():
                drain(listener)
    if wait == "select":
        while True:
            if select.select([listener], [], [])[0]:
                drain(listener)
    epoll = select.epoll()
    epoll.register(listener, select.EPOLLIN | EPOLL[wait])
    if "early" in options and index == 0:
        os.write(waits[1], b"." * workers)
    if "another" in options:
        signal.signal(signal.SIGUSR1, lambda *_: epoll.unregister(listener))
        threading.Thread(target=wait_in, args=(epoll, listener, index), daemon=True).start()
        threading.Event().wait()
    if "several" in options:
        for _ in range(2):
            threading.Thread(target=wait_in, args=(epoll, listener, index), daemon=True).start()
    wait_in(epoll, listener, index)


def accept(listener):
    while True:
        answer(listener.accept()[0])


def wait_in(epoll, listener, index):
    if "itself" in options:
        pin(cpus[index % len(cpus)])
    while True:
        events = epoll.poll()
        assert len({fd for fd, _ in events}) == len(events), f"reported twice: {events}"
        for _ in events:
            drain(listener)
        if wait == "oneshot":
            epoll.modify(listener, select.EPOLLIN | select.EPOLLONESHOT)


def listen(stock=False):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if "dual" in options else 1)
    if {"reuseport", "sockets", "each"} & set(options):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if "tune" in options:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 33000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 77)
        listener.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, 33)
    listener.bind((address, port))
    if stock:
        # When the child exits, it closes only its copy.
        code = f"import socket; socket.socket(fileno={listener.fileno()}).listen(512)"
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        subprocess.run([sys.executable, "-c", code], env=env, pass_fds=[listener.fileno()], check=True)
    else:
        listener.listen(512)
    return listener


def main():
    if "early" in options:
        waits.extend(os.pipe())
        early.extend(listen(stock=True) for _ in range(workers - 1))
    if "sockets" in options:
        listener = [listen() for _ in range(workers)]
    else:
        listener = None if "each" in options else socket.socket(fileno=3) if "fd3" in options else listen()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if kind == "thread":
        for i in range(workers):
            threading.Thread(target=work, args=(listener, i), daemon=True).start()
        threading.Event().wait()
    children = set()
    signal.signal(signal.SIGTERM, lambda *_: [os.kill(c, signal.SIGKILL) for c in children] and os._exit(0))
    number = {}
    for i in range(workers):
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            work(listener, i)
        children.add(pid)
        number[pid] = i
    while children:
        pid, _ = os.wait()
        children.discard(pid)
        if "respawn" in options:
            new = os.fork()
            if new == 0:
                work(listener, number[pid])
            children.add(new)
            number[new] = number[pid]


main()
