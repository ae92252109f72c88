"""The prompts of a run: their sources (files, functions, datasets of the hub), checks, and the order of their use."""

import difflib
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, Field, TypeAdapter, WrapValidator, field_validator, model_validator
from quartet.v1 import experience_pb2

from quartet_client.columns import JOINED, Columns, mapped, proposal
from quartet_client.curriculum import check_curriculum
from quartet_client.errors import InputError
from quartet_client.mixture import Part, Stop, Use, mix
from quartet_client.packs import converted, filled, with_pack
from quartet_client.prompts import Message, Prompt
from quartet_client.rows import Row, plain, source_rows
from quartet_client.tasks import list_tasks
from quartet_common.config import LoadedConfig, RunSection, SamplingSection, validate_section
from quartet_common.sections import Section, SentParameters, Verifiers
from quartet_common.sources import RowSource, as_table
from quartet_common.values import NAME, NAME_ALLOWED


class DataSource(RowSource):
    """Prompts: a file or a function by `path`, a dataset of the hub by `dataset`, or tasks by `environment`."""

    owners = {**RowSource.owners, "environment": ("parameters", "limit")}
    named = 'in a list of sources, source = "NAME" names it'

    environment: str = Field(
        "", description='Served environment whose tasks are the prompts, instead of a path: "agent.py:play", or a name.'
    )
    parameters: SentParameters = Field({}, description="Its parameters. Default: the run's, if it is the run's own.")
    limit: int = Field(0, ge=0, description="Most tasks of the environment; 0: all.")
    fields: dict[str, str | Annotated[list[str], Field(min_length=1)]] = Field(
        {},
        description='The column that each field of the prompts is read from: { prompt = "question" }; a dot goes into '
        'a column, a list joins several: { gt_answer = "reward_model.ground_truth" }. Other columns are for reward '
        "functions. Default: the columns have the fields' names.",
    )
    pack: str = Field(
        "", description="An evaluation pack, such as gsm8k (docs/evaluation.md), whose keys are the defaults of these."
    )
    template: str = Field(
        "", description="The user's text of each prompt, in which {NAME} is a column, instead of an input of the rows."
    )
    system_prompt: str = Field("", description="Prepended to its chats that have no system message.")
    verifiers: Verifiers = Field([], description="Verifiers of its prompts without their own. Default: the run's.")
    sampling: SamplingSection | None = Field(
        None, description="Sampling of its prompts without their own, with `n` completions; unset keys: the run's."
    )

    @field_validator("fields")
    @classmethod
    def _of_prompts(cls, value: dict[str, Columns]) -> dict[str, Columns]:
        for field, columns in value.items():
            if field not in Prompt.model_fields:
                close = difflib.get_close_matches(field, Prompt.model_fields, n=1)
                allowed = f"did you mean '{close[0]}'?" if close else f"allowed: {', '.join(Prompt.model_fields)}"
                if not close and columns in Prompt.model_fields:
                    allowed = f'a column is on the right of its field: {{ {columns} = "{field}" }}'
                raise ValueError(f"a prompt has no field '{field}'; {allowed}")
            if not isinstance(columns, str) and field not in JOINED:
                raise ValueError(f"'{field}' has one column; several can be joined of {', '.join(JOINED)}")
        return value

    @model_validator(mode="before")
    @classmethod
    def _of_a_pack(cls, value: Any) -> Any:
        return with_pack(value) if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _tasks_have_no_columns(self) -> "DataSource":
        if self.environment and (self.fields or self.template or self.system_prompt):
            raise ValueError("fields, template and system_prompt are of rows, which tasks are not; leave them out")
        return self

    @property
    def title(self) -> str:
        """Its name in errors."""
        return f"the tasks of {self.environment}" if self.environment else super().title

    @property
    def is_lines(self) -> bool:
        """Whether it is a JSONL file whose rows are prompts as they stand."""
        changed = self.fields or self.template or self.system_prompt or self.verifiers or self.sampling
        return self.is_jsonl and not changed

    def rows(self, key: str = "data.train") -> Iterator[Row]:
        """Yield its rows as they are.

        Args:
            key: the run-file key of this source, for errors.

        Raises:
            InputError: it cannot be read.
        """
        if self.environment:
            raise InputError(f"{key}.environment: tasks are read with a run's data alone; allowed here: a path")
        return source_rows(self, key)


