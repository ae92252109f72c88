"""`quartet eval MODEL SET`: starts services without a trainer."""

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from quartet_client.async_client import AsyncClient
from quartet_client.errors import QuartetError
from quartet_client.terminal import Terminal, echo
from quartet_common.config import LoadedConfig, load_config
from quartet_common.hub import is_hub_id
from quartet_common.ports import free_ports
from quartet_local.config import ENVIRONMENT, SERVICES, LaunchError, LauncherSection
from quartet_local.preflight import check
from quartet_local.run import Launch, launched

_NEEDED = tuple(name for name in SERVICES if name != "trainer")


def with_model(
    path: Path | None,
    overrides: Sequence[str],
    model: Path,
    version: int,
    work: Callable[[AsyncClient, str], Coroutine[Any, Any, int]],
) -> int:
    """Start services for a model, do work with a client and the id of a run of theirs, and return its exit status.

    Folder, ports, Redis and run id are their own, so a run of the same run file is not disturbed.

    Args:
        path: a run file, if there is one, for sections such as [rollout].
        model: its folder, or its id at the hub.
        version: policy version of its weights.
    """

    def make() -> Launch:
        config = load_config("launcher", LauncherSection, path, overrides)
        folder = Path(tempfile.mkdtemp(prefix="quartet-eval-"))
        settings = [*overrides, *_own_settings(config, folder, model, version)]
        try:
            plan = check(_NEEDED, path, settings, lambda _: None, partial(echo, err=True))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        launch = Launch(plan, Terminal(stderr=True))
        logs = folder / "logs"
        launch.hint = lambda: f"; the services' logs are in {logs}" if logs.is_dir() else ""
        return launch

    async def done(launch: Launch) -> int:
        # After a failure the folder is kept for its logs.
        try:
            async with launch.services() as supervisor, launch.client() as client:
                await supervisor.start(*supervisor.names)
                await client.create_run(launch.config.run)
                working = asyncio.create_task(work(client, launch.config.run.id))
                await supervisor.keep_up_until(working)
                status = working.result()
        except (QuartetError, LaunchError):
            raise
        except BaseException:
            shutil.rmtree(launch.folder, ignore_errors=True)
            raise
        if status:
            launch.say(launch.hint().removeprefix("; "))
        else:
            shutil.rmtree(launch.folder, ignore_errors=True)
        return status

    return launched(make, done)


def _own_settings(config: LoadedConfig, folder: Path, model: Path, version: int) -> list[str]:
    """Return settings that separate the services from those of the run file and give the rollout the model."""
    kinds = (*SERVICES, ENVIRONMENT)
    ports = free_ports(len(kinds), neighbor=config.server.metrics_port_offset)
    settings: dict[str, Any] = {
        "run.id": f"{config.run.id[:59]}-eval",
        "run.folder": str(folder),
        **{f"addresses.{name}": f"127.0.0.1:{port}" for name, port in zip(kinds, ports, strict=True)},
        "server.bind_host": "",
        "broker.redis_url": "",  # an embedded one
        "model.path": str(model),
        "rollout.initial_version": version,
        "rollout.runs": [],
        "rollout.advertise_address": "",
        "run.teachers": {},
        "model.revision": config.model.revision if is_hub_id(model) else "",
        **({"launcher.rollouts": 1} if config.section.rollouts == 0 else {}),
    }
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()]
