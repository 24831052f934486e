"""Socket activation without a service manager: manager.py PORT COMMAND… holds the socket, and starts the command with
it as descriptor 3 (LISTEN_FDS). On SIGHUP it ends the command, and then starts it again."""

import os
import signal
import socket
import subprocess
import sys
import time

port, argv = int(sys.argv[1]), sys.argv[2:]
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", port))
listener.listen(128)
again, ending = [], []
signal.signal(signal.SIGHUP, lambda *_: again.append(True))
signal.signal(signal.SIGTERM, lambda *_: ending.append(True))


def start():
    def descriptors():
        os.dup2(listener.fileno(), 3)
        os.environ["LISTEN_PID"] = str(os.getpid())

    env = {**os.environ, "LISTEN_FDS": "1"}
    return subprocess.Popen(argv, env=env, preexec_fn=descriptors, pass_fds=(3,), start_new_session=True)


service = start()
while not ending:
    if again:
        again.clear()
        os.killpg(service.pid, signal.SIGTERM)
        service.wait()
        service = start()
    elif service.poll() is not None:
        sys.exit(f"the service ended with {service.returncode}")
    else:
        time.sleep(0.02)
os.killpg(service.pid, signal.SIGTERM)
service.wait()
