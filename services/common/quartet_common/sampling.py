"""The sampling parameters: name, default, range, and effect on a token's distribution.

Run file, broker, rollout and trainer take them from `SamplingParameters`; the contract has a field of the same name
(experience.proto, SamplingParams). CONTRIBUTING.md lists what adding one takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from quartet.v1 import experience_pb2

_UNBOUNDED = 2**31 - 1


class Effect(Enum):
    """A parameter's effect on the distribution that a token is drawn from, which decides if a trainer can replay it."""

    RECORDED = "recorded"
    """None, or one that is recorded with each completion (temperature)."""
    REMOVES = "removes"
    """It removes candidates; a run with sampling masks records the remaining ones."""
    CHANGES = "changes"
    """It changes probabilities token by token: the log-probs are not the model's and cannot be recomputed."""


TokenId = Annotated[int, Field(ge=0, le=_UNBOUNDED)]
Text = Annotated[str, Field(min_length=1)]


class SamplingParameters(BaseModel):
    """How completions are drawn; unset keys take the rollout's defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    temperature: float = Field(1.0, ge=0, le=1e30, description="Softmax temperature; 0 is greedy.")
    top_p: Annotated[float, Effect.REMOVES] = Field(1.0, gt=0, le=1, description="Nucleus mass.")
    top_k: Annotated[int, Effect.REMOVES] = Field(0, ge=0, le=_UNBOUNDED, description="Candidates kept; 0 keeps all.")
    min_p: Annotated[float, Effect.REMOVES] = Field(
        0.0, ge=0, lt=1, description="Smallest probability relative to the likeliest token."
    )
    repetition_penalty: Annotated[float, Effect.CHANGES] = Field(
        1.0,
        gt=0,
        le=1e30,
        description="Divides positive and multiplies negative logits of tokens that occurred before.",
    )
    presence_penalty: Annotated[float, Effect.CHANGES] = Field(
        0.0, ge=-2, le=2, description="Subtracted from the logits of tokens that the completion has already."
    )
    frequency_penalty: Annotated[float, Effect.CHANGES] = Field(
        0.0, ge=-2, le=2, description="Subtracted from a token's logit for each time that the completion has it."
    )
    logit_bias: Annotated[dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], Effect.CHANGES] = Field(
        {}, description="Added to the logits, by token id."
    )
    bad_words: Annotated[tuple[Text, ...], Effect.REMOVES] = Field(
        (), description="Texts whose last token is never drawn after the tokens before it."
    )
    max_new_tokens: int = Field(1024, ge=1, le=_UNBOUNDED, description="Maximum tokens of a completion.")
    min_tokens: Annotated[int, Effect.REMOVES] = Field(
        0, ge=0, le=_UNBOUNDED, description="Minimum tokens before a completion can end or stop."
    )
    stop: tuple[Text, ...] = Field((), description="Strings that end a completion; they are kept in it.")
    stop_token_ids: tuple[TokenId, ...] = Field((), description="Token ids that end a completion.")
    seed: int | None = Field(
        None,
        ge=-(2**63),
        lt=2**63,
        description="Makes, with a prompt's id, the seed of its completions; unset: random.",
    )


class SamplingSection(SamplingParameters):
    """How completions are drawn, and how many; unset keys take the rollout's defaults."""

    n: int = Field(0, ge=0, le=1024, description="Completions per prompt; 0: the group size (1 in evaluations).")


FIRST_RELEASE = frozenset(
    ("n", "temperature", "top_p", "top_k", "min_p", "max_new_tokens", "stop", "stop_token_ids", "seed")
)
"""Parameters that every peer and engine supports. Others are sent only if they are set, and an engine that supports one
has the capability `capability(name)`."""


def capability(name: str) -> str:
    """Return the capability of an engine that supports a parameter newer than the first release."""
    return f"sampling.{name}"


def altered(values: BaseModel, *effects: Effect) -> dict[str, Any]:
    """Return the parameters that are not at their defaults, by name; only those of `effects`, if given."""
    return {
        name: value
        for name, info in SamplingParameters.model_fields.items()
        if (value := getattr(values, name)) != info.default and (not effects or set(effects) & {*info.metadata})
    }


def given(message: experience_pb2.SamplingParams) -> dict[str, Any]:
    """Return what a message sets, by name: fields with presence if present, others if not zero or empty."""
    found = {}
    for field, value in message.ListFields():
        if field.name in SamplingSection.model_fields:
            mapping = field.message_type is not None
            found[field.name] = dict(value) if mapping else tuple(value) if field.is_repeated else value
    return found


def to_message(values: SamplingParameters, names: Iterable[str] | None = None) -> experience_pb2.SamplingParams:
    """Return the contract's message, with the named parameters only if `names` is given."""
    keys = SamplingSection.model_fields.keys() & (values.__class__.model_fields if names is None else set(names))
    return experience_pb2.SamplingParams(**values.model_dump(include=set(keys), exclude_none=True))


def refusal(error: ValidationError) -> tuple[str, Any, str]:
    """Return name, value and allowed range of the first parameter that is out of range."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    bounds = _bounds(name) if len(first["loc"]) == 1 else ""
    return name, first["input"], bounds or first["msg"][0].lower() + first["msg"][1:]


def check(message: experience_pb2.SamplingParams) -> tuple[str, Any, str] | None:
    """Return `refusal` of the first field of a message that is out of range; None if there is none."""
    if not (values := given(message)):  # most prompts set none
        return None
    try:
        SamplingSection(**values)
    except ValidationError as error:
        return refusal(error)
    return None


def unreplayable(message: experience_pb2.SamplingParams) -> tuple[str, Any] | None:
    """Return name and value of the first parameter that a trainer cannot replay; None if there is none."""
    set_here = altered(SamplingParameters.model_construct(**given(message)), Effect.CHANGES)
    return next(iter(set_here.items()), None)


def _bounds(name: str) -> str:
    """Return the range of a number in words, e.g. "in (0, 1]"; empty where it has none."""
    if (info := SamplingSection.model_fields.get(name)) is None:
        return ""
    found = {
        kind: getattr(each, kind) for each in info.metadata for kind in ("ge", "gt", "le", "lt") if hasattr(each, kind)
    }
    low, high = found.get("ge", found.get("gt")), found.get("le", found.get("lt"))
    if low is None:
        return ""
    if high is None or high >= _UNBOUNDED:
        return f"{'>=' if 'ge' in found else '>'} {low:g}"
    if info.annotation is int:
        return f"{low} to {high}"
    return f"in {'[' if 'ge' in found else '('}{low:g}, {high:g}{']' if 'le' in found else ')'}"
