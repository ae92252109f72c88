"""Rate limits: the buckets by a clock of ours, and refusals over a real socket."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import REGISTRY
from quartet.v1 import common_pb2, reward_pb2, reward_pb2_grpc

from quartet_client.authority import create_authority, issue
from quartet_common.channel import connect
from quartet_common.config import SecuritySection, ServerSection
from quartet_common.errors import describe, retry_delay
from quartet_common.handshake import handshake
from quartet_common.host import ServiceHost
from quartet_common.rate_limits import Bucket, RateLimits

SUBMIT = "/quartet.v1.BrokerService/SubmitPrompts"
GET = "/quartet.v1.BrokerService/GetRun"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_lets_its_rate_through_and_a_burst_after_a_rest():
    bucket = Bucket(rate=10, size=20, now=0.0)
    # By hand: 20 at once, then one every 0.1 s: within 3 s from a full bucket 20 + 30.
    passed = sum(bucket.take(tick / 1000) == 0 for tick in range(3001))
    assert passed == 50
    assert bucket.take(3.0) == pytest.approx(0.1)
    assert [bucket.take(1000.0) for _ in range(21)].count(0.0) == 20


def test_peers_and_classes_have_buckets_of_their_own():
    clock = Clock()
    limits = RateLimits(ServerSection(work_calls_per_second=1, calls_per_second=4, burst_seconds=1), clock)
    assert limits.refusal(SUBMIT, "host a") is None
    refused = limits.refusal(SUBMIT, "host a")
    assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED and "server.work_calls_per_second" in refused.message
    assert limits.refusal(SUBMIT, "host b") is None
    assert limits.refusal(GET, "host a") is None and limits.refusal(GET, "host a") is None
    refused = limits.refusal(GET, "host a")
    assert "server.calls_per_second" in refused.message, "four calls in all, of whatever class"
    clock.now += 1
    assert limits.refusal(SUBMIT, "host a") is None


def test_strangers_without_end_take_bounded_memory(monkeypatch):
    monkeypatch.setattr("quartet_common.rate_limits._MOST_PEERS", 3)
    limits = RateLimits(ServerSection(calls_per_second=1, burst_seconds=1), Clock())
    for number in range(100):
        assert limits.refusal(GET, f"host {number}") is None
    assert len(limits._buckets) == 3
    assert limits.refusal(GET, "host 99") is not None and limits.refusal(GET, "host 0") is None


class Scoring(reward_pb2_grpc.RewardServiceServicer):
    async def Score(self, request, context):  # noqa: N802
        return reward_pb2.ScoreResponse()


@asynccontextmanager
async def scoring(security: SecuritySection, calls: int) -> AsyncIterator[ServiceHost]:
    """A service that lets so many calls of a caller through, and then none."""
    settings = ServerSection(metrics=False, work_calls_per_second=0.001, burst_seconds=1000 * calls)
    host = ServiceHost("reward", "127.0.0.1:0", security, settings)
    reward_pb2_grpc.add_RewardServiceServicer_to_server(Scoring(), host.server)
    await host.start()
    yield host
    await host.drain()


async def test_one_call_too_many_is_refused_with_a_delay_and_counted_while_probes_pass():
    before = REGISTRY.get_sample_value("quartet_grpc_rate_limited_total", {"class": "work"}) or 0
    async with scoring(SecuritySection(), 2) as host, connect(host.address) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        for _ in range(2):
            await stub.Score(reward_pb2.ScoreRequest())
        with pytest.raises(grpc.RpcError) as caught:
            await stub.Score(reward_pb2.ScoreRequest())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "127.0.0.1" in describe(caught.value) and 900 < retry_delay(caught.value) <= 1000
        assert (await handshake(channel, common_pb2.SERVICE_KIND_CLIENT)).instance_id == host.instance_id
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert REGISTRY.get_sample_value("quartet_grpc_rate_limited_total", {"class": "work"}) == before + 1


async def test_with_certificates_the_peer_is_who_the_certificate_names(tmp_path):
    create_authority(tmp_path)
    issue(tmp_path, "reward", ["reward"])
    security = SecuritySection(
        tls_ca=tmp_path / "ca.pem", tls_certificate=tmp_path / "reward.pem", tls_key=tmp_path / "reward-key.pem"
    )
    async with (
        scoring(security.model_copy(update={"roles": False}), 1) as host,
        connect(host.address, security, service="reward") as first,
        connect(host.address, security, service="reward") as second,
    ):
        await reward_pb2_grpc.RewardServiceStub(first).Score(reward_pb2.ScoreRequest())
        with pytest.raises(grpc.RpcError) as caught:
            await reward_pb2_grpc.RewardServiceStub(second).Score(reward_pb2.ScoreRequest())
    assert "rate of certificate reward:" in describe(caught.value)
