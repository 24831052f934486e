"""Serves N bytes at /N, for gunicorn."""


def application(environ, start_response):
    n = int(environ["PATH_INFO"][1:])
    body = (b"0123456789abcdef" * (n // 16 + 1))[:n]
    start_response("200 OK", [("Content-Type", "application/octet-stream"), ("Content-Length", str(n))])
    return [body]
