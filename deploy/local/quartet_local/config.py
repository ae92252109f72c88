"""[launcher] of the run file; the checkout this launcher belongs to, and the environments of its services."""

import json
import subprocess
import sys
from pathlib import Path
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


ROOT = Path(__file__).resolve().parents[3]
SERVICES = ("broker", "reward", "rollout", "trainer")


def service_python(name: str) -> Path:
    """Return the interpreter of a service's environment."""
    return ROOT / ".quartet" / "envs" / name / "bin" / "python"


def made_for_gpus() -> bool:
    """Return whether rollout and trainer may use GPUs: `environments.py` made them so, or a person made them.

    Raises:
        LaunchError: one may, the other not.
    """
    made = {}
    for name in ("rollout", "trainer"):
        stamp = service_python(name).parents[1] / "quartet-stamp.json"
        made[name] = json.loads(stamp.read_text()).get("profile", "cpu") if stamp.exists() else "gpu"
    if made["rollout"] != made["trainer"]:
        raise LaunchError(
            f"the rollout's environment is made for the {made['rollout']}, the trainer's for the {made['trainer']}; "
            "make both alike: python3 deploy/local/environments.py --gpu rollout trainer (or --cpu)",
            2,
        )
    return made["rollout"] == "gpu"


def ensure_environments() -> None:
    """Make the environments that are missing or out of date; instant if there are none. Raises LaunchError."""
    if run_environments(*SERVICES):
        raise LaunchError("the environments of the services could not be made; the reason is above")


def run_environments(*arguments: str) -> int:
    """Run `environments.py` and return its exit status; what it says goes to this process's output."""
    script = ROOT / "deploy" / "local" / "environments.py"
    if not script.exists():
        raise LaunchError(f"{script} is not there: the launcher works from a checkout (install it with --editable)", 2)
    done = subprocess.run([sys.executable, str(script), *arguments], stdin=subprocess.DEVNULL, check=False)
    if done.returncode == 130:
        raise KeyboardInterrupt
    return done.returncode
