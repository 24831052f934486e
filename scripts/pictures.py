#!/usr/bin/env python3
"""Makes the pictures of the README as SVG: real output of `fastsocket top` and `fastsocket stat`, and charts of a report
of `fastsocket bench`.

usage: scripts/pictures.py [--only screens|report] [--bin DIR] [--report FILE] [--out DIR]

For the screens it starts a private monitor, redis under the library, and two clients: one under the library, one
without. `top` runs on a pseudo-terminal, whose screen is drawn after some looks. For the report it runs `fastsocket
bench --quick` (some minutes), or takes the HTML file that is named. Needs redis-server, redis-benchmark and `make
benchmark`.
"""

import argparse
import fcntl
import html
import os
import pathlib
import pty
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import termios
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
COLUMNS, ROWS = 156, 18
#: Size of a character, and the colours of the terminal.
WIDTH, HEIGHT, MARGIN = 7.8, 17, 12
BACK, FORE, DIM = "#1e1e1e", "#d4d4d4", "#8a8a8a"
COLORS = ["#1e1e1e", "#cd5c5c", "#6a9955", "#d7ba7d", "#569cd6", "#c586c0", "#4ec9b0", "#d4d4d4"]


class Screen:
    """As much of a terminal as `top` uses: absolute moves, colours, text."""

    def __init__(self):
        self.cells = [[(" ", FORE, None, False)] * COLUMNS for _ in range(ROWS)]
        self.row = self.column = 0
        self.plain()

    def plain(self):
        self.fore, self.back, self.bold, self.reverse = FORE, None, False, False

    def style(self, numbers):
        numbers = [int(n or 0) for n in numbers]
        while numbers:
            n = numbers.pop(0)
            if n in (38, 48):
                kind = numbers.pop(0)
                color = COLORS[numbers.pop(0) % 8] if kind == 5 else "#%02x%02x%02x" % tuple(numbers[:3])
                del numbers[: 3 if kind == 2 else 0]
                self.fore, self.back = (color, self.back) if n == 38 else (self.fore, color)
            elif n == 0:
                self.plain()
            elif n == 1:
                self.bold = True
            elif n == 2:
                self.fore = DIM
            elif n in (7, 27):
                self.reverse = n == 7
            elif n == 22:
                self.bold, self.fore = False, FORE
            elif n == 39:
                self.fore = FORE
            elif n == 49:
                self.back = None
            elif 30 <= n <= 37 or 90 <= n <= 97:
                self.fore = COLORS[n % 10]
            elif 40 <= n <= 47 or 100 <= n <= 107:
                self.back = COLORS[n % 10]

    def put(self, c):
        if c == "\r":
            self.column = 0
        elif c == "\n":
            self.row = min(self.row + 1, ROWS - 1)
        elif self.column < COLUMNS:
            fore, back = (self.back or BACK, self.fore) if self.reverse else (self.fore, self.back)
            # (A full block is drawn as a rectangle: fonts leave gaps.)
            c, back = (" ", fore) if c == "█" else (c, back)
            self.cells[self.row][self.column] = (c, fore, back, self.bold)
            self.column += 1

    def feed(self, text):
        for escape, numbers, end, c in re.findall(r"(\x1b\[([?0-9;]*)([A-Za-z]))|\x1b[()][A-Z0-9]|\x1b.|([^\x1b])", text):
            if c:
                self.put(c)
            elif end == "H":
                row, column = (numbers.split(";") + ["1"])[:2] if numbers else (1, 1)
                self.row, self.column = int(row) - 1, int(column) - 1
            elif end == "m":
                self.style(numbers.split(";"))
            elif end == "J":
                self.cells = [[(" ", FORE, None, False)] * COLUMNS for _ in range(ROWS)]
            elif end == "C":
                self.column += int(numbers or 1)

    def lines(self):
        """Each row as runs of cells that look alike: column, text, colours, bold."""
        for row in self.cells:
            runs, at = [], 0
            for c, *look in row:
                if runs and runs[-1][2] == look:
                    runs[-1][1] += c
                else:
                    runs.append([at, c, look])
                at += 1
            yield runs


