"""The place where one program is tried: a directory of its own, a monitor, processes that
end with it, and clients. Runs as root in namespaces of its own (run.py)."""

import json
import os
import pathlib
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "suites"))

import harness  # noqa: E402

PYTHON = "/usr/bin/python3"
#: How long the library's own descriptors and sockets may outlive a program, in seconds.
SETTLE = 5.0


class Wrong(Exception):
    """A step did not do what it must do."""


#: For each side: the ends that have the library, and the world of each end. "ours" is the lab's
#: monitor; "world" is another monitor, which does not know the first one. A backend is a server
#: behind the server under test.
SIDES = {
    "stock": {},
    # Stock a second time shows how much two equal runs differ.
    "control": {},
    "ours": {"server": "ours", "client": "ours", "backend": "ours"},
    # Connections stay in the kernel, because one end has the library, or both have it in two
    # worlds.
    "kernel": {"server": "ours"},
    "client": {"client": "world"},
    "worlds": {"server": "ours", "client": "world"},
}


class Lab:
    """`side` is one of SIDES. `out` is the directory for logs."""

    def __init__(self, side, out):
        self.side = side
        self.out = pathlib.Path(out)
        # The mount ends with the namespace, and servers that drop their privileges can use it.
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755,size=2g", "lab", "/run"], check=True)
        subprocess.run(["mount", "-t", "bpf", "bpf", "/sys/fs/bpf"], check=False, stderr=subprocess.DEVNULL)
        self.path = pathlib.Path("/run/lab")
        self.path.mkdir(mode=0o755)
        self.processes = []
        self.env = harness.plain_env()
        self.monitor = self.world = None
        self.world_env = {}
        #: Words before the argv of the next clients, for example those of strace.
        self.tracer = []
        if "ours" in SIDES[side].values():
            self.start_monitor()
        if "world" in SIDES[side].values():
            self.start_world()

    def start_monitor(self):
        """Starts the system's monitor, which servers that give up root can reach, too."""
        pathlib.Path("/run/fastsocket").mkdir(mode=0o755, exist_ok=True)
        log = open(self.out / "monitor.log", "ab")
        # Servers run as users of their own, and clients as root. Here all of them share memory.
        users = ", ".join(str(uid) for uid in sorted({user.pw_uid for user in pwd.getpwall()}))
        config = self.out / "fastsocketd.toml"
        config.write_text(f'share = [[{users}]]\n[[rule]]\naction = "allow"\n')
        self.monitor = subprocess.Popen([harness.tool("monitor"), "--config", str(config)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env)
        self.until(lambda: self.ask("stat") is not None, 10, "the monitor does not answer")

    def start_world(self):
        """Starts a private monitor, for clients that must not meet the servers' library."""
        path, self.world = harness.start_monitor(self.path / "world")
        self.world_env = {"FASTSOCKET_SOCKET": str(path)}

    def file(self, name, content, mode=0o644):
        path = self.path / name
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        path.chmod(mode)
        return path

    def directory(self, name, user=None, mode=0o755):
        path = self.path / name
        path.mkdir(mode=mode, parents=True, exist_ok=True)
        path.chmod(mode)
        if user:
            shutil.chown(path, user)
        return path

    def command(self, argv, side=None, role="client"):
        argv = [str(a) for a in argv]
        where = SIDES[side or self.side].get(role)
        if where is None:
            return argv
        world = [f"{name}={value}" for name, value in self.world_env.items()] if where == "world" else []
        return [*(["env", *world] if world else []), harness.tool("cli"), "run", "--", *argv]

    def start(self, argv, *, env=None, side=None, name=None, cwd=None, stdout=None, role="server"):
        """Starts a process in the background. It has the library if its end of the side has it."""
        log = open(self.out / f"{name or pathlib.Path(str(argv[0])).name}.log", "ab")
        process = subprocess.Popen(
            self.command(argv, side, role), cwd=cwd or self.path, env={**self.env, **(env or {})}, stdin=subprocess.DEVNULL,
            stdout=stdout or log, stderr=log, start_new_session=True,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def run(self, argv, *, env=None, side=None, timeout=60, status=0, data=None):
        """Runs a client, which must end with `status`, and returns its standard output."""
        argv = [str(a) for a in argv]
        try:
            done = subprocess.run(
                [*self.tracer, *self.command(argv, side)], cwd=self.path, env={**self.env, **(env or {})}, input=data,
                stdin=subprocess.DEVNULL if data is None else None, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout,
            )  # fmt: skip
        except subprocess.TimeoutExpired as e:
            raise Wrong(f"{argv[0]} did not end within {timeout} s: {(e.stderr or b'').decode(errors='replace')[-300:]}") from None
        if status is not None and done.returncode != status:
            said = (done.stderr or done.stdout).decode(errors="replace").strip()[-400:]
            raise Wrong(f"{argv[0]} ended with {done.returncode}: {said}")
        return done.stdout

    def same(self, got, want, what):
        if got != want:
            raise Wrong(f"{what}: {len(got)} bytes instead of {len(want)}, or other bytes")

    def until(self, true, limit, message):
        end = time.monotonic() + limit
        while not true():
            if time.monotonic() > end:
                raise Wrong(message() if callable(message) else message)
            time.sleep(0.02)

    def sockets(self, port, state="0A"):
        """Number of kernel sockets with this local port and state (hexadecimal, as in /proc/net/tcp)."""
        n = 0
        for name in ("tcp", "tcp6"):
            for line in pathlib.Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                words = line.split()
                n += words[3] == state and int(words[1].rsplit(":", 1)[1], 16) == port
        return n

    def listens(self, port, process=None, limit=30, known=True):
        """Waits for a listener. On our side it waits until the monitor knows the listener, too (if `known`)."""

        def there():
            if process is not None and process.poll() is not None:
                raise Wrong(f"ended with {process.returncode} before it listened")
            return self.sockets(port) > 0 and (self.side != "ours" or not known or self.knows(port))

        kernel = lambda: f"nobody listens on {port} (kernel: {self.sockets(port)})"  # noqa: E731
        self.until(there, limit, kernel)

    def knows(self, port):
        state = self.ask("ss")
        return bool(state) and any(x["local"].endswith(f":{port}") for x in state["listeners"])

    def ask(self, verb, env=None):
        """The answer of `fastsocket VERB --json`, or None if no monitor answers."""
        done = subprocess.run([harness.tool("cli"), verb, "--json"], env={**self.env, **(env or {})}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def counters(self):
        """The library's counters, and `tcp_opens`: connections that the kernel has opened in this namespace."""
        rows = [r.split() for r in pathlib.Path("/proc/net/snmp").read_text().splitlines() if r.startswith("Tcp:")]
        kernel = {"tcp_opens": int(dict(zip(*rows, strict=True))["ActiveOpens"])}
        sums = {}
        for env in [{}] * bool(self.monitor) + [self.world_env] * bool(self.world):
            said = self.ask("stat", env)
            if said is None:
                raise Wrong("the monitor does not answer")
            for name, n in said["totals"].items():
                sums[name] = sums.get(name, 0) + n
        return {**sums, **kernel}

    def load(self, spec):
        """Starts `load.py` in the background, with `spec` as its argument."""
        log = tempfile.TemporaryFile()
        process = self.start([PYTHON, HERE / "load.py", json.dumps(spec)], name="load", stdout=log, role="client")
        process.result, process.began = log, time.monotonic()
        return process

    def ended_load(self, process):
        """Stops a load, and returns its report."""
        # Until the load handles the signal, it has nothing to report.
        young = time.monotonic() - process.began < 3
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            raise Wrong("the load's clients hang") from None
        if young and process.returncode == -signal.SIGTERM:
            return {"ok": 0, "failed": {}, "wrong": []}
        process.result.seek(0)
        text = process.result.read()
        if process.returncode != 0 or not text:
            raise Wrong(f"the load ended with {process.returncode}")
        return json.loads(text)

    def left(self):
        """Processes besides process 1, this one, and the two of the monitor."""
        monitor = self.monitor.pid if self.monitor else None
        mine = {1, os.getpid(), monitor}
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) not in mine:
                try:
                    state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
                    if state != "Z" and int(parent) != monitor:
                        found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:60])
                except OSError:
                    pass
        return found

    def settled_connections(self):
        """Waits for the end of connections whose clients have ended, for SETTLE seconds at most."""
        try:
            self.until(lambda: not (self.ask("ss") or {}).get("connections"), SETTLE, "")
        except Wrong:
            pass

    def settled(self):
        """Waits until the monitor holds nothing. Returns what it still holds after SETTLE seconds."""
        rest = {}

        def empty():
            state, stat = self.ask("ss") or {}, self.ask("stat") or {}
            rest.clear()
            rest.update({k: len(state.get(k, ())) for k in ("listeners", "channels", "connections") if state.get(k)})
            rest.update({"processes": len(stat["processes"])} if stat.get("processes") else {})
            return not rest

        try:
            self.until(empty, SETTLE, "")
        except Wrong:
            return dict(rest)
        return {}

    def end(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for monitor in (self.monitor, self.world):
            if monitor:
                monitor.terminate()
                monitor.wait(10)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def noise(seed, size):
    """Bytes without repetitions, the same on every run."""
    import random

    return random.Random(seed).randbytes(size)
