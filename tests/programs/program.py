"""The steps that every program goes through, and what a program declares about itself."""

import signal
import subprocess
import time

from lab import Wrong, free_port

#: Counters that show which path connections took.
PATHS = ("connect_shm", "connect_kernel", "accept_shm", "accept_kernel", "path_switch", "path_upgrade", "hostile_peer", "tcp_opens")
RELOADS = 3


class Program:
    """A server and its client. Subclasses define both; `lab` is the place where they run."""

    name = ""
    #: argv whose first line of output names the version.
    version = ()
    #: The path of connections:
    #: "shm": shared memory.
    #: "passes": the program accepts in one process and serves in another. The first connection switches; later ones
    #: begin in the kernel, and long ones move to shared memory.
    #: "learned": the program forks for each connection and moves it to the kernel, or its connections are short. After
    #: the first ones, the listener accepts only from the kernel (ADR 76).
    #: "kernel": raw system calls without libc, or an option that only kernel TCP has.
    path = "shm"
    #: The signal for a clean end, and the exit statuses of a clean end.
    stop_signal = signal.SIGTERM
    stop_status = (0,)
    #: Why some connections use kernel TCP from the start.
    kernel_too = ""
    #: Why a reload may lose requests (it loses them on stock sockets, too).
    reload_loses = ""
    restarts = True
    threads = 8
    env = None
    #: "server", or "backend" for a server behind the server under test.
    role = "server"

    def __init__(self, lab):
        self.lab = lab
        self.port = free_port()
        self.process = None
        #: Does the server's listener accept only from the kernel?
        self.has_learned = False

    # Subclasses define the following.

    def prepare(self):
        """Makes files and databases, and starts further servers."""

    def argv(self):
        raise NotImplementedError

    def serve(self):
        """Runs real clients and compares bytes. Returns the least number of TCP connections that they made."""
        raise NotImplementedError

    def load(self):
        """The argument for load.py, without the number of threads."""
        raise NotImplementedError

    #: `def reload(self)` reloads once. None: the program cannot reload.
    reload = None

    def ready(self):
        """Called when the listener is there."""

    def after(self):
        """Called after the end, to end further servers."""

    # The test uses the following.

    def start(self):
        self.process = self.lab.start(self.argv(), name=type(self).__name__.lower(), env=self.env, role=self.role)
        self.lab.listens(self.port, self.process, known=self.path not in ("kernel", "learned"))
        self.ready()

    def stop(self):
        """Ends the server cleanly. Returns how long that took, in seconds."""
        began = time.monotonic()
        self.process.send_signal(self.stop_signal)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            raise Wrong("does not end within 30 s of being told to") from None
        if self.process.returncode not in self.stop_status:
            raise Wrong(f"ended with {self.process.returncode}, not with one of {self.stop_status}")
        return time.monotonic() - began

    def alive(self):
        if self.process.poll() is not None:
            raise Wrong(f"ended by itself with {self.process.returncode}")


def difference(before, after):
    names = [n for n in after if n in PATHS or n.startswith("fallback.")]
    return {n: after[n] - before.get(n, 0) for n in names if after[n] - before.get(n, 0)}


def judge_path(program, moved, connections, where):
    """Checks that the connections of a step took the path that they must take."""
    get = lambda name: moved.get(name, 0)  # noqa: E731
    if get("hostile_peer"):
        raise Wrong(f"{where}: a peer was called hostile: {moved}")
    if program.path == "kernel":
        # A client that never meets a peer with the library has no counters, so the kernel's count
        # is used.
        if get("connect_shm") or get("accept_shm") or get("tcp_opens") < connections:
            raise Wrong(f"{where}: not all over the kernel: {moved}")
        return
    if program.path == "passes":
        seen = get("accept_shm") + get("accept_kernel")
        if seen < connections or get("accept_shm") and not get("path_switch"):
            raise Wrong(f"{where}: {connections} connections, switched or the kernel's: {moved}")
        return
    if program.path == "learned":
        program.has_learned |= bool(get("fallback.short_lived"))
        seen = get("accept_shm") + get("accept_kernel")
        if seen < connections or get("accept_shm") and not get("path_switch"):
            raise Wrong(f"{where}: {connections} connections, switched or the kernel's: {moved}")
        if get("connect_kernel") > get("fallback.resource") and not program.has_learned:
            raise Wrong(f"{where}: the kernel's before the server has learned: {moved}")
        return
    if program.kernel_too:
        connections -= get("fallback.kernel_first")
    # On a busy machine the monitor may answer too late for a connection, because the library does
    # not wait.
    late = get("fallback.monitor_busy")
    connections -= late
    if get("connect_shm") < connections or get("accept_shm") < connections:
        raise Wrong(f"{where}: {connections} connections were to go over shared memory: {moved}")
    if (get("connect_kernel") > late or get("accept_kernel") > late) and not program.kernel_too:
        raise Wrong(f"{where}: connections over kernel TCP: {moved}")
    if program.path == "shm" and get("tcp_opens") > late and not program.kernel_too:
        raise Wrong(f"{where}: the kernel opened connections: {moved}")