class TrainSource(DataSource):
    """One of several sources of training prompts."""

    weight: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="Its share of the prompts, relative to the others' weights."
    )
    source: str = Field("", description="Its name in ids and metrics. Default: that of its file, dataset or agent.")

    @field_validator("source")
    @classmethod
    def _named(cls, value: str) -> str:
        if not NAME.fullmatch(value):
            raise ValueError(f"allowed: {NAME_ALLOWED}")
        return value

    @property
    def label(self) -> str:
        """Its name: what is given, or made of what it is read from."""
        own = self.dataset.rpartition("/")[2] or self.environment or str(self.path)
        return self.source or re.sub(r"[^a-zA-Z0-9._-]+", "-", Path(own).stem).strip("-._")[:64] or "data"


AnySource = Annotated[DataSource, BeforeValidator(as_table, json_schema_input_type=Path | DataSource)]
"""A source by its path alone, or with all its keys."""


_SOURCES = TypeAdapter(
    Annotated[list[Annotated[TrainSource, BeforeValidator(as_table)]], Field(min_length=1, max_length=64)]
)


def _one_or_many(value: Any, _: Any) -> Any:
    # Not pydantic's union, whose errors are those of both forms.
    if isinstance(value, list):
        return _SOURCES.validate_python(value)
    if isinstance(value, Mapping) and (only := [key for key in ("weight", "source") if key in value]):
        raise ValueError(f"{only[0]} belongs to one of several sources; allowed: in a list, train = [{{ … }}, {{ … }}]")
    return None if value is None else DataSource.model_validate(as_table(value))


def _asked(source: DataSource, rows: Iterable[Row], key: str) -> Iterator[Row]:
    """Yield the rows as their pack reads them, with the text of `template` as their column "messages"."""
    inputs = () if source.fields else ("prompt", "token_ids")
    for place, row in rows:
        if isinstance(row, dict):
            try:
                row = converted(row, source.pack)
                text = {"messages": filled(source.template, row)} if source.template else {}
            except (LookupError, ValueError) as error:
                raise InputError(f"{key}.template: {source.title}, {place} {error.args[0]}") from None
            row = {name: value for name, value in row.items() if not text or name not in inputs} | text
        yield place, row


def _check_system_prompt(key: str, prompts: Iterable[Prompt]) -> None:
    """Raise InputError if no prompt is a chat, or may become one: a system prompt would not be used."""
    if not any(prompt.messages or prompt.task or prompt.environment for prompt in prompts):
        raise InputError(
            f'{key}.system_prompt: got one, and no prompt is a chat; allowed: none, or prompts under "messages", such '
            'as fields = { messages = "prompt" }'
        )


def _with_defaults(prompt: Prompt, source: DataSource) -> Prompt:
    """Return a prompt with what its source gives to all and it does not have itself."""
    given: dict[str, Any] = {}
    if source.verifiers and not prompt.verifiers:
        given["verifiers"] = source.verifiers
    if source.sampling is not None:
        own = prompt.sampling.model_dump(exclude_unset=True) if prompt.sampling else {}
        given["sampling"] = source.sampling.model_copy(update=own)
    if source.system_prompt and prompt.messages and all(turn.role != "system" for turn in prompt.messages):
        given["messages"] = [Message(role="system", content=source.system_prompt), *prompt.messages]
    return prompt.model_copy(update=given) if given else prompt


