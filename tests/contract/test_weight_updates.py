"""Weights from another trainer's hands: what is generated afterwards is theirs, and what goes wrong is healed."""

import grpc
import pytest
from contract_stack import ENGINES
from quartet.v1 import rollout_pb2 as pb

from quartet_contract import cases_rollout as cases
from quartet_contract.world import World


@pytest.fixture(params=ENGINES)
def world(stack, request):
    """Return the world of a rollout of each engine."""
    weights = stack.weights(request.param)
    made = World(stack.callers(request.param), weights)
    yield made
    weights.use(0).settle(made)


def generate(w: World) -> list[pb.GeneratedCompletion]:
    return list(w.call("RolloutService.Generate", pb.GenerateRequest(prompt=cases.prompt())).completions)


def refusal(w: World, rpc: str, request) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as raised:
        w.call(f"RolloutService.{rpc}", request)
    return raised.value


def finish_with_another_checksum(w: World) -> grpc.RpcError:
    conclusion = w.weights.join(w).begin(w).send().conclusion()
    conclusion.checksum ^= 1
    return refusal(w, "FinishWeightUpdate", conclusion)


def assert_refuses_to_generate(w: World) -> None:
    assert cases.status(w).policy_version == -1
    for rpc, kind in (("Generate", pb.GenerateRequest), ("GenerateStream", pb.GenerateStreamRequest)):
        assert refusal(w, rpc, kind(prompt=cases.prompt())).code() == grpc.StatusCode.UNAVAILABLE


def test_nothing_is_generated_before_the_first_good_update(stack):
    world = stack.new_rollout()
    assert_refuses_to_generate(world)
    assert finish_with_another_checksum(world).code() == grpc.StatusCode.DATA_LOSS
    assert_refuses_to_generate(world)
    version = world.weights.publish(world)
    assert {span.policy_version for each in generate(world) for span in each.info.version_spans} == {version}


def test_after_a_wrong_checksum_the_old_weights_stand_until_a_good_update(world):
    world.weights.ensure(world)
    version, before = cases.status(world).policy_version, generate(world)
    world.weights.use(1)
    error = finish_with_another_checksum(world)
    assert error.code() == grpc.StatusCode.DATA_LOSS and "checksum" in error.details()
    now = cases.status(world)
    assert (now.group_epoch, now.paused, now.policy_version) == (-1, False, version)
    assert generate(world) == before
    newer = world.weights.publish(world)
    completions = generate(world)
    assert completions != before
    assert {span.policy_version for each in completions for span in each.info.version_spans} == {newer}
