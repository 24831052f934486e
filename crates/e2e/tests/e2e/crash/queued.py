"""Two workers are stopped, and forty connections wait for them. Then one worker is killed, and the
other one continues. Prints how many connections were served, and by how many workers."""

import os
import select
import signal
import socket
import time

COUNT = 40


def worker(listener):
    """Sends its number to each client that connects."""
    listener.setblocking(False)
    ep = select.epoll()
    ep.register(listener, select.EPOLLIN)
    kept = []
    while True:
        ep.poll()
        try:
            c, _ = listener.accept()
        except BlockingIOError:
            continue
        c.sendall(b"%d" % os.getpid())
        kept.append(c)


def main():
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(256)
    address = listener.getsockname()
    workers = []
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            worker(listener)
        workers.append(pid)
    listener.close()
    with socket.create_connection(address, timeout=10) as first:
        assert int(first.recv(20)) in workers
    time.sleep(0.3)
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(0.1)
    waiting = [socket.create_connection(address, timeout=10) for _ in range(COUNT)]
    os.kill(workers[0], signal.SIGKILL)
    os.waitpid(workers[0], 0)
    os.kill(workers[1], signal.SIGCONT)
    by = {int(c.recv(20)) for c in waiting}
    print(len(waiting), "served by", "the one that is left" if by == {workers[1]} else by)
    os.kill(workers[1], signal.SIGKILL)
    os.waitpid(workers[1], 0)


signal.alarm(50)
main()
