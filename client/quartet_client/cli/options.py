"""What all commands share: which services they talk to, and running asyncio code."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from quartet_client.async_client import AsyncClient
from quartet_client.data import DataSection
from quartet_client.errors import QuartetError
from quartet_common.config import LoadedConfig, load_config


@dataclass(frozen=True)
class Target:
    """The services a command talks to: a run file's, or the defaults, with overrides."""

    path: Path | None
    overrides: tuple[str, ...]

    def config(self) -> LoadedConfig[DataSection]:
        """Return the configuration. Raises ConfigError."""
        return load_config("data", DataSection, self.path, self.overrides)

    def client(self) -> AsyncClient:
        """Return a client of the services."""
        return AsyncClient.from_config(self.path, self.overrides)


def with_broker(values: tuple[str, ...], broker: str | None) -> tuple[str, ...]:
    return (*values, f'addresses.broker="{broker}"') if broker else values


def targeted(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options --config, --broker, --set, and their Target as its first argument."""

    @click.option("--config", "path", type=click.Path(path_type=Path), help="Run file (TOML) with [addresses].")
    @click.option("--broker", metavar="HOST:PORT", help="Address of the broker.")
    @click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the run file.")
    @functools.wraps(command)
    def wrapped(*args: Any, path: Path | None, broker: str | None, overrides: tuple[str, ...], **kwargs: Any) -> Any:
        return command(Target(path, with_broker(overrides, broker)), *args, **kwargs)

    return wrapped


@contextmanager
def the_launcher(otherwise: str) -> Iterator[None]:
    """For imports from the launcher. Raises QuartetError where it is not installed; `otherwise`: what else to do."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "quartet_local":
            raise
        raise QuartetError(
            "the launcher (package quartet-local, folder deploy/local) is not installed here; install it, or "
            f"{otherwise}"
        ) from error


def asynchronous(command: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    """Run a coroutine function as a command."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return asyncio.run(command(*args, **kwargs))

    return wrapped


run_option = click.option("--run", "run_id", help="The run; by default run.id of the run file, or 'default'.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
