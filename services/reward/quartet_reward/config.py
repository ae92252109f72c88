"""[reward], [reward.sandbox] and [reward.reward_model] of the run file. Imports no torch."""

import os
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from quartet_common.config import ConfigError
from quartet_common.python_file import install_command
from quartet_common.sections import FunctionPath, Section


class Mode(StrEnum):
    """Modes from the strongest to the weakest, see docs/sandbox.md."""

    NAMESPACES_UID = "namespaces+uid"
    """Namespaces, and a user of its own for each slot; needs root."""
    NAMESPACES = "namespaces"
    """Namespaces of an ordinary user."""
    UID = "uid+landlock+seccomp"
    """Without namespaces: a user of its own for each slot, Landlock and a system call filter; needs root."""


class SandboxSection(BaseModel):
    """How programs are isolated."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    required: bool = Field(
        False,
        description="Refuse to start if no mode as strong as `minimum` works here. Naming `code` in a run implies it.",
    )
    minimum: Mode = Field(Mode.UID, description="The weakest allowed mode; if it does not work, no program is run.")
    slots: int = Field(4, ge=2, le=512, description="Programs that run at one time; a judged execution takes two.")
    first_uid: int = Field(
        60600,
        ge=1000,
        le=2**31,
        description="As root: the first of slots + 1 user ids that nothing else uses; "
        "ranges in use by another sandbox are skipped.",
    )
    packages: tuple[str, ...] = Field(
        (), description="Absolute paths of folders whose packages programs may import; they can read all files there."
    )
    python: str = Field(
        "",
        description="Absolute path of the interpreter (3.11 or newer) that runs programs; default: the service's own.",
    )

    @field_validator("packages")
    @classmethod
    def _folders(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for path in value:
            if not os.path.isabs(path) or not os.path.isdir(path) or os.path.realpath(path).startswith("/tmp"):
                raise ValueError(f"packages: {path!r} must be the absolute path of a folder, not under /tmp")
        return value


MOST_ITEMS = 1024
"""Most items of a call of Score or of a message of ScoreStream."""
_PACKAGES = ("torch", "transformers", "safetensors")


class RewardModelSection(Section):
    """[reward.reward_model]: the model, its device, batches and template."""

    path: Path | None = Field(
        None, description="Hugging Face folder of a sequence classification model, safetensors. None: no reward model."
    )
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda, or cuda:N.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Type of the weights in memory.")
    threads: int = Field(1, ge=1, le=1024, description="Threads of torch, on the CPU.")
    batch: int = Field(16, ge=1, le=1024, description="Most texts of a forward pass.")
    batch_tokens: int = Field(32_768, ge=1, description="Most tokens of a forward pass, padding included.")
    wait_seconds: float = Field(0.01, ge=0, le=10, description="How long a batch that is not full waits for more.")
    max_tokens: int = Field(4096, ge=1, description="Of a longer text the last max_tokens are read.")
    template: str = Field(
        "{prompt}{completion}", description="The model's input; {prompt} and {completion} are replaced unchanged."
    )
    add_special_tokens: bool = Field(
        False,
        description="Add the tokenizer's special tokens: true for encoders (BERT's [CLS]), false where the "
        "text has them already, as prompts and completions of chat models do.",
    )
    deadline_seconds: float = Field(120.0, ge=1, le=3600, description="A batch that takes longer is killed.")
    start_seconds: float = Field(600.0, ge=1, le=7200, description="Longest time to load the model.")


def check_reward_model(section: RewardModelSection) -> None:
    """Check what can be checked without loading the model. Raises ConfigError, which says what to do."""
    if section.path is None:
        return
    lacking = [package for package in _PACKAGES if find_spec(package) is None]
    if lacking:
        raise ConfigError(
            f"reward.reward_model.path: a reward model needs {', '.join(lacking)}, not installed here; install "
            f"them: {install_command(*lacking)} (pinned: requirements-reward-model.txt)"
        )
    if not (section.path / "config.json").is_file():
        raise ConfigError(
            f"reward.reward_model.path: '{section.path}' is not a Hugging Face model folder: it has no config.json"
        )
    if not list(section.path.glob("*.safetensors")):
        raise ConfigError(
            f"reward.reward_model.path: '{section.path}' holds no *.safetensors; save it by save_pretrained()"
        )
    if "{completion}" not in section.template:
        raise ConfigError(f"reward.reward_model.template: got '{section.template}'; it must contain {{completion}}")


class RewardSection(Section):
    """Worker processes, their limits, and the queue before them."""

    workers: int = Field(1, ge=1, le=1024, description="Worker processes for mathematics that is not plain numbers.")
    worker_memory_bytes: int = Field(
        1 << 30, ge=256 << 20, description="Most address space of a worker, in bytes (RLIMIT_AS)."
    )
    deadline_seconds: float = Field(5.0, ge=0.1, le=600, description="Seconds after which a comparison is killed.")
    recycle_after: int = Field(5000, ge=1, description="Comparisons after which a worker is replaced by a fresh one.")
    max_queue: int = Field(
        4096,
        ge=MOST_ITEMS,
        description="Most items under way that need a worker; beyond, calls get RESOURCE_EXHAUSTED, streams wait.",
    )
    cache_bytes: int = Field(64 << 20, ge=0, description="Bytes of cached verdicts of math workers; 0: no cache.")
    queue_seconds: float = Field(300.0, gt=0, description="Longest wait for a worker before an item fails (retryable).")
    functions: list[FunctionPath] = Field(
        [], description='Reward functions beside those of run.verifiers: "FILE.py:FUNCTION".'
    )
    function_workers: int = Field(1, ge=1, le=1024, description="Processes for each reward function.")
    function_seconds: float = Field(
        30.0, ge=0.1, le=3600, description="Seconds after which a call of a reward function is killed."
    )
    reward_model: RewardModelSection = Field(RewardModelSection(), description="The learned reward model.")
    sandbox: SandboxSection = Field(SandboxSection(), description="How programs are isolated.")
