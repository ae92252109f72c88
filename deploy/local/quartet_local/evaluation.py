"""`quartet eval RUN.toml SET --checkpoint FOLDER`: starts services without a trainer to evaluate a model."""

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from quartet_client.cli.export import find_model
from quartet_client.data import DataSection, load_prompts
from quartet_client.errors import InputError, QuartetError
from quartet_client.models import Evaluation
from quartet_client.prompts import Prompt
from quartet_client.terminal import Terminal, echo
from quartet_common.config import LoadedConfig, load_config
from quartet_common.ports import free_ports
from quartet_local.config import ENVIRONMENT, SERVICES, LaunchError, LauncherSection
from quartet_local.preflight import check
from quartet_local.run import Launch, launched
from quartet_local.supervisor import Supervisor

_NEEDED = tuple(name for name in SERVICES if name != "trainer")
_DEAD_SHOWN = 5  # dead prompts whose reasons are printed


def evaluate(
    config_path: Path,
    evaluation_set: str,
    checkpoint: Path,
    show: Callable[[Evaluation], int],
    prompts_path: Path | None = None,
    overrides: Sequence[str] = (),
    timeout: float = 600.0,
    summary_only: bool = False,
) -> int:
    """Evaluate the model of a checkpoint with services on this machine and return the exit status.

    Folder, ports, Redis and run id are its own, so a run of the same run file is not disturbed.

    Args:
        evaluation_set: a set of [data.evaluation]; with `prompts_path`, the name of the set in that file.
        checkpoint: folder of a checkpoint or of a model.
        show: prints the result and returns the exit status.
        timeout: seconds for the prompts, from when the services are healthy.
        summary_only: omit the completions.
    """

    def make() -> Launch:
        config = load_config("launcher", LauncherSection, config_path, overrides)
        prompts = _prompts(config_path, overrides, evaluation_set, prompts_path)
        model, version = find_model(checkpoint, "--checkpoint")
        folder = Path(tempfile.mkdtemp(prefix="quartet-eval-"))
        settings = [*overrides, *_own_settings(config, folder, model, version)]
        try:
            plan = check(_NEEDED, config_path, settings, lambda _: (prompts, version), partial(echo, err=True))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        launch = Launch(plan, Terminal(stderr=True))
        logs = folder / "logs"
        launch.hint = lambda: f"; the services' logs are in {logs}" if logs.is_dir() else ""
        return launch

    async def work(launch: Launch) -> int:
        # After a failure the folder is kept for its logs.
        try:
            async with launch.services() as supervisor:
                await supervisor.start(*supervisor.names)
                result = await _evaluate(launch, supervisor, evaluation_set, timeout, summary_only)
            status = show(result)
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

    return launched(make, work)


def _prompts(path: Path, overrides: Sequence[str], name: str, file: Path | None) -> list[Prompt]:
    section = load_config("data", DataSection, path, overrides).section
    if file is None and name not in section.evaluation:
        known = ", ".join(section.evaluation) or "none yet"
        raise InputError(f"[data.evaluation] of {path} has no set '{name}'; allowed: {known}, or one by --prompts FILE")
    return load_prompts(file or section.evaluation[name], section.require_reference, f"data.evaluation.{name}")


def _own_settings(config: LoadedConfig, folder: Path, model: Path, version: int) -> list[str]:
    """Return settings that separate the services from those of the run file and give the rollout the model."""
    kinds = (*SERVICES, ENVIRONMENT)
    ports = free_ports(len(kinds), neighbor=config.server.metrics_port_offset)
    settings = {
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
        "model.revision": "",
        **({"launcher.rollouts": 1} if config.section.rollouts == 0 else {}),
    }
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()]


async def _evaluate(
    launch: Launch, supervisor: Supervisor, evaluation_set: str, timeout: float, summary_only: bool
) -> Evaluation:
    run, (prompts, version) = launch.config.run, launch.plan.data
    options = {"prompts": prompts, "policy_version": version, "timeout": timeout, "summary_only": summary_only}

    async with launch.client() as client:
        await client.create_run(run)
        evaluating = asyncio.create_task(client.evaluate(run.id, evaluation_set, **options))
        await supervisor.keep_up_until(evaluating)
        if evaluating.result().dead:
            dead, _ = await client.list_dead(run.id, _DEAD_SHOWN)
            for prompt in dead:
                launch.say(f"{prompt.instance_id} has no answer: {'; '.join(dict.fromkeys(prompt.reasons))}")
    return evaluating.result()