def svg(title, lines, columns):
    width, height = columns * WIDTH + 2 * MARGIN, len(lines) * HEIGHT + 2 * MARGIN
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" role="img">',
        f"<title>{html.escape(title)}</title>",
        f'<rect width="100%" height="100%" rx="6" fill="{BACK}"/>',
        '<g font-family="ui-monospace, DejaVu Sans Mono, Consolas, monospace" font-size="13" xml:space="preserve">',
    ]
    for n, runs in enumerate(lines):
        y = MARGIN + n * HEIGHT
        for column, text, (fore, back, bold) in runs:
            x, length = MARGIN + column * WIDTH, len(text) * WIDTH
            if back:
                out.append(f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="{HEIGHT}" fill="{back}"/>')
            if text.strip():
                weight = ' font-weight="bold"' if bold else ""
                out.append(
                    f'<text x="{x:.1f}" y="{y + 13}" textLength="{length:.1f}" fill="{fore}"{weight}>'
                    f"{html.escape(text)}</text>"
                )
    return "\n".join(out + ["</g>", "</svg>", ""])


def text_lines(text):
    """Lines of a table, with bold heads; long ones are cut."""
    cut = lambda line: line if len(line) <= COLUMNS else line[: COLUMNS - 1] + "…"  # noqa: E731
    return [[[0, cut(line), [FORE, None, line.isupper()]]] for line in text.rstrip("\n").split("\n")]


def watch(command, env, seconds):
    """The screen of a command that ran for so long on a terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(command[0], command, env)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    screen, until, rest = Screen(), time.monotonic() + seconds, b""
    while (left := until - time.monotonic()) > 0:
        if select.select([terminal], [], [], left)[0]:
            rest += os.read(terminal, 1 << 16)
            whole = rest[: rest.rfind(b"\x1b")] if b"\x1b" in rest[-32:] else rest
            screen.feed(whole.decode("utf-8", "replace"))
            rest = rest[len(whole) :]
    os.write(terminal, b"q")
    os.waitpid(pid, 0)
    os.close(terminal)
    return screen


def charts(report):
    """The charts of the first layout in a report of `fastsocket bench`, below each other, with its machine and command."""
    head, *layouts = report.split("<h2>")
    found = re.findall(r'<svg width="(\d+)" height="(\d+)"(.*?</svg>)', layouts[0], re.S)
    about = re.search(r"<p>(.*?)</p><p><code>(.*?)</code>", head)
    width, top = max(int(w) for w, _, _ in found), 44
    body = []
    for _, height, rest in found:
        body.append(f'<svg y="{top}" width="{width}" height="{height}"{rest}')
        top += int(height)
    texts = [f'<text x="12" y="{18 * n}" font-size="13">{line}</text>' for n, line in enumerate(about.groups(), 1)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" role="img">',
            "<title>fastsocket bench</title>",
            '<rect width="100%" height="100%" fill="white"/>',
            '<g font-family="sans-serif">',
            *texts,
            "</g>",
            *body,
            "</svg>",
            "",
        ]
    )


def bench(fastsocket):
    """The report of a quick run of the benchmark."""
    with tempfile.TemporaryDirectory(prefix="fastsocket-pictures-") as place:
        report = pathlib.Path(place) / "bench.html"
        command = [fastsocket, "bench", "--quick", "--layout", "two-cpus", "--report", str(report)]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        return report.read_text()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(port):
    for _ in range(600):
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise SystemExit("redis did not start")


def screens(args):
    """Draws `top` and `stat`."""
    place = pathlib.Path(tempfile.mkdtemp(prefix="fastsocket-pictures-"))
    env = dict(os.environ, TERM="xterm-256color", FASTSOCKET_SOCKET=str(place / "monitor.sock"))
    fastsocket, started = str(args.bin.resolve() / "fastsocket"), []

    def start(*command):
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(command, env=env, cwd=place, stdin=quiet, stdout=quiet, stderr=quiet)
        started.append(process)

    try:
        start(str(args.bin.resolve() / "fastsocketd"), "--private", "--socket", env["FASTSOCKET_SOCKET"])
        while not os.path.exists(env["FASTSOCKET_SOCKET"]):
            time.sleep(0.1)
        port = str(free_port())
        start(fastsocket, "run", "--", "redis-server", "--port", port, "--save", "", "--bind", "127.0.0.1")
        wait_for(int(port))
        load = ["redis-benchmark", "-p", port, "-t", "get", "-n", "1000000000", "-q"]
        start(fastsocket, "run", "--", *load, "-c", "20")
        start(*load, "-c", "2")
        # Short connections: rates of new ones.
        asks = f"while :; do redis-cli -p {port} ping; sleep 0.2; done"
        start(fastsocket, "run", "--", "sh", "-c", asks)
        time.sleep(3)
        screen = watch([fastsocket, "top", "--delay", "1"], env, 6)
        stat = subprocess.run([fastsocket, "stat"], env=env, capture_output=True, text=True, check=True).stdout
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
        for process in started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        shutil.rmtree(place, ignore_errors=True)
    (args.out / "top.svg").write_text(svg("fastsocket top", list(screen.lines()), COLUMNS))
    lines = text_lines(stat)
    (args.out / "stat.svg").write_text(svg("fastsocket stat", lines, max(len(runs[0][1]) for runs in lines)))
    print(f"{args.out}/top.svg, stat.svg")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", choices=["screens", "report"])
    p.add_argument("--bin", type=pathlib.Path, default=ROOT / "target" / "release", metavar="DIR")
    p.add_argument("--report", type=pathlib.Path, metavar="FILE")
    p.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "pictures", metavar="DIR")
    args = p.parse_args()
    args.out.mkdir(exist_ok=True)
    if args.only != "report":
        screens(args)
    if args.only != "screens":
        report = args.report.read_text() if args.report else bench(str(args.bin.resolve() / "fastsocket"))
        (args.out / "bench.svg").write_text(charts(report))
        print(f"{args.out}/bench.svg")


if __name__ == "__main__":
    main()
