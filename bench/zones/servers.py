"""nginx for the zone benchmarks: stock (shared socket), stock with SO_REUSEPORT, ours.

Everything lies in a temporary directory and is gone with the `Place`.
"""
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
ARTIFACTS = pathlib.Path(os.environ.get("FASTSOCKET_ARTIFACTS", ROOT / "target/release"))


def need(program):
    path = shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")
    if not path:
        sys.exit(f"SKIPPED: {program} is not installed")
    return path


def wait_until(what, seconds=10):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if what():
            return True
        time.sleep(0.01)
    return False


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Place:
    """A temporary directory, and a monitor in it."""

    def __init__(self):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="fastsocket-zones-"))
        self.dir.chmod(0o755)
        (self.dir / "www").mkdir()
        (self.dir / "www/64").write_bytes(b"x" * 64)
        (self.dir / "monitor").mkdir(mode=0o700)
        self.socket = self.dir / "monitor/monitor.sock"
        self.monitor = None
        self.servers = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for server in self.servers:
            server.stop()
        if self.monitor:
            self.monitor.terminate()
            self.monitor.wait(10)
        shutil.rmtree(self.dir, ignore_errors=True)

    def start_monitor(self):
        args = [ARTIFACTS / "fastsocketd", "--private", "--linger", "600", "--socket", self.socket]
        self.monitor = subprocess.Popen(args)
        if not wait_until(self.socket.exists):
            sys.exit("the monitor did not start")

    def environment(self, extra=()):
        env = {k: v for k, v in os.environ.items() if not k.startswith("FASTSOCKET_") and k != "LD_PRELOAD"}
        env.update(
            LD_PRELOAD=str(ARTIFACTS / "libfsocket.so"), FASTSOCKET_SOCKET=str(self.socket), FASTSOCKET_DISABLE="shm"
        )
        env.update(extra)
        return env

    def zones(self):
        """What `fastsocket stat --zones --json` says."""
        import json

        env = dict(os.environ, FASTSOCKET_SOCKET=str(self.socket))
        return json.loads(
            subprocess.run([ARTIFACTS / "fastsocket", "stat", "--zones", "--json"], env=env, check=True, capture_output=True).stdout
        )

    def nginx(self, kind, workers=2, extra=()):
        """kind: "shared", "reuseport" (both stock nginx), "separate" (stock SO_REUSEPORT,
        a socket that each worker makes itself; not nginx), "ours"."""
        if kind == "ours" and not self.monitor:
            self.start_monitor()
        server = Separate(self, workers) if kind == "separate" else Nginx(self, kind, workers, extra)
        self.servers.append(server)
        return server


class Nginx:
    def __init__(self, place, kind, workers, extra):
        self.kind, self.port = kind, free_port()
        self.dir = place.dir / f"nginx-{kind}-{self.port}"
        self.dir.mkdir()
        reuse = " reuseport" if kind == "reuseport" else ""
        temp = "\n".join(f"{n}_temp_path {self.dir}/{n};" for n in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        (self.dir / "conf").write_text(
            f"daemon off; worker_processes {workers}; pid {self.dir}/pid; error_log {self.dir}/error.log notice;\n"
            f"worker_cpu_affinity auto;\nevents {{ worker_connections 4096; }}\n"
            f"http {{ access_log off; {temp}\n"
            f"server {{ listen 127.0.0.1:{self.port}{reuse} backlog=4096; root {place.dir}/www; }} }}\n"
        )
        env = place.environment(extra) if kind == "ours" else None
        self.process = subprocess.Popen([need("nginx"), "-c", self.dir / "conf", "-e", self.dir / "error.log"], env=env)
        if not wait_until(lambda: len(self.workers()) == workers and self.answers()):
            sys.exit(f"nginx ({kind}) did not start: {(self.dir / 'error.log').read_text()[-500:]}")
        time.sleep(0.3)

    def answers(self):
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
            return True
        except OSError:
            return False

    def workers(self):
        try:
            text = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        except OSError:
            return []
        return [int(w) for w in text.split() if not self.is_zombie(w)]

    @staticmethod
    def is_zombie(pid):
        try:
            return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
        except OSError:
            return True

    def crashed(self):
        """Workers that ended by a signal other than our SIGKILL, as nginx's log has it."""
        log = self.dir / "error.log" if hasattr(self, "dir") else None
        text = log.read_text() if log and log.exists() else ""
        return len([s for s in re.findall(r"exited on signal (\d+)", text) if s != "9"])

    def accepted_by(self, pid):
        """Connections that a worker has accepted and not closed."""
        inodes = set()
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                m = re.match(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{fd}"))
            except OSError:
                continue
            if m:
                inodes.add(m[1])
        count = 0
        for line in open("/proc/net/tcp"):
            f = line.split()
            # 01 ESTABLISHED, 08 CLOSE_WAIT
            if len(f) > 9 and f[1].endswith(f":{self.port:04X}") and f[3] in ("01", "08", "04", "05", "0B") and f[9] in inodes:
                count += 1
        return count

    def queued_of(self, pid):
        """Connections in the queues of listen sockets that only this worker holds."""
        out = subprocess.run(["ss", "-Hltnp", f"sport = :{self.port}"], capture_output=True, text=True).stdout
        mine = [l for l in out.splitlines() if re.findall(r"pid=(\d+)", l) and set(re.findall(r"pid=(\d+)", l)) == {str(pid)}]
        return sum(int(l.split()[1]) for l in mine)

    def reload(self):
        self.process.send_signal(signal.SIGHUP)

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)


class Separate(Nginx):
    """`separate.py`."""

    def __init__(self, place, workers):
        self.kind, self.port = "separate", free_port()
        script = pathlib.Path(__file__).with_name("separate.py")
        self.process = subprocess.Popen(["/usr/bin/python3", script, str(self.port), str(workers)])
        if not wait_until(lambda: len(self.workers()) == workers and self.answers()):
            sys.exit("separate.py did not start")
        time.sleep(0.3)