class DataSection(Section):
    """[data]: the prompts of a run."""

    train: Annotated[
        DataSource | list[TrainSource] | None,
        WrapValidator(_one_or_many, json_schema_input_type=Path | DataSource | list[Path | TrainSource]),
    ] = Field(
        None,
        description="Source of the training prompts; its path is enough. Several, in a list, are mixed: each has a "
        "`weight` (1) and a name, `source`, besides (docs/data.md).",
    )
    passes: int = Field(1, ge=0, description="Passes over the training prompts; 0: until run.max_steps is reached.")
    stopping_strategy: Stop = Field(
        "first_exhausted",
        description="When a pass over several sources ends: when the first, or each, has been used up once more.",
    )
    shuffle: bool = Field(True, description="Use the prompts in another order in each pass.")
    shuffle_seed: int = Field(42, description="Seed of the orders.")
    evaluation: dict[str, AnySource] = Field({}, description="Evaluation sets: name = source.")
    require_reference: bool = Field(
        True, description="Refuse prompts without gt_answer, test_cases or test_program. Off for learned rewards."
    )

    @field_validator("train")
    @classmethod
    def _each_once(cls, value: DataSource | list[TrainSource] | None) -> DataSource | list[TrainSource] | None:
        counts = Counter(each.label for each in value) if isinstance(value, list) else Counter()
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"several sources are named '{twice[0]}'; give each its own name, source = \"NAME\"")
        return value

    @field_validator("evaluation")
    @classmethod
    def _named(cls, value: dict[str, DataSource]) -> dict[str, DataSource]:
        for name in value:
            if not NAME.fullmatch(name):
                raise ValueError(f"a set is named {name!r}; allowed: {NAME_ALLOWED}")
        return value

    def sources(self) -> list[tuple[str, DataSource]]:
        """Return the sources of the training prompts, then those of the evaluation sets, each with its key."""
        if isinstance(self.train, list):
            train = [(f"data.train[{n}]", cast(DataSource, each)) for n, each in enumerate(self.train)]
        else:
            train = [("data.train", self.train)] if self.train else []
        return train + [(f"data.evaluation.{name}", source) for name, source in self.evaluation.items()]


def load_prompts(
    path: Path | DataSource, require_reference: bool = False, key: str = "data.train", chats: bool = True
) -> list[Prompt]:
    """Read the prompts of a source, or of a path as in `DataSource.path`; "-" is standard input.

    Args:
        require_reference: refuse prompts without anything to check completions against.
        key: the run-file key of this source, for errors.
        chats: the model has a chat template, or may have one.

    Raises:
        InputError: the source cannot be read or is empty, or a row is invalid: which, what came, what is allowed.
    """
    source = path if isinstance(path, DataSource) else DataSource(path=path)
    rows = _asked(source, source.rows(key), key)
    fields = source.fields | {"messages": "messages"} if source.template and source.fields else source.fields
    prompts = parse_rows(rows, source.title, require_reference, fields, key, chats)
    return [_with_defaults(prompt, source) for prompt in prompts]


def parse_rows(
    rows: Iterable[Row],
    title: str,
    require_reference: bool = False,
    fields: Mapping[str, Columns] | None = None,
    key: str = "",
    chats: bool = True,
) -> list[Prompt]:
    """Parse rows, each with its place, "line 7"; a prompt without an id gets "line-7".

    Args:
        fields: the map of their source, with the run-file key `key`; None: they are of no source, and have no map.

    Raises:
        InputError: as `load_prompts`.
    """
    prompts = []
    for place, row in rows:
        where = f"{title}, {place}"
        own = plain(mapped(row, fields, where, key) if fields and isinstance(row, dict) else row)
        try:
            prompt = Prompt.parse(own, where)
            if require_reference and not prompt.has_reference:
                raise InputError(
                    f'{where}: nothing to check completions against; give "gt_answer", "test_cases" or "test_program" '
                    "(or set data.require_reference = false)"
                )
        except InputError as error:
            if fields is None or not isinstance(row, dict):
                raise
            raise InputError(f"{error}{proposal(row, fields, require_reference, chats)}") from error
        prompts.append(prompt if prompt.id else prompt.model_copy(update={"id": place.replace(" ", "-")}))
    if not prompts:
        raise InputError(f"{title}: it holds no prompts; give one JSON object a line, or a row each")
    return prompts


