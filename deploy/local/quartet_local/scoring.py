"""`quartet score RUN.toml` and `quartet rescore`: starts the reward service alone."""

import json
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from quartet_client.async_client import AsyncClient
from quartet_client.terminal import Terminal
from quartet_common.config import load_config
from quartet_common.ports import free_ports
from quartet_local.config import LaunchError, LauncherSection, run_environments
from quartet_local.placement import Service
from quartet_local.preflight import Plan
from quartet_local.process import parse_record
from quartet_local.run import Launch, launched


def with_reward_service(
    path: Path | None, overrides: Sequence[str], work: Callable[[AsyncClient], Coroutine[Any, Any, int]]
) -> int:
    """Start the reward service of a run file or of the defaults, do work with a client, and return its exit status.

    Port and folder are its own, so a run of the same run file is not disturbed. What reward functions print is shown.
    The folder, with the service's log, is kept after the status 1.
    """
    folder = Path(tempfile.mkdtemp(prefix="quartet-score-"))
    log = folder / "logs" / "reward.log"

    def make() -> Launch:
        config = load_config("launcher", LauncherSection, path, overrides)
        if run_environments("reward"):
            raise LaunchError("the environment of the reward service could not be made; see the reason above")
        (port,) = free_ports(1, neighbor=config.server.metrics_port_offset)
        own = {"run.folder": str(folder), "addresses.reward": f"127.0.0.1:{port}", "server.bind_host": ""}
        settings = [*overrides, *(f"{key}={json.dumps(value)}" for key, value in own.items())]
        config = load_config("launcher", LauncherSection, path, settings)
        service = Service("reward", "reward", "")
        plan = Plan(config, settings, [], "", services=[service], redis_server="", data=None)
        return Launch(plan, Terminal(stderr=True))

    async def scored(launch: Launch) -> int:
        async with launch.services() as supervisor, launch.client() as client:
            await supervisor.start("reward")
            status = await work(client)
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            if parse_record(line)[0] == line:
                launch.say(line)
        return status

    status = 1
    try:
        status = launched(make, scored)
    finally:
        if status == 1 and log.exists():
            Terminal(stderr=True).print(f"the service's log is {log}", soft_wrap=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return status
