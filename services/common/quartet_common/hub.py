"""Models of the Hugging Face hub: downloads them to folders in the cache, and explains errors of the hub.

huggingface_hub, a dependency of transformers, reads HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE.
`python -m quartet_common.hub FILE --set KEY=VALUE` downloads what a run file's [model] names.
"""

import argparse
import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

from quartet_common.config import ConfigError, LoadedConfig, SectionT, load_config
from quartet_common.python_file import install_command
from quartet_common.sections import Section
from quartet_common.tokenizer_overrides import with_overrides

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
