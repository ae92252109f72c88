"""A running reward service over a real socket, and the pool alone."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest_asyncio
from quartet.v1 import reward_pb2_grpc
from reward_samples import DEADLINE_SECONDS

from quartet_common.config import load_config
from quartet_common.host import ServiceHost
from quartet_reward.config import RewardSection
from quartet_reward.serving import assemble
from quartet_reward.verifiers.function import RewardFunction
from quartet_reward.worker_pool import Limits, WorkerPool


@dataclass
class Running:
    """A service under test, its parts, and a stub that speaks to it."""

    stub: reward_pb2_grpc.RewardServiceStub
    pool: WorkerPool
    host: ServiceHost
    functions: list[RewardFunction]


@asynccontextmanager
async def serving(*overrides: str) -> AsyncIterator[Running]:
    """One worker, a short deadline, the smallest queue."""
    config = load_config(
        "reward",
        RewardSection,
        overrides=[
            "addresses.reward=127.0.0.1:0",
            f"reward.deadline_seconds={DEADLINE_SECONDS}",
            "reward.max_queue=1024",
            "server.drain_seconds=2.5",  # less than the deadline
            *overrides,
        ],
    )
    host = ServiceHost("reward", config.addresses.reward, config.security, config.server)
    resources = assemble(config, host)
    await resources.start()
    await host.start()
    async with grpc.aio.insecure_channel(host.address) as channel:
        try:
            yield Running(reward_pb2_grpc.RewardServiceStub(channel), resources.mathematics, host, resources.functions)
        finally:
            await host.drain()
            await resources.close()


@pytest_asyncio.fixture
async def service() -> AsyncIterator[Running]:
    async with serving() as running:
        yield running


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    """One worker that lives for three tasks."""
    pool = WorkerPool(1, Limits(DEADLINE_SECONDS, memory_bytes=1 << 30, recycle_after=3, queue_seconds=60.0))
    pool.start()
    yield pool
    await pool.close()
