"""What is checked before anything starts, and by `quartet run --dry-run`: run file, data, machine, addresses, and every
service's own check in its own environment. Whatever is wrong is reported at once."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ConfigDict

from quartet_client.async_client import AsyncClient
from quartet_client.data import DataSection, RunData
from quartet_client.errors import InputError
from quartet_common.config import ConfigError, LoadedConfig, Section, load_config, validate_section
from quartet_common.gpus import GpuError, read_gpus
from quartet_common.hub import is_hub_id
from quartet_common.ports import check_ports_free, free_ports
from quartet_common.run_file import Problems, RunFile
from quartet_local.config import (
    SERVICES,
    LaunchError,
    LauncherSection,
    ensure_environments,
    made_for_gpus,
    service_python,
)
from quartet_local.placement import Service, check_memory, place

_ASKED_SECONDS = 3.0


async def free_addresses(config: LoadedConfig, kinds: Sequence[str]) -> tuple[list[str], str]:
    """Return settings with free addresses of the services, and who holds the default ones; none if those are free.

    Addresses that the run file gives are left as they are: whoever else uses them has them from there.
    """
    if config.addresses.model_fields_set:
        return [], ""
    for kind in kinds:
        try:
            check_ports_free(kind, getattr(config.addresses, kind), config.server)
        except ConfigError as error:
            ports = free_ports(len(kinds), neighbour=config.server.metrics_port_offset)
            found = [f'addresses.{each}="127.0.0.1:{port}"' for each, port in zip(kinds, ports, strict=True)]
            return found, f"{error}{await holder(config, kind)}"
    return [], ""


async def holder(config: LoadedConfig, kind: str) -> str:
    """Return " by the KIND of run 'NAME'" if a service answers at the address of `kind`, else ""."""
    try:
        async with (
            asyncio.timeout(_ASKED_SECONDS),
            AsyncClient(**config.addresses.model_dump(), security=config.security) as client,
        ):
            service, broker = await asyncio.gather(client.service(kind), client.service("broker"))
    except TimeoutError:
        return ""
    if service.health == "unreachable":
        return ""
    active = (run["run_id"] for run in broker.details.get("runs", ()) if run["state"] == "active")
    run_id = service.details.get("run_id") or next(active, "")
    return f" by the {kind} of run '{run_id}'" if run_id else f" by the {kind} of another run"


_WITHOUT_REDIS = ["--section-only", "--set", "broker.redis_url=unix:///not-started-yet"]
_TIMEOUT = 60.0  # seconds; a dry run takes about one, more while everything is imported for the first time

DataT = TypeVar("DataT")
Say = Callable[[str], None]


class _BrokerSection(Section):
    """The one key of [broker] that matters here."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    redis_url: str = ""


@dataclass(frozen=True)
class Plan(Generic[DataT]):
    """What passed the checks.

    Attributes:
        config: the run file as the launcher reads it, with all overrides.
        asked: the overrides that were given.
        found: settings with free addresses, where others hold the default ones.
        held: a sentence about who holds those.
        services: the processes, the broker first.
        own_redis: no Redis is named, so that the launcher starts one.
        data: the prompts, as they were read.
    """

    config: LoadedConfig[LauncherSection]
    asked: list[str]
    found: list[str]
    held: str
    services: list[Service]
    own_redis: bool
    data: DataT

    @property
    def overrides(self) -> list[str]:
        """Those that `config` was loaded with."""
        return [*self.asked, *self.found]


def check_run(path: Path | None, overrides: Sequence[str], say: Say = lambda line: None) -> Plan[RunData]:
    """Check what `quartet run` would start, see `check`."""
    return check(SERVICES, path, overrides, RunData.load, say)