class Trial:
    """All steps of one program on one side; each is a row of the result."""

    def __init__(self, program):
        self.p = program
        self.lab = program.lab
        self.steps = {}

    def run(self):
        before = self.lab.counters()
        try:
            self.step("start", self.begin)
            if self.steps["start"]["ok"]:
                self.step("serve", lambda: self.serve("serve"))
                self.step("reload", self.reload)
                self.step("restart", self.restart)
                self.step("shutdown", self.shutdown)
        finally:
            path = difference(before, self.lab.counters()) if self.lab.side == "ours" else {}
        return {"steps": self.steps, "path": path}

    def step(self, name, action):
        began = time.monotonic()
        self.loads = []
        try:
            more = action()
            self.steps[name] = {"ok": True, **(more or {})}
        except Wrong as e:
            self.steps[name] = {"ok": False, "why": str(e)}
        except Exception as e:  # noqa: BLE001 - the other steps still say something
            self.steps[name] = {"ok": False, "why": f"{type(e).__name__}: {e}"}
        for load in self.loads:
            if load.poll() is None:
                load.kill()
                load.wait()
        self.steps[name]["seconds"] = round(time.monotonic() - began, 1)
        print(f"{name}: {self.steps[name]}", flush=True)

    def begin(self):
        self.p.prepare()
        self.p.start()

    def serve(self, where):
        before = self.lab.counters()
        connections = self.p.serve()
        if self.lab.side == "ours":
            judge_path(self.p, difference(before, self.lab.counters()), connections, where)
        return {"connections": connections}

    def start_load(self):
        load = self.lab.load({"threads": self.p.threads, **self.p.load()})
        self.loads.append(load)
        return load

    def reload(self):
        if self.p.reload is None:
            return {"none": True}
        load = self.start_load()
        for _ in range(RELOADS):
            time.sleep(1.0)
            self.p.reload()
            self.p.alive()
        time.sleep(1.5)
        said = self.lab.ended_load(load)
        if said["wrong"]:
            raise Wrong(f"during reload: {said['wrong']}")
        if not said["ok"]:
            raise Wrong(f"during reload nothing was served: {said}")
        if said["failed"] and not self.p.reload_loses:
            raise Wrong(f"requests failed during reload: {said}")
        self.lab.listens(self.p.port, self.p.process, known=False)
        self.serve("after the reload")
        return {"requests": said["ok"], "failed": said["failed"]}

    def restart(self):
        load = self.start_load()
        time.sleep(1.0)
        took = self.p.stop()
        time.sleep(0.2)
        self.p.start()
        time.sleep(1.5)
        said = self.lab.ended_load(load)
        if said["wrong"]:
            raise Wrong(f"during restart: {said['wrong']}")
        slow = {k: n for k, n in said["failed"].items() if "timeout" in k or "no end" in k}
        if slow:
            raise Wrong(f"clients hung during restart: {said['failed']}")
        self.serve("after the restart")
        return {"requests": said["ok"], "failed": said["failed"], "stop_s": round(took, 1)}

    def shutdown(self):
        took = self.p.stop()
        self.p.after()
        left = []

        def gone():
            left[:] = self.lab.left()
            return not left

        self.lab.until(gone, 10, lambda: f"processes are left: {left}")
        if self.lab.side == "ours":
            rest = self.lab.settled()
            if rest:
                raise Wrong(f"the monitor still holds {rest}")
        if self.lab.sockets(self.p.port):
            raise Wrong("somebody still listens on the port")
        return {"stop_s": round(took, 1)}
