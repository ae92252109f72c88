"""What every section of the run file is made of: its base, functions of files, verifiers and environments."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from google.protobuf.struct_pb2 import Struct
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from quartet_common.python_file import in_a_file, takes_arguments
from quartet_common.values import check_values


class Section(BaseModel):
    """A section of the run file. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _sendable(parameters: dict[str, Any]) -> dict[str, Any]:
    check_values(parameters)
    try:
        Struct().update(parameters)
    except (ValueError, OverflowError, RecursionError) as error:  # a date, a number beyond a double
        raise ValueError(f"allowed are values that JSON has: {error}") from error
    return parameters


SentParameters = Annotated[dict[str, Any], AfterValidator(_sendable)]
"""Parameters that travel as a Struct."""


def _in_a_file(path: str) -> str:
    if not in_a_file(path):
        raise ValueError('allowed: a Python file and a function in it, "reward.py:close"')
    return path


FunctionPath = Annotated[str, AfterValidator(_in_a_file)]
"""A function in a Python file: `reward.py:close`."""


def by_name(value: Any) -> Any:
    """Return the table of a name, or of a function in a file; other values as they are."""
    if not isinstance(value, str):
        return value
    return {"file" if in_a_file(value) else "name": value}


def all_by_name(value: Any) -> Any:
    many = [value] if isinstance(value, str | Mapping) else value
    return [by_name(one) for one in many] if isinstance(many, list) else value


class PluginSection(Section):
    """What a service has by `name`, or a function or class of a Python file by `file`."""

    name: str = ""
    file: FunctionPath | None = None

    @model_validator(mode="before")
    @classmethod
    def _function(cls, fields: Any) -> Any:
        """Take a function that is given under `name`, as other systems name it, as `file`."""
        if not isinstance(fields, Mapping):
            return fields
        if in_a_file(str(fields.get("name"))) and "file" not in fields:
            return {**fields, "name": "", "file": fields["name"]}
        return {"name": "", **fields} if fields.get("file") else fields

    @model_validator(mode="after")
    def _one(self) -> Self:
        if ":" in self.name or self.name.endswith(".py"):
            raise ValueError('name: a function is in a Python file: "reward.py:close"')
        if bool(self.name) == (self.file is not None):
            came = f"name '{self.name}' and file '{self.file}'" if self.name else "neither name nor file"
            raise ValueError(f"got {came}; exactly one of them is allowed")
        return self

    @property
    def spec_name(self) -> str:
        """The name in the contract: the name, or file and function as in the run file."""
        return self.file or self.name


class VerifierSection(PluginSection):
    """A verifier with its weight and parameters: one of the service's by `name`, or a function by `file`."""

    name: str = Field("", description="A verifier of the reward service.")
    file: FunctionPath | None = Field(
        None, description='Instead of a name: a reward function in a Python file, "reward.py:close".'
    )
    weight: float = Field(1.0, description="Multiplies the verifier's reward before the sum.")
    parameters: SentParameters = Field({}, description="Parameters of the verifier; arguments of a function.")


Verifiers = Annotated[
    list[VerifierSection], BeforeValidator(all_by_name, json_schema_input_type=list[str | VerifierSection])
]
"""Verifiers, each as its table, or by its name or function alone."""


class EnvironmentSection(PluginSection):
    """What answers the policy's turns, see docs/environments.md."""

    name: str = Field("single_turn", description="An environment of the rollouts, or of the environment service.")
    file: FunctionPath | None = Field(
        None,
        description='Instead of a name, in a file: an environment, "game.py:Game", or an agent, "agent.py:play".',
    )
    served: bool = Field(
        False,
        description="It is one of the environment service, which plays whole episodes (docs/agents.md). Default: true "
        "for a function of a file that takes arguments.",
    )
    parameters: SentParameters = Field({}, description="Parameters of the environment.")
    max_turns: int = Field(8, ge=1, le=1024, description="Maximum turns of the policy in a completion.")
    max_turn_tokens: int = Field(
        0, ge=0, lt=2**31, description="Maximum tokens of one turn; 0: what is left of max_new_tokens."
    )
    max_answer_tokens: int = Field(
        1024, ge=16, lt=2**31, description="Maximum tokens of one answer; a longer one loses its middle."
    )
    answer_deadline_seconds: float = Field(
        60.0,
        gt=0,
        le=86400,
        description="Maximum wait for one answer; of a served environment: for a whole episode, 600 by default.",
    )
    scored_text: Literal["whole", "last_turn"] = Field("whole", description="Part of a completion that verifiers read.")
    add_verifiers: bool = Field(
        False,
        description="Of a served environment: verifiers score its completions too; their rewards are added to its own.",
    )

    @model_validator(mode="after")
    def _adds_to_its_own(self) -> Self:
        if self.add_verifiers and not self.served:
            raise ValueError("add_verifiers: only a served environment has rewards of its own; leave the key out")
        return self

    @model_validator(mode="before")
    @classmethod
    def _agent(cls, fields: Any) -> Any:
        """Take a function that has arguments, of a file, as an agent: an environment is a class."""
        if not isinstance(fields, Mapping) or "served" in fields:
            return fields
        path = str(fields.get("file") or fields.get("name"))
        return {**fields, "served": True} if in_a_file(path) and takes_arguments(path) else fields


AnyEnvironment = Annotated[
    EnvironmentSection, BeforeValidator(by_name, json_schema_input_type=str | EnvironmentSection)
]
"""An environment, as its table or by its name alone."""
