"""Checks before a start, and `quartet run --dry-run`: run file, data, machine, addresses, and each service's own check
in its own environment. All errors are reported together."""

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

from pydantic import ConfigDict

from quartet_client.async_client import AsyncClient
from quartet_client.data import DataSection, RunData
from quartet_client.errors import InputError
from quartet_common import tracing
from quartet_common.config import ConfigError, LoadedConfig, load_config, split_address, validate_section
from quartet_common.gpus import Gpu, GpuError, read_gpus
from quartet_common.hub import is_hub_id
from quartet_common.ports import check_ports, free_ports, ports_of, reserve_ports
from quartet_common.run_file import Problems, RunFile
from quartet_common.sections import Section
from quartet_local.config import (
    ENVIRONMENT,
    SERVICES,
    LaunchError,
    LauncherSection,
    ensure_environments,
    has_tasks,
    made_for_gpus,
    serves_environments,
    service_python,
)
from quartet_local.dry_runs import dry_runs, running, service_command
from quartet_local.memory import check_memory
from quartet_local.placement import Service, place, teacher_addresses, unused
from quartet_local.process import find_server

_ASKED_SECONDS = 3.0


async def free_addresses(config: LoadedConfig[LauncherSection], kinds: Sequence[str]) -> tuple[list[str], str]:
    """Reserve the services' ports. Return settings with free addresses, and a sentence about who has the default ones.

    Both are empty if the defaults are free, or others may use the addresses: the run file gives them, or rollouts on
    other hosts do.
    """
    addresses = {kind: getattr(config.addresses, kind) for kind in kinds}
    named: dict[str, str] = {}
    for kind, address in addresses.items():
        if (other := named.setdefault(address, kind)) != kind and not address.endswith(":0"):
            raise ConfigError(
                f"addresses.{kind}: got '{address}', that of addresses.{other}; allowed: a port of its own"
            )
    own = {port for kind, at in addresses.items() for port in ports_of(kind, at, config.server).values()}
    if config.addresses.model_fields_set or config.section.rollouts == 0:
        reserve_ports(own)  # from the free ports of others
        return [], ""
    try:
        for kind, address in addresses.items():
            check_ports(kind, address, config.server)
        if reserve_ports(own):
            return [], ""
        held = "addresses: another run that starts now has the default ones"
    except ConfigError as error:
        held = f"{error}{await holder(config, kind)}"
    ports = free_ports(len(kinds), neighbor=config.server.metrics_port_offset)
    return [f'addresses.{each}="127.0.0.1:{port}"' for each, port in zip(kinds, ports, strict=True)], held


async def holder(config: LoadedConfig, kind: str) -> str:
    """Return " by the KIND of run 'NAME'" if a service answers at the address of `kind`, else ""."""
    try:
        async with (
            asyncio.timeout(_ASKED_SECONDS),
            AsyncClient(**config.addresses.model_dump(), security=config.security) as client,
        ):
            service, broker = await asyncio.gather(client.get_service(kind), client.get_service("broker"))
    except TimeoutError:
        return ""
    if service.health == "unreachable":
        return ""
    active = (run["run_id"] for run in broker.details.get("runs", ()) if run["state"] == "active")
    run_id = service.details.get("run_id") or next(active, "")
    return f" by the {kind} of run '{run_id}'" if run_id else f" by the {kind} of another run"


DataT = TypeVar("DataT")
Say = Callable[[str], None]


