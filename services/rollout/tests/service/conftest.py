"""A whole rollout service on real sockets, with a scripted engine, between a broker and a reward service."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from doubles import InTestBroker, InTestReward, ScriptedEngine, quiet_host
from quartet.v1 import broker_pb2_grpc, experience_pb2, reward_pb2, reward_pb2_grpc, rollout_pb2, rollout_pb2_grpc

from quartet_common.channel import connect
from quartet_common.config import (
    AddressesSection,
    LoadedConfig,
    ModelSection,
    RunSection,
    SecuritySection,
    ServerSection,
)
from quartet_common.host import ServiceHost
from quartet_rollout.config import RolloutSection
from quartet_rollout.engines import EngineError
from quartet_rollout.scoring import BATCHES
from quartet_rollout.service import RolloutService


class ServiceUnderTest(RolloutService):
    """The service, with the engine of the test."""

    def __init__(self, config, host, engine):
        super().__init__(config, host)
        self._given = engine

    def _make_engine(self):
        return self._given


@dataclass
class World:
    """Everything a test looks at."""

    broker: InTestBroker
    reward: InTestReward
    engine: ScriptedEngine
    broker_host: ServiceHost
    reward_host: ServiceHost
    folder: Path
    host: ServiceHost | None = None
    service: RolloutService | None = None
    stub: rollout_pb2_grpc.RolloutServiceStub | None = None
    section: dict = field(default_factory=dict)
    _task: asyncio.Task | None = None
    _channel: object = None

    async def start(self, drain_seconds: float = 6.0, **section) -> None:
        """Start the rollout, by default with the first weights in."""
        config = LoadedConfig(
            run=RunSection(id="demo"),
            model=ModelSection(path=self.folder),
            addresses=AddressesSection(
                broker=self.broker_host.address, reward=self.reward_host.address, rollout="127.0.0.1:0"
            ),
            security=SecuritySection(),
            server=ServerSection(metrics=False, drain_seconds=drain_seconds),
            section=RolloutSection(**{"lease_wait_seconds": 0.5, "engine": "transformers", **section}),
        )
        self.host = quiet_host("rollout")
        self.service = ServiceUnderTest(config, self.host, self.engine)
        self._task = asyncio.create_task(self.service.run())
        async with asyncio.timeout(20):
            while self.host.address.endswith(":0"):
                await asyncio.sleep(0.01)
        self._channel = connect(self.host.address)
        self.stub = rollout_pb2_grpc.RolloutServiceStub(self._channel)

    async def stop(self) -> int:
        """Stop it as SIGTERM would; return the exit code."""
        if self._task is not None:
            self.host.stop("the test ends")
            async with asyncio.timeout(20):
                await self._task
            await self._channel.close()
            self._task = None
        return self.host.exit_code if self.host else 0

    async def until(self, condition, timeout: float = 20.0) -> None:
        """Wait for something about the rollout itself."""
        async with asyncio.timeout(timeout):
            while not condition():
                await asyncio.sleep(0.01)

    async def load(self, version: int, epoch: int = 1) -> None:
        """Bring weights in, as a trainer does."""
        await self.stub.JoinWeightGroup(join_request(epoch), timeout=10)
        await self.stub.BeginWeightUpdate(begin_request(version, epoch), timeout=10)
        await self.stub.FinishWeightUpdate(finish_request(version, epoch), timeout=10)


@pytest.fixture
async def world(tmp_path) -> AsyncIterator[World]:
    (tmp_path / "config.json").write_text("{}")
    broker, reward = InTestBroker(), InTestReward()
    broker.create_run()
    broker_host, reward_host = quiet_host("broker"), quiet_host("reward")
    broker_pb2_grpc.add_BrokerServiceServicer_to_server(broker, broker_host.server)
    reward_pb2_grpc.add_RewardServiceServicer_to_server(reward, reward_host.server)
    reward_host.capabilities.append(BATCHES)
    await broker_host.start()
    await reward_host.start()
    engine = ScriptedEngine()
    engine.policy_version = 0
    made = World(broker, reward, engine, broker_host, reward_host, tmp_path)
    try:
        yield made
    finally:
        await made.stop()
        await broker_host.drain()
        await reward_host.drain()


def instance(name: str = "pass-0/0", text: str = "1+1=?", purpose=experience_pb2.PURPOSE_TRAIN, **fields):
    """A prompt instance that asks for text."""
    prompt = experience_pb2.Prompt(prompt_id="p", text=text, reference=reward_pb2.Reference(answer="2"))
    return experience_pb2.PromptInstance(**{"instance_id": name, "prompt": prompt, "purpose": purpose, **fields})


def join_request(epoch: int = 1, **fields) -> rollout_pb2.JoinWeightGroupRequest:
    request = rollout_pb2.JoinWeightGroupRequest(
        run_id="demo",
        group_epoch=epoch,
        transport=rollout_pb2.WEIGHT_TRANSPORT_GLOO,
        store_host="127.0.0.1",
        store_port=29500,
        rank=1,
        world_size=2,
        secret=b"s",
    )
    request.timeout.seconds = 5
    for name in fields:
        request.ClearField(name)  # merging leaves out what is at its default
    request.MergeFrom(rollout_pb2.JoinWeightGroupRequest(**fields))
    return request


def begin_request(version: int, epoch: int = 1, seconds: int = 20, **fields) -> rollout_pb2.BeginWeightUpdateRequest:
    manifest = rollout_pb2.WeightManifest(
        kind=rollout_pb2.WEIGHT_KIND_FULL, bucket_bytes=[16], checksum_algorithm="xxh3_64"
    )
    manifest.tensors.add(name="w", dtype=6, shape=[4], bucket=0, offset=0)
    request = rollout_pb2.BeginWeightUpdateRequest(
        run_id="demo", group_epoch=epoch, policy_version=version, manifest=manifest, **fields
    )
    request.timeout.seconds = seconds
    return request


def finish_request(version: int, epoch: int = 1, checksum: int = 0xC0FFEE) -> rollout_pb2.FinishWeightUpdateRequest:
    return rollout_pb2.FinishWeightUpdateRequest(
        run_id="demo", group_epoch=epoch, policy_version=version, checksum=checksum
    )


__all__ = ["EngineError", "World", "begin_request", "finish_request", "instance", "join_request"]
