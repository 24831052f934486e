"""Fork, exec, the end of a process."""
import os
import socket
import subprocess

from .kit import pair, read_all


@pair()
def fork_shares_a_connection():
    def server(t, s):
        got = b""
        while len(got) < 33:
            part = s.recv(100)
            if not part:
                break
            got += part
        t.log("lines", sorted(got.split()))
        s.sendall(b"bye")
        t.call("EOF", s.recv, 10)

    def client(t, s):
        pid = os.fork()
        if pid == 0:
            for i in range(3):
                s.send(b"child-%d.. " % i)
            os._exit(0)
        os.waitpid(pid, 0)
        s.send(b"end")
        t.call("recv", s.recv, 3, socket.MSG_WAITALL)
        s.close()

    return server, client


@pair(raw=True)
def fork_after_accept():
    def server(t, listener):
        for _ in range(3):
            conn, _ = listener.accept()
            pid = os.fork()
            if pid == 0:
                listener.close()
                conn.sendall(b"hello from a child")
                conn.sendall(conn.recv(100))
                os._exit(0)
            conn.close()
            os.waitpid(pid, 0)

    def client(t, address):
        for i in range(3):
            s = socket.create_connection(address)
            t.call("greeting", s.recv, 18, socket.MSG_WAITALL)
            s.send(b"%d" % i)
            t.call("echo", read_all, s)

    return server, client


@pair(raw=True)
def prefork_accept():
    def server(t, listener):
        pids = []
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                conn, _ = listener.accept()
                conn.sendall(b"one of three")
                conn.close()
                os._exit(0)
            pids.append(pid)
        t.step()
        t.log("ended", [os.waitpid(pid, 0)[1] for pid in pids])

    def client(t, address):
        t.step()
        for _ in range(3):
            s = socket.create_connection(address)
            t.call("all", read_all, s)

    return server, client


@pair()
def parent_closes_child_goes_on():
    def server(t, s):
        t.call("first", s.recv, 100)
        s.send(b"answer")
        t.call("second", s.recv, 100)
        t.call("EOF", s.recv, 100)

    def client(t, s):
        r, w = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.read(r, 1)  # until the parent has closed
            s.send(b"from the child")
            answer = s.recv(100)
            s.send(b"got " + answer)
            os._exit(0)
        s.close()
        os.write(w, b"x")
        t.log("status", os.waitpid(pid, 0)[1])

    return server, client


@pair()
def executed_program_inherits():
    def server(t, s):
        s.sendall(b"through cat\n")
        s.shutdown(socket.SHUT_WR)
        t.call("back", read_all, s)

    def client(t, s):
        status = subprocess.run(["/bin/cat"], stdin=s, stdout=s).returncode
        t.log("status", status)
        s.close()

    return server, client


@pair()
def close_on_exec():
    def server(t, s):
        t.call("EOF at once", s.recv, 10)
        t.step()

    def client(t, s):
        child = subprocess.Popen(["/bin/sleep", "20"], close_fds=False)
        s.close()
        t.step()
        child.kill()
        child.wait()

    return server, client


@pair()
def process_end_closes():
    def server(t, s):
        t.call("data", s.recv, 100)
        t.call("EOF", s.recv, 100)

    def client(t, s):
        pid = os.fork()
        if pid == 0:
            s.send(b"last words")
            os._exit(0)
        s.close()
        os.waitpid(pid, 0)

    return server, client
