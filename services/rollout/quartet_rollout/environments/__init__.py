"""Environments: answers to the policy's turns.

    base.py          the interface (`Environment`, `Episode`), `Turn`, `Answer`, `EnvironmentFailed`: read this first
    registry.py      environments by name; validates the contract's EnvironmentSpec
    episode.py       the loop of one completion: turn, answer, turn, ...
    conversation.py  turns and answers as one sequence of token ids with a loss mask
    tools.py         gives environments the reward service's sandbox
    python_tool.py   runs the policy's programs and inserts their output

docs/environments.md shows how to add one.
"""

from quartet_rollout.environments.base import (  # noqa: F401 (the package's interface)
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
from quartet_rollout.environments.registry import Chosen, Environments, load_environments  # noqa: F401
