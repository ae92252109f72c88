"""A proxy for a process that `server.py` forks: it forwards signals to it and exits with its status.

`preloaded.py` installs this as the `python` of an environment.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import sys

if any(word.startswith("--parent=") for word in sys.argv):  # a worker, which ends with its service
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
descriptors = sorted(each for each in descriptors if os.path.exists(f"/proc/self/fd/{each}"))  # not the listing's own
mask = os.umask(0)
asked = {
    "arguments": sys.argv[1:],
    "environment": dict(os.environ),
    "folder": os.getcwd(),
    "umask": mask,
    "limits": {name: resource.getrlimit(getattr(resource, name)) for name in ("RLIMIT_FSIZE", "RLIMIT_NOFILE")},
    "python": os.path.abspath(__file__),
    "descriptors": descriptors,
    "leads_session": os.getsid(0) == os.getpid(),
}
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(os.path.join(os.path.dirname(os.path.realpath(__file__)), "socket"))
network = os.open("/proc/self/ns/net", os.O_RDONLY)
socket.send_fds(connection, [json.dumps(asked).encode()], [*descriptors, network])
pid = int(connection.recv(32))
with open("/proc/self/comm", "w") as name:
    name.write(f"for {pid}")  # read by `preloaded.process_of`


def forward(number: int, _: object) -> None:
    with contextlib.suppress(ConnectionError):
        connection.send(str(number).encode())


for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, forward)
status = int(connection.recv(32))
if status < 0:
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
