"""The fields of a prompt, in a line of JSONL or in Python: those of ColossalChat and more."""

import difflib
import json
import struct
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator, model_validator
from quartet.v1 import experience_pb2, reward_pb2, tensor_pb2

from quartet_client.errors import InputError
from quartet_common.chats import MEDIA, called_tools, content_text, from_json, to_chat
from quartet_common.config import SamplingSection
from quartet_common.references import answer_text, is_program, program_text, read_cases
from quartet_common.run_spec import environment_spec, verifier_spec
from quartet_common.sections import AnyEnvironment, Section, Verifiers
from quartet_common.text import encodable
from quartet_common.values import check_values


def _json_text(value: Any) -> Any:
    # Notes may be any JSON value; the contract has a string.
    return value if isinstance(value, str) else json.dumps(value)


class Message(Section):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(content_text)]
    tool_calls: Annotated[list[dict[str, Any]], BeforeValidator(called_tools)] = []
    tool_call_id: str = ""
    name: str = ""
    reasoning_content: str = ""

    @model_validator(mode="before")
    @classmethod
    def _nulls(cls, fields: Any) -> Any:
        """Leave out keys that are null; a message with tool calls needs no content."""
        if not isinstance(fields, Mapping):
            return fields
        own = {key: value for key, value in fields.items() if value is not None}
        return {"content": "", **own} if own.get("tool_calls") else own


class TestCases(Section):
    """Test cases of a programming problem: `outputs[i]` is expected for `inputs[i]`."""

    __test__ = False  # not a test class, whatever pytest thinks of its name

    inputs: list[str] = Field(min_length=1)
    outputs: list[str] = Field(min_length=1)
    fn_name: str = Field("", description="Function under test; empty: a program that reads standard input.")

    @model_validator(mode="after")
    def _pairs(self) -> "TestCases":
        if len(self.inputs) != len(self.outputs):
            raise ValueError(
                f"{len(self.inputs)} inputs and {len(self.outputs)} outputs; there must be as many of each"
            )
        return self


_INPUTS = ("messages", "prompt", "token_ids")