class _BrokerSection(Section):
    """The key of [broker] that the launcher uses."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    redis_url: str = ""


@dataclass(frozen=True)
class Plan(Generic[DataT]):
    """A checked launch.

    Attributes:
        config: the run file with all overrides.
        asked: the user's overrides.
        found: settings with free addresses, if the default ones are in use.
        held: a sentence about who uses those.
        services: the processes, the broker first.
        redis_server: the path of the redis-server to start; "" if the run file names a Redis.
        data: the prompts, as returned by `read`.
        summaries: by service, what its own dry run printed.
    """

    config: LoadedConfig[LauncherSection]
    asked: list[str]
    found: list[str]
    held: str
    services: list[Service]
    redis_server: str
    data: DataT
    summaries: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def overrides(self) -> list[str]:
        """All overrides of `config`."""
        return [*self.asked, *self.found]


def check_run(path: Path, overrides: Sequence[str], say: Say = lambda line: None) -> Plan[RunData]:
    """Check a launch of all services, as `check` does."""
    return check(SERVICES, path, overrides, RunData.load, say)


def check(
    names: Sequence[str],
    path: Path | None,
    overrides: Sequence[str],
    read: Callable[[LoadedConfig[LauncherSection]], DataT],
    say: Say,
    options: tuple[str, ...] = (),
) -> Plan[DataT]:
    """Check a launch of some services; nothing is started.

    Args:
        names: in the order of `SERVICES`; without a broker there is no Redis either.
        read: reads the prompts; raises InputError.
        say: prints a progress line.
        options: of the services' command lines.

    Raises:
        ConfigError: all errors, a sentence each.
        LaunchError: the environments cannot be made, or a service's check crashed.
    """
    RunFile.read(path, overrides)  # raises before environments are made for a missing file
    ensure_environments(*names if "broker" not in names else ())
    return asyncio.run(_check(names, path, list(overrides), read, say, options))


async def _check(
    names: Sequence[str],
    path: Path | None,
    asked: list[str],
    read: Callable[[LoadedConfig[LauncherSection]], DataT],
    say: Say,
    options: tuple[str, ...],
) -> Plan[DataT]:
    # Even if the launcher's own sections have errors, the services check theirs.
    services = [Service(name, name, "", options=options) for name in names]
    reading: asyncio.Task | None = None
    finding: asyncio.Task[str] | None = None
    found: list[str] = []
    idle: list[str] = []
    served = "broker" in names
    held, overrides, own_redis, redis_server, lines_alone = "", asked, served, "", True
    with Problems() as problems:
        with problems.collecting(LaunchError):
            config = load_config("launcher", LauncherSection, path, asked)
            if served and serves_environments(config):
                await asyncio.to_thread(ensure_environments, ENVIRONMENT)
                names = [*names, ENVIRONMENT]
                services = [Service(name, name, "") for name in names]
            found, held = await free_addresses(config, names)
            teachers = teacher_addresses(config) if "trainer" in names else {}
            found += [f'run.teachers.{name}.address="{address}"' for name, address in teachers.items()]
            overrides = [*asked, *found]
            config = load_config("launcher", LauncherSection, path, overrides)
            reading = asyncio.create_task(_read(config, overrides, read))
            own_redis = served and not load_config("broker", _BrokerSection, path, overrides).section.redis_url
            gpus = usable_gpus()
            services = [replace(one, options=options) for one in place(config, names, gpus, overrides, teachers)]
            check_memory(services, config, overrides)
            idle = unused(services, gpus)
            lines_alone = not served or _lines_alone(config)
            tracing.check(config.tracing)  # the launcher feeds the run, and traces that
            say("checking the run file with every service")
        if own_redis:
            finding = asyncio.create_task(asyncio.to_thread(find_server))
        with tempfile.TemporaryDirectory(prefix="quartet-data-") as folder:
            settings: list[str] = []
            titles: dict[str, str] = {}
            if reading is not None and not lines_alone:
                await asyncio.wait([reading])
                if reading.exception() is None and isinstance(read_data := reading.result(), RunData):
                    settings, titles = await asyncio.to_thread(_as_lines, read_data, Path(folder))
            complaints, summaries, failures = await dry_runs(
                services, path, [*overrides, *settings], redis_later=own_redis
            )
        warnings = idle + [warning for summary in summaries.values() for warning in summary.get("warnings", [])]
        if finding is not None:
            with problems.collecting(LaunchError):
                redis_server = await finding
        if reading is not None:
            with problems.collecting(InputError):
                data = await reading
                if isinstance(data, RunData):
                    warnings += data.warnings()
                    data.check_enough(config.run)
                complaints = await asyncio.gather(*(_with_holder(config, complaint) for complaint in complaints))
        problems.add(*(with_titles(complaint, titles) for complaint in complaints))
        if failures and not problems.found:
            raise failures[0]
        problems.add(*map(str, failures))
    for warning in dict.fromkeys(warnings):
        say(f"warning: {with_titles(warning, titles)}")
    return Plan(config, asked, found, held, services, redis_server, data, summaries)


async def _read(
    config: LoadedConfig[LauncherSection],
    overrides: list[str],
    read: Callable[[LoadedConfig[LauncherSection]], DataT],
) -> DataT:
    """Read the prompts; where they are an environment's tasks, the environment service is started for that alone.

    Raises:
        InputError: as `read`, or the service does not answer.
    """
    if not has_tasks(config):
        return await asyncio.to_thread(read, config)
    command = service_command(Service(ENVIRONMENT, ENVIRONMENT, ""), config.path, overrides)
    with tempfile.TemporaryFile() as errors:
        async with running(command, stdout=asyncio.subprocess.DEVNULL, stderr=errors) as process:
            await _until_it_listens(process, errors, config)
            return await asyncio.to_thread(read, config)


async def _until_it_listens(
    process: asyncio.subprocess.Process, errors: IO[bytes], config: LoadedConfig[LauncherSection]
) -> None:
    """Wait for the environment service. Raises InputError, with the last line of its errors if it ended."""
    what, seconds = "data: the environment service, which has the tasks,", config.section.start_timeout_seconds
    deadline = time.monotonic() + seconds
    while not await _listens(config.addresses.environment):
        if process.returncode is not None:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
            raise InputError(f"{what} ended with status {process.returncode}: {said}")
        if time.monotonic() > deadline:
            raise InputError(f"{what} did not serve within {seconds:g} s (launcher.start_timeout_seconds)")
        await asyncio.sleep(0.2)


async def _listens(address: str) -> bool:
    try:
        _, writer = await asyncio.open_connection(*split_address(address))
    except OSError:
        return False
    writer.close()
    return True


def _lines_alone(config: LoadedConfig) -> bool:
    """Return whether the services can read the data themselves, which they can if all files are JSONL."""
    section = validate_section(DataSection, config.data, "data", config.file)
    return all(source.is_lines for _, source in section.sources())


def _as_lines(data: RunData, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Write the prompts as JSONL files, for the services' checks.

    Returns:
        Settings that name the files, and for each prefix of an error about a line its replacement: the source's row.
    """
    files: list[str] = []
    titles: dict[str, str] = {}
    read = [*(part.prompts for part in data.parts), *data.evaluation.values()]
    for (_, source), prompts in zip(data.section.sources(), read, strict=True):
        files.append(str(source.path))
        if source.is_lines:
            continue
        files[-1] = str(folder / f"{len(files)}.jsonl")
        with open(files[-1], "w", encoding="utf-8") as lines:
            for prompt in prompts:
                lines.write(prompt.model_dump_json(exclude_defaults=True) + "\n")
        titles |= {f"{files[-1]}, line ": f"{source.title}, row ", files[-1]: source.title}
    trained, sets = (
        files[: len(data.parts)],
        [json.dumps(file, ensure_ascii=False) for file in files[len(data.parts) :]],
    )
    train = json.dumps(trained if isinstance(data.section.train, list) else trained[0], ensure_ascii=False)
    names = (json.dumps(name, ensure_ascii=False) for name in data.evaluation)
    table = ", ".join(f"{name} = {file}" for name, file in zip(names, sets, strict=True))
    return [f"data.train={train}", f"data.evaluation={{{table}}}"], titles


