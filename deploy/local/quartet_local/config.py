"""[launcher] of the run file; this launcher's checkout and the environments of the services."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from quartet_common.config import LoadedConfig
from quartet_common.sections import Section
from quartet_common.sources import task_sources


class LauncherSection(Section):
    """[launcher]: how the services on one machine are started and restarted."""

    rollouts: int | None = Field(
        None,
        ge=0,
        le=1024,
        description="Rollouts on this machine: the first at addresses.rollout, the others at free ports of that host; "
        "0: they run elsewhere. Unset: one on a CPU; with GPUs, as many as fit on half of them.",
    )
    rollout_gpus: list[Annotated[int, Field(ge=0)]] = Field(
        [], description="GPUs of the rollouts, by nvidia-smi's index. Empty: the first GPUs that are not assigned."
    )
    trainer_gpus: list[Annotated[int, Field(ge=0)]] = Field(
        [], description="GPUs of the trainer, one per rank. Empty: those that the rollouts do not use."
    )
    reward_gpus: list[Annotated[int, Field(ge=0)]] = Field(
        [], description="GPUs of the reward service, for a learned reward model."
    )
    teacher_gpus: list[Annotated[int, Field(ge=0)]] = Field(
        [], description="GPUs of the teachers that the launcher serves, in the order of [run.teachers]."
    )
    colocate: Literal["sleep", "split"] | None = Field(
        None,
        description="Rollout and trainer on one GPU. sleep: the rollout frees its memory while a step is trained; "
        "split: its KV cache has a fixed size, and the trainer uses the rest. Unset: sleep if there is one GPU.",
    )
    restart: bool = Field(True, description="Restart a service that exits during the run.")
    max_restarts: int = Field(
        3, ge=0, description="Restarts of one service without a new step in between; at the next exit the run is ended."
    )
    hang_seconds: float = Field(
        120.0, gt=0, description="A service whose event loop does not run for so long has hung: it is killed."
    )
    start_timeout_seconds: float = Field(180.0, gt=0, description="Time for a service to answer; it may still load.")
    embedded_redis_memory: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of the host's memory for the embedded Redis, which is started if broker.redis_url is unset.",
    )
    plain: bool = Field(False, description="Print a line per step instead of a live display.")


class LaunchError(Exception):
    """The run could not be started or continued; the text is one sentence for the user."""

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code


ROOT = Path(__file__).resolve().parents[3]
SERVICES = ("broker", "reward", "rollout", "trainer")
ENVIRONMENT = "environment"
"""The optional fifth service."""


def serves_environments(config: LoadedConfig) -> bool:
    """Return whether a run uses the environment service, by its environment, its data or [environment]."""
    run = config.run.environment
    return (run is not None and run.served) or bool(config.file.section(ENVIRONMENT)) or has_tasks(config)


def has_tasks(config: LoadedConfig) -> bool:
    """Return whether a source of the data is an environment's tasks."""
    return any(task_sources(config.data))


def service_python(name: str) -> Path:
    """Return the interpreter of a service's environment."""
    return ROOT / ".quartet" / "envs" / name / "bin" / "python"


def made_for_gpus() -> bool:
    """Return whether the environments of rollout and trainer are for GPUs; one made by hand is taken to be.

    Raises:
        LaunchError: one is, the other is not.
    """
    made = {}
    for name in ("rollout", "trainer"):
        stamp = service_python(name).parents[1] / "quartet-stamp.json"
        if service_python(name).exists():  # supervised fine-tuning needs no rollout
            made[name] = json.loads(stamp.read_text()).get("profile", "cpu") if stamp.exists() else "gpu"
    if len(set(made.values())) > 1:
        raise LaunchError(
            f"the rollout's environment is made for the {made['rollout']}, the trainer's for the {made['trainer']}; "
            "make both alike: python3 deploy/local/environments.py --gpu rollout trainer (or --cpu)",
            2,
        )
    return "gpu" in made.values()


def ensure_environments(*names: str) -> None:
    """Make the environments that are missing or out of date; by default of the four services. Raises LaunchError."""
    if run_environments(*(names or SERVICES)):
        raise LaunchError("the environments of the services could not be made; the reason is above")


def run_environments(*arguments: str) -> int:
    """Run `environments.py` with this process's output and return its exit status. Raises LaunchError."""
    script = ROOT / "deploy" / "local" / "environments.py"
    if not script.exists():
        raise LaunchError(f"{script} is not there: the launcher works from a checkout (install it with --editable)", 2)
    # In a session of its own: Ctrl-C reaches it once, from here, and then it kills its installer.
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments], stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        status = process.wait()
    except (KeyboardInterrupt, SystemExit):
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    if status == 130:
        raise KeyboardInterrupt
    return status
