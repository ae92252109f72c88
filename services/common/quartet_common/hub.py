"""Models of the Hugging Face hub: downloads them to folders in the cache, replaces tokenizer or chat template, uploads
them, and explains errors of the hub.

huggingface_hub, a dependency of transformers, reads HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE.
`python -m quartet_common.hub FILE --set KEY=VALUE` downloads what a run file's [model] names.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quartet_common.config import ConfigError, LoadedConfig, ModelSection, SectionT, load_config
from quartet_common.python_file import install_command
from quartet_common.run_file import read_text
from quartet_common.sections import Section

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


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SMALL = ["*.json", "*.jinja", "*.model", "*.txt"]
_WEIGHTS = ["*.safetensors"]
_NOT_TRANSFORMERS = ["*/*.safetensors", "*/*.json", "consolidated*"]
"""Other formats of the weights, which some models have beside the one that transformers reads."""


def is_hub_id(path: Path | None) -> bool:
    """Return whether a path is "owner/name", a model of the hub, and no folder of that name exists."""
    return path is not None and HUB_ID.fullmatch(str(path)) is not None and not path.exists()


def located(config: LoadedConfig[SectionT], weights: bool = True) -> LoadedConfig[SectionT]:
    """Return the configuration with a folder as model.path, to which the files of a hub model are downloaded.

    Args:
        weights: download the weights too. Without them `LoadedConfig.weights` is False for a hub model.

    Raises:
        ConfigError: a key of [model] has an invalid value, or the download failed.
    """
    model, folder = config.model, config.model.path
    if not (hub := is_hub_id(folder)) and model.revision:
        raise ConfigError(
            f"model.revision: got '{model.revision}'; allowed: empty, unless model.path is the id of a hub model "
            f"(it is '{folder}')"
        )
    if hub:
        folder = download(str(folder), model.revision, "model.path", weights)
    if model.overrides_tokenizer and folder is not None and folder.is_dir():
        tokenizer = Path(model.tokenizer) if model.tokenizer else None
        if is_hub_id(tokenizer):
            tokenizer = download(model.tokenizer, "", "model.tokenizer", None)
        folder = with_overrides(folder, tokenizer, model)
    model = model.model_copy(update={"path": folder})
    return dataclasses.replace(config, model=model, weights=weights or not hub)


def folder_of(path: Path, key: str, weights: bool = True) -> Path:
    """Return a model's folder: that of the hub's, downloaded, if `path` is an id. Arguments, errors: see `download`."""
    return download(str(path), "", key, weights) if is_hub_id(path) else path


def download(name: str, revision: str, key: str, weights: bool | None) -> Path:
    """Return the folder of a hub model in the cache.

    Args:
        key: of the run file, whose value the name is, for errors.
        weights: False: only configuration and tokenizer; None: likewise, of a model that need not have weights.

    Raises:
        ConfigError: no such model or revision, no access, no connection, or needed files are missing.
    """
    try:
        from huggingface_hub import get_cached_repo_tree, snapshot_download
        from huggingface_hub.utils import disable_progress_bars
    except ImportError as error:
        raise ConfigError(
            f"{key}: '{name}' is no folder here, and hub models need the package huggingface_hub: "
            f"{install_command('huggingface_hub')}"
        ) from error
    if not sys.stderr.isatty():
        disable_progress_bars()
    wanted = [*_SMALL, *_WEIGHTS] if weights else _SMALL
    try:
        folder = Path(
            snapshot_download(name, revision=revision or None, allow_patterns=wanted, ignore_patterns=_NOT_TRANSFORMERS)
        )
    except Exception as error:  # of huggingface_hub, of the HTTP library beneath, of the disk
        raise ConfigError(hub_sentence(error, name, revision, key)) from error
    files = [file.path for file in get_cached_repo_tree(name, revision=folder.name)]
    for suffix in ("config.json", ".safetensors") if weights is not None else ():
        if not any(file.endswith(suffix) and "/" not in file for file in files):
            shown = ", ".join(sorted(files)[:5]) or "none"
            raise ConfigError(
                f"{key}: the hub model '{name}' has no {suffix} among its files ({shown}); allowed: a model that "
                "transformers loads, with weights in safetensors"
            )
    return folder


def check_dataset(name: str, revision: str, key: str) -> None:
    """Check that the hub has a dataset. Nothing is raised if the hub cannot be reached: the cache may have it.

    Args:
        key: of the run file, whose value the name is, for errors.

    Raises:
        ConfigError: no such dataset or revision, or no access.
        ImportError: huggingface_hub is not installed here.
    """
    from huggingface_hub import HfApi, errors

    hub = HfApi()
    try:
        hub.auth_check(name, repo_type="dataset")
        hub.dataset_info(name, revision=revision or None)
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", 500)
        if status < 500 or isinstance(error, errors.HFValidationError):
            raise ConfigError(hub_sentence(error, name, revision, key, "dataset")) from error


def hub_sentence(error: Exception, name: str, revision: str, key: str, kind: str = "model") -> str:
    """Explain an error of huggingface_hub, or of the HTTP library beneath, in a sentence.

    Args:
        name: of what was requested from the hub, with its revision.
        key: of the run file, whose value the name is.
        kind: "model", which may also be a folder, or "dataset".
    """
    from huggingface_hub import constants, errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    where = constants.ENDPOINT
    if isinstance(error, errors.RevisionNotFoundError):
        key = f"{key.rpartition('.')[0]}.revision"
        return (
            f"{key}: '{name}' has no '{revision or 'main'}' at {where}; allowed: one of its branches, tags or commits"
        )
    if isinstance(error, errors.GatedRepoError):
        page = f"{where}/{name}" if kind == "model" else f"{where}/{kind}s/{name}"
        return (
            f"{key}: '{name}' is gated, and HF_TOKEN has no access to it; accept its terms at {page}, and "
            "set HF_TOKEN to your token"
        )
    folder, allowed = (f"there is no folder '{name}', and ", "a folder, or ") if kind == "model" else ("", "")
    if isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
        return (
            f"{key}: {folder}no {kind} {'of that id' if folder else repr(name)} at {where}; allowed: {allowed}a "
            f"{kind}'s id, and for a private one an HF_TOKEN that may read it"
        )
    if status in (401, 403):
        return f"{key}: {where} refuses HF_TOKEN for '{name}' (HTTP {status}); set it to a valid token, or unset it"
    if constants.HF_HUB_OFFLINE:
        cache = constants.HF_HUB_CACHE if kind == "model" else constants.HF_HOME
        return (
            f"{key}: '{name}'{f' at {revision}' if revision else ''} is not in the cache ({cache}), or not all of it, "
            "and HF_HUB_OFFLINE forbids to download it; unset that, or copy it there"
        )
    if isinstance(error, OSError) and error.errno is not None:
        return f"{key}: '{name}' cannot be stored in {constants.HF_HUB_CACHE}: {error.strerror}"
    cause = error.__cause__ or error
    reason = f"HTTP {status}" if status else f"{type(cause).__name__}: {cause}".strip().partition("\n")[0]
    return (
        f"{key}: {folder}the hub at {where} does not give the {kind} {'of that id' if folder else repr(name)} "
        f"({reason}); try again later{', or name a folder' if folder else ''}"
    )


def push_folder(folder: Path, name: str, revision: str, private: bool, more: Mapping[str, bytes]) -> str:
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


class _Nothing(Section):
    """A section of which no key is read."""


def main(argv: list[str] | None = None) -> int:
    """Download the model of a run file and print its folder, or, with exit status 2, why that failed."""
    parser = argparse.ArgumentParser(prog="python -m quartet_common.hub", description=main.__doc__)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args(argv)
    try:
        config: LoadedConfig[Any] = located(load_config("none", _Nothing, arguments.file, arguments.set))
    except ConfigError as error:
        print(error)
        return 2
    print(config.model.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
