"""The services' own checks, `--dry-run`, each as a process in its own environment."""

import asyncio
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from quartet_local.config import LaunchError, service_python
from quartet_local.placement import Service
from quartet_local.process import service_variables

_WITHOUT_REDIS = ["--section-only", "--set", "broker.redis_url=unix:///not-started-yet"]
_STALL_SECONDS = 60.0  # without work or output, after which a dry run is killed
_LONGEST_SECONDS = 900.0
_LOOK_SECONDS = 2.0


def service_command(service: Service, path: Path | None, overrides: list[str]) -> list[str]:
    """Return the command line of a service."""
    settings = [argument for override in (*overrides, *service.settings) for argument in ("--set", override)]
    program = [str(service_python(service.kind)), "-m", f"quartet_{service.kind}"]
    return [*program, *([str(path)] if path else []), *settings, *service.options]


async def dry_runs(
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
            async with running(command, stdout=output, stderr=errors) as process:
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
async def running(command: list[str], **pipes: Any) -> AsyncIterator[asyncio.subprocess.Process]:
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
