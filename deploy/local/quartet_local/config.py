"""[launcher] of the run file."""

from typing import Annotated, Literal

from pydantic import Field

from quartet_common.config import Section


class LauncherSection(Section):
    """[launcher]: how the services of one machine are started and kept."""

    rollouts: int | None = Field(
        None,
        ge=0,
        le=1024,
        description="Rollouts on this machine: one at addresses.rollout, the others at free ports of its host; "
        "0: they run elsewhere. Unset: one on the CPU, as many as half of the GPUs hold.",
    )
    rollout_gpus: list[Annotated[int, Field(ge=0)]] = Field(
        [], description="GPUs of the rollouts, as nvidia-smi counts them. Empty: the first of those that are left."
    )
    trainer_gpus: list[Annotated[int, Field(ge=0)]] = Field(
        [], description="GPUs of the trainer, one a rank. Empty: those that the rollouts leave."
    )
    reward_gpus: list[Annotated[int, Field(ge=0)]] = Field(
        [], description="GPUs of the reward service, for a learned reward model."
    )
    colocate: Literal["sleep", "split"] | None = Field(
        None,
        description="Rollout and trainer on one GPU. sleep: the rollout gives its memory up while a step is trained; "
        "split: its KV cache has a fixed size, the rest is the trainer's. Unset: sleep on an only GPU.",
    )
    restart: bool = Field(True, description="Start a service again that died while the run is under way.")
    max_restarts: int = Field(
        3, ge=0, description="Restarts of one service without a new step of the run, after which the run is given up."
    )
    start_timeout_seconds: float = Field(180.0, gt=0, description="Time for a service to become healthy.")
    embedded_redis_memory: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of the host's memory for the data of the Redis that is started without broker.redis_url.",
    )
    plain: bool = Field(False, description="A line per step instead of a live picture.")


class LaunchError(Exception):
    """The run could not be started or kept going; the text is one sentence for the person who started it."""

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code
