"""Serves N bytes at /N, for uvicorn."""


async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    n = int(scope["path"][1:])
    body = (b"0123456789abcdef" * (n // 16 + 1))[:n]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(n).encode())]})
    await send({"type": "http.response.body", "body": body})
