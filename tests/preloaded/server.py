"""A service that is started again and again and imports its libraries once: `preloaded.py PACKAGE MODULE...`.

Imports the modules and all of the package's own, so that a checkout that changes meanwhile cannot become a mixture of
two versions; what only an engine needs that is not the default waits. For each line of input,
{"arguments": [...], "log": path}, it forks a process that goes on as `python -m PACKAGE ARGUMENTS...` would, and
answers {"pid"}; when that has ended, {"status"}. Every run is still a process of its own with nothing of an earlier one
in it: only the import, which on two cores is longer than a short run, is shared. The libraries must start no thread
while they are imported, which is checked.
"""

import ctypes
import importlib
import json
import os
import pkgutil
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
OPTIONAL = ("vllm_engine", "wandb", "nccl")


def main() -> int:
    """Serve until the input ends."""
    package, modules = sys.argv[1], sys.argv[2:]
    entry = importlib.import_module(f"{package}.__main__")
    for module in (*modules, *modules_of(package), *modules_of("quartet_common")):
        importlib.import_module(module)
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        print(f"{package}: {threads} threads after the import; such a process cannot be forked", file=sys.stderr)
        return 1
    for line in sys.stdin:
        asked = json.loads(line)
        if (pid := os.fork()) == 0:
            os._exit(_become(entry, package, asked))
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(status)}), flush=True)
    return 0


def modules_of(package: str) -> list[str]:
    """Return the names of a package's modules, but programs and the parts that need an optional engine."""
    found = pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
    names = [module.name for module in found if not module.name.endswith("__main__")]
    return [name for name in names if not any(part in name for part in OPTIONAL)]


def _become(entry, package: str, asked: dict) -> int:
    """Go on as the service and return its exit status."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(Path(asked["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    sys.stdin = sys.__stdin__ = None  # what the parent had read ahead is not for this process
    sys.argv = [package, *asked["arguments"]]
    status = 1
    try:
        status = entry.main()
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # what would have been the interpreter's traceback
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return status


if __name__ == "__main__":
    sys.exit(main())
