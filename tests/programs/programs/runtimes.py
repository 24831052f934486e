"""Servers of language runtimes. All serve the same pages: /N has N bytes."""

import pathlib
import signal
import subprocess

from programs.web import Http

APPS = pathlib.Path(__file__).resolve().parents[1] / "apps"


def page(n):
    return (b"0123456789abcdef" * (n // 16 + 1))[:n]


class Runtime(Http):
    pages = {f"/{n}": page(n) for n in (0, 1, 1000, 65536, 1000000, 8000000)}


class Node(Runtime):
    name = "node"
    version = ("node", "--version")

    def argv(self):
        return ["node", APPS / "web.js", self.port]


class NodeCluster(Runtime):
    """The primary accepts and passes connections to two workers."""

    name = "node (cluster)"
    version = ("node", "--version")
    path = "passes"

    def argv(self):
        return ["node", APPS / "web.js", self.port, "2"]

    def reload(self):
        self.process.send_signal(signal.SIGHUP)


class Gunicorn(Runtime):
    name = "gunicorn"
    version = ("gunicorn", "--version")

    def argv(self):
        return ["/usr/bin/gunicorn", "-w", "2", "-b", f"127.0.0.1:{self.port}", "--chdir", APPS, "web_wsgi:application"]

    def reload(self):
        self.process.send_signal(signal.SIGHUP)


class Uvicorn(Runtime):
    name = "uvicorn"
    version = ("uvicorn", "--version")

    def argv(self):
        return ["/usr/bin/uvicorn", "--host", "127.0.0.1", "--port", self.port, "--log-level", "warning", "--app-dir", APPS, "web_asgi:app"]


class Java(Runtime):
    name = "java (HttpServer)"
    version = ("java", "--version")
    stop_status = (143,)

    def prepare(self):
        self.lab.run(["javac", "-d", self.lab.directory("java"), APPS / "Web.java"], side="stock", timeout=120)

    def argv(self):
        return ["java", "-Xmx256m", "-cp", self.lab.path / "java", "Web", self.port]


class Go(Runtime):
    """Go uses raw system calls without libc. So all connections use kernel TCP, even if the client has the library."""

    name = "go (net/http)"
    version = ("go", "version")
    path = "kernel"

    def prepare(self):
        env = {"GO111MODULE": "off", "CGO_ENABLED": "0", "GOCACHE": str(self.lab.path / "gocache"), "GOFLAGS": "-p=2"}
        self.lab.run(["go", "build", "-o", self.lab.path / "web", APPS / "web.go"], side="stock", env=env, timeout=300)

    def argv(self):
        return [self.lab.path / "web", self.port]
