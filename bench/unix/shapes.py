"""Requests and answers of one size over some connections: a reduced matrix of sizes, connections and ways to wait."""

import json
import subprocess

from side import ROOT, Figure, Row

SIZES = (8, 512, 16384, 262144)
CONNECTIONS = (1, 4, 32)
WAYS = ("blocking", "poll", "epoll")


class Shapes:
    """`shapes.c`: both programs wait in the same way. CPU time is that of the two programs."""

    def __init__(self, sides):
        self.program = sides[0].place.parent / "shapes"
        subprocess.run(["cc", "-O2", "-pthread", "-o", self.program, ROOT / "bench/unix/shapes.c"], check=True)
        for way in WAYS:
            for s in sides:
                path = s.place / way
                s.start([self.program, "serve", path, way], path.exists)

    def rows(self, quick):
        ms = 300 if quick else 600
        for way in WAYS:
            for size in SIZES:
                for connections in CONNECTIONS:
                    measure = lambda s, w=way, n=size, c=connections: self.rate(s, w, n, c, ms)  # noqa: E731
                    yield Row(f"{way}, {size} bytes, {connections} connections", measure, bar=0.97)

    def rate(self, s, way, size, connections, ms):
        said = json.loads(s.ask([self.program, "ask", s.place / way, way, size, connections, ms]))
        n = said["requests"]
        return Figure(n / said["seconds"], n, 2 * n * size, cpu=said["cpu"])
