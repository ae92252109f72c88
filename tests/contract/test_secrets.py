"""Secrets stay secret: the token and Redis' password are in no log, no answer, no argument."""

from contextlib import closing
from pathlib import Path

import grpc
import pytest
from contract_stack import TOKEN
from quartet.v1 import broker_pb2
from redis import Redis
from servers_under_test import Servers
from started import Started

from quartet_contract.calls import OWNERS

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
