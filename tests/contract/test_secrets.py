"""Secrets stay secret: token, Redis' password and a weight group's secret are in no log, no answer, no argument; and
nobody meets a weight group without its secret."""

from contextlib import closing
from pathlib import Path

import grpc
import pytest
from contract_stack import ENGINES, TOKEN
from quartet.v1 import broker_pb2, rollout_pb2
from redis import Redis
from servers_under_test import Servers
from started import Started

from quartet_common.durations import to_duration
from quartet_contract.calls import OWNERS
from quartet_contract.world import World

PASSWORD = "p4ssw0rd-of-redis"


def argument_lines(*processes: Started) -> list[str]:
    """What `ps` shows of processes: arguments. The environment is for the same user only, and is looked at as well."""
    lines = []
    for process in processes:
        for name in ("cmdline", "environ"):
            lines.append(Path(f"/proc/{process.pid}/{name}").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return lines


@pytest.mark.parametrize("kind", OWNERS)
def test_the_token_is_in_no_log_and_no_argument(stack, kind):
    server = stack.alone[kind]
    caller = server.caller()
    known, refusals = caller.metadata, []
    try:
        for token in (TOKEN, f"{TOKEN}x", TOKEN.upper(), ""):
            caller.metadata = [("authorization", f"Bearer {token}")]
            error = caller.raw("HandshakeService.Handshake", b"")
            refusals.append(error.details() if error is not None else "")
    finally:
        caller.metadata = known
    assert refusals[0] == "" and all(refusals[1:])
    for text in (server.said(), *argument_lines(server), *refusals):
        assert TOKEN not in text and TOKEN.upper() not in text


def test_redis_password_is_in_no_log_no_argument_and_no_refusal(tmp_path: Path):
    with closing(Servers(tmp_path)) as servers:
        redis, url = servers.start_redis()
        with Redis.from_url(url) as client:
            client.config_set("requirepass", PASSWORD)
        with_password = url.replace("redis://", f"redis://:{PASSWORD}@")
        server = servers.serve("broker", redis_url=with_password, redis_timeout=1.0)
        caller = server.caller()
        request = broker_pb2.ListRunsRequest()
        assert caller.call("BrokerService.ListRuns", request) is not None
        redis.close()
        # Without Redis it complains, in its log and to callers, as long as one cares to listen.
        with pytest.raises(grpc.RpcError) as raised:
            caller.call("BrokerService.ListRuns", request)
        assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
        server.wait_until(lambda: "subscription to Redis broke" in server.said(), "it misses its Redis")
        for text in (server.said(), *argument_lines(server), str(raised.value)):
            assert PASSWORD not in text


@pytest.fixture
def world(stack):
    """A world of the first rollout, with the trainer's side of it."""
    engine = ENGINES[0]
    world = World(stack.callers(engine), stack.weights(engine))
    yield world
    world.weights.settle(world)


def test_without_its_secret_nobody_meets_a_weight_group(stack, world):
    server = stack.servers[ENGINES[0]]
    invitation = world.weights.open().invitation()
    stranger = rollout_pb2.JoinWeightGroupRequest()
    stranger.CopyFrom(invitation)
    stranger.secret = b"another secret!!"
    stranger.timeout.CopyFrom(to_duration(2))
    world.call("RolloutService.JoinWeightGroup", stranger)
    failure = f"could not join the weight group of epoch {world.weights.epoch} "
    server.wait_until(lambda: failure in server.said(), "it gives up")
    # The trainer still waits at the same store: whoever has the secret is met there.
    world.call("RolloutService.JoinWeightGroup", invitation)
    world.weights.wait_until_met()
    # And neither secret was written down, though torch names the keys that it waited for.
    log = server.said()
    for secret in (invitation.secret, stranger.secret):
        for form in (secret.hex(), str(secret)[2:-1]):
            assert form not in log
