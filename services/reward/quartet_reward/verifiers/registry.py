"""Loads the verifiers, built in and by the entry points `quartet.verifiers`, and binds them to items' specs."""

import difflib
import inspect
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

from pydantic import ValidationError
from quartet.v1 import reward_pb2

from quartet_common.config import ConfigError
from quartet_common.errors import ContractError, invalid_argument
from quartet_common.values import struct_content
from quartet_reward.errors import VerifierFailure
from quartet_reward.verifiers import answers, text
from quartet_reward.verifiers.base import LARGEST_NUMBER, NUMBER_ALLOWED, Parameters, Verifier
from quartet_reward.verifiers.code import Code
from quartet_reward.verifiers.function import RewardFunction
from quartet_reward.verifiers.reward_model import RewardModelVerifier
from quartet_server.plugins import load_plugins

ENTRY_POINT_GROUP = "quartet.verifiers"

# Any: the parameters of their `verify` are narrower than the Protocol's, which mypy rejects.
_BUILT_IN: tuple[Any, ...] = (*answers.VERIFIERS, *text.VERIFIERS, Code, RewardModelVerifier)
_PARTS = ("name", "description", "parameters", "verify")


def load_verifiers(
    functions: Iterable[RewardFunction] = (), points: Iterable[EntryPoint] | None = None
) -> dict[str, Verifier]:
    """Return all verifiers by name, in alphabetical order.

    Args:
        functions: the user's reward functions.
        points: the entry points to load; by default those of the installed packages.

    Raises:
        ConfigError: an entry point cannot be loaded, is not a verifier with an async `verify`, or its name is taken.
    """
    own = [*(one() for one in _BUILT_IN), *functions]
    found = load_plugins("verifier", ENTRY_POINT_GROUP, own, _PARTS, Parameters, points)
    for name, verifier in found.items():
        if not inspect.iscoroutinefunction(verifier.verify):
            raise ConfigError(f"verifier '{name}' of {type(verifier).__module__}: write its verify as `async def`")
    return found


_CACHED_SPECS = 1024  # a run's items repeat a few specs


@dataclass(frozen=True, slots=True)
class BoundVerifier:
    """A verifier with the weight and parameters of a spec."""

    verifier: Verifier
    weight: float
    parameters: Parameters


class SpecReader:
    """Turns VerifierSpecs into bound verifiers."""

    def __init__(self, verifiers: Mapping[str, Verifier]):
        self._verifiers = verifiers
        self._read: OrderedDict[bytes, BoundVerifier] = OrderedDict()

    def read(self, spec: reward_pb2.VerifierSpec, field: str) -> BoundVerifier:
        """Return the verifier that `spec` names; `field` is the spec's field, for errors.

        Raises:
            ContractError: INVALID_ARGUMENT with the field, the value and what is allowed.
            VerifierFailure: the verifier's parameter model raised another exception.
        """
        key = spec.SerializeToString(deterministic=True)
        bound = self._read.get(key)
        if bound is None:
            parameters = struct_content(spec.parameters, f"{field}.parameters", invalid_argument)
            bound = self.bind(spec.name, spec.weight, parameters, field)
            self._read[key] = bound
            if len(self._read) > _CACHED_SPECS:
                self._read.popitem(last=False)
        return bound

    def bind(self, name: str, weight: float, parameters: Mapping[str, Any], field: str) -> BoundVerifier:
        """Return verifier `name` with its weight (0 means 1) and parameters. Raises as `read` does."""
        verifier = self._verifiers.get(name)
        if verifier is None:
            raise invalid_argument(f"{field}.name", f"'{name}'", _names(name, self._verifiers))
        if not abs(weight) <= LARGEST_NUMBER:
            raise invalid_argument(f"{field}.weight", weight, f"{NUMBER_ALLOWED}; 0 means 1")
        try:
            return BoundVerifier(verifier, weight or 1.0, verifier.parameters.model_validate(dict(parameters)))
        except ValidationError as error:
            raise _refusal(f"{field}.parameters", error, verifier) from error
        except Exception as error:
            raise VerifierFailure.of_exception(name, type(verifier).__module__, error) from error


def _refusal(field: str, error: ValidationError, verifier: Verifier) -> ContractError:
    problem = error.errors(include_url=False)[0]
    key = ".".join([field, *(str(part) for part in problem["loc"])])
    if problem["type"] == "extra_forbidden":
        return invalid_argument(
            key, json.dumps(problem["input"], default=str), f"parameters of '{verifier.name}': {_fields(verifier)}"
        )
    message = problem["msg"].removeprefix("Value error, ")
    return invalid_argument(key, repr(problem["input"]), message[0].lower() + message[1:])


def _fields(verifier: Verifier) -> str:
    return ", ".join(verifier.parameters.model_fields) or "none"


def _names(name: str, verifiers: Mapping[str, Verifier]) -> str:
    close = difflib.get_close_matches(name, verifiers, n=1)
    return ", ".join(verifiers) + (f" (did you mean '{close[0]}'?)" if close else "")
