"""Where a run's services listen: at the run file's addresses, or, where others hold the default ones, at free ports."""

import asyncio
from collections.abc import Sequence

from quartet_client.async_client import AsyncClient
from quartet_common.config import ConfigError, LoadedConfig
from quartet_common.ports import check_ports_free, free_ports

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
