"""The one declaration of the sampling parameters: the contract has the same names, each range is checked and said."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from quartet.v1 import experience_pb2

from quartet_common.config import RunSection
from quartet_common.run_spec import run_spec
from quartet_common.sampling import (
    FIRST_RELEASE,
    Effect,
    SamplingParameters,
    SamplingSection,
    altered,
    check,
    given,
    to_message,
    unreplayable,
)

NAMES = sorted(SamplingParameters.model_fields)
OTHERS: dict[Any, Any] = {float: 0.75, int: 3, int | None: 3}


def other_value(name: str) -> Any:
    """A value that a parameter may have and that is not its default."""
    info = SamplingParameters.model_fields[name]
    if info.default == ():
        return (7,) if name.endswith("_ids") else ("x",)
    return {7: 1.5} if info.default == {} else OTHERS[info.annotation]


def test_the_contract_has_the_parameters_that_are_declared() -> None:
    fields = {field.name for field in experience_pb2.SamplingParams.DESCRIPTOR.fields}
    assert fields == set(SamplingSection.model_fields)


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_goes_from_the_run_file_into_the_specification_and_back(name: str) -> None:
    sampling = SamplingSection(**{name: other_value(name)})
    spec = run_spec(RunSection(sampling=sampling)).sampling
    assert given(spec)[name] == other_value(name) and SamplingSection(**given(spec)) == sampling
    assert altered(sampling) == {name: other_value(name)}
    assert given(to_message(sampling)) == given(to_message(SamplingSection())) | {name: other_value(name)}


def test_what_came_after_the_first_release_is_sent_only_where_it_is_set() -> None:
    assert given(run_spec(RunSection()).sampling).keys() <= FIRST_RELEASE


@pytest.mark.parametrize("name", NAMES)
def test_a_trainer_is_told_of_what_it_cannot_replay_and_of_nothing_else(name: str) -> None:
    changes = Effect.CHANGES in SamplingParameters.model_fields[name].metadata
    message = to_message(SamplingSection(**{name: other_value(name)}), {name})
    assert unreplayable(message) == ((name, other_value(name)) if changes else None)
    assert unreplayable(to_message(SamplingSection())) is None


@pytest.mark.parametrize(
    ("wrong", "allowed"),
    [
        ({"temperature": -1.0}, ">= 0"),
        ({"top_p": 0.0}, "in (0, 1]"),
        ({"n": 1025}, "0 to 1024"),
        ({"logit_bias": {7: 101.0}}, "input should be less than or equal to 100"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_range_is_checked_in_messages_as_in_the_run_file(wrong: dict[str, Any], allowed: str) -> None:
    (name,) = wrong
    refused = check(experience_pb2.SamplingParams(**wrong))
    assert refused is not None and (refused[0], refused[2]) == (name, allowed)
    with pytest.raises(ValidationError):
        SamplingSection(**wrong)
    assert check(experience_pb2.SamplingParams()) is None
