"""`quartet init`: the two files of a run on one's own data, run.toml and rewards.py (docs/start.md)."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import click

from quartet_client.columns import Columns, fitting
from quartet_client.data import DataSource, lacks_chat_template, load_prompts
from quartet_client.errors import InputError
from quartet_client.prompts import Prompt
from quartet_client.terminal import echo
from quartet_common.run_file import run_file_text, toml_value

_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
_MOST_TOKENS = 512
_DATA = (".jsonl", ".parquet", ".json", ".csv", ".tsv")  # the last three only if they are refused with their cure
_HELD = re.compile(
    r"[-_.]?(?<![a-z])(held[-_]?out|test|eval|evaluation|val|valid|validation|dev)(?![a-z])", re.IGNORECASE
)
_TRAIN = re.compile(r"[-_.]?(?<![a-z])train(ing)?(?![a-z])", re.IGNORECASE)

_HEAD = "# Prompts: group_size completions of each, groups_per_step to a step. All keys: docs/run-file.md\n"
_REWARDS = '''"""The rewards of {run}. Each function gets the completion and the row's columns by name:
{columns}. It returns a number, or True or False, which also count as accuracy."""
{correct}

def short(completion, **columns):
    """From 1 for an empty completion to 0 for {most} characters and more."""
    return max(0.0, 1 - len(completion) / {most})
'''
_CORRECT = '''
import re


def final_answer(text):
    """Return what is in the last <answer> tags or box, or after ####, else the last number, else the last line."""
    for pattern in (r"<answer>(.*?)</answer>", r"\\\\boxed{([^{}]*)}", r"####([^\\n]*)", r"-?\\d[\\d,]*(?:\\.\\d+)?"):
        if found := re.findall(pattern, text, re.DOTALL):
            return found[-1].strip().replace(",", "")
    return text.strip().rpartition("\\n")[2]


def correct(completion, gt_answer, **columns):
    """Whether the final answer is that of the reference."""
    return final_answer(completion) == final_answer(gt_answer)
'''


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--data", type=click.Path(path_type=Path), help="Training prompts, JSONL or Parquet. Default: in FOLDER.")
@click.option("--model", default=_MODEL, show_default=True, help="A model's folder, or its id at the hub.")
def init(folder: Path, data: Path | None, model: str) -> int:
    """Write FOLDER/run.toml and FOLDER/rewards.py, a run on your own data, to be changed as you like.

    The columns of the data are guessed; a file beside it that is named heldout, test, validation or the like is
    evaluated. Nothing is overwritten.
    """
    files = run_file, rewards = folder / "run.toml", folder / "rewards.py"
    for file in files:
        if file.exists():
            raise InputError(f"'{file}' exists; allowed: a folder without it")
    data = data or _training_file(folder)
    template = not lacks_chat_template(Path(model))
    train, prompts = _source(data, template, "data.train")
    held = {file.stem: _source(file, template, f"data.evaluation.{file.stem}")[0] for file in _held_out(data)}
    run_id = re.sub(r"[^a-zA-Z0-9._-]+", "-", folder.resolve().name).strip("._-")[:64] or "run-1"
    first = prompts[0]
    verifiers: list[dict[str, Any]] = [{"name": "code"}] if first.has_reference else []
    if first.gt_answer:
        verifiers = [{"file": f"{rewards}:correct"}]
    verifiers.append({"file": f"{rewards}:short", "weight": 0.1})
    run = {"id": run_id, "group_size": 8, "groups_per_step": 16, "max_staleness": 1, "max_steps": 40}
    sections: dict[str, dict[str, Any]] = {
        "run": {**run, "verifiers": verifiers, "sampling": {"max_new_tokens": _tokens(Path(model))}},
        "model": {"path": model},
        "data": {"train": train, "passes": 0, "evaluation": held},
        "trainer": {"learning_rate": 1e-6, "evaluation": {"sets": [*held], "interval": 20}},
    }
    own = _REWARDS.format(
        run=run_file,
        columns=", ".join(["prompt", *(["gt_answer"] if first.gt_answer else []), *first.columns]),
        correct=_CORRECT if first.gt_answer else "",
        most=4 * _MOST_TOKENS,
    )
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in zip(files, (_HEAD + run_file_text(sections), own), strict=True):
        with file.open("x", encoding="utf-8") as written:
            written.write(text)
    echo(f"{rewards}: the rewards, to be changed to what you want")
    echo(
        f"{run_file}: model {model}; {len(prompts):,} prompts, {toml_value(train)}; evaluated: {', '.join(held) or '–'}"
    )
    echo(f"next: quartet run {shlex.quote(str(run_file))} --dry-run")
    return 0


def _training_file(folder: Path) -> Path:
    """Return the one file of training data in a folder. Raises InputError."""
    files = sorted(file for file in folder.glob("*") if file.suffix.lower() in _DATA)
    found = [file for file in files if not _HELD.search(file.stem)]
    found = [file for file in found if _TRAIN.search(file.stem)] or found
    if len(found) != 1:
        there = ", ".join(file.name for file in files) or "no data"
        raise InputError(f"--data: '{folder}' has {there}; name the file of the training prompts, JSONL or Parquet")
    return found[0]


def _held_out(data: Path) -> list[Path]:
    """Return the files beside the training data that are called as it is, but for test and the like."""
    name = _TRAIN.sub("", data.stem)
    files = sorted(file for file in data.parent.glob(f"*{data.suffix}") if file != data and _HELD.search(file.stem))
    return [file for file in files if _HELD.sub("", file.stem) in ("", name)]


def _source(path: Path, template: bool, key: str) -> tuple[Any, list[Prompt]]:
    """Return a source as in the run file, with the fields that fit its first row, and its prompts. Raises InputError.

    Args:
        template: whether the model has a chat template, for which a text is a user's turn.
    """
    row: Any = next((row for _, row in DataSource(path=path).rows(key)), {})
    fields: dict[str, Columns] = {}
    if isinstance(row, dict):
        fields = fitting(row, {}, True) or fitting(row, {}, False) or {}
    text, plain = ("messages", "prompt") if template else ("prompt", "messages")
    if plain in fields and isinstance(row.get(str(fields[plain])), str):
        fields = {text if field == plain else field: columns for field, columns in fields.items()}
    source = DataSource(path=path, fields={} if all(f == c for f, c in fields.items()) else fields)
    table = {"path": str(path), "fields": source.fields} if source.fields else str(path)
    return table, load_prompts(source, key=key)


def _tokens(model: Path) -> int:
    try:
        context = json.loads((model / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    except (OSError, ValueError, KeyError):
        return _MOST_TOKENS
    return min(_MOST_TOKENS, context // 2)
