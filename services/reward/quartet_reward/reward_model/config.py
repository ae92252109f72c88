"""[reward.reward_model] of the run file, and what is checked before the service starts. Imports no torch."""

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import Field

from quartet_common.config import ConfigError, Section
from quartet_common.plugins import install_command

_PACKAGES = ("torch", "transformers", "safetensors")


class RewardModelSection(Section):
    """[reward.reward_model]: which model, where it runs, and how its texts are put together."""

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
        "{prompt}{completion}", description="The text that is read: {prompt} and {completion} stand as they came."
    )
    add_special_tokens: bool = Field(
        False,
        description="Add those that the tokenizer adds by itself: true for encoders (BERT's [CLS]), false where the "
        "text has them already, as prompts and completions of chat models do.",
    )
    deadline_seconds: float = Field(120.0, ge=1, le=3600, description="A batch that takes longer is killed.")
    start_seconds: float = Field(600.0, ge=1, le=7200, description="Longest time that loading may take.")


def check(section: RewardModelSection) -> None:
    """Check what can be checked without loading the model. Raises ConfigError with the cure."""
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
            f"reward.reward_model.path: '{section.path}' is no Hugging Face model folder: it has no config.json"
        )
    if not list(section.path.glob("*.safetensors")):
        raise ConfigError(
            f"reward.reward_model.path: '{section.path}' holds no *.safetensors; save it by save_pretrained()"
        )
    if "{completion}" not in section.template:
        raise ConfigError(f"reward.reward_model.template: got '{section.template}'; it must contain {{completion}}")
