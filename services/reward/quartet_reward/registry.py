"""Which verifiers there are: this package's own and those of the entry points in the group `quartet.verifiers`."""

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from quartet_common.config import ConfigError
from quartet_reward.verifiers.base import Parameters, Verifier
from quartet_reward.verifiers.boxed import Boxed
from quartet_reward.verifiers.code import Code
from quartet_reward.verifiers.exact import Exact
from quartet_reward.verifiers.format import Format
from quartet_reward.verifiers.length import Length
from quartet_reward.verifiers.math import Math
from quartet_reward.verifiers.reward_model import RewardModel
from quartet_reward.verifiers.think_answer_tags import ThinkAnswerTags

ENTRY_POINT_GROUP = "quartet.verifiers"

# Any: to a type checker each has parameters of another class than the Protocol's.
_BUILT_IN: tuple[Any, ...] = (Boxed, Code, Exact, Format, Length, Math, RewardModel, ThinkAnswerTags)


def load_verifiers(points: Iterable[EntryPoint] | None = None) -> dict[str, Verifier]:
    """Return all verifiers by name, in alphabetical order.

    Args:
        points: the entry points to load; by default those of the installed packages.

    Raises:
        ConfigError: an entry point cannot be loaded, is no verifier, or takes a name that is taken.
    """
    verifiers: dict[str, Verifier] = {verifier.name: verifier() for verifier in _BUILT_IN}
    for point in entry_points(group=ENTRY_POINT_GROUP) if points is None else points:
        verifier = _load(point)
        if verifier.name in verifiers:
            raise ConfigError(
                f"entry point {point.value}: its verifier's name '{verifier.name}' is taken; choose another"
            )
        verifiers[verifier.name] = verifier
    return dict(sorted(verifiers.items()))


def _load(point: EntryPoint) -> Verifier:
    try:
        verifier = point.load()()
    except Exception as error:  # any module may be named here
        raise ConfigError(f"entry point {point.value}: cannot be loaded: {type(error).__name__}: {error}") from error
    lacking = [part for part in ("name", "description", "parameters", "verify") if not hasattr(verifier, part)]
    if lacking:
        raise ConfigError(f"entry point {point.value}: no verifier: it lacks {', '.join(lacking)}")
    if not (isinstance(verifier.parameters, type) and issubclass(verifier.parameters, Parameters)):
        raise ConfigError(
            f"entry point {point.value}: 'parameters' must be a subclass of quartet_reward.verifiers.base.Parameters"
        )
    return verifier
