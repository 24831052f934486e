"""Rows of programs that pass descriptors.

Their answers must be the same as on stock. A connection that has passed a descriptor must stay in the kernel.
"""

import itertools
import socket
import time

from side import ROOT, Figure, Row, Wrong

APPS = ROOT / "bench/unix/apps"
PYTHON = "/usr/bin/python3"


def timed(run, n=1):
    began = time.monotonic()
    said = run()
    return Figure(n / (time.monotonic() - began), n, said=said)


class Multiprocessing:
    def __init__(self, sides):
        self.runs = itertools.count()

    def rows(self, quick):
        yield Row("multiprocessing, runs", self.run, "any")

    def run(self, s):
        place = s.place / str(next(self.runs))
        place.mkdir()
        return timed(lambda: s.ask([PYTHON, APPS / "mp.py", place]))


class Dbus:
    def __init__(self, sides):
        for s in sides:
            path = s.place / "bus"
            (s.place / "bus.conf").write_text(
                '<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"\n'
                ' "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">\n'
                f"<busconfig><type>session</type><listen>unix:path={path}</listen><auth>EXTERNAL</auth>\n"
                '<policy context="default"><allow send_destination="*" eavesdrop="true"/><allow eavesdrop="true"/>'
                '<allow own="*"/></policy></busconfig>\n'
            )
            s.start(["dbus-daemon", f"--config-file={s.place}/bus.conf", "--nofork", "--nopidfile"], path.exists)

    def rows(self, quick):
        # Each of two clients makes this number of calls twice: before and after it passes a descriptor.
        for calls in (2, 400):
            yield Row(f"dbus, {calls} calls before a descriptor", lambda s, n=calls: self.run(s, n), "kernel")

    def run(self, s, calls):
        return timed(lambda: s.ask([PYTHON, APPS / "bus.py", s.place / "bus", calls]), 4 * calls)


class Activation:
    """systemd-socket-activate begins the service with the first connection; it clears the environment."""

    def __init__(self, sides):
        self.runs = itertools.count()

    def rows(self, quick):
        yield Row("socket activation, runs", self.run, "any")

    def run(self, s):
        path = s.place / f"activated-{next(self.runs)}"
        keep = ["-E", "LD_PRELOAD", "-E", "FASTSOCKET_SOCKET"] if s.ours else []
        s.start(["systemd-socket-activate", "-l", path, *keep, PYTHON, APPS / "listens.py"], path.exists)
        figure = timed(lambda: s.ask([PYTHON, APPS / "listens.py", "ask", path]))
        s.end()
        s.servers.clear()
        with socket.socket(socket.AF_UNIX) as left:
            if left.connect_ex(str(path)) == 0:
                raise Wrong(f"{s.name}: somebody listens at {path} after its end")
        return figure
