"""Web servers and proxies."""

import hashlib
import os
import pathlib
import signal
import time

from lab import Wrong, free_port, noise
from program import Program

SIZES = (0, 1, 64, 1000, 4096, 65536, 1000000, 20000000)
PAGES = {f"/{n}": noise(n, n) for n in SIZES}


def sha(data):
    return hashlib.sha256(data).hexdigest()


class Http(Program):
    """A server of files, which curl and ab fetch."""

    pages = PAGES

    def url(self, path):
        return f"http://127.0.0.1:{self.port}{path}"

    def document_root(self):
        for path, content in self.pages.items():
            self.lab.file(f"www{path}", content)
        return self.lab.path / "www"

    def serve(self):
        for path, content in self.pages.items():
            got = self.lab.run(["curl", "-sS", "--fail", "--max-time", "30", self.url(path)])
            self.lab.same(got, content, path)
        some = next(p for p, c in self.pages.items() if len(c) in (1000, 4096))
        said = self.lab.run(["ab", "-q", "-n", "500", "-c", "8", self.url(some)]).decode()
        if "Complete requests:      500" not in said or "Failed requests:        0" not in said or "Non-2xx" in said:
            raise Wrong(f"ab: {said}")
        return len(self.pages) + 500

    def load(self):
        paths = {p: sha(c) for p, c in self.pages.items() if 0 < len(c) <= 1000000}
        return {"kind": "http", "port": self.port, "paths": paths}


