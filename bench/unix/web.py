"""nginx in front of gunicorn, uWSGI and php-fpm on Unix sockets. The client is wrk over TCP, without the
library. The sides differ only in the connections from nginx to the program."""

import http.client
import re

from side import ROOT, Figure, Row, Wrong, free_port, same

APPS = ROOT / "tests/programs/apps"
SIZES = (0, 1, 1000, 16000, 65536, 1000000)
#: Connections that nginx keeps, and workers of servers that serve one connection at a time.
KEPT = 4
FCGI = "".join(
    f"fastcgi_param {name} {value}; "
    for name, value in (("QUERY_STRING", "$query_string"), ("REQUEST_METHOD", "$request_method"), ("CONTENT_LENGTH", "$content_length"),
                        ("CONTENT_TYPE", "$content_type"))
)  # fmt: skip


def page(n):
    return (b"0123456789abcdef" * (n // 16 + 1))[:n]


class Front:
    """nginx with a port for kept connections to `upstream`, and one that uses a new connection for each request."""

    #: Seconds of a turn. gunicorn and others answer few requests per second, so a turn must be long.
    seconds = 3
    url = "/{}"

    def __init__(self, sides):
        self.ports = {}
        for s in sides:
            self.begin(s, s.place / "app")
            d = s.place / "nginx"
            d.mkdir()
            kept, short = self.ports[s.name] = free_port(), free_port()
            temp = "".join(f"{n}_temp_path {d}/{n}; " for n in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
            (d / "nginx.conf").write_text(
                f"daemon off; user root; worker_processes 1; pid {d}/pid; error_log {d}/error.log;\n"
                f"events {{ worker_connections 512; }}\nhttp {{ access_log off; {temp} keepalive_requests 10000000;\n"
                f"upstream kept {{ server unix:{s.place}/app; keepalive {KEPT}; keepalive_requests 10000000; }}\n"
                f"server {{ listen 127.0.0.1:{kept}; location / {{ {self.passes(s, 'kept', True)} }} }}\n"
                f"server {{ listen 127.0.0.1:{short}; location / {{ {self.passes(s, f'unix:{s.place}/app', False)} }} }} }}\n"
            )
            s.start(["/usr/sbin/nginx", "-p", d, "-c", d / "nginx.conf"], lambda p=kept: self.answers(p))
            for port in (kept, short):
                self.compare(s, port)

    def begin(self, s, path):
        """Starts the program on the socket."""
        raise NotImplementedError

    def passes(self, s, upstream, kept):
        target = upstream if upstream == "kept" else f"{upstream}:"
        return f"proxy_pass http://{target}; " + ('proxy_http_version 1.1; proxy_set_header Connection "";' if kept else "")

    def answers(self, port):
        try:
            c = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            c.request("GET", self.url.format(16))
            return c.getresponse().status == 200
        except OSError:
            return False

    def compare(self, s, port, rounds=12):
        """Pages of all sizes over one connection to nginx."""
        c = http.client.HTTPConnection("127.0.0.1", port, timeout=15)
        for i in range(rounds):
            for n in SIZES:
                what = f"{s.name}: {self.name}, {n} bytes, round {i}"
                try:
                    c.request("GET", self.url.format(n))
                    got = c.getresponse()
                    data = got.read()
                except (OSError, http.client.HTTPException) as e:
                    raise Wrong(f"{what}: {e!r}; servers say: {s.log()}") from None
                same(data, page(n), f"{what}, status {got.status}")
        c.close()

    def rate(self, s, short, size, connections=KEPT):
        port = self.ports[s.name][short]
        where = f"http://127.0.0.1:{port}{self.url.format(size)}"
        said = s.ask(["wrk", "-t", 1, "-c", connections, "-d", f"{self.seconds}s", where], library=False)
        if "Non-2xx" in said or "Socket errors" in said:
            raise Wrong(f"{s.name}: {said}\n{(s.place / 'nginx/error.log').read_text()[-1000:]}\n{s.log()}")
        n = int(re.search(r"(\d+) requests in", said)[1])
        self.compare(s, port, 2)
        return Figure(float(re.search(r"Requests/sec:\s*([\d.]+)", said)[1]), n, n * size)

    def rows(self, quick):
        self.seconds = 2 if quick else 4
        for size in (1000, 65536):
            yield Row(f"{self.name}, kept, {size} bytes", lambda s, n=size: self.rate(s, False, n), bar=1.1)
        yield Row(f"{self.name}, kept, 1000 bytes, 1 client", lambda s: self.rate(s, False, 1000, 1))
        yield Row(f"{self.name}, a connection a request", lambda s: self.rate(s, True, 1000), "any", 0.97, rounds=2)


class Gunicorn(Front):
    """gunicorn with threads: its other kinds of workers close each connection after one request."""

    name = "gunicorn"

    def begin(self, s, path):
        s.start(["/usr/bin/gunicorn", "-w", 2, "-k", "gthread", "--threads", KEPT, "--keep-alive", 75, "-b", f"unix:{path}", "--chdir", APPS,
                 "web_wsgi:application"], path.exists)  # fmt: skip


class Uwsgi(Front):
    """uWSGI. Kept connections use HTTP 1.1, because the uwsgi protocol has a connection for each request."""

    name = "uWSGI"

    def begin(self, s, path):
        s.start(["/usr/bin/uwsgi", "--plugin", "python3", "--http11-socket", path, "--uwsgi-socket", f"{path}.uwsgi", "--chdir", APPS,
                 "--module", "web_wsgi:application", "--master", "--processes", 2 * KEPT, "--disable-logging", "--die-on-term"],
                path.exists)  # fmt: skip

    def passes(self, s, upstream, kept):
        if kept:
            return super().passes(s, upstream, kept)
        return f"uwsgi_pass unix:{s.place}/app.uwsgi; uwsgi_param PATH_INFO $uri; uwsgi_param REQUEST_METHOD $request_method; {UWSGI}"


UWSGI = "".join(
    f"uwsgi_param {name} {value}; "
    for name, value in (("QUERY_STRING", "$query_string"), ("REQUEST_URI", "$request_uri"), ("SERVER_PROTOCOL", "$server_protocol"),
                        ("SERVER_NAME", "$server_name"), ("SERVER_PORT", "$server_port"))
)  # fmt: skip


class PhpFpm(Front):
    name = "php-fpm"
    url = "/page.php?n={}"

    def begin(self, s, path):
        d = s.place / "php"
        d.mkdir()
        (d / "page.php").write_text(
            "<?php $n = (int)$_GET['n']; echo substr(str_repeat('0123456789abcdef', intdiv($n, 16) + 1), 0, $n);\n"
        )
        # A child serves one connection until it ends, so there are as many as both ports of nginx may have connections.
        (d / "fpm.conf").write_text(
            f"[global]\nerror_log = {d}/error.log\npid = {d}/pid\ndaemonize = no\n"
            f"[www]\nuser = root\ngroup = root\nlisten = {path}\npm = static\npm.max_children = {2 * KEPT}\n"
        )
        s.start(["php-fpm8.2", "-F", "-R", "-y", d / "fpm.conf"], path.exists)

    def passes(self, s, upstream, kept):
        keep = "fastcgi_keep_conn on; " if kept else ""
        return f"fastcgi_pass {upstream}; fastcgi_param SCRIPT_FILENAME {s.place}/php$fastcgi_script_name; {keep}{FCGI}"
