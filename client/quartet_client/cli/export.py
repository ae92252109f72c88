"""`quartet export`: a run's model with a card, in a folder or at the hub."""

import json
import shutil
import sys
import tomllib
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from quartet_client.errors import InputError, QuartetError
from quartet_client.progress import RunProgress, accuracy_text, read_run
from quartet_client.terminal import echo
from quartet_common.checkpoints import part_of, read_manifest
from quartet_common.config import ConfigError
from quartet_common.hub import HUB_ID, is_hub_id
from quartet_common.model_folder import read_model_folder, read_safetensors_header
from quartet_common.python_file import install_command
from quartet_common.sections import all_by_name
from quartet_common.sources import data_sources

_CARD = "README.md"
_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_ARRAYS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_CHUNK = 64 << 20


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--to", type=click.Path(path_type=Path), help="A new folder for the model and its card.")
@click.option("--push", metavar="ORG/NAME", help="Model of the hub to upload to, created if needed.")
@click.option("--revision", default="", help="With --push: branch to upload to, created if needed.")
@click.option("--private", is_flag=True, help="With --push: create a private model, or require that it is.")
def export(folder: Path, to: Path | None, push: str | None, revision: str, private: bool) -> int:
    """Export the model of FOLDER: a run's, a checkpoint's (checkpoints/step-00000040 in it) or a model's.

    A card, README.md, says what the run was, unless the model has one. The token for the hub is HF_TOKEN, or the one
    that `hf auth login` has stored; with --push all files arrive in one commit, or none.
    """
    if to is None and push is None:
        raise click.UsageError("give --to FOLDER, --push ORG/NAME or both")
    if push is None and (revision or private):
        raise click.UsageError("--revision and --private are for --push ORG/NAME")
    if push is not None and not HUB_ID.fullmatch(push):
        raise InputError(f"--push: got '{push}'; allowed: the owner and the name of a model at the hub, ORG/NAME")
    if to is not None and to.exists():
        raise InputError(f"--to: '{to}' exists; allowed: a folder that is not there yet")
    model, version = find_model(folder / "model" if (folder / "run.toml").is_file() else folder, "FOLDER")
    card = None if (model / _CARD).is_file() else model_card((push or folder.resolve().name), folder, version)
    rounding = _rounding_of(model)
    with ExitStack() as parts:
        if to is not None or rounding:
            copy = to or Path(parts.enter_context(TemporaryDirectory())) / "model"
            try:
                shutil.copytree(model, copy, copy_function=partial(_copy_rounded, rounding=rounding))
                if card is not None:
                    (copy / _CARD).write_text(card, encoding="utf-8")
            except BaseException as error:
                # A full disk, Ctrl-C: a part of a model would pass for a whole one. What another has made stays.
                if not isinstance(error, FileExistsError):
                    shutil.rmtree(copy, ignore_errors=True)
                if isinstance(error, OSError):
                    raise InputError(f"cannot write '{copy}': {error.strerror or error}") from error
                raise
            model = copy
        if to is not None:
            echo(f"{to}: {sum(file.stat().st_size for file in to.rglob('*') if file.is_file()) / 1e6:,.1f} MB")
        if push is not None:
            try:
                echo(_push_folder(model, push, revision, private, {} if card is None else {_CARD: card.encode()}))
            except ConfigError as error:
                raise QuartetError(str(error)) from error
    return 0


def _rounding_of(model: Path) -> tuple[str, str] | None:
    """Return the types of the weights, in the files and in config.json, which is that of the run's publications.

    None unless all files have one, wider type.
    """
    config = read_model_folder(model, "FOLDER", weights=False)
    if (code := _CODES.get(config.get("dtype") or config.get("torch_dtype") or "")) is None:
        return None
    headers = [read_safetensors_header(file, "FOLDER") for file in model.glob("*.safetensors")]
    held = {tensor["dtype"] for header in headers for tensor in header.values()}
    wider = len(held) == 1 and held <= {"F32", "F64"} and _ARRAYS[min(held)][-1] > _ARRAYS[code][-1]
    return (held.pop(), code) if wider else None


