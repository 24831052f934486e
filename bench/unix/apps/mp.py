"""Uses Python's multiprocessing over Unix sockets: mp.py PLACE. Prints a digest of all that was answered.

Descriptors are passed over a new connection, over a connection that has lasted for a while, by the fork server, and by
queues.
"""

import array
import hashlib
import multiprocessing
import os
import socket
import sys
from multiprocessing import connection, reduction
from multiprocessing.managers import BaseManager

said = hashlib.sha256()


def note(*values):
    said.update(repr(values).encode())


def squares(n):
    return [i * i for i in range(n)]


def receiver(path, first):
    """Answers each message by its double; each tenth one comes with a pipe, into which the answer goes."""
    with connection.Client(path) as c:
        for i in range(400):
            word = c.recv()
            if i % 10 == 9 and i >= first:
                fd = reduction.recv_handle(c)
                os.write(fd, f"{word * 2}\n".encode())
                os.close(fd)
            c.send(word * 2)


def passes(context, path, first):
    with connection.Listener(path, "AF_UNIX") as listener:
        p = context.Process(target=receiver, args=(path, first))
        p.start()
        with listener.accept() as c:
            for i in range(400):
                c.send(i)
                if i % 10 == 9 and i >= first:
                    r, w = os.pipe()
                    reduction.send_handle(c, w, p.pid)
                    os.close(w)
                    with os.fdopen(r) as f:
                        note(f.read())
                note(c.recv())
        p.join()
        note(p.exitcode)


def over_queue(q, answers):
    """Takes connections from a queue: their descriptors come over a Unix socket of the queue's own process."""
    for _ in range(30):
        c = q.get()
        c.send(os.getpid() > 0)
        c.close()
    answers.put("done")


def queues(context):
    q, answers = context.Queue(), context.Queue()
    p = context.Process(target=over_queue, args=(q, answers))
    p.start()
    for _ in range(30):
        mine, theirs = context.Pipe()
        q.put(theirs)
        note(mine.recv())
        mine.close()
    note(answers.get())
    p.join()
    note(p.exitcode)


class Store:
    def __init__(self):
        self.values = {}

    def put(self, k, v):
        self.values[k] = v
        return len(self.values)

    def get(self, k):
        return self.values.get(k)


class Manager(BaseManager):
    pass


Manager.register("Store", Store)


def ancillary(path):
    """send_fds and recv_fds by themselves, several descriptors in one message, with data before and behind."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    pid = os.fork()
    if pid == 0:
        c = socket.socket(socket.AF_UNIX)
        c.connect(path)
        for i in range(200):
            c.sendall(b"q%03d" % i)
            if i % 50 == 40:
                fds = [os.open("/dev/zero", os.O_RDONLY) for _ in range(3)]
                socket.send_fds(c, [b"fds!"], fds)
                for fd in fds:
                    os.close(fd)
            if c.recv(4, socket.MSG_WAITALL) != b"a%03d" % i:
                os._exit(1)
        os._exit(0)
    c, _ = listener.accept()
    for i in range(200):
        note(c.recv(4, socket.MSG_WAITALL))
        if i % 50 == 40:
            data, fds, flags, _ = socket.recv_fds(c, 4, 3)
            note(data, len(fds), flags & ~socket.MSG_CMSG_CLOEXEC, [os.read(fd, 2) for fd in fds])
            for fd in fds:
                os.close(fd)
        c.sendall(b"a%03d" % i)
    note(os.waitpid(pid, 0)[1])


def main():
    place = sys.argv[1]
    context = multiprocessing.get_context("forkserver")
    # Descriptors are passed at once, and only after 200 messages.
    passes(context, f"{place}/early", 0)
    passes(context, f"{place}/late", 200)
    queues(context)
    ancillary(f"{place}/ancillary")
    with context.Pool(2) as pool:
        note(pool.map(squares, range(100)))
    manager = Manager(address=f"{place}/manager", authkey=b"key", ctx=context)
    manager.start()
    store = manager.Store()
    for i in range(300):
        note(store.put(i, array.array("i", range(i))), store.get(i // 2))
    manager.shutdown()
    print(said.hexdigest())


if __name__ == "__main__":
    main()
