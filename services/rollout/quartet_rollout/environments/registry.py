"""Environments by name: built-in ones, those of the entry points `quartet.environments`, and those in Python files.

A prompt's environment overrides the run's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from quartet.v1 import broker_pb2, experience_pb2

from quartet_common.config import RunSection
from quartet_common.durations import to_duration, to_seconds
from quartet_common.values import struct_content
from quartet_rollout.environments.base import Environment, Parameters, Tools
from quartet_rollout.environments.conversation import AnswerWriter
from quartet_rollout.environments.python_tool import PythonTool
from quartet_rollout.generation import PromptRefused
from quartet_server.plugins import load_in_file, load_plugins

SINGLE_TURN = "single_turn"
DEFAULT_DEADLINE_SECONDS = 60.0
_LONGEST_DEADLINE_SECONDS = 86400.0
# Fields of an EnvironmentSpec: default, least, most.
_BOUNDS = (
    ("max_turns", 8, 1, 1024),
    ("max_turn_tokens", 0, 0, 2**31 - 1),
    ("max_answer_tokens", 1024, 16, 2**31 - 1),
)


class SingleTurn:
    """No environment; the rollout never calls `begin` (`Environments.choose`)."""

    name = SINGLE_TURN
    description = "Nothing answers: a completion is one turn."
    parameters = Parameters


ENTRY_POINT_GROUP = "quartet.environments"

# Any, because the classes of their parameters differ from the Protocol's.
_BUILT_IN: tuple[Any, ...] = (PythonTool, SingleTurn)
_PARTS = ("name", "description", "parameters", "stop", "begin")


def load_environments(run: RunSection, files: Sequence[str] = ()) -> dict[str, Environment]:
    """Return all environments by name: the installed ones, those in `files`, and the run's if it is in a file.

    Raises ConfigError if one cannot be loaded, is no environment, or has a name that is taken.
    """
    found = load_plugins("environment", ENTRY_POINT_GROUP, [one() for one in _BUILT_IN], _PARTS, Parameters)
    named = {path: f"rollout.environments[{i}]" for i, path in enumerate(files)}
    if run.environment is not None and run.environment.file and not run.environment.served:
        named[run.environment.file] = "run.environment.file"
    return found | {path: load_in_file("environment", path, key, _PARTS, Parameters) for path, key in named.items()}


class UnknownEnvironment(Exception):
    """This rollout has no environment of that name; another rollout may have it."""


@dataclass(frozen=True)
class Chosen:
    """An environment with its parameters and the limits of a completion."""

    environment: Environment
    parameters: Any
    spec: experience_pb2.EnvironmentSpec
    """With defaults filled in."""

    @property
    def scores_last_turn(self) -> bool:
        """Whether verifiers get only the last turn."""
        return self.spec.scored_text == experience_pb2.SCORED_TEXT_LAST_TURN


class Environments:
    """All environments of this rollout, and their tools."""

    def __init__(self, environments: Mapping[str, Environment], tools: Tools):
        self._environments, self.tools = environments, tools
        self.writer: AnswerWriter | None = None
        """Set when the model is loaded."""

    @property
    def names(self) -> list[str]:
        """Their names, in alphabetical order."""
        return sorted(self._environments)

    def choose(self, prompt: experience_pb2.Prompt, spec: broker_pb2.RunSpec | None) -> Chosen | None:
        """Return a prompt's environment; None for a single turn.

        Raises:
            UnknownEnvironment: this rollout does not have it.
            PromptRefused: its parameters or limits are invalid.
        """
        if prompt.HasField("environment"):
            chosen = read_environment(self._environments, prompt.environment, "prompt.environment")
        elif spec is not None and spec.HasField("environment"):
            chosen = read_environment(self._environments, spec.environment, "run.environment")
        else:
            return None
        return None if chosen.environment.name == SINGLE_TURN else chosen


def served_environment(
    prompt: experience_pb2.Prompt, spec: broker_pb2.RunSpec
) -> experience_pb2.EnvironmentSpec | None:
    """Return a prompt's environment if the environment service serves it."""
    chosen = prompt.environment if prompt.HasField("environment") else spec.environment
    return chosen if chosen.served else None


def read_environment(
    environments: Mapping[str, Environment], spec: experience_pb2.EnvironmentSpec, field: str
) -> Chosen:
    """Validate a specification and fill in its defaults. Raises as `Environments.choose`."""
    name = spec.name or SINGLE_TURN
    environment = environments.get(name)
    if environment is None:
        raise UnknownEnvironment(
            f"{field}.name: this rollout has no environment '{name}'; it has: {', '.join(sorted(environments))}"
        )
    given, spec = spec, experience_pb2.EnvironmentSpec()
    spec.CopyFrom(given)
    if not given.HasField("answer_deadline"):
        spec.answer_deadline.CopyFrom(to_duration(DEFAULT_DEADLINE_SECONDS))
    deadline = to_seconds(spec.answer_deadline)
    if not 0 < deadline <= _LONGEST_DEADLINE_SECONDS:
        raise PromptRefused(f"{field}.answer_deadline", f"{deadline:g} s", "above 0 s, at most one day")
    if spec.add_verifiers:
        raise PromptRefused(f"{field}.add_verifiers", True, "none: only a served environment has rewards of its own")
    if spec.scored_text not in experience_pb2.ScoredText.values():
        allowed = ", ".join(experience_pb2.ScoredText.keys()[1:])
        raise PromptRefused(f"{field}.scored_text", spec.scored_text, allowed)
    for name, default, least, most in _BOUNDS:
        value = getattr(given, name) or default
        if not least <= value <= most:
            raise PromptRefused(f"{field}.{name}", value, f"{least} to {most}")
        setattr(spec, name, value)
    return Chosen(environment, _parameters(environment, spec, field), spec)


def _parameters(environment: Environment, spec: experience_pb2.EnvironmentSpec, field: str) -> Any:
    try:
        parameters = struct_content(spec.parameters, f"{field}.parameters", PromptRefused)
        return environment.parameters.model_validate(parameters)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join([field, "parameters", *(str(part) for part in problem["loc"])])
        if problem["type"] == "extra_forbidden":
            keys = ", ".join(environment.parameters.model_fields) or "none"
            raise PromptRefused(key, "an unknown parameter", keys) from error
        raise PromptRefused(key, repr(problem["input"])[:80], problem["msg"]) from error
