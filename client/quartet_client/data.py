"""The prompts of a run, read from their sources and checked, and the order in which a run uses them."""

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import Field
from quartet.v1 import experience_pb2

from quartet_client.errors import InputError
from quartet_client.prompts import Prompt
from quartet_client.sources import AnySource, DataSource, Row
from quartet_common.config import LoadedConfig, Section, validate_section


class DataSection(Section):
    """[data]: the prompts of a run. The client reads it."""

    train: AnySource | None = Field(None, description="Source of the training prompts; its path is enough.")
    passes: int = Field(1, ge=0, description="Passes over the training prompts; 0: until run.max_steps is reached.")
    shuffle: bool = Field(True, description="Use the prompts in another order in each pass.")
    shuffle_seed: int = Field(42, description="Seed of the orders.")
    evaluation: dict[str, AnySource] = Field({}, description="Evaluation sets: name = source.")
    require_reference: bool = Field(
        True, description="Refuse prompts without gt_answer, test_cases or test_program. Off for learned rewards."
    )

    def sources(self) -> list[tuple[str, DataSource]]:
        """Return the source of the training prompts, then those of the evaluation sets, each with its key."""
        train = [("data.train", self.train)] if self.train else []
        return train + [(f"data.evaluation.{name}", source) for name, source in self.evaluation.items()]


def load_prompts(path: Path | DataSource, require_reference: bool = False, key: str = "data.train") -> list[Prompt]:
    """Read the prompts of a source, or of what a path names: see `DataSource.path`; "-" is standard input.

    Args:
        require_reference: refuse prompts without anything to check completions against.
        key: of the run file, which has this source, for errors.

    Raises:
        InputError: the source cannot be read or is empty, or a row is broken: which, what came, what is allowed.
    """
    source = path if isinstance(path, DataSource) else DataSource(path=path)
    return parse_rows(source.rows(key), source.title, require_reference)


def parse_rows(rows: Iterable[Row], title: str, require_reference: bool = False) -> list[Prompt]:
    """Parse rows, each with its place, "line 7"; a prompt without an id gets "line-7". Raises InputError."""
    prompts = []
    for place, row in rows:
        where = f"{title}, {place}"
        prompt = Prompt.parse(row, where)
        if require_reference and not prompt.has_reference:
            raise InputError(
                f'{where}: nothing to check completions against; give "gt_answer", "test_cases" or "test_program" '
                "(or set data.require_reference = false)"
            )
        prompts.append(prompt if prompt.id else prompt.model_copy(update={"id": place.replace(" ", "-")}))
    if not prompts:
        raise InputError(f"{title}: it holds no prompts; give one JSON object a line, or a row each")
    return prompts


def _check_chat_template(model: Path | None, source: DataSource, prompts: list[Prompt]) -> None:
    """Raise InputError for the first chat if the model, where its folder is on this host, cannot render any."""
    chat = next((prompt for prompt in prompts if prompt.messages), None)
    if chat is not None and model is not None and _lacks_chat_template(model):
        raise InputError(
            f"{source.title}: prompt '{chat.id}' has \"messages\", and the model in '{model}' has no chat template; "
            'give "prompt", whose text is used as it stands, or a model with a template'
        )


def _lacks_chat_template(model: Path) -> bool:
    """Whether the folder has a tokenizer of transformers, and no template in any of the places where that looks."""
    if not (model / "tokenizer.json").is_file() or (model / "chat_template.jinja").is_file():
        return False
    if (model / "additional_chat_templates").is_dir():
        return False
    try:
        settings = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # what is wrong with it the services say
    return isinstance(settings, dict) and not settings.get("chat_template")


class RunData:
    """The prompts of a run, read and checked: its training prompts pass by pass, and its evaluation sets.

    Instance ids are "pass-{p}/{i}" and "{set}/{i}", where i is the prompt's place in its file: the same whatever the
    order, so a feeder that is started again submits nothing twice.
    """

    def __init__(self, section: DataSection, train: list[Prompt], evaluation: dict[str, list[Prompt]]):
        self.section = section
        self.train = train
        self.evaluation = evaluation

    @classmethod
    def load(cls, config: LoadedConfig) -> "RunData":
        """Read all files that [data] names. Raises ConfigError, InputError before anything is submitted."""
        section = validate_section(DataSection, config.data, "data", config.file)
        if section.train is None:
            raise InputError("data.train is missing: name the source of the training prompts, such as a JSONL file")
        if section.passes == 0 and config.run.max_steps == 0:
            raise InputError("data.passes = 0 goes on until run.max_steps, which is not set: set either above 0")
        # A function may read any column, or none.
        require_reference = section.require_reference and not any(one.file for one in config.run.verifiers)
        model = None if config.model.overrides_tokenizer else config.model.path
        read = []
        for key, source in section.sources():
            prompts = load_prompts(source, require_reference, key)
            _check_chat_template(model, source, prompts)
            read.append(prompts)
        return cls(section, read[0], dict(zip(section.evaluation, read[1:], strict=True)))

    def order(self, data_pass: int) -> list[int]:
        """Return the places of the training prompts in the order of a pass (from 0)."""
        places = list(range(len(self.train)))
        if self.section.shuffle:
            random.Random(f"{self.section.shuffle_seed}/{data_pass}").shuffle(places)
        return places

    def training_instances(self) -> Iterator[experience_pb2.PromptInstance]:
        """Yield the training prompt instances in the order of their use; for ever if `passes` is 0."""
        data_pass = 0
        while data_pass < self.section.passes or self.section.passes == 0:
            for place in self.order(data_pass):
                yield experience_pb2.PromptInstance(
                    instance_id=f"pass-{data_pass}/{place}",
                    prompt=self.train[place].to_proto(),
                    purpose=experience_pb2.PURPOSE_TRAIN,
                    data_pass=data_pass,
                )
            data_pass += 1

    def evaluation_instances(self, name: str) -> Iterator[experience_pb2.PromptInstance]:
        """Yield the prompt instances of an evaluation set, in file order."""
        for place, prompt in enumerate(self.evaluation[name]):
            yield experience_pb2.PromptInstance(
                instance_id=f"{name}/{place}", prompt=prompt.to_proto(), purpose=experience_pb2.PURPOSE_EVALUATE
            )
