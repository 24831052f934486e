"""Bytes: how they are sent and received."""
import os
import socket
import threading
import time

from .kit import data, pair, read_all


@pair()
def echo():
    def server(t, s):
        for _ in range(200):
            s.sendall(s.recv(1000))

    def client(t, s):
        for i in range(200):
            s.sendall(b"message %d" % i)
            if s.recv(1000) != b"message %d" % i:
                t.log("differs", i)
        t.log("done")

    return server, client


@pair()
def bulk_both_ways():
    def both(seed, other):
        def run(t, s):
            thread = threading.Thread(target=lambda: (s.sendall(data(4_000_000, seed)), s.shutdown(socket.SHUT_WR)))
            thread.start()
            got = read_all(s)
            t.log("same", got == data(4_000_000, other))
            thread.join()

        return run

    return both(1, 2), both(2, 1)


@pair()
def sendall_to_a_slow_reader():
    def server(t, s):
        s.sendall(data(3_000_000))
        s.close()

    def client(t, s):
        time.sleep(0.1)
        got = bytearray()
        while part := s.recv(100_000):
            got += part
            time.sleep(0.001)
        t.log("got", bytes(got) == data(3_000_000))

    return server, client


@pair()
def zero_length():
    def server(t, s):
        t.call("send 0", s.send, b"")
        t.step()
        t.step()
        s.send(b"x")
        t.step()
        t.step()

    def client(t, s):
        t.step()
        s.setblocking(False)
        t.call("after send 0", s.recv, 10)
        t.step()
        t.step()
        t.call("recv 0", s.recv, 0)
        t.call("recv", s.recv, 10)
        t.call("recv 0 empty", s.recv, 0)
        t.step()

    return server, client


@pair()
def messages_run_together():
    def server(t, s):
        for i in range(10):
            s.send(b"%d," % i)
        t.step()

    def client(t, s):
        t.step()
        t.call("one", s.recv, 3)
        t.call("rest", s.recv, 1000)

    return server, client


@pair()
def scatter_gather():
    def server(t, s):
        t.call("sendmsg", s.sendmsg, [b"one", b"", b"two", b"three" * 100])
        t.call("writev", os.writev, s.fileno(), [b"four", b"five"])
        t.call("write", os.write, s.fileno(), b"six")
        t.step()
        t.step()

    def client(t, s):
        t.step()
        buffers = [bytearray(2), bytearray(4), bytearray(0), bytearray(10)]
        result = s.recvmsg_into(buffers)
        t.log("recvmsg_into", result[0], result[2], buffers)
        more = [bytearray(490), bytearray(5)]
        t.log("readv", os.readv(s.fileno(), more), more)
        t.call("read", os.read, s.fileno(), 5)
        message = s.recvmsg(100)
        t.log("recvmsg", message[0], len(message[1]), message[2])
        t.step()

    return server, client


@pair()
def recv_into_memoryview():
    def server(t, s):
        s.sendall(data(1000))

    def client(t, s):
        buffer = bytearray(1200)
        view = memoryview(buffer)
        count = 0
        while count < 1000:
            count += s.recv_into(view[count:])
        t.log("bytes", bytes(buffer[:1000]))
        t.call("end", s.recv_into, buffer)

    return server, client


@pair()
def sendfile():
    def server(t, s):
        with open("/proc/self/exe", "rb") as f:
            size = 1_500_000
            offset, sent = 1000, 0
            while sent < size:
                sent += os.sendfile(s.fileno(), f.fileno(), offset + sent, size - sent)
            t.log("position untouched", f.tell())
        t.log("sent", sent)

    def client(t, s):
        with open("/proc/self/exe", "rb") as f:
            f.seek(1000)
            t.log("same", f.read(1_500_000) == read_all(s))

    return server, client


@pair()
def sendfile_moves_the_position():
    def server(t, s):
        with open("/proc/self/exe", "rb", buffering=0) as f:
            sent = os.sendfile(s.fileno(), f.fileno(), None, 5000)
            t.log("sent", sent, os.lseek(f.fileno(), 0, os.SEEK_CUR))

    def client(t, s):
        with open("/proc/self/exe", "rb") as f:
            t.log("same", read_all(s) == f.read(5000))

    return server, client


@pair()
def makefile():
    def server(t, s):
        with s.makefile("rwb") as f:
            for line in f:
                f.write(line.upper())
                f.flush()

    def client(t, s):
        f = s.makefile("rwb")
        for word in (b"alpha\n", b"beta\n", b"x" * 20000 + b"\n"):
            f.write(word)
            f.flush()
            t.log(f.readline())
        s.shutdown(socket.SHUT_WR)
        t.log("end", f.read())

    return server, client
