"""Quartet's Python client and the `quartet` command."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

__version__ = "0.1.0"

# Imported at first use: gRPC takes half a second, and the command must be able to say "interrupted" before it is there.
_HOME_OF = {
    "AsyncClient": "quartet_client.async_client",
    "Client": "quartet_client.client",
    "Completion": "quartet_client.models",
    "DeadPrompt": "quartet_client.models",
    "Evaluation": "quartet_client.models",
    "Group": "quartet_client.models",
    "Handle": "quartet_client.models",
    "InputError": "quartet_client.errors",
    "Member": "quartet_client.models",
    "Prompt": "quartet_client.prompts",
    "QuartetError": "quartet_client.errors",
    "Run": "quartet_client.models",
    "RunStats": "quartet_client.models",
    "Score": "quartet_client.models",
    "ServiceStatus": "quartet_client.models",
    "VersionSpan": "quartet_client.models",
    "load_prompts": "quartet_client.data",
}

__all__ = [  # noqa: F822 (see __getattr__)
    "AsyncClient",
    "Client",
    "Completion",
    "DeadPrompt",
    "Evaluation",
    "Group",
    "Handle",
    "InputError",
    "Member",
    "Prompt",
    "QuartetError",
    "Run",
    "RunStats",
    "Score",
    "ServiceStatus",
    "VersionSpan",
    "load_prompts",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'quartet_client' has no attribute '{name}'")
    return getattr(import_module(_HOME_OF[name]), name)
