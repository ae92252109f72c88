"""A whole rollout service on real sockets, with a scripted engine, between a broker and a reward service."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
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
from quartet_common.durations import to_duration
from quartet_common.errors import describe
from quartet_rollout.app import RolloutService
from quartet_rollout.config import RolloutSection
from quartet_rollout.scoring import BATCHES
from quartet_server.host import ServiceHost


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
    security: SecuritySection | None = None  # of the rollout's server
    address: str = "127.0.0.1:0"
    _task: asyncio.Task | None = None
    _channel: object = None

    async def start(self, drain_seconds: float = 6.0, teachers: dict | None = None, **section) -> None:
        """Start the rollout, by default with the first weights in. `teachers`: their addresses."""
        known = {name: {"address": address} for name, address in (teachers or {}).items()}
        config = LoadedConfig(
            run=RunSection(id="demo", teachers=known),
            model=ModelSection(path=self.folder),
            addresses=AddressesSection(
                broker=self.broker_host.address, reward=self.reward_host.address, rollout="127.0.0.1:0"
            ),
            security=SecuritySection(),
            server=ServerSection(metrics=False, drain_seconds=drain_seconds),
            section=RolloutSection(**{"engine": "transformers", **section}),
        )
        self.host = quiet_host("rollout", self.address, security=self.security)
        self.service = ServiceUnderTest(config, self.host, self.engine)
        self._task = asyncio.create_task(self.service.run())
        await self.until(lambda: not self.host.address.endswith(":0"))
        self._channel = connect(self.host.address, self.security, service="rollout")
        self.stub = rollout_pb2_grpc.RolloutServiceStub(self._channel)

    async def ready(self, **section) -> None:
        """Start it, and wait until it has its engine and its run."""
        await self.start(**section)
        await self.until(lambda: self.service.state.engine is not None and self.service.state.run is not None)

    async def stop(self) -> int:
        """Stop it as SIGTERM would; return the exit code."""
        if self._task is not None:
            self.host.stop("the test ends")
            await self.broker.close()
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

    async def put(self, *instances, timeout: float = 20.0) -> None:
        """Submit instances, to a rollout that is started if none runs, and wait until a group of each was put."""
        wanted = len(self.broker.puts) + len(instances)
        await self._submit(instances)
        await self.broker.until(lambda: len(self.broker.puts) >= wanted, timeout)

    async def release(self, *instances):
        """As `put`, for leases that are given back; return the last release."""
        wanted = len(self.broker.releases) + len(instances)
        await self._submit(instances)
        await self.broker.until(lambda: len(self.broker.releases) >= wanted)
        return self.broker.releases[-1]

    async def cross(self, one, tokens: int, free: int = 0, **begin) -> None:
        """Have version 1 come in when so many tokens of an instance are there; see `hold`."""
        self.engine.hold(2, free)
        await self.start()
        await self.broker.submit(one)
        await self.until(lambda: self.engine.tokens_total == tokens)
        await self.load(version=1, **begin)
        self.engine.let_go()
        await self.broker.until(lambda: self.broker.puts or self.broker.releases)

    async def _submit(self, instances) -> None:
        if self._task is None:
            await self.start()
        await self.broker.submit(*instances)

    # What a trainer does.

    async def join(self, epoch: int = 1, **fields):
        return await self.stub.JoinWeightGroup(join_request(epoch, **fields), timeout=10)

    async def begin(self, version: int, epoch: int = 1, **fields):
        return await self.stub.BeginWeightUpdate(begin_request(version, epoch, **fields), timeout=20)

    async def finish(self, version: int, epoch: int = 1, timeout: float = 10, **fields):
        return await self.stub.FinishWeightUpdate(finish_request(version, epoch, **fields), timeout=timeout)

    async def abort(self, version: int, run_id: str = "demo") -> int:
        """Return the version that stands."""
        request = rollout_pb2.AbortWeightUpdateRequest(
            run_id=run_id, group_epoch=1, policy_version=version, reason="another rollout died"
        )
        return (await self.stub.AbortWeightUpdate(request, timeout=10)).policy_version

    async def load(self, version: int, epoch: int = 1, run_id: str = "demo", **begin) -> None:
        """Bring weights in."""
        await self.join(epoch, run_id=run_id)
        await self.begin(version, epoch, run_id=run_id, **begin)
        await self.finish(version, epoch, run_id=run_id)

    async def status(self) -> rollout_pb2.RolloutServiceGetStatusResponse:
        return await self.stub.GetStatus(rollout_pb2.RolloutServiceGetStatusRequest(), timeout=5)


@asynccontextmanager
async def neighbors(folder: Path, broker) -> AsyncIterator[Callable[[], World]]:
    """A broker and a reward service; yields what makes worlds around them, which are stopped at the end."""
    (folder / "config.json").write_text("{}")
    reward, worlds = InTestReward(), []
    broker_host, reward_host = quiet_host("broker"), quiet_host("reward")
    broker_pb2_grpc.add_BrokerServiceServicer_to_server(broker, broker_host.server)
    reward_pb2_grpc.add_RewardServiceServicer_to_server(reward, reward_host.server)
    reward_host.capabilities.append(BATCHES)
    await asyncio.gather(broker_host.start(), reward_host.start())

    def make() -> World:
        worlds.append(World(broker, reward, ScriptedEngine(), broker_host, reward_host, folder))
        return worlds[-1]

    try:
        yield make
    finally:
        for world in worlds:
            await world.stop()
        await asyncio.gather(broker_host.drain(), reward_host.drain())


async def refused(call, code: grpc.StatusCode) -> str:
    """Return the sentence with which a call is refused."""
    return describe(await refusal(call, code))


async def refusal(call, code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() == code, caught.value
    return caught.value


def instance(name: str = "pass-0/0", text: str = "1+1=?", purpose=experience_pb2.PURPOSE_TRAIN, **fields):
    """A prompt instance that asks for text."""
    prompt = experience_pb2.Prompt(prompt_id="p", text=text, reference=reward_pb2.Reference(answer="2"))
    return experience_pb2.PromptInstance(**{"instance_id": name, "prompt": prompt, "purpose": purpose, **fields})


def join_request(epoch: int = 1, **fields) -> rollout_pb2.JoinWeightGroupRequest:
    fields = {
        "run_id": "demo",
        "transport": rollout_pb2.WEIGHT_TRANSPORT_GLOO,
        "store_host": "127.0.0.1",
        "store_port": 29500,
        "rank": 1,
        "world_size": 2,
        "secret": b"s",
        "timeout": to_duration(5.0),
        "group_epoch": epoch,
        **fields,
    }
    return rollout_pb2.JoinWeightGroupRequest(**fields)


def begin_request(version: int, epoch: int = 1, seconds: float = 20.0, buckets: int = 1, **fields):
    manifest = rollout_pb2.WeightManifest(
        kind=rollout_pb2.WEIGHT_KIND_FULL, bucket_bytes=[16] * buckets, checksum_algorithm="xxh3_64"
    )
    manifest.tensors.add(name="w", dtype=6, shape=[4], bucket=0, offset=0)
    update = {"group_epoch": epoch, "policy_version": version, "timeout": to_duration(seconds), "manifest": manifest}
    return rollout_pb2.BeginWeightUpdateRequest(**{"run_id": "demo", **update, **fields})


def finish_request(version: int, epoch: int = 1, **fields):
    update = {"group_epoch": epoch, "policy_version": version, "checksum": 0xC0FFEE}
    return rollout_pb2.FinishWeightUpdateRequest(**{"run_id": "demo", **update, **fields})
