"""What the `quartet` command asks of a launcher, which starts services on this machine: package quartet-local.

The launcher is above the client, so it is found as an entry point: `launcher` of the group `quartet`.
"""

import json
import subprocess
from collections.abc import Callable, Coroutine, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, cast

from quartet_client.async_client import AsyncClient
from quartet_client.data import RunData
from quartet_client.errors import InputError, QuartetError
from quartet_common.config import LoadedConfig


class Plan(Protocol):
    """A checked launch: the run file with all overrides, and the prompts."""

    @property
    def config(self) -> LoadedConfig[Any]: ...

    @property
    def data(self) -> RunData: ...


class Launcher(Protocol):
    """A launcher's module. Functions that return an int return the exit status and print their errors."""

    @staticmethod
    def run(path: Path, overrides: Sequence[str], plain: bool) -> int: ...

    @staticmethod
    def check_run(path: Path, overrides: Sequence[str], say: Callable[[str], None]) -> Plan: ...

    @staticmethod
    def sft(path: Path, overrides: Sequence[str]) -> int: ...

    @staticmethod
    def check_sft(path: Path, overrides: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]: ...

    @staticmethod
    def sweep(path: Path, given: Sequence[str], parallel: int) -> int: ...

    @staticmethod
    def check_sweep(
        path: Path, given: Sequence[str], parallel: int, say: Callable[[str], None]
    ) -> dict[str, list[str]]: ...

    @staticmethod
    def with_model(
        path: Path | None,
        overrides: Sequence[str],
        model: Path,
        version: int,
        work: Callable[[AsyncClient, str], Coroutine[Any, Any, int]],
    ) -> int: ...

    @staticmethod
    def with_reward_service(
        path: Path | None, overrides: Sequence[str], work: Callable[[AsyncClient], Coroutine[Any, Any, int]]
    ) -> int: ...

    @staticmethod
    def run_environments(*arguments: str) -> int: ...

    @staticmethod
    def service_python(name: str) -> Path: ...


def the_launcher(otherwise: str) -> Launcher:
    """Return the installed launcher. Raises QuartetError if there is none; `otherwise`: what else to do."""
    for found in entry_points(group="quartet", name="launcher"):
        return cast(Launcher, found.load())
    raise QuartetError(
        "the launcher (package quartet-local, folder deploy/local) is not installed here; install it, or " + otherwise
    )


def run_in_environment(service: str, module: str, *words: str) -> dict[str, Any]:
    """Run a module of a service in its environment on this host, and return the JSON object that it prints.

    Raises:
        InputError: it refuses, with its reason.
        QuartetError: there is no such environment.
    """
    python = the_launcher("make a checkout's environments on this host").service_python(service)
    if not python.exists():
        raise QuartetError(
            f"the {service}'s environment, which does this, is not made: '{python}' is missing; make it: "
            f"python3 deploy/local/environments.py {service}"
        )
    command = [str(python), "-m", module, *words]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"{module} ended with status {done.returncode}"]
        raise InputError("; ".join(lines) if done.returncode == 2 else lines[-1])
    return dict(json.loads(done.stdout))
