#!/usr/bin/env python3
"""Clients that send requests until SIGTERM, and count. One JSON argument:

    {"threads": N, "kind": "http", "port": P, "paths": {PATH: SHA256, …}, "keep": BOOL}
    {"threads": N, "kind": "redis" | "memcached" | "echo", "port": P}
    {"threads": 1, "kind": "echo-fork", "port": P}    two processes use the connection in turn
    {"threads": N, "kind": "run", "argv": […], "sha": SHA256 of its standard output}

Writes {"ok": N, "failed": {REASON: N}, "wrong": [WHAT, …]}: `wrong` lists answers
that were complete according to their length, but had other bytes.
"""

import collections
import hashlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

LIMIT = 15  # seconds for one answer
stop = threading.Event()


class Wrong(Exception):
    pass


def sha(data):
    return hashlib.sha256(data).hexdigest()


def http_client(spec):
    connection = None
    paths = list(spec["paths"].items())
    i = 0
    while not stop.is_set():
        path, want = paths[i % len(paths)]
        i += 1
        try:
            fresh = connection is None
            if fresh:
                connection = http.client.HTTPConnection("127.0.0.1", spec["port"], timeout=LIMIT)
            connection.request("GET", path, headers={} if spec.get("keep") else {"Connection": "close"})
            try:
                answer = connection.getresponse()
            except http.client.RemoteDisconnected:
                # A server may end an idle kept connection at any time.
                if fresh:
                    raise
                connection.close()
                connection = None
                continue
            body = answer.read()
            if answer.status != 200:
                raise OSError(f"status {answer.status}")
            if sha(body) != want:
                raise Wrong(f"{path}: {len(body)} bytes")
            if not spec.get("keep") or answer.will_close:
                connection.close()
                connection = None
            yield None
        except (OSError, http.client.HTTPException) as e:
            if connection:
                connection.close()
            # A kept connection that ends between two requests is no failure.
            if not fresh and isinstance(e, (ConnectionResetError, BrokenPipeError)):
                connection = None
                continue
            connection = None
            yield e
    if connection:
        connection.close()


