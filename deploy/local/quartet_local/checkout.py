"""The checkout this launcher belongs to, and the environments of its services."""

import json
import subprocess
import sys
from pathlib import Path

from quartet_local.config import LaunchError

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
