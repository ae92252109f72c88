"""How the reward service starts, and how it ends."""

import asyncio

from quartet.v1 import reward_pb2_grpc

from quartet_common.config import LoadedConfig
from quartet_common.host import ServiceHost
from quartet_common.idleness import Idleness
from quartet_reward.config import RewardSection
from quartet_reward.execution import LANGUAGES, Executor
from quartet_reward.preflight import load_functions
from quartet_reward.registry import load_verifiers
from quartet_reward.resources import Resources
from quartet_reward.room import Room
from quartet_reward.scoring import Scorer
from quartet_reward.service import RewardServicer
from quartet_reward.specs import SpecReader

# Of the time to drain: the rest is for telling callers what was not done.
_SHARE_TO_FINISH = 0.7


async def serve(config: LoadedConfig[RewardSection], host: ServiceHost) -> None:
    """Serve RewardService until stopped."""
    resources = assemble(config, host)
    await resources.start()
    try:
        await host.run()
    finally:
        await resources.close()


def assemble(config: LoadedConfig[RewardSection], host: ServiceHost) -> Resources:
    """Add RewardService to the host; return what it works with, to be started before the host and closed after it."""
    section = config.section
    functions = load_functions(config)
    resources = Resources.of(section, functions)
    room = Room(section.max_queue)
    verifiers = load_verifiers(functions)
    scorer = Scorer(SpecReader(verifiers), resources.tools)
    offered = {name: verifier for name, verifier in verifiers.items() if resources.serve(name)}
    sandbox = resources.tools.sandbox
    executor = Executor(sandbox, room) if sandbox is not None else None
    servicer = RewardServicer(scorer, offered, room, executor)
    reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, host.server)
    host.capabilities.append("score_stream.batches")
    host.capabilities.extend(f"verifier.{name}" for name in offered)
    if executor is not None:
        host.capabilities.extend(f"execute.{language}" for language in LANGUAGES)

    host.tell_idleness(Idleness(lambda: room.busy_seconds))

    async def finish_or_fail() -> None:
        servicer.draining = True
        try:
            async with asyncio.timeout(_SHARE_TO_FINISH * config.server.drain_seconds):
                await room.wait_empty()
        except TimeoutError:
            await resources.close()  # what is left is answered with FAILURE_KIND_SHUT_DOWN
            await room.wait_empty()

    host.on_drain(finish_or_fail)
    return resources
