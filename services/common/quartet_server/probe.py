"""`python -m quartet_server.probe broker run.toml`: checks a service's health, for containers and scripts.

It calls `grpc.health.v1` with the service's own run file: its address, its port, mutual TLS with its certificate.
Exit status 0: serving; 1: not serving or unreachable; 2: invalid run file; 3: no answer in time. With `--live`, 0 is a
service that answers, serving or not: its event loop runs, which a connection alone does not show, as the kernel accepts
it.
"""

import argparse
import asyncio
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import ConfigDict

from quartet_common.channel import connect
from quartet_common.config import ConfigError, LoadedConfig, load_config, split_address
from quartet_common.errors import describe
from quartet_common.identity import SERVERS
from quartet_common.sections import Section
from quartet_common.text import one_line

_ALL_ADDRESSES = ("0.0.0.0", "::")


class AnySection(Section):
    """The service's own section, not validated."""

    model_config = ConfigDict(extra="allow", frozen=True)


def main(argv: list[str] | None = None) -> int:
    """Ask once and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m quartet_server.probe", description="Ask a service for its health.")
    parser.add_argument("service", choices=SERVERS)
    parser.add_argument("file", nargs="?", type=Path, help="the service's run file (TOML)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds to wait for the answer (default: 5)")
    parser.add_argument("--live", action="store_true", help="any answer is success: the process is not stuck")
    arguments = parser.parse_args(argv)
    try:
        config = load_config(arguments.service, AnySection, arguments.file, arguments.set)
        state = asyncio.run(ask(arguments.service, config, arguments.timeout))
    except ConfigError as error:
        print(one_line(f"probe: {error}"), file=sys.stderr)
        return 2
    except grpc.aio.AioRpcError as error:
        print(one_line(f"probe: {describe(error)}"), file=sys.stderr)
        return 3 if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else 1
    print(state)
    return int(state != "SERVING" and not arguments.live)


async def ask(kind: str, config: LoadedConfig[AnySection], seconds: float) -> str:
    """Return the health of the service on this host. Raises AioRpcError if it does not answer."""
    name, port = split_address(getattr(config.addresses, kind))
    host = config.server.bind_host or name
    if host in _ALL_ADDRESSES:
        host = "localhost"  # which every certificate of `quartet certs` names
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    async with connect(address, config.security, service=kind) as channel:
        request = health_pb2.HealthCheckRequest(service=f"quartet.v1.{kind.capitalize()}Service")
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=seconds)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


if __name__ == "__main__":
    sys.exit(main())