def check(
    names: Sequence[str],
    path: Path | None,
    overrides: Sequence[str],
    read: Callable[[LoadedConfig[LauncherSection]], DataT],
    say: Say = lambda line: None,
) -> Plan[DataT]:
    """Check a launch of some services; nothing is started.

    Args:
        names: in the order of `SERVICES`; the broker is the first.
        read: reads the prompts; raises InputError.
        say: is given a line before the services are asked.

    Raises:
        ConfigError: all that is wrong, a sentence each.
        LaunchError: the environments cannot be made, or a service's check failed in another way.
    """
    RunFile.read(path, overrides)  # environments are not made for a file that is not there
    ensure_environments()
    return asyncio.run(_check(names, path, list(overrides), read, say))


async def _check(
    names: Sequence[str],
    path: Path | None,
    asked: list[str],
    read: Callable[[LoadedConfig[LauncherSection]], DataT],
    say: Say,
) -> Plan[DataT]:
    # Where the launcher's own sections are wrong, the services still find what is wrong with theirs.
    services = [Service(name, name, "") for name in names]
    reading: asyncio.Task | None = None
    found: list[str] = []
    held, overrides, own_redis, lines_alone = "", asked, True, True
    with Problems() as problems:
        with problems.collecting(LaunchError):
            config = load_config("launcher", LauncherSection, path, asked)
            if config.section.rollouts != 0:  # rollouts elsewhere look for the run at the run file's addresses
                found, held = await free_addresses(config, names)
                overrides = [*asked, *found]
                config = load_config("launcher", LauncherSection, path, overrides)
            reading = asyncio.create_task(asyncio.to_thread(read, config))
            own_redis = not load_config("broker", _BrokerSection, path, overrides).section.redis_url
            services = _placed(config, names, overrides)
            lines_alone = _lines_alone(config)
            say("checking the run file with every service")
        with tempfile.TemporaryDirectory(prefix="quartet-data-") as folder:
            settings: list[str] = []
            titles: dict[str, str] = {}
            if reading is not None and not lines_alone:
                await asyncio.wait([reading])
                if reading.exception() is None and isinstance(read_data := reading.result(), RunData):
                    settings, titles = await asyncio.to_thread(_as_lines, read_data, Path(folder))
            complaints = await _dry_runs(services, path, [*overrides, *settings], redis_later=own_redis)
        if reading is not None:
            with problems.collecting(InputError):
                data = await reading
                complaints = await asyncio.gather(*(_with_holder(config, complaint) for complaint in complaints))
                complaints = [_with_titles(complaint, titles) for complaint in complaints]
        problems.add(*complaints)
    return Plan(config, asked, found, held, services, own_redis, data)


def _lines_alone(config: LoadedConfig) -> bool:
    """Whether the services can read the data themselves: JSONL alone has prompts as they stand."""
    section = validate_section(DataSection, config.data, "data", config.file)
    return all(source.is_lines for _, source in section.sources())


