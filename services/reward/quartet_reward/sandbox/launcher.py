"""Starts a fork server in its namespaces, and ends with it.

    python -I -S launcher.py FOLDER CHANNEL SETTINGS

FOLDER holds the package, CHANNEL is the descriptor of a socket to the service, SETTINGS a JSON object. This process
stays outside, as the parent of the fork server, whose death is its own and the other way round.
"""

import fcntl
import gc
import importlib
import json
import os
import signal
import site
import socket
import sys

_RESERVED = 10


def main() -> int:
    """Start the fork server and wait for it. Return its status."""
    folder, settings = sys.argv[1], json.loads(sys.argv[3])
    channel = socket.socket(fileno=fcntl.fcntl(int(sys.argv[2]), fcntl.F_DUPFD_CLOEXEC, _RESERVED))
    sys.path.insert(0, folder)
    from quartet_reward.sandbox import isolation, messages
    from quartet_reward.sandbox.syscalls import PR_SET_PDEATHSIG, prctl

    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != settings["parent"]:
            return 1
        reserve_descriptors()
        os.environ.clear()
        os.environ.update(isolation.ENVIRONMENT)
        site.setquit()  # `exit` and `quit`, which -S leaves out
        for name in settings["preload"]:
            importlib.import_module(name)
        entries = {name: importlib.import_module(module).main for name, module in settings["entries"].items()}
        sys.path[:] = [path for path in sys.path if path != folder] + settings["packages"]
        gc.collect()
        gc.freeze()
        return isolation.start(channel, entries, settings)
    except Exception as error:
        messages.send(channel, {"event": "failed", "reason": f"{type(error).__name__}: {error}"})
        return 1


def reserve_descriptors() -> None:
    """Take the numbers that programs will use, so that no descriptor of a fork server or of a job has one of them."""
    os.closerange(3, _RESERVED)
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor < _RESERVED - 1:
        descriptor = os.dup(descriptor)


if __name__ == "__main__":
    sys.exit(main())
