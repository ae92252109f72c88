"""Every service checks its own section of the run file in its own environment (`--dry-run`), before anything starts."""

import asyncio
import tempfile
from pathlib import Path

from quartet_common.config import ConfigError
from quartet_local.checkout import service_python
from quartet_local.config import LaunchError
from quartet_local.placement import Service

_TIMEOUT = 60.0  # seconds; a dry run takes about one, more while everything is imported for the first time


async def check_services(services: list[Service], path: Path | None, overrides: list[str]) -> None:
    """Dry-run the services side by side.

    Raises:
        ConfigError: the first complaint, in the order of `services`.
        LaunchError: a dry run failed in another way.
    """
    results = await asyncio.gather(*(_dry_run(service, path, overrides) for service in services))
    for service, (status, words) in zip(services, results, strict=True):
        if status == 2:
            raise ConfigError(words.removeprefix(f"quartet-{service.kind}: "))
        if status:
            raise LaunchError(f"{service.name}: its check failed: {words}")


def service_command(service: Service, path: Path | None, overrides: list[str]) -> list[str]:
    """Return the command line of a service."""
    settings = [argument for override in (*overrides, *service.settings) for argument in ("--set", override)]
    program = [str(service_python(service.kind)), "-m", f"quartet_{service.kind}"]
    return [*program, *([str(path)] if path else []), *settings]


async def _dry_run(service: Service, path: Path | None, overrides: list[str]) -> tuple[int, str]:
    """Return the exit status and the last line of standard error."""
    command = [*service_command(service, path, overrides), "--dry-run", "--check-port"]
    with tempfile.TemporaryFile() as errors:  # no pipe, which what it started may hold open after its end
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,  # a Ctrl-C is the launcher's to handle
        )
        try:
            async with asyncio.timeout(_TIMEOUT):
                status = await process.wait()
        except TimeoutError:
            return 1, f"no answer within {_TIMEOUT:.0f} s"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
    return status, lines[-1] if lines else "it said nothing"
