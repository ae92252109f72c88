"""Upload of a model's folder to the Hugging Face hub, for `quartet export --push`."""

import sys
from collections.abc import Mapping
from pathlib import Path

from quartet_common.config import ConfigError
from quartet_common.python_file import install_command


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
