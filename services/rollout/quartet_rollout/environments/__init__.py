"""Environments: what answers the policy's turns.

    base.py          the interface (`Environment`, `Episode`), `Turn`, `Answer`, `EnvironmentFailed`: read this first
    registry.py      environments by name; the contract's EnvironmentSpec, read and checked
    episode.py       the loop of one completion: turn, answer, turn, ...
    conversation.py  turns and answers as one sequence of token ids with its mask
    tools.py         what environments may use: the reward service's sandbox
    python_tool.py   runs the policy's programs and answers what they print

docs/environments.md shows how to add one.
"""

from quartet_rollout.environments.base import (
    Answer,
    Environment,
    EnvironmentFailed,
    Episode,
    Execution,
    Parameters,
    Start,
    Tools,
    Turn,
)
from quartet_rollout.environments.registry import Chosen, Environments, load_environments

__all__ = [
    "Answer",
    "Chosen",
    "Environment",
    "EnvironmentFailed",
    "Environments",
    "Episode",
    "Execution",
    "Parameters",
    "Start",
    "Tools",
    "Turn",
    "load_environments",
]
