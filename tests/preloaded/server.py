"""Forks processes with libraries imported: `python server.py MODULE...`, with a listening socket as standard input.

All modules of a Quartet package are imported at the start, so that later edits of the checkout cannot mix two versions.
Each connection (`client.py`) requests a process that runs as `python ARGUMENTS...` would, with the client's open files,
network namespace, environment, folder, umask and limits, and then sends signals for it. The responses are the process
id and, at its exit, its status, negative for a signal. The process is killed if its client exits first.
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
_MOST_DESCRIPTORS = 250  # in one message
ACCOUNT = "QUARTET_TESTS_ACCOUNT"
"""The variable that names a file for the CPU seconds of each process, which are not counted as the client's."""
PARENT = "--parent="
OPTIONAL = ("__main__", "vllm_engine", "openai_app", "wandb", "nccl", "contract", "reward_model")


def main() -> None:
    """Import the modules, then serve until killed; earlier requests wait."""
    die_with_parent()
    with socket.socket(fileno=os.dup(0)) as listening:
        for name in sys.argv[1:]:
            for module in (name, *modules_of(importlib.import_module(name))):
                with contextlib.suppress(ModuleNotFoundError):  # it needs a library that this environment lacks
                    importlib.import_module(module)
        if worker := sys.modules.get("quartet_reward.math.worker"):
            worker.warm_up()
        if (threads := len(os.listdir("/proc/self/task"))) != 1:
            sys.exit(f"{threads} threads after the imports; such a process cannot be forked")
        gc.collect()
        gc.freeze()  # otherwise the collector of each process would touch, and so copy, all imported objects
        serve(listening)


def modules_of(package: ModuleType) -> list[str]:
    """Return the names of the modules of a Quartet package, except programs and rarely used parts."""
    if not package.__name__.startswith("quartet_"):
        return []
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=lambda _: None)
    return [module.name for module in found if not any(part in module.name for part in OPTIONAL)]


def serve(listening: socket.socket) -> None:
    """Fork for each connection, report exits, and kill processes whose client has exited."""
    selector = selectors.DefaultSelector()
    selector.register(listening, selectors.EVENT_READ)
    while True:
        key, _ = selector.select()[0]
        if key.fileobj is listening:
            connection, _ = listening.accept()
            message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE, _MOST_DESCRIPTORS)
            if not message:  # the client was killed before its request
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
        elif key.fileobj == key.fd:  # a process has exited
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
            with contextlib.suppress(ConnectionError):  # the client may have exited with unread data
                if asked := key.fileobj.recv(32):
                    os.kill(key.data, int(asked))
                    continue
            os.kill(key.data, signal.SIGKILL)
            selector.unregister(key.fileobj)


def send(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(ConnectionError):  # the client was killed
        connection.send(str(number).encode())


def become(asked: dict, *descriptors: int) -> int:
    """Run as the requested process and return its exit status."""
    die_with_parent()
    if asked["leads_session"] or "vllm" not in sys.modules:
        os.setsid()
    else:
        os.setpgid(0, 0)  # not setsid: vLLM's workers call it themselves, and it fails for a process group's leader
    *passed, network = (fcntl.fcntl(each, fcntl.F_DUPFD, _MOST_DESCRIPTORS) for each in descriptors)
    for each in descriptors:  # before dup2, because their numbers may be among the requested ones
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

        # Fork the engine's process, too. The reader of the rollout's stderr is not forked, so that it exits with it.
        engine.sys = types.SimpleNamespace(executable=asked["python"])
    if "vllm" in sys.modules:
        # Its engine core and workers, and the process in which it inspects a model's class.
        multiprocessing.set_executable(asked["python"])
        sys.modules["vllm.model_executor.models.registry"]._SUBPROCESS_COMMAND[0] = asked["python"]
    if "quartet_reward" in sys.modules:
        from quartet_server import worker_process

        # Fork its workers, too: sympy's imports and tables take a second of CPU.
        worker_process.sys = types.SimpleNamespace(executable=asked["python"])
        worker_process._ENVIRONMENT += (ACCOUNT,)
    sys.path[:0] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    # Opened anew: whether they can seek is read then. They stay open until the process ends.
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    status = 0
    try:
        # A worker ends if its parent, the service, is not this one; `client.py` ends with the service.
        run([f"{PARENT}{os.getppid()}" if word.startswith(PARENT) else word for word in asked["arguments"]])
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except BaseException:  # print the traceback, as the interpreter would
        status = 1
        sys.excepthook(*sys.exc_info())
    return status


def end(status: int) -> NoReturn:
    """Exit as an interpreter does, without its slow clean-up of all modules."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run(words: list[str]) -> None:
    """Run -m NAME, -c CODE or FILE with their arguments, as `python` does."""
    while words[0].startswith("-") and words[0] not in ("-m", "-c"):  # skip options of the interpreter
        words = words[2:] if words[0] in ("-X", "-W") else words[1:]
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
    """Enter a network namespace."""
    if not os.path.samestat(os.stat("/proc/self/ns/net"), os.fstat(descriptor)):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), "cannot join the client's network namespace")
    os.close(descriptor)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent exits."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
