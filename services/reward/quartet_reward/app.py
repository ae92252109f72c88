"""Assembles, starts and stops the parts of the reward service."""

import asyncio
from dataclasses import dataclass

from quartet.v1 import reward_pb2_grpc

from quartet_common.config import LoadedConfig
from quartet_common.handshake import Idleness
from quartet_reward.config import RewardSection
from quartet_reward.math.equality import MathEquality, worker_command
from quartet_reward.preflight import load_functions
from quartet_reward.reward_model import RewardModel
from quartet_reward.sandbox.pool import Sandbox
from quartet_reward.scoring import Scorer
from quartet_reward.servicer import LANGUAGES, RewardServicer
from quartet_reward.verifiers.base import Tools
from quartet_reward.verifiers.function import RewardFunction
from quartet_reward.verifiers.registry import SpecReader, load_verifiers
from quartet_reward.workers.pool import WorkerPool
from quartet_server.fair_queue import Admission
from quartet_server.host import ServiceHost


@dataclass(frozen=True)
class Resources:
    """Worker processes, the sandbox, which starts when it is first used, and the reward model, if configured."""

    mathematics: WorkerPool
    sandbox: Sandbox
    tools: Tools
    functions: list[RewardFunction]

    @classmethod
    def of(cls, section: RewardSection, functions: list[RewardFunction]) -> "Resources":
        """Return the configured resources, not yet started."""
        mathematics = WorkerPool(
            "math",
            worker_command(section.worker_memory_bytes),
            section.deadline_seconds,
            section.queue_seconds,
            section.workers,
            section.recycle_after,
        )
        model = None
        if section.reward_model.path is not None:
            model = RewardModel(section.reward_model, section.queue_seconds)
        sandbox = Sandbox(section.sandbox, section.queue_seconds)
        tools = Tools(MathEquality(mathematics, section.cache_bytes), sandbox, model)
        return cls(mathematics, sandbox, tools, functions)

    @property
    def pools(self) -> list[WorkerPool | RewardModel]:
        """What has worker processes."""
        model = [] if self.tools.reward_model is None else [self.tools.reward_model]
        return [self.mathematics, *(function.pool for function in self.functions), *model]

    async def start(self) -> None:
        """Start the processes in the background; work waits for them."""
        for pool in self.pools:
            pool.start()

    async def close(self) -> None:
        """Kill the processes; waiting and running work fails with SHUT_DOWN. May be called again."""
        await asyncio.gather(self.sandbox.close(), *(pool.close() for pool in self.pools))


async def serve(config: LoadedConfig[RewardSection], host: ServiceHost) -> None:
    """Serve RewardService until stopped."""
    resources = assemble(config, host)
    await resources.start()
    host.loading = "workers loading"
    host.spawn(_load(resources, host), "load workers")
    try:
        await host.run()
    finally:
        await resources.close()


async def _load(resources: Resources, host: ServiceHost) -> None:
    """Report that the service can work when a process of each kind can judge."""
    for pool in resources.pools:
        await pool.ready.wait()
    await host.set_ready()


def assemble(config: LoadedConfig[RewardSection], host: ServiceHost) -> Resources:
    """Add RewardService to the host; return its resources, to be started before the host and closed after it."""
    section = config.section
    functions = load_functions(config)
    resources = Resources.of(section, functions)
    admission = Admission(section.max_queue)
    verifiers = load_verifiers(functions)
    scorer = Scorer(SpecReader(verifiers), resources.tools)
    has_model = resources.tools.reward_model is not None
    offered = {name: verifier for name, verifier in verifiers.items() if has_model or name != "reward_model"}
    servicer = RewardServicer(scorer, offered, admission, resources.sandbox)
    reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, host.server)
    host.capabilities.append("score_stream.batches")
    host.capabilities.extend(f"verifier.{name}" for name in offered)
    host.capabilities.extend(f"execute.{language}" for language in LANGUAGES)
    host.report_idleness(Idleness(lambda: admission.busy_seconds))

    async def finish_or_fail() -> None:
        servicer.draining = True
        await admission.drain(config.server.drain_seconds, resources.close)  # the rest get FAILURE_KIND_SHUT_DOWN

    host.on_drain(finish_or_fail)
    return resources