def _copy_rounded(source: str, target: str, rounding: tuple[str, str] | None) -> None:
    """Copy a file of a model folder; round weights to the nearest, as torch does. Raises InputError without numpy."""
    if rounding is None or not source.endswith(".safetensors"):
        shutil.copy2(source, target)
        return
    try:
        import numpy as np
    except ModuleNotFoundError as error:
        raise InputError(f"quartet export needs numpy for this checkpoint: {install_command('numpy')}") from error
    held, code = rounding
    ratio = int(_ARRAYS[held][-1]) // int(_ARRAYS[code][-1])
    header = {
        name: {**tensor, "dtype": code, "data_offsets": [offset // ratio for offset in tensor["data_offsets"]]}
        for name, tensor in read_safetensors_header(Path(source)).items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with Path(source).open("rb") as read, Path(target).open("xb") as written:
        written.write(len(text).to_bytes(8, "little") + text)
        read.seek(8 + int.from_bytes(read.read(8), "little"))
        while data := read.read(_CHUNK):
            values = np.frombuffer(data, _ARRAYS[held]).astype("<f4")
            if code == "BF16":  # the upper half, rounded to the nearest, and to the even one of two as near
                bits = values.view("<u4")
                values = np.where(np.isnan(values), 0x7FC0, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
            written.write(values.astype(_ARRAYS[code]).tobytes())


def _push_folder(folder: Path, name: str, revision: str, private: bool, more: Mapping[str, bytes]) -> str:
    """Upload a model's folder to the hub in one commit, and return the commit's URL.

    Args:
        revision: the branch, created if necessary; empty: main.
        private: create a private model; an existing one must be private.
        more: further files.

    Raises:
        ConfigError: no token, no write access, no connection, or an existing model is public despite `private`.
    """
    try:
        from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
        from huggingface_hub.utils import disable_progress_bars
    except ImportError as error:
        raise ConfigError(
            f"--push: it needs the package huggingface_hub, not installed here; install it: "
            f"{install_command('huggingface_hub')}"
        ) from error
    if not get_token():
        raise ConfigError(
            f"--push: there is no token for {constants.ENDPOINT}; set HF_TOKEN to one that may write to '{name}', or "
            "log in: hf auth login"
        )
    if not sys.stderr.isatty():
        disable_progress_bars()
    hub = HfApi()
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    operations = [CommitOperationAdd(path, content) for path, content in {**files, **more}.items()]
    try:
        hub.create_repo(name, private=private or None, exist_ok=True)
        if private and not hub.model_info(name).private:
            raise ConfigError(
                f"--private: '{name}' is there, and public; make it private at {constants.ENDPOINT}/{name}"
            )
        if revision:
            hub.create_branch(name, branch=revision, exist_ok=True)
        commit = hub.create_commit(
            name, operations, commit_message="Upload model trained with Quartet", revision=revision or None
        )
    except ConfigError:
        raise
    except Exception as error:  # of huggingface_hub, of the HTTP library beneath
        status = getattr(getattr(error, "response", None), "status_code", None)
        where = constants.ENDPOINT
        if status in (401, 403):
            raise ConfigError(
                f"--push: {where} does not let this token write to '{name}' (HTTP {status}); set HF_TOKEN to one that "
                "may"
            ) from error
        reason = f"HTTP {status}" if status else f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConfigError(
            f"--push: the hub at {where} did not take the files of '{name}' ({reason}); none of them is there"
        ) from error
    return str(commit.commit_url)


def find_model(folder: Path, argument: str) -> tuple[Path, int]:
    """Return a checkpoint's model folder and policy version, or the folder of a model itself and 0.

    Args:
        argument: of the command line, for errors.

    Raises:
        InputError: there is none.
    """
    if not folder.is_dir():
        raise InputError(f"{argument}: there is no folder '{folder}'")
    model, step = part_of(folder, "model"), (read_manifest(folder) or {}).get("step", 0)
    if (model / "config.json").is_file():
        return model, step
    if (folder / "adapter").is_dir():
        raise InputError(
            f"{argument}: '{folder}' holds an adapter without its base; allowed: the whole model, which a run leaves "
            "in its folder's 'model' at its end"
        )
    raise InputError(
        f"{argument}: '{folder}' holds no model; allowed: a complete checkpoint, such as checkpoints/step-00000040 "
        "in a run's folder, or the folder of a model, with config.json"
    )


def model_card(title: str, folder: Path, version: int) -> str:
    """Return the card of a model, from the run file and the metrics beside it, if there are any.

    Args:
        folder: a run's, or one of its checkpoints'.
        version: optimizer steps of the checkpoint; 0: all.
    """
    home = next((one for one in (folder, *folder.resolve().parents[:2]) if _is_run(one)), None)
    try:
        sections = tomllib.loads((home / "run.toml").read_text(encoding="utf-8")) if home else {}
    except ValueError as error:
        raise InputError(f"run file '{home}/run.toml' is not valid TOML: {error}") from error
    run, model, data, trainer = (sections.get(name, {}) for name in ("run", "model", "data", "trainer"))
    facts: dict[str, Any] = {}
    algorithm = trainer.get("algorithm", "")
    algorithm = algorithm.get("name", "") if isinstance(algorithm, dict) else algorithm
    evaluations: list[str] = []
    if home and (home / "metrics.jsonl").is_file():
        progress = read_run(home)
        facts["optimizer steps"] = min(progress.steps_done, version or progress.steps_done)
        evaluations = _evaluations(progress, version)
    for name, value in (
        ("algorithm", algorithm),
        ("completions per step", f"{run.get('groups_per_step', '?')} prompts × {run.get('group_size', '?')}"),
        ("learning rate", trainer.get("learning_rate")),
        ("KL coefficient", trainer.get("kl_coefficient")),
        (
            "rewards",
            ", ".join(Path(one.get("file") or one["name"]).name for one in all_by_name(run.get("verifiers", []))),
        ),
    ):
        if home and value not in (None, ""):
            facts[name] = value
    base = str(model.get("path", ""))
    sources = (source for _, source in data_sources(data) if isinstance(source, dict))
    datasets = dict.fromkeys(source["dataset"] for source in sources if source.get("dataset"))
    header = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        **({"base_model": base} if base and is_hub_id(Path(base)) else {}),
        **({"datasets": list(datasets)} if datasets else {}),
        "tags": ["quartet", "reinforcement-learning", *([algorithm] if algorithm else [])],
    }
    lines = ["---", *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in header.items()), "---", ""]
    lines += [f"# {title.rpartition('/')[2]}", "", "Trained by reinforcement learning with Quartet."]
    if facts:
        lines += ["", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())]
    return "\n".join([*lines, *evaluations, ""])


def _is_run(folder: Path) -> bool:
    # A run file alone may be any run's: models are also saved below the folder that a user works in.
    made = (folder / "metrics.jsonl").is_file() or (folder / "checkpoints").is_dir()
    return made and (folder / "run.toml").is_file()


def _evaluations(progress: RunProgress, version: int) -> list[str]:
    """Return a table of the first and the last accuracy on each set, up to a version; 0: of all."""
    rows = []
    for name in sorted(progress.evaluations):
        values = [
            f"{accuracy_text(each)} at version {each.policy_version}"
            for each in progress.points(name)
            if not version or each.policy_version <= version
        ]
        rows += [f"| {name} | {values[0]} | {values[-1]} |"] if values else []
    return ["", "| evaluation | before | after |", "|---|---|---|", *rows] if rows else []
