"""Checks before a start, and `quartet run --dry-run`: run file, data, machine, addresses, and each service's own check
in its own environment. All errors are reported together."""

import asyncio
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
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
from quartet_local.memory import check_memory
from quartet_local.placement import Service, place, teacher_addresses
from quartet_local.process import find_server, service_variables

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


_WITHOUT_REDIS = ["--section-only", "--set", "broker.redis_url=unix:///not-started-yet"]
_STALL_SECONDS = 60.0  # without work or output, after which a dry run is killed
_LONGEST_SECONDS = 900.0
_LOOK_SECONDS = 2.0

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
            services = [replace(one, options=options) for one in _placed(config, names, overrides, teachers)]
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
            complaints, summaries, failures = await _dry_runs(
                services, path, [*overrides, *settings], redis_later=own_redis
            )
        warnings = [warning for summary in summaries.values() for warning in summary.get("warnings", [])]
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
        async with _running(command, stdout=asyncio.subprocess.DEVNULL, stderr=errors) as process:
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
    return [*program, *([str(path)] if path else []), *settings, *service.options]


def usable_gpus() -> list[Gpu]:
    """Return the GPUs of runs on this machine; none if the environments are for the CPU. Raises ConfigError."""
    try:
        gpus = read_gpus()
    except GpuError as error:
        raise ConfigError(str(error)) from error
    return gpus if gpus and made_for_gpus() else []


def _placed(
    config: LoadedConfig[LauncherSection], names: Sequence[str], overrides: Sequence[str], teachers: Mapping[str, str]
) -> list[Service]:
    """Return the processes of the services, on GPUs if the environments are for GPUs. `teachers`: their addresses.

    Raises:
        ConfigError: GPUs are missing or have too little memory.
    """
    services = place(config, names, usable_gpus(), overrides, teachers)
    check_memory(services, config, overrides)
    return services


async def _dry_runs(
    services: Sequence[Service], path: Path | None, overrides: list[str], redis_later: bool
) -> tuple[list[str], dict[str, dict[str, Any]], list[LaunchError]]:
    """Return the services' configuration errors, what each printed, and which checks crashed or came to no end."""
    options = [_WITHOUT_REDIS if redis_later and service.kind == "broker" else [] for service in services]
    commands = [
        [*service_command(service, path, overrides), "--dry-run", "--check-port", *own]
        for service, own in zip(services, options, strict=True)
    ]
    results = await asyncio.gather(*map(_dry_run, commands))
    complaints, failures = [], []
    summaries: dict[str, dict[str, Any]] = {}
    for service, (status, printed, lines) in zip(services, results, strict=True):
        start = f"quartet-{service.kind}: "
        if status == 2:
            complaints += [line.removeprefix(start) for line in lines if line.startswith(start)] or lines[-1:]
        elif not status:
            summaries[service.name] = _summary(printed)
        else:
            last_line = lines[-1] if lines else "it printed nothing"
            failures.append(LaunchError(f"{service.name}: its check failed: {last_line}"))
    return complaints, summaries, failures


def _summary(printed: bytes) -> dict[str, Any]:
    """Return the plan that a service printed; a library may have printed something before it."""
    _, begin, rest = printed.rpartition(b'{\n  "service"')
    found: dict[str, Any] = json.loads(begin + rest) if begin else {}
    return found


async def _dry_run(command: list[str]) -> tuple[int, bytes, list[str]]:
    """Run a command; return its exit status, what it printed, and the lines of its standard error."""
    # Not pipes: a descendant could hold them open after the exit.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            async with _running(command, stdout=output, stderr=errors) as process:
                async with asyncio.timeout(_LONGEST_SECONDS):
                    status = await _while_it_works(process, lambda: os.fstat(errors.fileno()).st_size)
        except TimeoutError as error:
            return 1, b"", [str(error) or f"no end within {_LONGEST_SECONDS:.0f} s"]
        output.seek(0)
        errors.seek(0)
        return status, output.read(), errors.read().decode(errors="replace").strip().splitlines()


async def _while_it_works(process: asyncio.subprocess.Process, written: Callable[[], int]) -> int:
    """Return the exit status. Raises TimeoutError if the process neither works nor writes for a while."""
    ending, last, since = asyncio.ensure_future(process.wait()), (-1, -1), time.monotonic()
    while not (await asyncio.wait([ending], timeout=_LOOK_SECONDS))[0]:
        if (now := (_cpu_ticks(process.pid), written())) != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > _STALL_SECONDS:
            raise TimeoutError(f"for {_STALL_SECONDS:.0f} s it neither worked nor wrote; start it alone to see where")
    return ending.result()


def _cpu_ticks(session: int) -> int:
    """Return the processor time of the processes of a session, in clock ticks (proc(5))."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12]) if int(fields[3]) == session else 0
    return ticks


@asynccontextmanager
async def _running(command: list[str], **pipes: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a command in its own session, so that Ctrl-C does not reach it; kill it at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, start_new_session=True, env=service_variables(), **pipes
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
