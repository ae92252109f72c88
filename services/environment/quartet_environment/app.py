"""Assembles, starts and stops the parts of the environment service."""

import asyncio
from collections.abc import Mapping
from functools import partial

from quartet.v1 import environment_pb2_grpc

from quartet_common.config import LoadedConfig
from quartet_environment.config import EnvironmentServiceSection
from quartet_environment.environments import Environment, load_environments
from quartet_environment.servicer import EnvironmentServicer
from quartet_server.host import ServiceHost


async def serve(config: LoadedConfig[EnvironmentServiceSection], host: ServiceHost) -> None:
    """Serve EnvironmentService until stopped."""
    environments = await asyncio.to_thread(load_environments, config)
    assemble(config, host, environments)
    for one in environments.values():
        one.pool.start()
    host.loading = "environments loading"
    host.spawn(_load(environments, host), "load environments")
    try:
        await host.run()
    finally:
        await close(environments)


async def close(environments: Mapping[str, Environment]) -> None:
    """Kill the processes; their episodes fail. May be called again."""
    await asyncio.gather(*(one.pool.close() for one in environments.values()))


async def _load(environments: Mapping[str, Environment], host: ServiceHost) -> None:
    """Report that the service can work when each environment has a process."""
    for one in environments.values():
        await one.pool.ready.wait()
    await host.set_ready()


def assemble(
    config: LoadedConfig[EnvironmentServiceSection], host: ServiceHost, environments: Mapping[str, Environment]
) -> EnvironmentServicer:
    """Add EnvironmentService to the host; return its servicer."""
    ca_file = str(config.security.tls_ca) if config.security.tls_ca is not None else ""
    servicer = EnvironmentServicer(environments, config.section, ca_file)
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(servicer, host.server)
    host.capabilities.extend(f"environment.{name}" for name in environments)

    async def finish_or_fail() -> None:
        servicer.draining = True
        await servicer.admission.drain(config.server.drain_seconds, partial(close, environments))

    host.on_drain(finish_or_fail)
    return servicer
