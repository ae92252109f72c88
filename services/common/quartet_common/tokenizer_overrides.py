"""A model's folder with another tokenizer or chat template: model.tokenizer, chat_template and template_arguments."""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from quartet_common.config import ConfigError, ModelSection
from quartet_common.run_file import read_text

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
"""A tokenizer has at least one of these files."""

_TEMPLATE, _SETTINGS = "chat_template.jinja", "tokenizer_config.json"
_MORE_TEMPLATES = "additional_chat_templates"
_BESIDE = ("special_tokens_map.json", "added_tokens.json", "merges.txt", _SETTINGS, _TEMPLATE, "chat_template.json")


def with_overrides(folder: Path, tokenizer: Path | None, model: ModelSection) -> Path:
    """Return a folder in the cache (HF_HOME) with the files of `folder` and the tokenizer files that [model] replaces.

    Args:
        folder: the model's, whose files are linked; it may have no weights.
        tokenizer: the folder of another tokenizer; None: the model's own.

    Raises:
        ConfigError: the tokenizer or template cannot be used, or the cache cannot be written.
    """
    source = tokenizer or folder
    if not any((source / name).is_file() for name in TOKENIZER_FILES):
        key = "model.tokenizer" if tokenizer else "model.path"
        raise ConfigError(
            f"{key}: '{source}' has no tokenizer; allowed: a folder with one of its files, such as tokenizer.json"
        )
    if tokenizer:
        _check_vocabulary(tokenizer, folder)
    replaced = {*TOKENIZER_FILES, *_BESIDE} if tokenizer else set()
    files = {file.name: file for file in folder.iterdir() if file.is_file() and file.name not in replaced}
    if tokenizer:
        files |= {name: tokenizer / name for name in replaced if (tokenizer / name).is_file()}
    others = () if model.chat_template else (source / _MORE_TEMPLATES).glob("*.jinja")  # that is one for everything
    files |= (more := {f"{_MORE_TEMPLATES}/{file.name}": file for file in others})
    written: dict[str, str] = {}
    if model.chat_template or model.template_arguments:
        template = _template(source, model)
        files.pop("chat_template.json", None)
        written[_TEMPLATE] = template
        written |= {name: _arguments(model) + read_text(file, "model.path") for name, file in more.items()}
        settings = _read(source / _SETTINGS)
        if "chat_template" in settings:  # what transformers before 4.43 reads
            written[_SETTINGS] = json.dumps({**settings, "chat_template": template}, indent=2, ensure_ascii=False)
    return _cached_folder({name: file for name, file in files.items() if name not in written}, written)


def _template(source: Path, model: ModelSection) -> str:
    """Return the chat template, preceded by the arguments as default values of its variables."""
    if model.chat_template:
        template: Any = read_text(Path(model.chat_template), "model.chat_template")
    elif (source / _TEMPLATE).is_file():
        template = read_text(source / _TEMPLATE, "model.path")
    else:
        template = _read(source / _SETTINGS).get("chat_template")
    if not isinstance(template, str):
        raise ConfigError(
            f"model.template_arguments: '{source}' has no chat template that takes them; name one by "
            "model.chat_template"
        )
    return _arguments(model) + template


def _arguments(model: ModelSection) -> str:
    return "".join(
        f"{{%- set {name} = {name} if {name} is defined else {value!r} %}}"
        for name, value in sorted(model.template_arguments.items())
    )


def _check_vocabulary(tokenizer: Path, folder: Path) -> None:
    read, size = _read(tokenizer / "tokenizer.json"), _read(folder / "config.json").get("vocab_size")
    vocabulary = read.get("model", {}).get("vocab", {})
    ids = [*(vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary)))]
    ids += [token["id"] for token in read.get("added_tokens", ())]
    if isinstance(size, int) and ids and max(ids) >= size:
        raise ConfigError(
            f"model.tokenizer: '{tokenizer}' has tokens up to {max(ids)}; allowed: below {size}, the vocab_size of the "
            "model"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # the checks of the folder report what is wrong with it
    return found if isinstance(found, dict) else {}


def _cached_folder(links: dict[str, Path], written: dict[str, str]) -> Path:
    """Return a folder with these files, named by a digest of them; make it unless it exists."""
    marks = [(name, str(path.absolute()), path.stat().st_mtime_ns) for name, path in sorted(links.items())]
    digest = hashlib.sha256(json.dumps([marks, sorted(written.items())]).encode()).hexdigest()[:16]
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "quartet"
    made = home / digest
    if made.is_dir():
        return made
    try:
        home.mkdir(parents=True, exist_ok=True)
        writing = Path(tempfile.mkdtemp(dir=home, prefix=".writing-"))
        for name in {*links, *written}:
            (writing / name).parent.mkdir(exist_ok=True)
        for name, path in links.items():
            (writing / name).symlink_to(path.absolute())
        for name, text in written.items():
            (writing / name).write_text(text, encoding="utf-8")
        try:
            writing.rename(made)
        except OSError:
            shutil.rmtree(writing)
            if not made.is_dir():  # another process made it meanwhile
                raise
    except OSError as error:
        raise ConfigError(
            f"model: '{home}' cannot be written to ({error.strerror}); name another by HF_HOME"
        ) from error
    return made
