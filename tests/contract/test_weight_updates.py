"""Weights from another trainer's hands: what is generated afterwards is theirs, and what goes wrong is healed."""

import grpc
import numpy as np
import pytest
from contract_stack import ENGINES
from quartet.v1 import rollout_pb2 as pb

from quartet_client.contract import cases_rollout as cases
from quartet_client.contract.world import World
from quartet_common.tensors import decode

pytestmark = pytest.mark.timeout(180)


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


def test_completions_are_of_the_weights_that_were_sent(world):
    made = []
    for folder in (1, 0):
        version = world.weights.use(folder).publish(world)
        completions = generate(world)
        for completion in completions:
            cases.is_whole(world, completion)
            assert completion.info.version_spans[0].policy_version == version
            tokens = decode(completion.token_ids)
            expected = world.weights.score(cases.PROMPT.tolist(), tokens.tolist())
            np.testing.assert_allclose(decode(completion.log_probs), expected, atol=2e-4)
        made.append([decode(completion.token_ids).tolist() for completion in completions])
    assert made[0] != made[1]


def test_a_stream_and_a_call_of_the_same_seed_give_the_same_tokens(world):
    world.weights.ensure(world)
    streamed = world.call("RolloutService.GenerateStream", pb.GenerateStreamRequest(prompt=cases.prompt()))
    by_index = {answer.completion.info.index: answer.completion.token_ids for answer in streamed}
    assert by_index == {completion.info.index: completion.token_ids for completion in generate(world)}


def refuses_to_generate(w: World) -> bool:
    for rpc, kind in (("Generate", pb.GenerateRequest), ("GenerateStream", pb.GenerateStreamRequest)):
        assert refusal(w, rpc, kind(prompt=cases.prompt())).code() == grpc.StatusCode.UNAVAILABLE
    return True


def test_nothing_is_generated_before_the_first_good_update(stack):
    world = stack.new_rollout()
    assert cases.status(world).policy_version == -1 and refuses_to_generate(world)
    assert finish_with_another_checksum(world).code() == grpc.StatusCode.DATA_LOSS
    assert cases.status(world).policy_version == -1 and refuses_to_generate(world)
    version = world.weights.publish(world)
    assert {span.policy_version for each in generate(world) for span in each.info.version_spans} == {version}


def assert_apart_with_old_weights(w: World, version: int, completions: list[pb.GeneratedCompletion]) -> None:
    """It left the epoch, and goes on with what it had before."""
    now = cases.status(w)
    assert (now.group_epoch, now.paused, now.policy_version) == (-1, False, version)
    again = refusal(w, "BeginWeightUpdate", w.weights.announcement())
    assert again.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert generate(w) == completions


def test_after_a_wrong_checksum_the_old_weights_stand_until_a_good_update(world):
    world.weights.ensure(world)
    version, before = cases.status(world).policy_version, generate(world)
    world.weights.use(1)
    error = finish_with_another_checksum(world)
    assert error.code() == grpc.StatusCode.DATA_LOSS and "checksum" in error.details()
    assert_apart_with_old_weights(world, version, before)
    newer = world.weights.publish(world)
    completions = generate(world)
    assert completions != before
    assert {span.policy_version for each in completions for span in each.info.version_spans} == {newer}


def test_an_update_given_up_before_the_broadcast_leaves_the_old_weights(world):
    world.weights.ensure(world)
    before = generate(world)
    world.weights.use(1).join(world).begin(world)
    assert cases.status(world).paused
    world.call("RolloutService.AbortWeightUpdate", world.weights.surrender())
    assert not cases.status(world).paused
    assert generate(world) == before
    late = refusal(world, "FinishWeightUpdate", world.weights.conclusion())
    assert late.code() in (grpc.StatusCode.ABORTED, grpc.StatusCode.FAILED_PRECONDITION)


def test_a_manifest_that_does_not_fit_names_the_tensor_and_changes_nothing(world):
    world.weights.ensure(world)
    before = cases.status(world).policy_version
    for change, name in ((cases.wrong_shape, "q_proj.weight"), (cases.one_missing, "model.norm.weight")):
        request = world.weights.join(world).announcement()
        change(request.manifest)
        error = refusal(world, "BeginWeightUpdate", request)
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT and name in error.details()
        now = cases.status(world)
        assert (now.policy_version, now.paused) == (before, False)


def test_after_a_transfer_that_does_not_come_the_old_weights_stand(world):
    world.weights.ensure(world)
    version, before = cases.status(world).policy_version, generate(world)
    request = world.weights.use(1).join(world).announcement()
    request.timeout.FromMilliseconds(1500)
    world.call("RolloutService.BeginWeightUpdate", request)
    error = refusal(world, "FinishWeightUpdate", world.weights.conclusion())
    assert error.code() == grpc.StatusCode.ABORTED
    assert_apart_with_old_weights(world, version, before)
