"""Quartet's Python client and the `quartet` command.

- `async_client`, `client`: everything a program may ask, for asyncio and for ordinary programs.
- `types`, `runs`, `events`: what they return. `errors`: what they raise.
- `prompts`, `data`: prompts in Python and JSONL, the [data] section, the order of passes.
- `connections`, `submission`, `streams`, `services`: how they talk to the services.
- `feeder`: creates a run and feeds it with prompts. `progress`, `view`: what a run is doing, and its picture.
- `cli`, `commands`: the command.
"""

from quartet_client.async_client import AsyncClient
from quartet_client.client import Client
from quartet_client.data import load_prompts
from quartet_client.errors import InputError, QuartetError
from quartet_client.prompts import Prompt
from quartet_client.runs import Evaluation, Member, Run, RunStats, ServiceStatus
from quartet_client.types import Completion, DeadPrompt, Group, Handle, Score, VersionSpan

__version__ = "0.1.0"

__all__ = [
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
