"""CPython 3.11's own tests."""

import shutil
import subprocess
import sys

import parse
from suites import Step

NAME = "cpython"

MODULES = """
    test_socket test_select test_selectors test_epoll test_poll test_asyncio test_socketserver test_httplib test_ssl
    test_subprocess test_ftplib test_poplib test_imaplib test_smtplib test_urllib2_localnet test_xmlrpc test_wsgiref
    test_httpservers test_asyncore test_asynchat test_smtpd test_telnetlib test_logging test_multiprocessing_spawn
    test_multiprocessing_fork test_multiprocessing_forkserver
""".split()


def interpreter():
    """A Python 3.11 that has its tests (Debian: libpython3.11-testsuite)."""
    tried = []
    for python in (sys.executable, shutil.which("python3.11"), shutil.which("python3"), "/usr/bin/python3"):
        if not python or python in tried:
            continue
        tried.append(python)
        probe = "import sys, test.test_socket, _ctypes, ssl; assert sys.version_info[:2] == (3, 11); print(sys.version.split()[0])"
        done = subprocess.run([python, "-c", probe], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        if done.returncode == 0:
            # The real interpreter, not the shim of a version manager.
            real = subprocess.run([python, "-c", "import sys; print(sys.executable)"], stdout=subprocess.PIPE, text=True)
            return real.stdout.strip(), done.stdout.strip()
    raise RuntimeError(f"no Python 3.11 with its tests among {tried} (Debian: apt-get install libpython3.11-testsuite)")


def prepare(_cache):
    python, version = interpreter()
    # One VSOCK test hangs on kernel sockets, too.
    argv = [python, "-m", "test", "-v", "-u", "network", "-i", "*VSOCK*", "--junit-xml", "{out}/junit.xml"]
    return version, [Step(m, [*argv, m], parse.junit, timeout=1200) for m in MODULES]