def _as_lines(data: RunData, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Write the prompts as JSONL, for the services' checks.

    Returns:
        Settings that name the files, and what errors about a line of each begin with, by what they should.
    """
    files, titles = [], {}
    for (_, source), prompts in zip(data.section.sources(), [data.train, *data.evaluation.values()], strict=True):
        files.append(str(source.path))
        if source.is_lines:
            continue
        files[-1] = str(folder / f"{len(files)}.jsonl")
        with open(files[-1], "w", encoding="utf-8") as lines:
            for prompt in prompts:
                lines.write(prompt.model_dump_json(exclude_defaults=True, exclude={"columns"}) + "\n")
        titles[f"{files[-1]}, line "] = f"{source.title}, row "
    train, *sets = (json.dumps(file, ensure_ascii=False) for file in files)
    names = (json.dumps(name, ensure_ascii=False) for name in data.evaluation)
    table = ", ".join(f"{name} = {file}" for name, file in zip(names, sets, strict=True))
    return [f"data.train={train}", f"data.evaluation={{{table}}}"], titles


def _with_titles(complaint: str, titles: dict[str, str]) -> str:
    """Return a complaint about a line of a file of `_as_lines` as one about its source's row."""
    for line, row in titles.items():
        complaint = complaint.replace(line, row)
    return complaint


async def _with_holder(config: LoadedConfig, complaint: str) -> str:
    """Return a complaint about an address with who holds it, others as they are."""
    held = [kind for kind in SERVICES if complaint.startswith(f"addresses.{kind}:")]
    return complaint + await holder(config, held[0]) if held else complaint


async def download_model(plan: Plan, say: Say) -> list[str]:
    """Return settings that give the services the model's folder, if it is one of the hub, with its weights, or has
    another tokenizer or chat template.

    Raises:
        ConfigError: it cannot be had, or does not fit the GPUs.
    """
    model = plan.config.model
    if not is_hub_id(model.path) and not model.overrides_tokenizer:
        return []
    if is_hub_id(model.path):
        say(f"model: {model.path}, from the hub or its cache")
    kind = next(service.kind for service in plan.services if service.kind in ("rollout", "trainer"))
    given = [word for override in plan.overrides for word in ("--set", override)]
    command = [str(service_python(kind)), "-m", "quartet_common.hub"]
    command += [*([str(plan.config.path)] if plan.config.path else []), *given]
    async with _running(command, stdout=asyncio.subprocess.PIPE) as process:
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


def service_command(service: Service, path: Path | None, overrides: list[str]) -> list[str]:
    """Return the command line of a service."""
    settings = [argument for override in (*overrides, *service.settings) for argument in ("--set", override)]
    program = [str(service_python(service.kind)), "-m", f"quartet_{service.kind}"]
    return [*program, *([str(path)] if path else []), *settings]


def _placed(config: LoadedConfig[LauncherSection], names: Sequence[str], overrides: Sequence[str]) -> list[Service]:
    """Return the processes of the services, on the GPUs that the environments are made for.

    Raises:
        ConfigError: GPUs are missing, or cannot hold what is to run on them.
    """
    try:
        gpus = read_gpus()
    except GpuError as error:
        raise ConfigError(str(error)) from error
    services = place(config, names, gpus if gpus and made_for_gpus() else [], overrides)
    check_memory(services, config, overrides)
    return services


async def _dry_runs(
    services: Sequence[Service], path: Path | None, overrides: list[str], redis_later: bool
) -> list[str]:
    """Return what the services refuse, in their order. Raises LaunchError if one fails and none refuses anything."""
    options = [_WITHOUT_REDIS if redis_later and service.kind == "broker" else [] for service in services]
    commands = [
        [*service_command(service, path, overrides), "--dry-run", "--check-port", *own]
        for service, own in zip(services, options, strict=True)
    ]
    results = await asyncio.gather(*map(_dry_run, commands))
    complaints, failures = [], []
    for service, (status, lines) in zip(services, results, strict=True):
        start = f"quartet-{service.kind}: "
        if status == 2:
            complaints += [line.removeprefix(start) for line in lines if line.startswith(start)] or lines[-1:]
        elif status:
            said = lines[-1] if lines else "it said nothing"
            failures.append(LaunchError(f"{service.name}: its check failed: {said}"))
    if failures and not complaints:
        raise failures[0]
    return complaints


async def _dry_run(command: list[str]) -> tuple[int, list[str]]:
    """Return the exit status and the lines of standard error."""
    with tempfile.TemporaryFile() as errors:  # no pipe, which what it started may hold open after its end
        try:
            async with _running(command, stdout=asyncio.subprocess.DEVNULL, stderr=errors) as process:
                async with asyncio.timeout(_TIMEOUT):
                    status = await process.wait()
        except TimeoutError:
            return 1, [f"no answer within {_TIMEOUT:.0f} s"]
        errors.seek(0)
        return status, errors.read().decode(errors="replace").strip().splitlines()


@asynccontextmanager
async def _running(command: list[str], **pipes: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a command, which a Ctrl-C does not reach; kill it at the end if it has not ended."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, start_new_session=True, **pipes
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
