"""Threads that share a connection."""
import socket
import threading

from .kit import data, pair, read_all


@pair()
def threads_share_a_socket():
    def server(t, s):
        got = read_all(s)
        words = got.split()
        t.log("words", len(words), len(set(words)))

    def client(t, s):
        def send(number):
            for i in range(300):
                s.send(b"%d-%04d " % (number, i))

        threads = [threading.Thread(target=send, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        s.close()

    return server, client


@pair()
def reader_and_writer_threads():
    def server(t, s):
        while part := s.recv(10000):
            s.sendall(part)
        s.close()

    def client(t, s):
        got = []
        reader = threading.Thread(target=lambda: got.append(read_all(s)))
        reader.start()
        s.sendall(data(2_000_000))
        s.shutdown(socket.SHUT_WR)
        reader.join(15)
        t.log("same", got == [data(2_000_000)])

    return server, client
