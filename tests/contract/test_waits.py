"""Calls that wait: no longer than they were told, no longer than the caller's deadline, and not a moment too long."""

import threading
import time

import grpc
import pytest
from quartet.v1 import broker_pb2 as pb

from quartet_client.contract.world import World
from quartet_common.durations import to_duration

SLACK = 20.0
"""Seconds a loaded machine may add."""


@pytest.fixture
def world(stack):
    """Return a world with a broker."""
    return World(stack.callers())


def lease_prompts(w, seconds):
    return "LeasePrompts", w.run().wait(seconds)


def lease_experience(w, seconds):
    run = w.run().open()
    return "LeaseExperience", pb.LeaseExperienceRequest(
        run_id=run.id, session_epoch=run.session, step=0, wait=to_duration(seconds)
    )


def get_evaluation(w, seconds):
    run = w.run().evaluation()
    return "GetEvaluation", pb.GetEvaluationRequest(run_id=run.id, evaluation_id="heldout@0", wait=to_duration(seconds))


waits = pytest.mark.parametrize("make", [lease_prompts, lease_experience, get_evaluation])


def has_nothing(answer) -> bool:
    if isinstance(answer, list):
        return not answer[0].manifest.granted
    return not answer.complete if isinstance(answer, pb.GetEvaluationResponse) else not answer.leases


@waits
@pytest.mark.parametrize("seconds", [0, 0.5])
def test_it_waits_as_long_as_asked(world, make, seconds):
    rpc, request = make(world, seconds)
    began = time.monotonic()
    assert has_nothing(world.call(f"BrokerService.{rpc}", request))
    assert 0.9 * seconds < time.monotonic() - began < seconds + SLACK


@waits
def test_the_callers_deadline_is_shorter(world, make):
    rpc, request = make(world, 30)
    began = time.monotonic()
    try:
        assert has_nothing(world.call(f"BrokerService.{rpc}", request, timeout=0.5))
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - began < SLACK


@waits
def test_what_it_waits_for_ends_the_wait(world, make):
    rpc, request = make(world, 30)
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(world.call(f"BrokerService.{rpc}", request)))
    began = time.monotonic()
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    fulfil(world, rpc)
    waiting.join(30)
    assert time.monotonic() - began < SLACK
    assert answers and not has_nothing(answers[0])


def fulfil(w: World, rpc: str) -> None:
    """Have happen what a call waits for."""
    run = w.same_run()
    if rpc == "GetEvaluation":
        run.put(run.lease(1))
    elif rpc == "LeaseExperience":
        run.ready("a", "b")
    else:
        run.submit("a")


def test_a_run_that_is_finished_while_prompts_are_awaited_ends_the_wait(world):
    _, request = lease_prompts(world, 30)
    answers: list[pb.LeasePromptsResponse] = []
    waiting = threading.Thread(target=lambda: answers.append(world.call("BrokerService.LeasePrompts", request)))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    world.same_run().finish()
    waiting.join(SLACK)
    assert answers and not answers[0].leases and answers[0].gate == pb.GATE_REASON_FINISHED