def with_titles(complaint: str, titles: dict[str, str]) -> str:
    """Return a complaint about a file of `_as_lines`, or a line of it, with the source or its row in its place."""
    for line, row in titles.items():
        complaint = complaint.replace(line, row)
    return complaint


async def _with_holder(config: LoadedConfig, complaint: str) -> str:
    """Return a complaint; if it is about an address, with the service that uses the address appended."""
    held = [kind for kind in (*SERVICES, ENVIRONMENT) if complaint.startswith(f"addresses.{kind}:")]
    return complaint + await holder(config, held[0]) if held else complaint


async def download_model(plan: Plan, say: Say) -> list[str]:
    """Download a model of the hub, or make the folder of one with another tokenizer or chat template.

    Returns settings that name the folder; none if the run file's folder is used as it is.

    Raises:
        ConfigError: the model cannot be downloaded, or does not fit on the GPUs.
        LaunchError: the download crashed.
    """
    model = plan.config.model
    kinds = [service.kind for service in plan.services if service.kind in ("rollout", "trainer")]
    if not kinds or not (is_hub_id(model.path) or model.overrides_tokenizer):
        return []
    if is_hub_id(model.path):
        say(f"model: {model.path}, from the hub or its cache")
    given = [word for override in plan.overrides for word in ("--set", override)]
    command = [str(service_python(kinds[0])), "-m", "quartet_common.hub"]
    command += [*([str(plan.config.path)] if plan.config.path else []), *given]
    async with running(command, stdout=asyncio.subprocess.PIPE) as process:
        output, _ = await process.communicate()
    lines = output.decode(errors="replace").strip().splitlines()
    if process.returncode == 2:
        raise ConfigError(*lines)
    if process.returncode or not lines:
        raise LaunchError(f"model.path: the download of '{model.path}' failed; the reason is above")
    config = replace(plan.config, model=model.model_copy(update={"path": Path(lines[-1])}))
    check_memory(plan.services, config, plan.overrides)
    own = ["model.revision=", "model.tokenizer=", "model.chat_template=", "model.template_arguments={}"]
    return [f"model.path={json.dumps(lines[-1])}", *own]


def usable_gpus() -> list[Gpu]:
    """Return the GPUs of runs on this machine; none if the environments are for the CPU. Raises ConfigError."""
    try:
        gpus = read_gpus()
    except GpuError as error:
        raise ConfigError(str(error)) from error
    return gpus if gpus and made_for_gpus() else []