def _check_chat_template(model: Path | None, source: DataSource, prompts: list[Prompt]) -> None:
    """Raise InputError if a prompt is a chat and the model, if it is a folder here, has no chat template."""
    chat = next((prompt for prompt in prompts if prompt.messages), None)
    if chat is not None and model is not None and lacks_chat_template(model):
        raise InputError(
            f"{source.title}: prompt '{chat.id}' has \"messages\", and the model in '{model}' has no chat template; "
            'give "prompt", whose text is used as it stands, or a model with a template'
        )


def lacks_chat_template(model: Path) -> bool:
    """Return whether a folder has a transformers tokenizer without a chat template."""
    if not (model / "tokenizer.json").is_file() or (model / "chat_template.jinja").is_file():
        return False
    if (model / "additional_chat_templates").is_dir():
        return False
    try:
        settings = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # the services report what is wrong with it
    return isinstance(settings, dict) and not settings.get("chat_template")


def _input_of(prompt: Prompt) -> str:
    return prompt.model_dump_json(include={"messages", "prompt", "token_ids", "task"})


def _is_answered(prompt: Prompt) -> bool:
    """Whether the assistant's turn that completions continue has the reference answer."""
    last = prompt.messages[-1] if prompt.messages else None
    answer = rf"(?<!\w){re.escape(prompt.gt_answer)}(?!\w)"
    return last is not None and last.role == "assistant" and bool(prompt.gt_answer and re.search(answer, last.content))


def _check_teachers(run: RunSection, source: DataSource, prompts: list[Prompt]) -> None:
    for place, prompt in enumerate(prompts, start=1):
        if run.teachers and prompt.teacher and prompt.teacher not in run.teachers:
            allowed = ", ".join(run.teachers)
            raise InputError(f"{source.title}, prompt {place}: teacher: got '{prompt.teacher}'; allowed: {allowed}")


