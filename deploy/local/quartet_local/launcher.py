"""The entry point of the `quartet` command, which calls these: a `quartet_client.launcher.Launcher`."""

from quartet_local.config import run_environments, service_python
from quartet_local.evaluation import with_model
from quartet_local.preflight import check_run
from quartet_local.run import run
from quartet_local.scoring import with_reward_service
from quartet_local.sft import check_sft, sft
from quartet_local.sweep import check_sweep, sweep

__all__ = [
    "check_run",
    "check_sft",
    "check_sweep",
    "run",
    "run_environments",
    "service_python",
    "sft",
    "sweep",
    "with_model",
    "with_reward_service",
]
