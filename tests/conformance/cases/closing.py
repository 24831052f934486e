"""Shutdown, close, reset, duplicates."""
import os
import signal
import socket
import struct
import threading
import time

from .kit import data, events, pair, read_all


@pair()
def half_close_by_client():
    def server(t, s):
        t.call("all", read_all, s)
        t.call("poll", events, s)
        s.sendall(data(300_000))
        s.close()

    def client(t, s):
        s.sendall(b"question")
        t.call("shutdown", s.shutdown, socket.SHUT_WR)
        t.call("answer", read_all, s)
        t.call("poll", events, s)
        t.call("again", s.recv, 10)

    return server, client


@pair()
def half_close_by_server():
    def server(t, s):
        s.sendall(b"bye")
        s.shutdown(socket.SHUT_WR)
        t.call("still reads", read_all, s)

    def client(t, s):
        t.call("data", s.recv, 100)
        t.call("EOF", s.recv, 100)
        t.call("poll", events, s)
        t.call("send", s.send, b"more")
        t.call("send", s.send, b" and more")
        s.shutdown(socket.SHUT_WR)

    return server, client


@pair()
def send_after_shutdown():
    def server(t, s):
        t.step()

    def client(t, s):
        s.shutdown(socket.SHUT_WR)
        t.call("send", s.send, b"x")
        t.call("send 0", s.send, b"")
        t.call("shutdown again", s.shutdown, socket.SHUT_WR)
        t.call("poll", events, s)
        t.step()

    return server, client


@pair()
def shutdown_read():
    def server(t, s):
        t.step()
        t.call("send", s.send, b"late")
        t.step()
        t.call("EOF", s.recv, 10)

    def client(t, s):
        t.call("shutdown", s.shutdown, socket.SHUT_RD)
        t.call("recv", s.recv, 10)
        t.call("poll", events, s)
        t.step()
        t.step()
        t.call("recv late", s.recv, 10)
        t.call("recv", s.recv, 10)
        t.call("send", s.send, b"")
        s.close()

    return server, client


@pair()
def shutdown_both():
    def server(t, s):
        t.call("EOF", s.recv, 10)
        t.call("poll", events, s)
        t.step()

    def client(t, s):
        t.call("shutdown", s.shutdown, socket.SHUT_RDWR)
        t.call("recv", s.recv, 10)
        t.call("send", s.send, b"x")
        t.call("poll", events, s)
        t.call("peer", lambda: len(s.getpeername()))
        t.step()

    return server, client


@pair()
def shutdown_wakes_a_blocked_reader():
    def server(t, s):
        t.step()

    def client(t, s):
        result = []
        thread = threading.Thread(target=lambda: result.append(s.recv(10)))
        thread.start()
        time.sleep(0.1)
        s.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        t.log("woken", result)
        t.step()

    return server, client


@pair()
def reset_by_linger_zero():
    def server(t, s):
        t.step()
        t.step()
        t.call("poll", events, s)
        t.call("recv", s.recv, 10)
        t.call("recv", s.recv, 10)
        t.call("send", s.send, b"x")
        t.call("error", s.getsockopt, socket.SOL_SOCKET, socket.SO_ERROR)
        t.call("peer", lambda: len(s.getpeername()))

    def client(t, s):
        t.step()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        s.close()
        t.step()

    return server, client


@pair()
def reset_reported_by_so_error():
    def server(t, s):
        t.step()
        t.step()
        t.call("error", s.getsockopt, socket.SOL_SOCKET, socket.SO_ERROR)
        t.call("error", s.getsockopt, socket.SOL_SOCKET, socket.SO_ERROR)
        t.call("recv", s.recv, 10)
        t.call("send", s.send, b"x")

    def client(t, s):
        t.step()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        s.close()
        t.step()

    return server, client


@pair()
def reset_while_reader_blocks():
    def server(t, s):
        t.step()
        t.call("recv", s.recv, 10)

    def client(t, s):
        t.step()
        time.sleep(0.1)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        s.close()

    return server, client


@pair()
def close_with_unread_data_resets():
    def server(t, s):
        s.sendall(b"never read")
        t.step()
        t.step()
        t.call("poll", events, s)
        t.call("recv", s.recv, 10)
        t.call("recv", s.recv, 10)

    def client(t, s):
        t.step()
        s.close()
        t.step()

    return server, client


@pair()
def data_before_a_reset_is_lost():
    def server(t, s):
        t.step()
        t.call("recv", s.recv, 100)
        t.call("recv", s.recv, 100)

    def client(t, s):
        s.sendall(b"sent before the reset")
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        s.close()
        t.step()

    return server, client


@pair()
def epipe_after_close():
    def server(t, s):
        s.close()
        t.step()
        t.step()

    def client(t, s):
        t.step()
        t.call("poll", events, s)
        t.call("first send", s.send, b"x")
        t.step()
        time.sleep(0.02)
        t.call("poll", events, s)
        t.call("second send", s.send, b"x")
        t.call("third send", s.send, b"x")
        t.call("recv", s.recv, 10)

    return server, client


@pair()
def sigpipe_kills_and_nosignal_does_not():
    def server(t, s):
        t.step()

    def client(t, s):
        s.shutdown(socket.SHUT_WR)
        # Only the main thread can set a signal handler, so a child does it.
        t.step()
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            try:
                s.send(b"x", socket.MSG_NOSIGNAL)
            except BrokenPipeError:
                pass
            else:
                os._exit(3)
            try:
                s.send(b"x")
            finally:
                os._exit(4)
        status = os.waitpid(pid, 0)[1]
        t.log("killed by", os.WTERMSIG(status) if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}")

    return server, client


@pair()
def data_then_close_is_all_read():
    def server(t, s):
        s.sendall(data(20_000))
        s.close()
        t.step()

    def client(t, s):
        t.step()
        t.call("poll", events, s)
        t.call("all", read_all, s)
        t.call("poll", events, s)

    return server, client


@pair()
def duplicate_keeps_the_connection():
    def server(t, s):
        t.call("first", s.recv, 100)
        t.step()
        t.call("second", s.recv, 100)
        t.step()
        t.call("EOF", s.recv, 100)

    def client(t, s):
        other = os.dup(s.fileno())
        s.send(b"by the original")
        s.close()
        t.step()
        os.write(other, b"by the duplicate")
        t.step()
        os.close(other)

    return server, client


@pair()
def dup2_over_a_socket_closes_it():
    def server(t, s):
        t.call("EOF", s.recv, 100)

    def client(t, s):
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, s.fileno())
        t.call("now a file", os.write, s.fileno(), b"x")
        t.call("not a socket", s.getpeername)
        os.close(null)
        s.close()

    return server, client


@pair()
def dup2_moves_a_socket():
    def server(t, s):
        t.call("data", s.recv, 100)
        t.call("EOF", s.recv, 100)

    def client(t, s):
        os.dup2(s.fileno(), 200)
        s.close()
        t.call("write", os.write, 200, b"from 200")
        os.close(200)
        t.call("closed", os.write, 200, b"x")

    return server, client