class Prompt(Section):
    """A problem: one of `messages`, `prompt`, `token_ids` and `task`, and what completions are checked against."""

    messages: list[Message] | None = Field(
        None,
        min_length=1,
        description="A chat: a user's text, one message or a list; rendered with the model's chat template.",
    )
    tools: Annotated[list[dict[str, Any]], BeforeValidator(from_json)] = Field(
        [],
        description="Definitions of the chat's tools for its template: functions in JSON Schema, or their JSON text.",
    )
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(from_json)] = Field(
        {}, description="Variables of the chat template, such as enable_thinking."
    )
    prompt: str | None = Field(None, min_length=1, description="Text, tokenized as it stands, without a template.")
    token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = Field(
        None, min_length=1, description="Token ids, used as they are."
    )
    task: dict[str, Any] | None = Field(
        None,
        description="A task of an agent, an object that only its environment reads (docs/agents.md). Beside another "
        "input it is a column.",
    )
    gt_answer: Annotated[str, BeforeValidator(answer_text)] = Field("", description="The reference answer.")
    entry_point: str = Field("", description="Function under test.")
    test_cases: TestCases | None = Field(None, description="Inputs and expected outputs of a programming problem.")
    test_program: Annotated[str, BeforeValidator(program_text)] = Field(
        "", description="Assert-style test program, as in HumanEval and MBPP; a list of statements is one."
    )
    id: str = Field(
        "", coerce_numbers_to_str=True, description="Name of the problem, stable from pass to pass; at most 256 bytes."
    )
    verifiers: Verifiers = Field([], description="Verifiers of this prompt; empty: the run's.")
    sampling: SamplingSection | None = Field(None, description="Sampling of this prompt; unset keys: the run's.")
    environment: AnyEnvironment | None = Field(
        None,
        description="Environment of this prompt, by name or with parameters; unset: the run's.",
    )
    teacher: str = Field("", description="Teacher of this prompt, one of run.teachers; empty: the first of them.")
    metadata: Annotated[dict[str, Annotated[str, BeforeValidator(_json_text)]], BeforeValidator(from_json)] = Field(
        {}, description="Notes, kept as text: an object, or its JSON text."
    )
    columns: dict[str, Any] = Field(
        {}, description="Further values for reward functions; keys that are not listed here are added to them."
    )

    @model_validator(mode="before")
    @classmethod
    def _columns(cls, fields: Any) -> Any:
        """Move unknown keys to `columns`; refuse those that look like a misspelled field."""
        if not isinstance(fields, dict):
            return fields
        columns = {key: value for key, value in fields.items() if key not in cls.model_fields}
        for key in columns:
            if close := difflib.get_close_matches(str(key), cls.model_fields, n=1, cutoff=0.82):
                raise ValueError(f'unknown field "{key}"; did you mean "{close[0]}"?')
            if key in MEDIA and fields[key]:
                raise ValueError(
                    f'got "{key}", which the model would not see; allowed: text; leave the column out by a function, '
                    'or put it into "columns" if a reward function reads it'
                )
        task, has_input = fields.get("task"), any(fields.get(name) is not None for name in _INPUTS)
        if task is not None and (has_input or not isinstance(task, dict)):
            columns["task"] = task
        if teacher := fields.get("teacher"):  # a text is both: the run may have no teachers
            columns["teacher"] = teacher
        known = {
            key: value
            for key, value in fields.items()
            if key not in columns or (key == "teacher" and isinstance(value, str))
        }
        given = known.get("columns", {})
        return {**known, "columns": columns | given} if columns and isinstance(given, dict) else fields

    @model_validator(mode="before")
    @classmethod
    def _statements(cls, fields: Any) -> Any:
        """Take a list of statements under `test_cases` as what it is, a test program."""
        if not isinstance(fields, dict) or not is_program(fields.get("test_cases")) or fields.get("test_program"):
            return fields
        return {**fields, "test_cases": None, "test_program": fields["test_cases"]}

    @field_validator("test_cases", mode="before")
    @classmethod
    def _cases(cls, value: Any, info: ValidationInfo) -> Any:
        if not value or isinstance(value, TestCases):
            return value or None
        return read_cases(value, info.data.get("entry_point", ""))

    @field_validator("columns")
    @classmethod
    def _are_json(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"allowed are JSON values: {error}") from error
        return value

    @field_validator("messages", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        turn = {"role": "user", "content": value} if isinstance(value, str) else value
        return [turn] if isinstance(turn, Mapping) else turn

    @field_validator("id")
    @classmethod
    def _short_id(cls, value: str) -> str:
        if len(value.encode()) > 256:
            raise ValueError("at most 256 bytes are allowed")
        return value

    @model_validator(mode="after")
    def _one_input(self) -> "Prompt":
        given = [name for name in (*_INPUTS, "task") if getattr(self, name) is not None]
        if len(given) != 1:
            others = f", but {', '.join(self.columns)}" if self.columns else ""
            came = " and ".join(f'"{name}"' for name in given) if given else f"none of them{others}"
            raise ValueError(f'got {came}; exactly one of "messages", "prompt", "token_ids" and "task" is allowed')
        for name in ("tools", "chat_template_kwargs"):
            if getattr(self, name) and self.messages is None:
                raise ValueError(f'got "{name}" with "{given[0]}"; allowed with "messages", for their chat template')
        return self

    @property
    def has_reference(self) -> bool:
        """True if there is something to check completions against; a task's environment has it."""
        return self.task is not None or bool(self.gt_answer.strip() or self.test_cases or self.test_program)

    @classmethod
    def parse(cls, value: "PromptLike | None", where: str = "prompt") -> "Prompt":
        """Return a prompt from its text, its fields, or itself.

        Raises:
            InputError: `where`, the field, what came and what is allowed.
        """
        if isinstance(value, Prompt):
            return value
        fields = {"prompt": value} if isinstance(value, str) else value
        if not isinstance(fields, Mapping):
            raise InputError(
                f"{where}: got {encodable(repr(fields), 80)}; allowed: an object with a prompt's fields, or its text"
            )
        try:
            check_values(fields)
            return cls.model_validate(dict(fields))
        except ValidationError as error:
            raise InputError(f"{where}: {_first_problem(error)}") from error
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"{where}: {error}") from error

    def reference(self) -> reward_pb2.Reference:
        """Return what completions are checked against."""
        cases = self.test_cases
        return reward_pb2.Reference(
            answer=self.gt_answer,
            test_cases=[
                reward_pb2.TestCase(input=given, output=expected)
                for given, expected in (zip(cases.inputs, cases.outputs, strict=True) if cases else ())
            ],
            test_program=self.test_program,
            entry_point=self.entry_point or (cases.fn_name if cases else ""),
        )

    def to_proto(self, prompt_id: str = "") -> experience_pb2.Prompt:
        """Return the contract's Prompt; `prompt_id` names it if it has no id of its own."""
        message = experience_pb2.Prompt(
            prompt_id=self.id or prompt_id,
            reference=self.reference(),
            verifiers=[verifier_spec(verifier) for verifier in self.verifiers],
            metadata=self.metadata,
            columns=json.dumps(self.columns, ensure_ascii=False) if self.columns else "",
            teacher=self.teacher,
        )
        if self.messages is not None:
            turns = [turn.model_dump() for turn in self.messages]
            message.chat.CopyFrom(to_chat(turns, self.tools, self.chat_template_kwargs))
        elif self.prompt is not None:
            message.text = self.prompt
        elif self.task is not None:
            message.task = json.dumps(self.task)
        else:
            ids = self.token_ids or []
            data = struct.pack(f"<{len(ids)}i", *ids)
            message.token_ids.CopyFrom(tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_INT32, shape=[len(ids)], data=data))
        if self.sampling is not None:
            given = self.sampling.model_dump(exclude_unset=True, exclude_none=True)
            message.sampling.CopyFrom(experience_pb2.SamplingParams(**given))
        if self.environment is not None:
            message.environment.CopyFrom(environment_spec(self.environment))
        return message


PromptLike = Prompt | str | Mapping[str, Any]


def parse_prompts(prompts: PromptLike | Iterable[PromptLike]) -> list[Prompt]:
    """Parse one prompt or several. Raises InputError with the index of the one that is invalid."""
    items = [prompts] if isinstance(prompts, Prompt | str | Mapping) else prompts
    return [Prompt.parse(item, f"prompts[{index}]") for index, item in enumerate(items)]


def _first_problem(error: ValidationError) -> str:
    """Return the first problem as "field: got X; what is allowed"."""
    problem = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if problem["type"] == "extra_forbidden":
        allowed = f"; allowed: {', '.join(Prompt.model_fields)}" if len(problem["loc"]) == 1 else ""
        return f'unknown field "{key}"{allowed}'
    if problem["type"] == "missing":
        there = (
            f"; there are {', '.join(map(str, given))}" if isinstance(given := problem["input"], dict) and given else ""
        )
        return f'"{key}" is missing{there}'
    if not key or message.startswith("got "):
        return message
    return f'"{key}": got {encodable(repr(problem["input"]), 80)}; {message}'
