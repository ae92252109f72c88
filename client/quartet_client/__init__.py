"""Quartet's Python client and the `quartet` command."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quartet_common import __version__

# For type checkers; at run time `__getattr__` imports these.
# ruff: noqa: F401
if TYPE_CHECKING:
    from quartet_client.async_client import AsyncClient
    from quartet_client.client import Client
    from quartet_client.data import load_prompts
    from quartet_client.errors import InputError, QuartetError
    from quartet_client.models import (
        Completion,
        DeadPrompt,
        Evaluation,
        Group,
        Handle,
        Member,
        Run,
        RunStats,
        Score,
        ServiceStatus,
        VersionSpan,
    )
    from quartet_client.prompts import Prompt


# Imported on first use: importing gRPC takes half a second, and Ctrl-C during it must not print a traceback.
_MODULES = {
    "async_client": ("AsyncClient",),
    "client": ("Client",),
    "data": ("load_prompts",),
    "errors": ("InputError", "QuartetError"),
    "prompts": ("Prompt",),
    "models": (
        *("Completion", "DeadPrompt", "Evaluation", "Group", "Handle", "Member", "Run", "RunStats", "Score"),
        *("ServiceStatus", "VersionSpan"),
    ),
}
_HOME_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'quartet_client' has no attribute '{name}'")
    return getattr(import_module(f"quartet_client.{_HOME_OF[name]}"), name)
