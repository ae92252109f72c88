"""Forks processes whose libraries are imported: `python server.py MODULE...`, its standard input a listening socket.

Of a package of Quartet all modules are imported, so that a checkout that changes meanwhile cannot become a mixture of
two versions. Each connection (`client.py`) asks for a process that goes on as `python ARGUMENTS...` would, with the
open files, network namespace, environment, folder, umask and limits of the asker, and then for signals to it. The
answers are its process id and, when it has ended, its status, negative for a signal. It is killed when its asker ends
first.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import pkgutil
import resource
import runpy
import selectors
import signal
import socket
import sys
import threading
import types
from pathlib import Path
from types import ModuleType
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_MESSAGE = 1 << 20  # bytes
_MOST_DESCRIPTORS = 250  # which a message may have
ACCOUNT = "QUARTET_TESTS_ACCOUNT"
"""The variable that names a file for the CPU seconds of each process, as they are none of its asker's."""
OPTIONAL = ("__main__", "vllm_engine", "wandb", "nccl", "contract", "reward_model")


def main() -> None:
    """Serve until killed; who asks while the modules are imported waits."""
    die_with_parent()
    with socket.socket(fileno=os.dup(0)) as listening:
        for name in sys.argv[1:]:
            for module in (name, *modules_of(importlib.import_module(name))):
                with contextlib.suppress(ModuleNotFoundError):  # of a library that this environment does without
                    importlib.import_module(module)
        if (threads := len(os.listdir("/proc/self/task"))) != 1:
            sys.exit(f"{threads} threads after the imports; such a process cannot be forked")
        gc.collect()
        gc.freeze()  # or each process would look through, and so copy, all that was imported
        serve(listening)


def modules_of(package: ModuleType) -> list[str]:
    """Return the names of the modules of a package of Quartet, but programs and the parts that few runs need."""
    if not package.__name__.startswith("quartet_"):
        return []
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=lambda _: None)
    return [module.name for module in found if not any(part in module.name for part in OPTIONAL)]


def serve(listening: socket.socket) -> None:
    """Fork for each connection, report ends, and kill what nobody waits for."""
    selector = selectors.DefaultSelector()
    selector.register(listening, selectors.EVENT_READ)
    while True:
        key, _ = selector.select()[0]
        if key.fileobj is listening:
            connection, _ = listening.accept()
            message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE, _MOST_DESCRIPTORS)
            if not message:  # killed before it had asked
                connection.close()
                continue
            asked = json.loads(message)
            if (pid := os.fork()) == 0:
                for each in [*selector.get_map().values()]:
                    os.close(each.fd) if each.fd == each.fileobj else each.fileobj.close()
                connection.close()
                selector.close()
                end(become(asked, *descriptors))
            for descriptor in descriptors:
                os.close(descriptor)
            send(connection, pid)
            account = asked["environment"].get(ACCOUNT)
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection, account))
            selector.register(connection, selectors.EVENT_READ, pid)
        elif key.fileobj == key.fd:  # a process has ended
            pid, connection, account = key.data
            _, status, used = os.wait4(pid, 0)
            if account:
                with open(account, "a") as seconds:
                    print(used.ru_utime + used.ru_stime, file=seconds)
            send(connection, os.waitstatus_to_exitcode(status))
            selector.unregister(key.fd)
            os.close(key.fd)
            with contextlib.suppress(KeyError):
                selector.unregister(connection)
            connection.close()
        else:
            with contextlib.suppress(ConnectionError):  # it may have ended with something unread
                if asked := key.fileobj.recv(32):
                    os.kill(key.data, int(asked))
                    continue
            os.kill(key.data, signal.SIGKILL)
            selector.unregister(key.fileobj)


def send(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(ConnectionError):  # the asker was killed
        connection.send(str(number).encode())


def become(asked: dict, *descriptors: int) -> int:
    """Go on as the process that was asked for and return its exit status."""
    die_with_parent()
    if asked["leads_session"] or "vllm" not in sys.modules:
        os.setsid()
    else:
        os.setpgid(0, 0)  # as vLLM's workers do themselves, which no leader of a session can
    *passed, network = (fcntl.fcntl(each, fcntl.F_DUPFD, _MOST_DESCRIPTORS) for each in descriptors)
    for each in descriptors:  # which may have a number that another is to have
        os.close(each)
    for number, each in zip(asked["descriptors"], passed, strict=True):
        os.dup2(each, number)
        os.close(each)
    join_network(network)
    os.chdir(asked["folder"])
    os.umask(asked["umask"])
    for name, limit in asked["limits"].items():
        resource.setrlimit(getattr(resource, name), limit)
    os.environ.clear()
    os.environ.update(asked["environment"])
    if "quartet_rollout" in sys.modules:
        from quartet_rollout.engines.transformers_engine import engine

        # The engine's process is forked, too; what reads the rollout's stderr is not, and ends at once with it.
        engine.sys = types.SimpleNamespace(executable=asked["python"])
    if "vllm" in sys.modules:
        # Its engine core and workers, and the process in which it looks at a model's class.
        multiprocessing.set_executable(asked["python"])
        sys.modules["vllm.model_executor.models.registry"]._SUBPROCESS_COMMAND[0] = asked["python"]
    sys.path[:0] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (as long as the process lives)
    sys.stdout.reconfigure(line_buffering=True)
    status = 0
    try:
        run(asked["arguments"])
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except BaseException:  # what would have been the interpreter's traceback
        status = 1
        sys.excepthook(*sys.exc_info())
    return status


def end(status: int) -> NoReturn:
    """End as an interpreter does, but for taking all modules apart, which takes as long as much of what tests start."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run(words: list[str]) -> None:
    """Do what `python` does with -m NAME, -c CODE or FILE and their arguments."""
    while words[0].startswith("-") and words[0] not in ("-m", "-c"):  # as multiprocessing passes its own options on
        words = words[2:] if words[0] == "-X" else words[1:]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(words[1], {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent.absolute()))
        runpy.run_path(words[0], run_name="__main__")


def join_network(descriptor: int) -> None:
    """Be in a network namespace."""
    if not os.path.samestat(os.stat("/proc/self/ns/net"), os.fstat(descriptor)):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), "cannot join the asker's network namespace")
    os.close(descriptor)


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
