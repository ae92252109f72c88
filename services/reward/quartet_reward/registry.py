"""Which verifiers there are: this package's own and those of the entry points in the group `quartet.verifiers`."""

from collections.abc import Iterable
from importlib.metadata import EntryPoint
from typing import Any

from quartet_common.plugins import load_plugins
from quartet_reward.verifiers.base import Parameters, Verifier
from quartet_reward.verifiers.boxed import Boxed
from quartet_reward.verifiers.code import Code
from quartet_reward.verifiers.exact import Exact
from quartet_reward.verifiers.format import Format
from quartet_reward.verifiers.function import RewardFunction
from quartet_reward.verifiers.length import Length
from quartet_reward.verifiers.math import Math
from quartet_reward.verifiers.reward_model import RewardModel
from quartet_reward.verifiers.think_answer_tags import ThinkAnswerTags

ENTRY_POINT_GROUP = "quartet.verifiers"

# Any: to a type checker each has parameters of another class than the Protocol's.
_BUILT_IN: tuple[Any, ...] = (Boxed, Code, Exact, Format, Length, Math, RewardModel, ThinkAnswerTags)
_PARTS = ("name", "description", "parameters", "verify")


def load_verifiers(
    functions: Iterable[RewardFunction] = (), points: Iterable[EntryPoint] | None = None
) -> dict[str, Verifier]:
    """Return all verifiers by name, in alphabetical order.

    Args:
        functions: the user's reward functions.
        points: the entry points to load; by default those of the installed packages.

    Raises:
        ConfigError: an entry point cannot be loaded, is no verifier, or takes a name that is taken.
    """
    own = [*(one() for one in _BUILT_IN), *functions]
    return load_plugins("verifier", ENTRY_POINT_GROUP, own, _PARTS, Parameters, points)
