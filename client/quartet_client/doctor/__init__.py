"""`quartet doctor`: is this host fit for a service? One check a function, each with what to do about what it finds."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
from quartet.v1 import common_pb2

from quartet_client.data import DataSection
from quartet_client.doctor import host, program
from quartet_client.doctor.findings import Finding, failure, ok
from quartet_common.channel import connect
from quartet_common.config import LoadedConfig, load_config
from quartet_common.errors import describe
from quartet_common.handshake import handshake

SERVICES = ("broker", "reward", "rollout", "trainer")
_NEEDS = {"broker": (), "reward": (), "rollout": ("broker", "reward"), "trainer": ("broker",)}
_PEER_SECONDS = 5.0


async def examine(
    kind: str,
    file: Path | None = None,
    overrides: Sequence[str] = (),
    running: bool = False,
    user: str | None = None,
) -> AsyncIterator[Finding]:
    """Look at this host as the place of a service.

    Args:
        kind: of `SERVICES`.
        file: its run file.
        overrides: KEY=VALUE, as its own `--set`.
        running: it runs already, so its ports are taken, by itself.
        user: who runs it; None: the user of its systemd unit where it is installed as one, or else whoever calls this.

    Raises:
        ConfigError: the run file cannot be used at all.
    """
    config: LoadedConfig[DataSection] = load_config("data", DataSection, file, overrides)
    found = program.find_program(kind)
    yield program.check_program(kind, found)
    if found is not None:
        yield program.check_python(found)
        user = user or program.unit_user(kind, found)
        unchecked = program.check_user(user) if user else None
        if unchecked is not None:
            yield unchecked
            user = None
        preflight = program.check_preflight(found, file, overrides, user)
        yield preflight
        if kind == "reward" and preflight.state == "ok":
            yield program.check_sandbox(found, file, overrides, user)
    address = getattr(config.addresses, kind)
    if not running:
        yield host.check_ports(kind, address, config.server)
    for finding in program.check_security(kind, address, config.server.bind_host, config.security):
        yield finding
    if kind == "trainer":
        yield host.check_disk(config.run.path, "checkpoints and metrics")
    else:
        yield host.check_disk(Path("/tmp"), "temporary files")
    if kind == "reward":
        yield host.check_namespaces()
    if kind in ("rollout", "trainer"):
        yield host.check_shared_memory()
        other = program.find_program("trainer" if kind == "rollout" else "rollout")
        pythons = (each.parent / "python" if each else None for each in (found, other))
        for finding in host.check_gpus(*pythons):
            yield finding
    yield host.check_open_files()
    yield host.check_clock()
    for peer in _NEEDS[kind]:
        yield await _check_peer(peer, config)


async def _check_peer(peer: str, config: LoadedConfig[DataSection]) -> Finding:
    address = getattr(config.addresses, peer)
    async with connect(address, config.security, service=peer) as channel:
        try:
            answer = await handshake(channel, common_pb2.SERVICE_KIND_CLIENT, timeout=_PEER_SECONDS)
        except grpc.aio.AioRpcError as error:
            cure = f"start the {peer}, or correct addresses.{peer}; look for a firewall between the hosts"
            return failure(peer, f"{address}: {describe(error)}", cure)
    waits = f", waits for {', '.join(answer.waiting_for)}" if answer.waiting_for else ""
    return ok(peer, f"{answer.instance_id} answers at {address}{waits}")
