"""Weights from another trainer's hands: what is generated afterwards is theirs, and what goes wrong is healed."""

import grpc
import pytest
from quartet.v1 import rollout_pb2 as pb

from quartet_contract import cases_rollout as cases
from quartet_contract.world import World


def generate(w: World) -> tuple[set[int], list[pb.GeneratedCompletion]]:
    """Versions of the tokens, and the completions, which are the same each time as long as the weights are."""
    made = list(w.call("RolloutService.Generate", pb.GenerateRequest(prompt=cases.prompt())).completions)
    return {span.policy_version for each in made for span in each.info.version_spans}, made


def refusal(w: World, rpc: str, request) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as raised:
        w.call(f"RolloutService.{rpc}", request)
    return raised.value


def finish_with_another_checksum(w: World) -> None:
    conclusion = w.weights.join(w).begin(w).send().conclusion()
    conclusion.checksum ^= 1
    error = refusal(w, "FinishWeightUpdate", conclusion)
    assert error.code() == grpc.StatusCode.DATA_LOSS and "checksum" in error.details()
    now = cases.status(w)
    assert (now.group_epoch, now.paused) == (-1, False)


def assert_refuses_to_generate(w: World) -> None:
    assert cases.status(w).policy_version == -1
    for rpc, kind in (("Generate", pb.GenerateRequest), ("GenerateStream", pb.GenerateStreamRequest)):
        assert refusal(w, rpc, kind(prompt=cases.prompt())).code() == grpc.StatusCode.UNAVAILABLE


def test_what_is_generated_is_of_the_last_good_update_and_before_the_first_nothing_is(stack):
    world = stack.new_rollout()
    assert_refuses_to_generate(world)
    finish_with_another_checksum(world)
    assert_refuses_to_generate(world)
    first = world.weights.publish(world)
    versions, made = generate(world)
    assert versions == {first}
    world.weights.use(1)
    finish_with_another_checksum(world)
    assert generate(world) == (versions, made)
    second = world.weights.publish(world)
    versions, others = generate(world)
    assert versions == {second} and others != made