class Nginx(Http):
    name = "nginx"
    version = ("nginx", "-v")
    stop_signal = signal.SIGQUIT
    daemon = "off"

    def config(self):
        return f"server {{ listen 127.0.0.1:{self.port}; root {self.document_root()}; }}"

    def prepare(self):
        d = self.lab.directory("nginx")
        temp = "".join(f"{n}_temp_path {d}/{n}; " for n in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        self.conf = self.lab.file(
            "nginx/nginx.conf",
            f"daemon {self.daemon}; user www-data; worker_processes 2; pid {d}/pid; error_log {d}/error.log info;\n"
            f"events {{ worker_connections 1024; }}\n"
            f"http {{ access_log off; sendfile on; tcp_nopush on; {temp}\n{self.config()} }}\n",
        )

    def argv(self):
        # nginx needs its full path, so that its upgrade can find it.
        return ["/usr/sbin/nginx", "-p", self.lab.path / "nginx", "-c", self.conf]

    def reload(self):
        self.process.send_signal(signal.SIGHUP)


class NginxUpgrade(Nginx):
    """The binary upgrade: the new program inherits the listener through exec, and goes on with it."""

    name = "nginx, binary upgrade"
    # nginx ignores the signal if its parent is the process that started it.
    daemon = "on"

    def master(self, suffix=""):
        try:
            return int((self.lab.path / "nginx" / f"pid{suffix}").read_text())
        except (OSError, ValueError):
            return 0

    def start(self):
        self.lab.run(self.argv())
        self.lab.listens(self.port)
        self.lab.until(lambda: self.master() and self.workers(self.master()) == 2, 10, "no master, or no workers")
        self.now = self.master()

    def reload(self):
        old = self.now
        os.kill(old, signal.SIGUSR2)
        self.lab.until(lambda: self.master(".oldbin") == old and self.master() not in (0, old), 10, "no new master came up")
        self.now = self.master()
        self.lab.until(lambda: self.workers(self.now) == 2, 10, "no new workers came up")
        os.kill(old, signal.SIGQUIT)
        self.lab.until(lambda: not self.master(".oldbin") and not self.exists(old), 20, "the old master does not end")

    def workers(self, pid):
        try:
            return len(pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        except OSError:
            return 0

    def exists(self, pid):
        try:
            return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            return False

    def alive(self):
        if not self.exists(self.now):
            raise Wrong("the new master ended by itself")

    def stop(self):
        began = time.monotonic()
        os.kill(self.now, self.stop_signal)
        self.lab.until(lambda: not self.exists(self.now), 30, "does not end within 30 s of being told to")
        return time.monotonic() - began


class Haproxy(Http):
    """Master and worker, in front of nginx. The connections of both legs count."""

    name = "haproxy"
    kernel_too = "no_new_privs: one connection in 2 s to each server comes first over the kernel"
    version = ("haproxy", "-v")
    stop_status = (0, 143)

    def prepare(self):
        self.backend = Nginx(self.lab)
        self.backend.role = "backend"
        self.backend.prepare()
        self.backend.start()
        self.conf = self.lab.file("haproxy.cfg", self.text())

    def text(self):
        return (
            f"global\n  maxconn 500\n  nbthread 2\n  user haproxy\n  group haproxy\n  stats socket /run/lab/haproxy.sock expose-fd listeners\n"
            f"defaults\n  mode http\n  timeout connect 5s\n  timeout client 20s\n  timeout server 20s\n"
            f"frontend f\n  bind 127.0.0.1:{self.port}\n  default_backend b\nbackend b\n  server s1 127.0.0.1:{self.backend.port}\n"
        )

    def argv(self):
        return ["haproxy", "-W", "-f", self.conf]

    def serve(self):
        return 2 * super().serve()

    def reload(self):
        self.process.send_signal(signal.SIGUSR2)

    def after(self):
        self.backend.stop()


class Apache(Http):
    """Apache defers accepting until a request is there (TCP_DEFER_ACCEPT), which only kernel TCP can do."""

    name = "apache2 (event)"
    path = "kernel"
    version = ("apache2", "-v")

    def prepare(self):
        d = self.lab.directory("apache")
        modules = "/usr/lib/apache2/modules"
        self.conf = self.lab.file(
            "apache/apache.conf",
            f"ServerRoot {d}\nServerName localhost\nListen 127.0.0.1:{self.port}\nPidFile {d}/pid\nErrorLog {d}/error.log\n"
            f"LoadModule mpm_event_module {modules}/mod_mpm_event.so\nLoadModule authz_core_module {modules}/mod_authz_core.so\n"
            f"User www-data\nGroup www-data\nStartServers 2\nThreadsPerChild 16\nMaxRequestWorkers 64\n"
            f"DocumentRoot {self.document_root()}\n<Directory />\n  Require all granted\n</Directory>\n",
        )

    def argv(self):
        return ["apache2", "-DFOREGROUND", "-d", self.lab.path / "apache", "-f", self.conf]

    def reload(self):
        self.process.send_signal(signal.SIGUSR1)


class PhpFpm(Http):
    """php-fpm behind nginx. Requests to PHP go over TCP, too."""

    name = "php-fpm behind nginx"
    version = ("php-fpm8.2", "-v")
    stop_signal = signal.SIGQUIT
    #: nginx's settings for connections that it keeps between requests.
    upstream, keep, children = "", "", 4

    def prepare(self):
        self.fpm = free_port()
        self.lab.file("php/page.php", "<?php $n = (int)$_GET['n']; echo str_repeat('0123456789abcdef', intdiv($n, 16));\n")
        self.pages = {f"/page.php?n={n}": b"0123456789abcdef" * (n // 16) for n in (16, 4096, 65536, 1600000)}
        self.conf = self.lab.file(
            "php/fpm.conf",
            f"[global]\nerror_log = /run/lab/php/error.log\npid = /run/lab/php/pid\ndaemonize = no\nprocess_control_timeout = 10s\n"
            f"[www]\nuser = www-data\ngroup = www-data\nlisten.owner = www-data\nlisten = {self.listen()}\npm = static\npm.max_children = {self.children}\n",
        )
        front = self.front = Nginx(self.lab)
        self.port = front.port
        front.config = lambda: (
            f"{self.upstream}server {{ listen 127.0.0.1:{front.port}; root /run/lab/php; location ~ \\.php$ {{ "
            f"fastcgi_pass {self.passes()}; fastcgi_param SCRIPT_FILENAME $document_root$fastcgi_script_name; {self.keep}"
            f"fastcgi_param QUERY_STRING $query_string; fastcgi_param REQUEST_METHOD $request_method; "
            f"fastcgi_param CONTENT_LENGTH $content_length; fastcgi_param CONTENT_TYPE $content_type; }} }}"
        )
        front.prepare()
        front.start()

    def listen(self):
        return f"127.0.0.1:{self.fpm}"

    def passes(self):
        return self.listen()

    def argv(self):
        return ["php-fpm8.2", "-F", "-y", self.conf]

    def start(self):
        self.process = self.lab.start(self.argv(), name="php-fpm", role="backend")
        self.lab.listens(self.fpm, self.process)

    def serve(self):
        return 2 * super().serve()

    def reload(self):
        self.process.send_signal(signal.SIGUSR2)

    def after(self):
        self.front.stop()


class PhpFpmUnix(PhpFpm):
    """The same over a Unix socket, with connections that nginx keeps, so that they move to shared memory. Each child
    serves one connection, so there are as many children as both workers of nginx have connections."""

    name = "php-fpm behind nginx, Unix socket"
    upstream = "upstream fpm { server unix:/run/lab/php/sock; keepalive 8; } "
    keep = "fastcgi_keep_conn on; "
    children = 20

    def listen(self):
        return "/run/lab/php/sock"

    def passes(self):
        return "fpm"

    def start(self):
        self.process = self.lab.start(self.argv(), name="php-fpm", role="backend")
        self.lab.until((self.lab.path / "php/sock").exists, 10, "php-fpm does not listen")

    def serve(self):
        over = lambda: self.lab.counters().get("path_upgrade", 0)  # noqa: E731
        before = over()
        connections = Http.serve(self)
        # (A kept connection may have moved before.)
        kept = any(c["local"] == self.listen() for c in (self.lab.ask("ss") or {}).get("connections", ()))
        if self.lab.side == "ours" and not kept and over() == before:
            raise Wrong("no connection to php-fpm went over to shared memory")
        return connections
