"""Prompts from JSONL files and functions, and the order in which a run uses them."""

import importlib.util
import json
import random
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import Field
from quartet.v1 import experience_pb2

from quartet_client.errors import InputError
from quartet_client.prompts import Prompt
from quartet_common.config import LoadedConfig, Section, validate_section
from quartet_common.plugins import install_command

STDIN = Path("-")
_FUNCTION = re.compile(r".+\.py:[A-Za-z_]\w*")


class DataSection(Section):
    """[data]: the prompts of a run. The client reads it."""

    train: Path | None = Field(
        None, description='JSONL file of training prompts, or a function that returns their rows: "data.py:train".'
    )
    passes: int = Field(1, ge=0, description="Passes over the training prompts; 0: until run.max_steps is reached.")
    shuffle: bool = Field(True, description="Use the prompts in another order in each pass.")
    shuffle_seed: int = Field(42, description="Seed of the orders.")
    evaluation: dict[str, Path] = Field({}, description="Evaluation sets: name = JSONL file or function.")
    require_reference: bool = Field(
        True, description="Refuse prompts without gt_answer, test_cases or test_program. Off for learned rewards."
    )


def load_prompts(path: Path, require_reference: bool = False) -> list[Prompt]:
    """Read a JSONL file, "-" for standard input, or the rows that a function returns, "FILE.py:NAME".

    Raises:
        InputError: the file cannot be read or is empty, or a line or row is broken: which, what came, what is allowed.
    """
    if _FUNCTION.fullmatch(str(path)):
        return _parse_rows(_rows_of(str(path)), str(path), require_reference)
    if path == STDIN:
        return parse_lines(sys.stdin, "standard input", require_reference)
    try:
        with path.open(encoding="utf-8") as lines:
            return parse_lines(lines, str(path), require_reference)
    except OSError as error:
        raise InputError(f"cannot read '{path}': {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read '{path}': it is not UTF-8 text (byte {error.start})") from error


def parse_lines(lines: Iterable[str], name: str, require_reference: bool = False) -> list[Prompt]:
    """Parse JSONL, one prompt a line; blank lines are skipped. `name` says in errors where the lines are from."""
    rows = ((f"line {number}", line) for number, line in enumerate(lines, start=1) if line.strip())
    parsed = ((place, _parse_json(line, f"{name}, {place}")) for place, line in rows)
    return _parse_rows(parsed, name, require_reference)


def _parse_rows(rows: Iterable[tuple[str, Any]], name: str, require_reference: bool) -> list[Prompt]:
    """Parse rows, each with its place, "line 7"; a prompt without an id gets "line-7"."""
    prompts = []
    for place, row in rows:
        where = f"{name}, {place}"
        prompt = Prompt.parse(row, where)
        if require_reference and not prompt.has_reference:
            raise InputError(
                f'{where}: nothing to check completions against; give "gt_answer", "test_cases" or "test_program" '
                "(or set data.require_reference = false)"
            )
        prompts.append(prompt if prompt.id else prompt.model_copy(update={"id": place.replace(" ", "-")}))
    if not prompts:
        raise InputError(f"{name}: it holds no prompts; give one JSON object a line")
    return prompts


def _rows_of(function: str) -> Iterator[tuple[str, Any]]:
    """Yield what a function of a Python file returns, row by row. Raises InputError."""
    file, _, name = function.rpartition(":")
    if not Path(file).is_file():
        raise InputError(f"cannot read '{file}': no such file")
    number = 0
    try:
        spec = importlib.util.spec_from_file_location(f"quartet_data_{Path(file).stem}", file)
        assert spec is not None and spec.loader is not None, "its name ends in .py"
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not callable(rows := getattr(module, name, None)):
            raise InputError(f"'{file}' has no function '{name}'")
        for number, row in enumerate(rows(), start=1):
            yield f"row {number}", row
    except ModuleNotFoundError as error:
        raise InputError(f"{function}: {error}; install it here: {install_command(error.name or '')}") from error
    except InputError:
        raise
    except Exception as error:  # it is the user's program
        after = f" after row {number}" if number else ""
        raise InputError(f"{function}: it raised {type(error).__name__}{after}: {error}") from error


def _parse_json(line: str, where: str) -> dict:
    try:
        value = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        came = line.strip()
        shown = came if len(came) <= 60 else came[:59] + "…"
        reason = error.msg[0].lower() + error.msg[1:]
        raise InputError(f"{where}: not valid JSON: {reason} at column {error.colno} of '{shown}'") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise InputError(f"{where}: JSON that cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{where}: got {type(value).__name__}; allowed: one JSON object a line")
    return value


def _check_chat_template(model: Path | None, path: Path, prompts: list[Prompt]) -> None:
    """Raise InputError for the first chat if the model, where its folder is on this host, cannot render any."""
    chat = next((prompt for prompt in prompts if prompt.messages), None)
    if chat is not None and model is not None and _lacks_chat_template(model):
        raise InputError(
            f"{path}: prompt '{chat.id}' has \"messages\", and the model in '{model}' has no chat template; "
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
            raise InputError("data.train is missing: name the JSONL file of the training prompts, or a function")
        if section.passes == 0 and config.run.max_steps == 0:
            raise InputError("data.passes = 0 goes on until run.max_steps, which is not set: set either above 0")
        # A function may read any column, or none.
        require_reference = section.require_reference and not any(one.file for one in config.run.verifiers)
        train = load_prompts(section.train, require_reference)
        sets = {name: load_prompts(path, require_reference) for name, path in section.evaluation.items()}
        for path, prompts in ((section.train, train), *((section.evaluation[name], sets[name]) for name in sets)):
            _check_chat_template(None if config.model.overrides_tokenizer else config.model.path, path, prompts)
        return cls(section, train, sets)

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