def exchange(spec, command, answer):
    """Uses each connection for eight requests, some of which fit into one segment and some do not."""
    n = 0
    while not stop.is_set():
        try:
            with socket.create_connection(("127.0.0.1", spec["port"]), timeout=LIMIT) as c:
                stream = c.makefile("rb")
                for size in (1, 100, 5000, 200000) * 2:
                    n += 1
                    key = f"k{os.getpid()}-{threading.get_ident()}-{n % 20}".encode()
                    value = hashlib.sha256(key + str(n).encode()).digest() * (size // 32 + 1)
                    set_, get = command(key, value)
                    c.sendall(set_ + get)
                    got = answer(stream, value)
                    if got != value:
                        raise Wrong(f"{len(got)} bytes instead of {len(value)}")
                    yield None
        except OSError as e:
            yield e


def line(stream):
    text = stream.readline()
    if not text.endswith(b"\n"):
        raise ConnectionError("the connection ended")
    return text.strip()


def block(stream, size):
    data = stream.read(size)
    if len(data) != size:
        raise ConnectionError("the connection ended")
    return data


def redis_client(spec):
    def words(*w):
        return b"*%d\r\n" % len(w) + b"".join(b"$%d\r\n%s\r\n" % (len(x), x) for x in w)

    def answer(stream, _):
        said = line(stream)
        if said.startswith(b"-LOADING"):
            raise ConnectionError("loading")
        if said != b"+OK":
            raise Wrong(repr(said[:40]))
        head = line(stream)
        return block(stream, int(head[1:]) + 2)[:-2]

    return exchange(spec, lambda k, v: (words(b"SET", k, v), words(b"GET", k)), answer)


def memcached_client(spec):
    def answer(stream, _):
        said = line(stream)
        if said != b"STORED":
            raise Wrong(repr(said[:40]))
        head = line(stream).split()
        data = block(stream, int(head[3]) + 2)[:-2]
        line(stream)
        return data

    return exchange(spec, lambda k, v: (b"set %s 0 0 %d\r\n%s\r\n" % (k, len(v), v), b"get %s\r\n" % k), answer)


def echo_some(c, n):
    """Sends messages, some of which fit into one segment and some do not, and compares the echoes."""
    for size in (1, 100, 5000, 200000):
        data = hashlib.sha256(f"{os.getpid()}-{n}-{size}".encode()).digest() * (size // 32 + 1)
        c.sendall(data)
        got = bytearray()
        while len(got) < len(data):
            more = c.recv(65536)
            if not more:
                raise ConnectionError("the connection ended")
            got += more
        if got != data:
            raise Wrong(f"{len(data)} other bytes")


def echo_client(spec):
    n = 0
    while not stop.is_set():
        try:
            with socket.create_connection(("127.0.0.1", spec["port"]), timeout=LIMIT) as c:
                for _ in range(5):
                    n += 1
                    echo_some(c, n)
                    yield None
                c.shutdown(socket.SHUT_WR)
                if c.recv(1):
                    raise Wrong("more than was sent")
        except OSError as e:
            yield e


def echo_fork_client(spec):
    """A child uses the connection first, then its parent does."""
    n = 0
    while not stop.is_set():
        n += 1
        try:
            with socket.create_connection(("127.0.0.1", spec["port"]), timeout=LIMIT) as c:
                pid = os.fork()
                if pid == 0:
                    try:
                        echo_some(c, n)
                        os._exit(0)
                    except Wrong:
                        os._exit(2)
                    except OSError:
                        os._exit(1)
                _, status = os.waitpid(pid, 0)
                if os.waitstatus_to_exitcode(status) == 2:
                    raise Wrong("a forked child got other bytes")
                if status:
                    raise ConnectionError("the connection ended in the child")
                echo_some(c, n)
                yield None
        except OSError as e:
            yield e


def run_client(spec):
    while not stop.is_set():
        try:
            done = subprocess.run(
                spec["argv"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=LIMIT
            )
        except subprocess.TimeoutExpired:
            yield OSError(f"no end within {LIMIT} s")
            continue
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            yield OSError(f"exit {done.returncode}: {said[-1][:120] if said else ''}")
        elif sha(done.stdout) != spec["sha"]:
            raise Wrong(f"{len(done.stdout)} bytes")
        else:
            yield None


def reason(error):
    if isinstance(error, socket.timeout):
        return "timeout"
    number = getattr(error, "errno", None)
    return os.strerror(number) if number else f"{error}"[:140] or type(error).__name__


def main():
    spec = json.loads(sys.argv[1])
    # Not `stop.set()`: it waits for a lock that this very thread may hold.
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    ok, failed, wrong = collections.Counter(), collections.Counter(), []
    kinds = {"http": http_client, "redis": redis_client, "memcached": memcached_client, "run": run_client}
    kinds |= {"echo": echo_client, "echo-fork": echo_fork_client}
    client = kinds[spec["kind"]]

    def work():
        while not stop.is_set():
            try:
                for error in client(spec):
                    if error is None:
                        ok["n"] += 1
                        continue
                    failed[reason(error)] += 1
                    stop.wait(0.02)
            except Wrong as e:
                wrong.append(str(e)[:200])
            except Exception as e:  # noqa: BLE001 - a client that gives up must be seen
                wrong.append(f"{type(e).__name__}: {e}"[:200])

    threads = [threading.Thread(target=work, daemon=True) for _ in range(spec["threads"])]
    for t in threads:
        t.start()
    while not asked:
        time.sleep(0.05)
    stop.set()
    hanging = 0
    for t in threads:
        t.join(LIMIT + 5)
        hanging += t.is_alive()
    if hanging:
        wrong.append(f"{hanging} clients hang")
    json.dump({"ok": ok["n"], "failed": dict(failed), "wrong": wrong[:20]}, sys.stdout)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
