"""The three sides of a measurement: stock, stock once more (the control) and ours.

A Side has servers and clients of its own; `ours` runs them with the library, under a private monitor. A Row is one line
of the table.
"""

import dataclasses
import json
import os
import pathlib
import resource
import signal
import socket
import subprocess
import time
import typing

ROOT = pathlib.Path(__file__).resolve().parents[2]
TICK = os.sysconf("SC_CLK_TCK")
#: Seconds that one command of a client may take.
LIMIT = 120


class Wrong(Exception):
    """A program did not do what it must."""


class Build:
    """The directory of `fastsocket`, its library and its monitor."""

    at = pathlib.Path(os.environ.get("FASTSOCKET_BUILD", ROOT / "target/release"))


@dataclasses.dataclass
class Figure:
    """The result of one turn of one side. `rate`: more is better. `size`: the least number of bytes of all its requests
    and answers, or 0 if it is unknown. `said`: the answers, which must be the same on all sides. `cpu`: seconds of CPU
    time, if the programs have measured it themselves."""

    rate: float
    requests: float = 0
    size: float = 0
    said: str = ""
    cpu: float | None = None


@dataclasses.dataclass
class Row:
    """`path`: "shm" (the bytes must go over shared memory), "kernel" (none may stay there), "any". `bar`: the least ratio
    to stock, of issue 46. `rounds`: multiplies the number of rounds, for rows that are short or scatter."""

    name: str
    measure: typing.Callable[["Side"], Figure]
    path: str = "shm"
    bar: float = 0.0
    rounds: int = 1


class Side:
    """Servers and clients of one side; `ours`: with the library."""

    def __init__(self, name, place):
        self.name, self.ours = name, name == "ours"
        self.place = pathlib.Path(place, name)
        self.place.mkdir(mode=0o755)
        self.runtime = self.place / "run"
        self.runtime.mkdir(mode=0o700)
        self.servers = []
        # The beginning of a command that runs it as another user.
        self.lower = []

    def command(self, args, library=True):
        run = [str(Build.at / "fastsocket"), "run", "--"] if self.ours and library else []
        return [*self.lower, *run, *map(str, args)]

    def environment(self):
        return {**os.environ, "XDG_RUNTIME_DIR": str(self.runtime)}

    def start(self, args, ready):
        """Starts a server, and waits until `ready` returns True."""
        with open(self.place / "log", "a") as log:
            server = subprocess.Popen(
                self.command(args), env=self.environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.servers.append(server)
        end = time.monotonic() + 60
        while not ready():
            if server.poll() is not None or time.monotonic() > end:
                raise Wrong(f"{args[0]} does not begin: {self.log()}")
            time.sleep(0.05)
        return server

    def log(self):
        return (self.place / "log").read_text(errors="replace")[-2000:]

    def ask(self, args, library=True, data=None, limit=LIMIT):
        """Runs a client, and returns its output. `library`: it has the library, if this side's programs do."""
        client = subprocess.Popen(
            self.command(args, library), env=self.environment(), text=True, start_new_session=True,
            stdin=subprocess.PIPE if data is not None else subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            out, errors = client.communicate(data, timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(client.pid, signal.SIGKILL)
            client.communicate()
            raise Wrong(f"{self.name}: {args[0]} has not ended after {limit} s; servers say: {self.log()}") from None
        if client.returncode:
            raise Wrong(f"{self.name}: {args}: status {client.returncode}: {errors[-1500:]}")
        return out

    def told(self, what):
        """The JSON output of `fastsocket stat` or `fastsocket ss`."""
        if not self.ours:
            return {}
        args = [*self.lower, Build.at / "fastsocket", what, "--json"]
        said = subprocess.run(args, env=self.environment(), capture_output=True, text=True, timeout=30).stdout
        return json.loads(said or "{}")

    def counters(self):
        """Counters of all processes so far."""
        return self.told("stat").get("totals", {})

    def cpu(self):
        """CPU time of the servers, of this side's monitor and of clients that have ended, seconds."""
        sessions = {server.pid for server in self.servers}
        monitor = self.told("stat").get("monitor_pid")
        used = 0.0
        for entry in pathlib.Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[3]) in sessions or int(entry.name) == monitor:
                # The fields include children that the process has waited for.
                used += sum(int(n) for n in fields[11:15]) / TICK
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used + ended.ru_utime + ended.ru_stime

    def end(self):
        for server in reversed(self.servers):
            if server.poll() is None:
                server.send_signal(signal.SIGTERM)
        for server in self.servers:
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                print(f"{self.name}: {server.args} does not end", flush=True)
            # End the processes that this server has left in its session.
            try:
                os.killpg(server.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            server.wait()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def same(got, want, what):
    if got != want:
        at = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), min(len(got), len(want)))
        raise Wrong(f"{what}: another answer: {len(got)} instead of {len(want)} bytes, the first difference at {at}: {got[at : at + 60]!r}")


def difference(before, after):
    return {name: n - before.get(name, 0) for name, n in after.items() if n != before.get(name, 0)}


def wrong_path(row, delta, size):
    """The reason why a row took the wrong path in these turns of ours, or "". `size`: bytes of these turns."""
    over, back = (delta.get(name, 0) for name in ("path_upgrade", "path_switch"))
    if row.path == "shm":
        if not over and not delta.get("tx_bytes"):
            return "NOTHING WENT OVER"
        if delta.get("tx_bytes", 0) < 0.9 * size:
            return f"ONLY {100 * delta.get('bytes', 0) / size:.0f} % OF THE BYTES WENT OVER"
    # The end that moves back first is counted twice.
    if row.path == "kernel" and 3 * over > 2 * back:
        return f"{over} ENDS WENT OVER, {2 * back // 3} CAME BACK"
    return ""