class RunData:
    """The prompts of a run, read and checked: its training prompts pass by pass, and its evaluation sets.

    Instance ids are "pass-{p}/{i}", of several sources "pass-{p}/{source}/{i}", and "{set}/{i}", where i is the
    prompt's place in its file, whatever the order: a feeder that is started again submits nothing twice.
    """

    def __init__(self, section: DataSection, parts: list[Part], evaluation: dict[str, list[Prompt]]):
        self.section = section
        self.parts = parts
        self.evaluation = evaluation

    @property
    def train(self) -> list[Prompt]:
        """The training prompts of all sources."""
        return [prompt for part in self.parts for prompt in part.prompts]

    @classmethod
    def load(cls, config: LoadedConfig) -> "RunData":
        """Read all sources of [data]. Raises ConfigError, InputError."""
        section = validate_section(DataSection, config.data, "data", config.file)
        if section.train is None:
            raise InputError("data.train is missing: name the source of the training prompts, such as a JSONL file")
        if section.passes == 0 and config.run.max_steps == 0:
            raise InputError("data.passes = 0 goes on until run.max_steps, which is not set: set either above 0")
        # A reward function may need no reference.
        require_reference = section.require_reference and not any(one.file for one in config.run.verifiers)
        model = None if config.model.overrides_tokenizer else config.model.path
        chats = model is None or not lacks_chat_template(model)
        read = []
        for key, source in section.sources():
            if source.environment:
                tasks = list_tasks(config, source.environment, source.parameters, source.limit, key)
                prompts = [_with_defaults(task, source) for task in tasks]
            else:
                prompts = load_prompts(source, require_reference, key, chats)
            _check_chat_template(model, source, prompts)
            _check_teachers(config.run, source, prompts)
            if source.system_prompt:
                _check_system_prompt(key, prompts)
            read.append(prompts)
        if config.run.system_prompt and config.run.environment is None:
            _check_system_prompt("run", [prompt for prompts in read for prompt in prompts])
        sources = section.train if isinstance(section.train, list) else []
        parts = [Part(prompts, each.label, each.weight) for each, prompts in zip(sources, read, strict=False)]
        sets = read[len(parts or read[:1]) :]
        data = cls(section, parts or [Part(read[0])], dict(zip(section.evaluation, sets, strict=True)))
        check_curriculum(config.run, section.passes, data.parts)
        return data

    def check_enough(self, run: RunSection) -> None:
        """Raise InputError if the training prompts do not suffice for a step."""
        given = self.count_uses(run.groups_per_step)
        if given < run.groups_per_step and run.partial_batch == "drop":
            raise InputError(
                f"run.groups_per_step: got {run.groups_per_step}, and the training prompts of all passes are {given}, "
                f'too few for a step; allowed: at most {given}, or more data.passes, or run.partial_batch = "train"'
            )

    def warnings(self) -> Iterator[str]:
        """Yield what is allowed but rarely intended: ids of several prompts, training prompts in evaluation sets."""
        if len(self.parts) == 1 and "stopping_strategy" in self.section.model_fields_set:
            yield "data.stopping_strategy: without effect, as data.train is one source; leave it out, or name several"
        trained = {_input_of(prompt) for prompt in self.train} if self.evaluation else set()
        held = {f"data.evaluation.{name}": prompts for name, prompts in self.evaluation.items()}
        parts = {f"data.train{part.name and f' ({part.name})'}": part.prompts for part in self.parts}
        for key, prompts in {**parts, **held}.items():
            counts = Counter(prompt.id for prompt in prompts)
            if twice := [one for one, count in counts.items() if count > 1]:
                yield f"{key}: {len(twice)} ids name several prompts, such as '{twice[0]}'; give each prompt its own"
            answered = sum(map(_is_answered, prompts))
            if answered > len(prompts) / 2:
                yield (
                    f"{key}: {answered} of {len(prompts)} chats end with the assistant's turn, which has gt_answer and "
                    "is continued, so that there is nothing to learn; leave the last message out"
                )
            shared = sum(_input_of(prompt) in trained for prompt in prompts)
            if shared and key in held:
                yield (
                    f"{key}: {shared} of {len(prompts)} prompts are training prompts too, so that it "
                    "does not measure what is learned; leave them out of one of the two"
                )

    def order(self, part: Part, own_pass: int) -> list[int]:
        """Return the places of a source's prompts in the order of its pass (from 0)."""
        places = list(range(len(part.prompts)))
        if self.section.shuffle:
            of = f"{part.name}/" if part.name else ""
            random.Random(f"{self.section.shuffle_seed}/{of}{own_pass}").shuffle(places)
        return places

    def count_uses(self, most: int | None = None) -> int:
        """Return how many training prompt instances there are, or `most` if there are more."""
        return sum(1 for _ in islice(self._uses(), most))

    def _uses(self) -> Iterator[Use]:
        return mix(self.parts, self.section.passes, self.section.stopping_strategy)

    def training_instances(self) -> Iterator[experience_pb2.PromptInstance]:
        """Yield the training prompt instances in the order of their use; endlessly if `passes` is 0."""
        orders: dict[str, list[int]] = {}
        for use in self._uses():
            name = use.part.name
            if use.place == 0:
                orders[name] = self.order(use.part, use.own_pass)
            place = orders[name][use.place]
            yield experience_pb2.PromptInstance(
                instance_id=f"pass-{use.own_pass}/{name and f'{name}/'}{place}",
                prompt=use.part.prompts[place].to_proto(),
                purpose=experience_pb2.PURPOSE_TRAIN,
                data_pass=use.data_pass,
                source=name,
            )

    def evaluation_instances(self, name: str) -> Iterator[experience_pb2.PromptInstance]:
        """Yield the prompt instances of an evaluation set, in file order."""
        for place, prompt in enumerate(self.evaluation[name]):
            yield experience_pb2.PromptInstance(
                instance_id=f"{name}/{place}", prompt=prompt.to_proto(), purpose=experience_pb2.PURPOSE_EVALUATE
            )
