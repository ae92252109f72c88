"""Whatever a caller sends, it gets a status that says what is wrong, nothing is left behind, and others are served.

FUZZ_CASES sets how many messages are made up (`make fuzz`: 20,000), FUZZ_SEED which.
"""

import itertools
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from fuzz_broker import FuzzedBroker
from fuzz_messages import Hints, wire
from fuzz_target import Code, fault, refused, resident_bytes, send
from google.protobuf.struct_pb2 import Struct
from quartet.v1 import environment_pb2, reward_pb2
from servers_under_test import Servers

from quartet_contract import contract_agent
from quartet_contract.calls import OWNERS, RPCS, Caller, method_of

CASES = int(os.environ.get("FUZZ_CASES", "3000"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
# The pools of Python and gRPC settle in the first half of a run; from then on nothing may grow with the calls.
MOST_GROWTH = 24 << 20

pytestmark = [pytest.mark.slow, pytest.mark.timeout(max(300, CASES // 20))]


def rpcs_of(kind: str) -> list[str]:
    """Return the RPCs of a kind of server, by the descriptors: a new one is fuzzed as it comes."""
    return [rpc for rpc in RPCS if rpc.startswith(f"{OWNERS[kind]}.")]


def fuzz(
    caller: Caller, rpcs: list[str], hints: Hints, cases: int, look: Callable[[str, grpc.RpcError | None], str]
) -> Counter[tuple[str, str]]:
    """Send made-up messages; return how often each RPC ended in which code. `look` says what else is wrong after each.

    Raises AssertionError with all that is wrong, and the first message that showed each.
    """
    came: Counter[tuple[str, str]] = Counter()
    faults: dict[str, bytes] = {}

    for rpc, number in itertools.product(rpcs, range(-(-cases // len(rpcs)))):
        request = wire(random.Random(f"{SEED}/{rpc}/{number}"), method_of(rpc).input_type, hints)
        error = send(caller, rpc, request)
        came[rpc, error.code().name if error else Code.OK.name] += 1
        if wrong := fault(rpc, error):
            faults.setdefault(wrong, request)
        # What a stream that was left before still changes is not this call's, which changes it again if it is.
        if look(rpc, error) and (wrong := look(rpc, send(caller, rpc, request))):
            faults.setdefault(wrong, request)
    print(f"\n{came.total()} cases: {dict(Counter(code for _, code in came.elements()))}")
    assert not faults, "\n".join(f"{wrong} [{data[:300].hex()}]" for wrong, data in faults.items())
    return came


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[FuzzedBroker]:
    made = FuzzedBroker(tmp_path)
    yield made
    made.close()


def test_a_broker_refuses_with_a_status_and_changes_nothing(broker):
    memory: list[int] = []
    seen = 0

    def look(rpc: str, error: grpc.RpcError | None) -> str:
        nonlocal seen
        seen += 1
        if seen % (CASES // 10) == 0:
            memory.append(resident_bytes(broker.server))
        # A session that is newer than the newest, of which Redis would have lost the opening, fences that one too.
        if broker.unchanged() or not refused(error) or "it is fenced" in error.details():
            return ""
        return f"{rpc}: {error.code().name}, and yet what Redis holds has changed: {error.details()}"

    came = fuzz(broker.caller, rpcs_of("broker"), broker.hints, CASES, look)
    codes = {code for _, code in came}
    assert {code.name for code in (Code.OK, Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.FAILED_PRECONDITION)} <= codes
    assert max(memory[4:]) - memory[4] < MOST_GROWTH, memory
    broker.group_life("after-the-fuzz")


def test_a_reward_service_refuses_with_a_status_and_goes_on(tmp_path):
    server = Servers(tmp_path).serve("reward")
    exact = reward_pb2.VerifierSpec(name="exact", weight=1)
    others = [reward_pb2.VerifierSpec(name="no-such"), reward_pb2.VerifierSpec(name="format", weight=-1)]
    hints = {
        "verifiers": [exact, *others],  # those that run code are tried by the reward service's own tests
        "parameters": [Struct()],
        "completion": ["42", "\\boxed{42}"],
        "item_id": ["a", "b", "c"],
    }
    try:
        came = fuzz(server.caller(), rpcs_of("reward"), hints, CASES // 5, lambda rpc, error: "")
        assert {Code.OK.name, Code.INVALID_ARGUMENT.name} <= {code for _, code in came}
        item = reward_pb2.ScoreItem(
            item_id="a", completion="42", reference=reward_pb2.Reference(answer="42"), verifiers=[exact]
        )
        (result,) = server.caller().call("RewardService.Score", reward_pb2.ScoreRequest(items=[item])).results
        assert result.score.outcome == reward_pb2.OUTCOME_CORRECT
    finally:
        server.close()


def test_an_environment_service_refuses_with_a_status_and_goes_on(tmp_path):
    agent = f"{contract_agent.__file__}:play"
    server = Servers(tmp_path).serve("environment", files=[agent], workers=1)
    hints = {
        "name": [agent, "no-such"],
        "environment": [agent],
        "parameters": [Struct()],
        "task": ["{}", '{"act": "raise"}', "[]"],
        "base_url": ["http://127.0.0.1:9/v1", "http://[", "http://127.0.0.1:99999"],
        "api_key": ["key"],
        "episode_id": ["episode"],
    }
    try:
        came = fuzz(server.caller(), rpcs_of("environment"), hints, CASES // 10, lambda rpc, error: "")
        assert {Code.OK.name, Code.INVALID_ARGUMENT.name, Code.NOT_FOUND.name} <= {code for _, code in came}
        request = environment_pb2.RunEpisodeRequest(
            episode_id="episode",
            environment={"name": agent},
            prompt={"task": "{}"},
            endpoint={"base_url": "http://127.0.0.1:9/v1", "api_key": "key", "model": "policy"},
        )
        answer = server.caller().call("EnvironmentService.RunEpisode", request)
        assert answer.finished.seats[0].rewards[0].value == 0.5
    finally:
        server.close()
